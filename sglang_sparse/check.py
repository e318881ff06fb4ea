"""``python -m sglang_sparse.check``: what is served and what is refused, without starting a server.

Without arguments it prints what each method goes with, and what is refused and why. With the arguments of a server it
judges them as the server would: with ``--sparse-method`` or ``--sparse-prefill-method`` it prints the resolved config,
and without either what each method says to this model and these flags.

``--markdown README.md`` writes the tables of a document anew, between ``<!-- check: NAME -->`` and
``<!-- check end -->``.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from sglang_sparse import limits, refusals
from sglang_sparse.capabilities import (
    FLAGS,
    KINDS,
    UNCALIBRATED,
    UNRECTIFIED,
    Answer,
    Method,
    Place,
    answer,
    backends,
    flag_text,
    load,
    methods,
    page_sizes,
    partners,
    place_of,
)
from sglang_sparse.method import DecodeMethod
from sglang_sparse.methods.dense import Dense
from sglang_sparse.versions import SUPPORTED_SGLANG, installed_sglang

if TYPE_CHECKING:
    from sglang_sparse.config import SparseServerArgs

MARKDOWN = "--markdown"
BLOCK = re.compile(r"(<!-- check: (\w+) -->\n)(.*?)(<!-- check end -->)", re.S)
# A refused thing, the methods that refuse it, and why.
Refused = tuple[str, Sequence[Method], str]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _decode_class(method: Method) -> type[DecodeMethod]:
    found = load(method)
    return found if issubclass(found, DecodeMethod) else Dense


def _words(found: Answer) -> str:
    if not found.served:
        return "no"
    if found.fields == UNCALIBRATED:
        return "calibrated"
    return f"with `{json.dumps(found.fields)}`" if found.fields else "yes"


def _what(method: Method) -> str:
    return (inspect.getdoc(inspect.getmodule(load(method))) or method.name).split("\n")[0].removesuffix(".")


def _phase(method: Method) -> str:
    if method.prefill:
        return "prefill"
    return "prefill, decode" if _decode_class(method).selects_in_model else "decode"


def _kinds(method: Method) -> str:
    found = {kind: answer(method, Place(kind, place_of(method).gpu)) for kind in KINDS}
    return ", ".join(
        kind + ("" if how.fields != UNCALIBRATED else " (calibrated)") for kind, how in found.items() if how.served
    )


def _machine(method: Method) -> str:
    if place_of(method).gpu:
        return "GPU, CPU platform" if backends(method, gpu=False) else "GPU"
    reason = limits.refuse_gpu(method.name)
    return "CPU platform" + (f" only: {reason}" if reason else "")


def methods_table() -> str:
    """Return what each method is, and which models, machines and methods of the other phase it goes with."""
    rows = [
        [_what(m), f"`{m.flag}`", _phase(m), _kinds(m), _machine(m), ", ".join(partners(m)) or "none"]
        for m in methods()
    ]
    return _table(["method", "flag", "phase", "models", "runs on", "together with"], rows)


def features_table() -> str:
    """Return which flags of a server each method goes with."""
    features: dict[str, Callable[[Method], str]] = {
        "`--page-size`": lambda m: ", ".join(map(str, page_sizes(m))),
        "`--attention-backend` on a GPU": lambda m: ", ".join(backends(m, gpu=True)) or "none",
        "`--attention-backend` on the CPU platform": lambda m: ", ".join(backends(m, gpu=False)) or "none",
        **{f"`{flag_text(flag)}`": lambda m, flag=flag: _words(answer(m, place_of(m), flag)) for flag in FLAGS},
    }
    asked = methods()
    rows = [[name, *(found(method) for method in asked)] for name, found in features.items()]
    return _table(["", *(method.name for method in asked)], rows)


def _of_tables() -> Iterator[Refused]:
    asked = methods()
    for limit in limits.FLAG_LIMITS:
        yield limit.name, asked, limit.reason
    for method in asked:
        for limit in _decode_class(method).flag_limits:
            yield limit.name, [method], limit.reason
    for limit in limits.PREFILL_LIMITS:
        yield limit.name, [method for method in asked if method.prefill], limit.reason
    for limit in limits.RECTIFY_LIMITS:
        yield (
            f"rectification with {limit.name}",
            [method for method in asked if method.takes(UNRECTIFIED)],
            limit.reason,
        )
    for limit in limits.COMPACT_LIMITS:
        compacting = [method for method in asked if method.takes({"eviction": "compact"})]
        yield f"compact eviction with {limit.name}", compacting, limit.reason
    for limit in limits.MODEL_LIMITS:
        refusing = [method for method in asked if refusals.excludes(limit, _decode_class(method))]
        yield limit.name, refusing, limit.reason


def _of_answers() -> Iterator[Refused]:
    known = {reason for *_, reason in _of_tables()}
    for method in methods():
        place = place_of(method)
        asked = {f"{kind} model": answer(method, Place(kind, place.gpu)) for kind in KINDS}
        asked |= {f"`{flag_text(flag)}`": answer(method, place, flag) for flag in FLAGS}
        for name, found in asked.items():
            if found.reason is not None and not any(reason in found.reason for reason in known):
                # Before it stands what was asked.
                yield name, [method], found.reason.partition(": ")[2]


def refusals_table() -> str:
    """Return what is refused, by which methods, and why."""
    refusing: dict[tuple[str, str], dict[str, None]] = {}
    for name, asked, reason in (*_of_answers(), *_of_tables()):
        refusing.setdefault((name, reason), {}).update(dict.fromkeys(method.name for method in asked))
    merged: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (name, reason), names in refusing.items():
        merged.setdefault((reason, tuple(names)), []).append(name)
    everyone = tuple(method.name for method in methods())
    rows = [
        [", ".join(things), "all" if names == everyone else ", ".join(names), reason]
        for (reason, names), things in merged.items()
    ]
    return _table(["refused", "by", "why"], rows)


BLOCKS: Mapping[str, Callable[[], str]] = {
    "methods": methods_table,
    "features": features_table,
    "refusals": refusals_table,
}


def fill(document: str) -> str:
    """Return a document with its tables made anew.

    Raises:
        ValueError: a table has a name that nobody knows.
    """

    def made(match: re.Match[str]) -> str:
        if match[2] not in BLOCKS:
            raise ValueError(f"no table is called {match[2]!r}; allowed: {', '.join(BLOCKS)}")
        return f"{match[1]}{BLOCKS[match[2]]()}\n{match[4]}"

    return BLOCK.sub(made, document)


def _verdicts(arguments: list[str]) -> str:
    """Ask each method about a server's arguments, which name none."""
    from sglang.srt.server_args import prepare_server_args

    # Our hook around it would end the process.
    prepare = inspect.unwrap(prepare_server_args)
    rows = []
    for method in methods():
        reasons = []
        try:
            prepare([*arguments, *method.flag.split()])
        except ValueError as error:
            reasons.append(str(error).removeprefix(f"{method.flag} "))
        verdict = "no" if reasons else "yes"
        if reason := limits.refuse_gpu(method.name):
            reasons.append(f"not on a GPU: {reason}")
        rows.append([f"`{method.flag}`", verdict, "; ".join(reasons)])
    return _table(["with", "accepted here", "why not"], rows)


def _judge(arguments: list[str]) -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import prepare_server_args

    server_args = cast("SparseServerArgs", prepare_server_args(arguments))
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


def main(arguments: list[str]) -> int:
    """Print the tables, write them into documents, or judge a server's arguments. Returns the exit status."""
    if not arguments:
        print(f"SGLang: {', '.join(SUPPORTED_SGLANG)} (installed: {installed_sglang()})")
        for made in BLOCKS.values():
            print(f"\n{made()}")
    elif arguments[0] == MARKDOWN:
        for path in map(Path, arguments[1:]):
            path.write_text(fill(path.read_text()))
    else:
        _judge(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
