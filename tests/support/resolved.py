"""SGLang's arguments, resolved: since 0.5.19 making them resolves nothing."""

from typing import Any


def ServerArgs(*args: Any, **kwargs: Any) -> Any:
    from sglang.srt.server_args import ServerArgs as Record

    from sglang_sparse.config import arguments

    record = Record(*args, **kwargs)
    record.resolve_once()
    return arguments.of(record)


def prepare_server_args(argv: list[str]) -> Any:
    from sglang.srt import server_args

    from sglang_sparse.config import arguments

    record = server_args.prepare_server_args(argv)
    record.resolve_once()
    return arguments.of(record)


class Backends:
    """Arguments with another attention backend of both phases."""

    def __init__(self, args: Any, name: str) -> None:
        self.args, self.name = args, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self.args, name)

    def get_attention_backends(self) -> tuple[str, str]:
        return self.name, self.name
