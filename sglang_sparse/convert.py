"""``python -m sglang_sparse.convert FILE``: what TensorRT-LLM's options are on a server with this plugin.

FILE is what ``trtllm-serve --config`` (or ``--extra_llm_api_options``) takes, as YAML or JSON, with a
``sparse_attention_config``; field names are those of TensorRT-LLM 1.2 to 1.3. The flags that take its place go to
stdout, to be put behind ``python -m sglang.launch_server``; with ``--json`` they are one object for
``sglang.Engine(**fields)``. What became of each field, and why something has no counterpart, goes to stderr.

Nothing is printed that a server with a GPU would refuse (``--cpu-platform``: one on the CPU platform): the flags are
asked about as ``sglang_sparse.check`` does, for a typical model of the method's kind of attention.

Exit status: 0 where everything was converted, 3 where something was left out, 1 where the sparse attention is refused
and nothing is printed, 2 where FILE cannot be read or holds no ``sparse_attention_config``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_sparse import registry, serve
from sglang_sparse.capabilities import Method, load, place_of
from sglang_sparse.config.settings import SparseArgumentError, build
from sglang_sparse.config_value import read_config
from sglang_sparse.methods.skip_softmax_checkpoint import STAND_IN
from sglang_sparse.trtllm import ALGORITHM, ALGORITHMS, NESTED, Algorithm, Change, lost, never, rules, unless

SPARSE = "sparse_attention_config"
# Stands for the model where the options name none.
MODEL = ("--model-path", "MODEL")


class RefusedError(ValueError):
    """The sparse attention is not served, so that nothing is converted."""


@dataclass
class Conversion:
    """What a file became so far.

    Attributes:
        method: the method.
        gpu: whether the server's machine has a GPU.
        fields: of the method's config.
        flags: words of a command line, beside the method and its config.
        report: what became of each field.
    """

    method: Method
    gpu: bool
    fields: dict[str, Any] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    report: list[tuple[str, Any, Change]] = field(default_factory=list)

    @property
    def arguments(self) -> list[str]:
        """The command line of a server."""
        given = ["--sparse-config", json.dumps(self.fields)] if self.fields else []
        return [*self.method.flag.split(), *given, *self.flags]

    def refusal(self) -> str | None:
        """Why a server would not start with it, or None."""
        return serve.refusal([*MODEL, *self.arguments], place_of(self.method).kind, self.gpu)

    def add(self, name: str, value: Any, change: Change) -> None:
        """Take a field over, unless a server would then refuse to start, and report it."""
        before = dict(self.fields), list(self.flags)
        if not change.lost:
            self.fields.update(change.fields)
            self.flags += change.flags
            try:
                reason = (change.fields or change.flags) and self.refusal()
            except ValueError as error:
                reason = str(error)
            if reason:
                self.fields, self.flags = before
                change = dataclasses.replace(change, words=reason, lost=True)
        self.report.append((name, value, change))


def _method(algorithm: Algorithm) -> Method:
    try:
        registry.require_known("its method here", algorithm.method, registry.decode_methods())
    except ValueError as error:
        raise RefusedError(f"the algorithm is not served: {error}") from error
    return Method(algorithm.method, prefill=False)


def _validated(method: Method, fields: dict[str, Any]) -> str | None:
    """What the method's config says against fields, or None."""
    try:
        build(method.name, fields, checkpoint=lambda: STAND_IN)
    except SparseArgumentError as error:
        return str(error)
    return None


def _phases(method: Method, name: str, value: Any, words: str) -> Iterator[tuple[str, Any, Change]]:
    """One change for what the method's config takes of a field that has a number for each phase, or one for both."""
    phases = value if isinstance(value, dict) else {"prefill": value, "decode": value}
    whole = _validated(method, {name: phases})
    if whole is None:
        yield name, value, Change(fields={name: phases}, words=words)
        return
    for phase, number in phases.items():
        part = {name: {phase: number}}
        if _validated(method, part) is None:
            yield f"{name}.{phase}", number, Change(fields=part, words=words)
        else:
            off = Change(words="0 is dense, as here") if number == 0 else lost(whole)
            yield f"{name}.{phase}", number, off


def _sparse_changes(
    algorithm: Algorithm, method: Method, sparse: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Change]]:
    known = load(method).config_class.model_fields
    last = [name for name in algorithm.by_phase if name in sparse]
    for given in (*(name for name in sparse if name not in last), *last):
        value = sparse[given]
        name = algorithm.renamed.get(given, given)
        if given == ALGORITHM:
            yield given, value, Change(words=method.flag)
        elif value is None:
            yield given, value, Change(words="null, the default")
        elif name in algorithm.by_phase:
            yield from _phases(method, name, value, algorithm.by_phase[name])
        elif name in known and given not in algorithm.rules:
            yield given, value, Change(fields={name: value})
        else:
            rule = algorithm.rules.get(given, unless(False, never(f"the config of {method.name} has no such field")))
            yield given, value, rule(value)


