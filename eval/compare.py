"""Measure the cost of sparsity: a chosen set of tasks on a sparse and a dense server, one table, a verdict a row.

With ``--base-url`` the servers are there already; the dense one is ``--compare-url``, or the sparse server itself,
asked to run dense. With ``--model-path`` both are started on this machine, the sparse one without dense fallback of its
decode; ``--sparse-prefill-method`` gives it a sparse prefill too, which is judged alone with ``--sparse-method none``.
``--control NAME=URL`` puts the same questions to a control (see eval/lab/controls): a task gates only where a dense
server is right and a random choice of as many pages is not. Where the method's score loses more than a point by its
definition (control ``definition``) and the best choice of as many pages (``true_mass``) does not, the sparse server is
judged against the definition as well, and any loss beyond that is the server's. These controls are decode methods: for
a server that only prefills sparse none is taken, no task gates, and parts that force tokens through decode are omitted.

    python -m eval.compare --quick --model-path MODEL

asks few and short questions, to see within minutes that all works and what the table looks like.

Each suite writes its own file in the folder ``--out``, and the table goes to ``compare.jsonl`` there. A run that is
interrupted says what is done and what is left, and the same command continues it. A verdict is "within 1 pt" where the
sparse server is at most one point worse with 95 % confidence ("within 0.5 %" for perplexity), and "unclear" where there
are too few questions to say so.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.live.arms import phases_of, require_controls, require_sparse_lengths, servers
from eval.live.client import FAILURES, LiveServer, command_line, list_of, positive
from eval.live.counters import EvaluationError
from eval.live.record import Record, read_rows, summarised
from eval.scores.tables import comparison_table
from eval.scores.verdicts import read_folder
from eval.serving.grid import NO_METHOD
from eval.texts.lengths import length
from eval.texts.windows import read_tokens, require_books

NEEDLES = "single,multikey,multivalue,multiquery"
DEPTHS = 5
# The exit status of a part, and of this command, that was stopped from the keyboard.
INTERRUPTED = 130
# What ``--quick`` asks, and what is asked without it.
QUICK: Mapping[str, Any] = {
    "set": ["niah", "ruler"],
    "lengths": [4096],
    "n": 5,
    "server_args": "--mem-fraction-static 0.4",
    "out": Path("compare-quick"),
}
USUAL: Mapping[str, Any] = {
    "set": None,
    "lengths": [2048, 8192],
    "n": 20,
    "server_args": "",
    "out": Path("compare-results"),
}
# The least number of equal pairs whose 95 % interval is within one point, see `eval.scores.stats.paired_interval`.
DECIDED_BY = 276


@dataclass(frozen=True)
class Part:
    """One command of the set.

    Attributes:
        module: where its ``main`` is.
        arguments: of the command line, from those of this command and the sparse server's config.
        suite: whether it is a suite of questions, which takes two servers and controls (see `eval.live.runner`).
    """

    module: str
    arguments: Callable[[argparse.Namespace, Mapping[str, Any]], Sequence[object]]
    suite: bool = True


def _ppl(args: argparse.Namespace, config: Mapping[str, Any]) -> Sequence[object]:
    ratio, every = config.get("active_ratio", 1), config.get("rectify_interval", 0)
    suffix = min(512, args.text_length // 2)
    windows = _windows(args, args.n)
    sizes = ("--length", args.text_length, "--suffix", suffix, "--windows", windows, "--kind", "book,records")
    return *sizes, "--ratios", ratio, "--intervals", every, *_books(args)


def _drift(args: argparse.Namespace, config: Mapping[str, Any]) -> Sequence[object]:
    tokens = min(1024, args.text_length // 2)
    sizes = ("--prompt-length", args.text_length - tokens, "--tokens", tokens, "--n", _windows(args, args.n // DEPTHS))
    return *sizes, "--kind", "book,records", *_books(args)


def _windows(args: argparse.Namespace, wanted: int) -> int:
    """Return the number of texts to take, at most as many as the books have."""
    if args.texts < wanted:
        print(f"the books have {args.texts} texts of {args.text_length} tokens; --book gives more", file=sys.stderr)
    return max(2, min(wanted, args.texts))


def count_texts(server: LiveServer, books: Sequence[Path], length: int) -> int:
    """Count the texts of `length` tokens in the books that do not overlap, by the server's tokenizer."""
    return sum(len(tokens) // length for tokens in read_tokens(books, server.tokenize).values())


def _books(args: argparse.Namespace) -> list[object]:
    return [part for book in args.book for part in ("--book", book)]


def _lengths(args: argparse.Namespace, n: int) -> list[object]:
    return ["--lengths", ",".join(map(str, args.lengths)), "--n", n]


PARTS: dict[str, Part] = {
    "niah": Part("eval.niah", lambda a, _: [*_lengths(a, -(-a.n // DEPTHS)), *_books(a), "--tasks", NEEDLES]),
    "ruler": Part("eval.ruler", lambda a, _: [*_lengths(a, a.n), *_books(a)]),
    "infinitebench": Part("eval.infinitebench", lambda a, _: _lengths(a, -(-a.n // DEPTHS))),
    "long_generation": Part("eval.long_generation", _drift, suite=False),
    "ppl": Part("eval.ppl_rectify", _ppl, suite=False),
}


def run_part(
    name: str,
    args: argparse.Namespace,
    config: Mapping[str, Any],
    base: str,
    reference: Sequence[object],
    controls: Sequence[tuple[str, str, str]] = (),
) -> None:
    """Run one command of the set on the server at `base`, and its questions on the `controls` of `require_controls`.

    The arguments `reference` name the dense server.
    """
    part = PARTS[name]
    shared = [*part.arguments(args, config), "--concurrency", args.concurrency, "--seed", args.seed]
    shared += ["--revision", args.revision] if args.revision else []
    first: list[object] = ["--base-url", base, "--out", args.out / f"{name}.jsonl"]
    tokenizer = ["--tokenizer", args.tokenizer] if args.tokenizer and part.suite else []
    # The others force tokens, which a stock server cannot do: the sparse one decodes dense for them.
    own = [*reference, "--plot", args.out / name] if part.suite else []
    call(part.module, [*first, *own, *shared, *tokenizer])
    for control, url, methods in controls:
        expected = ["--expect", methods] if part.suite else []
        out = args.out / f"{name}--{control}.jsonl"
        call(part.module, ["--base-url", url, *expected, "--out", out, *shared, *tokenizer])


def call(module: str, arguments: Sequence[object]) -> None:
    """Run a command of this package; refused if it ends with another status than 0."""
    print(f"python -m {module} {shlex.join(map(str, arguments))}", file=sys.stderr)
    try:
        status = importlib.import_module(module).main([str(argument) for argument in arguments])
    except SystemExit as refused:
        # How argparse ends a program must not end the other parts.
        status = refused.code
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    if status:
        raise EvaluationError(f"{module} failed")


def progress(folder: Path, names: Sequence[str]) -> str:
    """Return a line for each of these parts of a run: done, begun or left."""
    lines = []
    for name in names:
        path = folder / f"{name}.jsonl"
        if summarised(path):
            state = "done"
        elif path.exists():
            state = f"begun, {sum(row.get('kind') not in ('header', 'resumed') for row in read_rows(path))} rows"
        else:
            state = "left"
        lines.append(f"  {name}: {state}")
    return "\n".join(lines)


def choose(wanted: Sequence[str] | None, decode: str | None, prefill: str | None) -> list[str]:
    """The parts to run: those asked for, by default all that judge the methods; refuses to judge dense decode."""
    forced = [name for name, part in PARTS.items() if not part.suite]
    if decode:
        return list(wanted or PARTS)
    if wrong := [name for name in wanted or () if name in forced]:
        raise EvaluationError(
            f"--set {','.join(wrong)}: judges decode by forced tokens, and a server of {prefill} alone decodes dense"
        )
    if not wanted:
        print(f"{prefill} is a prefill method: {' and '.join(forced)} judge decode, and are left out", file=sys.stderr)
    return list(wanted or [name for name in PARTS if name not in forced])


def run(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """Run the set and judge: the table of `eval.scores.verdicts.read_folder`, and the parts that failed."""
    failed = []
    with servers(args) as (base, dense):
        with LiveServer(base) as server:
            facts, state = server.facts(), server.sparse_state()
            args.set = choose(args.set, *phases_of(facts))
            config = state["config"] or {}
            require_sparse_lengths(state, args.lengths, args.text_length)
            forcing = any(not PARTS[name].suite for name in args.set)
            args.texts = count_texts(server, args.book, args.text_length) if forcing else 0
        controls = require_controls(args.control, facts, args.strict)
        with LiveServer(dense or base) as server:
            # A server with a method is as good a reference as a stock one, if it is asked to run dense.
            asked = ["--compare-custom-params", json.dumps({"sparse": False})] if server.facts().get("sparse") else []
        reference = ["--compare-url", dense or base, *asked]
        for name in args.set:
            try:
                run_part(name, args, config, base, reference, controls)
            except EvaluationError as error:
                print(f"eval.compare: {error}", file=sys.stderr)
                failed.append(name)
    table = read_folder(args.out, [name for name in args.set if name not in failed])
    names = ("set", "lengths", "text_length", "n", "seed", "control", "base_url", "compare_url", "model_path")
    arguments = {name: getattr(args, name) for name in names}
    header = {"arguments": json.loads(json.dumps(arguments, default=str)), "label": args.label}
    with Record(args.out / "compare.jsonl", "eval.compare", args.revision, servers={"base": facts}, **header) as record:
        for line in table:
            record.add("summary", **line)
    return table, failed


def parser_of() -> argparse.ArgumentParser:
    """The command line."""
    parser = command_line("eval.compare", __doc__)
    parser.add_argument("--base-url", help="the sparse server")
    parser.add_argument("--compare-url", help="the dense server (default: the sparse one, asked to decode dense)")
    parser.add_argument(
        "--control", action="append", default=[], metavar="NAME=URL", help="a server of eval/lab/controls"
    )
    parser.add_argument("--model-path", help="start both servers with this checkpoint")
    parser.add_argument("--sparse-method", default="resa", help="of the server to start; none: sparse prefill alone")
    parser.add_argument("--sparse-config", default="{}", help="of the server to start: inline JSON or a file")
    parser.add_argument("--sparse-prefill-method", help="of the server to start (default: dense prefill)")
    parser.add_argument("--sparse-prefill-config", default="{}", help="of the server to start, likewise")
    parser.add_argument(
        "--server-args", help="further arguments of both servers, as one string; with --quick half of the memory each"
    )
    parser.add_argument("--out", type=Path, help="folder (default: compare-results, or compare-quick)")
    parser.add_argument(
        "--quick", action="store_true", help="few questions of 4k tokens, of niah and ruler unless you say otherwise"
    )
    parser.add_argument(
        "--set",
        type=list_of(str, PARTS),
        action="extend",
        help=f"of {', '.join(PARTS)}; with commas, or given again (default: all that judge the methods)",
    )
    parser.add_argument("--lengths", type=list_of(length, some=True), help="tokens of the questions (default: 2k,8k)")
    parser.add_argument("--text-length", type=length, help="tokens of forced texts (default: the first of --lengths)")
    parser.add_argument(
        "--n", type=positive, help="questions of a task and length; 276 equal ones decide one point (default: 20)"
    )
    parser.add_argument("--book", type=Path, action="append", default=[], help="text file; repeat for more")
    parser.add_argument("--tokenizer", help="folder or name; the server's own model path by default")
    parser.add_argument("--concurrency", type=positive, default=8, help="questions in flight")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--strict", action="store_true", help="status 1 unless a task gates and all that do are same or better"
    )
    return parser


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The arguments, checked."""
    parser = parser_of()
    args = parser.parse_args(arguments)
    for name, value in (QUICK if args.quick else USUAL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if (args.base_url is None) == (args.model_path is None):
        parser.error("give --base-url, or --model-path to start the servers")
    if args.sparse_method == NO_METHOD and not args.sparse_prefill_method:
        parser.error("--sparse-method none needs a --sparse-prefill-method")
    if args.base_url and args.sparse_prefill_method:
        parser.error("--sparse-prefill-method is for the servers that --model-path starts; --base-url has its own")
    for control in args.control:
        if "=" not in control:
            parser.error(f"--control must be NAME=URL, got {control!r}")
    if any(not PARTS[name].suite for name in args.set or PARTS):
        require_books(parser, args.book)
    args.text_length = args.text_length or args.lengths[0]
    args.control = [tuple(control.split("=", 1)) for control in args.control]
    return args


def passes(table: Sequence[Mapping[str, Any]]) -> bool:
    """Whether every task that gates, at least one, is the same or better; see above where against the definition."""
    verdicts = [line.get("definition_verdict") or line["verdict"] for line in table if line["gates"]]
    return bool(verdicts) and all(verdict in ("same", "better") for verdict in verdicts)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 1 where a part of it failed, and with ``--strict`` where the verdicts say so."""
    args = parse(arguments)
    try:
        table, failed = run(args)
    except (*FAILURES, RuntimeError) as error:
        print(f"eval.compare: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        done = progress(args.out, args.set or list(PARTS))
        print(f"\neval.compare: interrupted; the same command continues. In {args.out}:\n{done}", file=sys.stderr)
        return INTERRUPTED
    print(comparison_table(table))
    if any(line["verdict"] == "unclear" and line["unit"] == "score" for line in table):
        print(f"\n{DECIDED_BY} questions with equal answers decide one point: give --n {DECIDED_BY} or more.")
    return 1 if failed or (args.strict and not passes(table)) else 0


if __name__ == "__main__":
    sys.exit(main())
