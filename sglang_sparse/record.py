"""SGLang's ``ServerArgs`` with the four fields of this plugin. Imported where SGLang is, in each process."""

from __future__ import annotations

from typing import Optional

from sglang.srt.arg_groups.arg_utils import A, Arg
from sglang.srt.server_args import ServerArgs

from sglang_sparse import cli

_HELP = cli.help_texts()


class SparseServerArgs(ServerArgs, dict=True):  # type: ignore[call-arg]
    """SGLang's record, in whose place it is put."""

    sparse_method: A[Optional[str], Arg(help=_HELP["sparse_method"])] = None
    sparse_prefill_method: A[Optional[str], Arg(help=_HELP["sparse_prefill_method"])] = None
    sparse_config: A[Optional[str], Arg(help=_HELP["sparse_config"])] = None
    sparse_prefill_config: A[Optional[str], Arg(help=_HELP["sparse_prefill_config"])] = None

    def resolve_once(self) -> None:
        """Resolve, and refuse what cannot be served before and after."""
        cli.resolve_record(super().resolve_once, self)