def _other_changes(options: Mapping[str, Any]) -> Iterator[tuple[str, Any, Change]]:
    known = rules(options)
    flat: dict[str, Any] = {}
    for name, value in options.items():
        inner = value if name in NESTED and isinstance(value, dict) else None
        flat |= {name: value} if inner is None else {f"{name}.{key}": part for key, part in inner.items()}
    for name, value in flat.items():
        if name == SPARSE:
            continue
        if value in (None, "auto") and name != "cuda_graph_config":
            yield name, value, Change(words="nothing to set, it is the default")
        else:
            rule = known.get(name, unless(False, never("no flag of SGLang is its evident counterpart")))
            yield name, value, rule(value)


def convert(options: Mapping[str, Any], gpu: bool) -> tuple[Conversion, str]:
    """Find what TensorRT-LLM's options are here.

    Args:
        options: as its YAML has them.
        gpu: whether the server's machine will have a GPU.

    Returns:
        The conversion, and what differs although nothing was left out.

    Raises:
        ValueError: there is no ``sparse_attention_config`` with an ``algorithm``.
        RefusedError: the algorithm is not served, or nothing says how sparse to be.
    """
    sparse = options.get(SPARSE)
    if not isinstance(sparse, dict) or not isinstance(sparse.get(ALGORITHM), str):
        raise ValueError(f"{SPARSE}: got {sparse!r}, allowed: a table with an algorithm, {', '.join(ALGORITHMS)}")
    algorithm = ALGORITHMS.get(sparse[ALGORITHM].lower())
    if algorithm is None:
        raise RefusedError(f"algorithm: got {sparse[ALGORITHM]!r}, allowed: {', '.join(ALGORITHMS)}")
    conversion = Conversion(_method(algorithm), gpu)
    if reason := conversion.refusal():
        raise RefusedError(reason)
    for name, value, change in _sparse_changes(algorithm, conversion.method, sparse):
        conversion.add(f"{SPARSE}.{name}", value, change)
    if algorithm.by_phase and not set(algorithm.by_phase) & set(conversion.fields):
        left = [f"{name}: {change}" for name, _, change in conversion.report if change.lost]
        raise RefusedError(
            "; ".join([f"nothing is left that says how much to skip ({' or '.join(algorithm.by_phase)})", *left])
        )
    for name, value, change in _other_changes(options):
        conversion.add(name, value, change)
    return conversion, algorithm.note


def _fields(args: Any) -> dict[str, Any]:
    import msgspec

    return msgspec.structs.asdict(args.record)


def as_fields(arguments: Sequence[str]) -> dict[str, Any]:
    """What a command line says, as fields of ``sglang.Engine``; configs of methods as mappings."""
    given, usual = (_fields(serve.parse([*MODEL, *more])) for more in (arguments, ()))
    fields = {name: value for name, value in given.items() if value != usual[name]}
    return {
        name: json.loads(value) if name.startswith("sparse_") and name.endswith("_config") else value
        for name, value in fields.items()
    }


def _report(conversion: Conversion, note: str) -> str:
    lines = [f"{name}: {json.dumps(value)} -> {change}" for name, value, change in conversion.report]
    lines += [f"note: {note}"] if note else []
    lines.append("the model itself was not asked: python -m sglang_sparse.check --model-path MODEL, with these flags")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert a file. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="sglang_sparse.convert", description=__doc__)
    parser.add_argument("file", help="what trtllm-serve --config takes: .yaml, .yml or .json")
    parser.add_argument("--json", action="store_true", help="print fields of sglang.Engine in place of flags")
    parser.add_argument(
        "--cpu-platform", action="store_true", help="for a server without a GPU, for trying and testing"
    )
    args = parser.parse_args(arguments)
    try:
        conversion, note = convert(read_config(args.file, "convert"), gpu=not args.cpu_platform)
    except ValueError as error:
        refused = isinstance(error, RefusedError)
        print(f"sglang_sparse: error: {'nothing is converted: ' if refused else ''}{error}", file=sys.stderr)
        return 1 if refused else 2
    print(_report(conversion, note), file=sys.stderr)
    given = conversion.arguments
    print(json.dumps(as_fields(given)) if args.json else shlex.join(given))
    return 3 if any(change.lost for *_, change in conversion.report) else 0


if __name__ == "__main__":
    sys.exit(main())
