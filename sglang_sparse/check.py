"""``python -m sglang_sparse.check``: what is served and what is refused, without starting a server.

Without arguments it prints what each method goes with, and what is refused and why: the tables of the page on
compatibility, which tests hold against the checks of a start, or where other methods or another SGLang are installed,
the answers of these checks. With the arguments of a server it
judges them as the server would: with ``--sparse-method`` or ``--sparse-prefill-method`` it prints the resolved config,
and without either what each method says to this model and these flags.

``--workers http://HOST:PORT …`` asks running servers, and says whether all answer alike or which fields of their
configs differ.

``--sglang`` says what the installed SGLang, of whatever version, lacks or has changed of what the plugin needs.

``--markdown README.md sglang_sparse/docs`` writes the tables of documents anew, between ``<!-- check: NAME -->``
and ``<!-- check end -->``.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

# The checks of a start take PyTorch and SGLang, which load for seconds; they are imported where they are asked.
from sglang_sparse.config import arguments as server_arguments
from sglang_sparse.config.versions import SUPPORTED_SGLANG, installed_sglang
from sglang_sparse.methods import registry

if TYPE_CHECKING:
    from sglang_sparse.config.arguments import Arguments

MARKDOWN = "--markdown"
PAGE = Path(__file__).parent / "docs" / "compatibility.md"


def _tables() -> list[str]:
    own = registry.decode_methods() == registry.DECODE_METHODS
    own = own and registry.prefill_methods() == registry.PREFILL_METHODS
    if own and installed_sglang() in SUPPORTED_SGLANG:
        return re.findall(r"<!-- check: \w+ -->\n(.*?)\n<!-- check end -->", PAGE.read_text(), re.S)
    from sglang_sparse.tools import doc_tables

    return [made() for made in doc_tables.BLOCKS.values()]


def _verdicts(arguments: list[str]) -> str:
    """Ask each method about a server's arguments, which name none."""
    from sglang.srt.server_args import prepare_server_args

    from sglang_sparse.tools.doc_tables import table
    from sglang_sparse.tools.support_matrix import broken_methods, methods

    # Our hook around it would end the process.
    prepare = inspect.unwrap(prepare_server_args)
    rows = []
    for method in (*methods(), *broken_methods()):
        reasons = []
        try:
            prepare([*arguments, *method.flag.split()]).resolve_once()
        except Exception as error:
            reasons.append(_reason(error).removeprefix(method.flag).lstrip(": "))
        verdict = "no" if reasons else "yes"
        rows.append([f"`{method.flag}`", verdict, "; ".join(reasons)])
    return table(["with", "accepted here", "why not"], rows)


def _reason(error: Exception) -> str:
    """Return the message of a refusal on one line, and of another error of SGLang its kind, too."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) else f"SGLang ends with {type(error).__name__}: {text}"


@contextmanager
def _each_message_once() -> Iterator[None]:
    """Log each message once: the same arguments are judged for every method."""
    said: set[str] = set()
    make = logging.getLogRecordFactory()

    def make_once(*args: object, **kwargs: object) -> logging.LogRecord:
        record = make(*args, **kwargs)
        text = record.getMessage()
        if text in said:
            # Below the level of any handler. A filter would go with its handler: SGLang replaces them.
            record.levelno = -1
        said.add(text)
        return record

    logging.setLogRecordFactory(make_once)
    try:
        yield
    finally:
        logging.setLogRecordFactory(make)


def _judge(arguments: list[str]) -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import prepare_server_args

    given = server_arguments.of(inspect.unwrap(prepare_server_args)(arguments))
    if server_arguments.drafts_itself(given) and not given.sparse_method and not given.sparse_prefill_method:
        print(f"these arguments start no server: {server_arguments.SPARSE_SELF} needs --sparse-method")
        print(f"\n{_verdicts(arguments)}")
        return
    try:
        server_args = cast("Arguments", prepare_server_args(arguments))
    except Exception as error:
        print(f"these arguments start no server: {_reason(error)}", file=sys.stderr)
        raise SystemExit(2) from None
    flags = {
        f"--sparse-method {server_args.sparse_method}": server_args.sparse_method and server_args.sparse_config,
        f"--sparse-prefill-method {server_args.sparse_prefill_method}": server_args.sparse_prefill_config,
    }
    for flag, resolved in flags.items():
        if resolved:
            print(f"{flag} fits {server_args.model_path}; resolved config:")
            print(json.dumps(json.loads(str(resolved)), indent=2))
    if not any(flags.values()):
        print("these arguments start a dense server: neither --sparse-method nor --sparse-prefill-method was given")
        print(f"\n{_verdicts(arguments)}")


def _surface() -> int:
    from sglang_sparse.hooks.table import HOOKS
    from sglang_sparse.tools import sglang_surface

    found = sglang_surface.problems()
    for name, what in found:
        print(f"{name}: {what}")
    asked = len(HOOKS), len(sglang_surface.imports()), len(sglang_surface.attributes())
    print(
        "SGLang {}: {} problems, of {} hooked functions, {} imports and {} attributes".format(
            installed_sglang(), len(found), *asked
        )
    )
    return int(bool(found))


def main(arguments: list[str]) -> int:
    """Print the tables, write them into documents, or judge SGLang, running servers or a server's arguments.

    Returns the exit status.
    """
    if arguments == ["--sglang"]:
        return _surface()
    if arguments[:1] == ["--workers"]:
        from sglang_sparse.tools import workers

        return workers.compare(arguments[1:])
    if not arguments:
        print(f"SGLang: {', '.join(SUPPORTED_SGLANG)} (installed: {installed_sglang()})")
        for table in _tables():
            print(f"\n{table}")
    elif arguments[0] == MARKDOWN:
        from sglang_sparse.tools import doc_tables

        for asked in map(Path, arguments[1:]):
            for path in asked.rglob("*.md") if asked.is_dir() else [asked]:
                path.write_text(doc_tables.fill(path.read_text()))
    else:
        with _each_message_once():
            _judge(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
