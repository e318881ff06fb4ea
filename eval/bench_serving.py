r"""``python -m eval.bench_serving``: a dense and a sparse server on this machine, driven by SGLang's benchmark client.

    python -m eval.bench_serving --model-path MODEL --contexts 4k,32k,128k,256k --batch 1,4 --out serving.jsonl

The servers run one after the other (``--both``: at once, asked in turn, asleep in between), each with room for the
largest cell of the grid; a cell that does not fit is skipped. For each context and batch size the client sends that
many prompts at once: ids in a row from random starts (the client's "random-ids"), so that no two share a prefix, the
prefix cache flushed before. Further ``--runs`` ask the same again and find the prompts cached, so only the first counts
for the time to the first token and for throughput.

``decode_tpot`` and ``decode_itl_*`` are ours, from the client's times: they count the window in which all requests of
the batch decode, in whole intervals between rectifications. The client's own ``tpot_*`` and ``itl_*`` stand beside; of
a batch they hold the time for which the first request waits until the others are prefilled. Seconds everywhere.

Two measures have rows of their own. ``prefix_hit``: the time to the first token of ``--hits`` prompts whose first
``--prefix`` tokens are cached, sent one at a time (`eval.serving.first_token`); and the pages that the sparse server
summarised beyond what was not cached, which must be none. With ``--both`` the servers take turns prompt by prompt, and
the ratio of the medians has a paired bootstrap 95 % interval. ``short_contexts``: the least ratio at contexts up to 8k,
most of which run dense by the server's choice.

``--sparse-prefill-method`` adds a prefill method to the sparse server; with ``--sparse-method none`` it is alone, and
the grid, which is about decode, is left out. With a prefill method ``first_token`` is measured: the time to the first
token of a cold prompt of each context, one at a time (`eval.serving.first_token`), the median of ``--cold-runs``
and their range. With ``--both`` dense and sparse take turns. ``--chunked-prefill-size 8k,16k`` does everything with
each size, on servers of its own. ``first_token_below``: the least ratio at contexts up to 8k that the server prefilled
dense by itself.

A server's arguments are those of the grid, then ``--server-args``, then its own; the later ones win. ``--server
dense="--page-size 1"`` gives the dense one some of its own, and any other name starts one more server, dense such as
``--server dense-fp8="--kv-cache-dtype fp8_e4m3"``, or sparse: ``--server half="--sparse-method ..."``.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from eval.live.client import FAILURES, LiveServer, command_line, list_of, positive
from eval.live.counters import EvaluationError
from eval.live.gpu_watch import SpeedRecord
from eval.live.record import Record, this_machine
from eval.live.runner import arguments_of
from eval.serving import first_token
from eval.serving.grid import (
    DENSE,
    ROBSA,
    ROOM,
    grid,
    methods,
    prefix_tokens,
    server_flags,
    short_contexts,
    sparse_flags,
    summarise,
    unfit,
)
from eval.serving.measurement import Inputs, Side, drive, look
from eval.texts.lengths import length, short_length
from launch.server import ServerProcess

INTERVALS = 8
PREFIX = 128 * 1024
SPARSE = "sparse"
METHOD_FLAGS = ("--sparse-method", "--sparse-prefill-method")
# Of the summary, what is printed.
SHOWN = ("id", "decode_tpot", "dense_decode_tpot", "decode_tpot_ratio", "ttft_median_ratio", "output_throughput_ratio")
SHOWN = (*SHOWN, "density", "dense_rows", "sparsity", "recall", "ttft", "dense_ttft", "ttft_ratio", "ttft_over_dense")
SHOWN = (*SHOWN, "ttft_over_dense_interval", "active_blocks", "recomputed")
# Of a summary, what times of prefill are part of.
OF_PREFILL = re.compile(r"ttft|throughput|^(dense_)?(tpot|itl)_")


class Bench:
    """The run: what was measured so far, and where it is written."""

    def __init__(self, inputs: Inputs, record: Record, scratch: Path) -> None:
        self.inputs, self.args, self.record, self.scratch = inputs, inputs.args, record, scratch
        self.folder, self.flags, self.environment = inputs.serve(scratch)
        self.items: list[dict[str, Any]] = []
        self.summary: list[dict[str, Any]] = []
        self.left_out: set[tuple[str, str]] = set()
        self.chunk: int | None = None
        self.failed = False
        # Tokens between rectifications; 0 for never.
        self.interval = 0

    def start(self, stack: contextlib.ExitStack, name: str, flags: Sequence[str]) -> Side:
        """Start a server that ends with `stack`, and refuse it where its answers would be too short."""
        args = self.args
        log = args.out.with_suffix(f".{short_length(self.chunk)}.{name}.log" if self.chunk else f".{name}.log")
        process = ServerProcess(self.folder, *flags, log_path=log, timeout=args.start_timeout, env=self.environment)
        try:
            stack.enter_context(process)
        except (RuntimeError, TimeoutError) as error:
            said = [line for line in process.log().splitlines() if "error" in line.lower()] or ["no reason in its log"]
            raise EvaluationError(f"the {name} server did not start: {said[-1].strip()} (all of it: {log})") from error
        server = stack.enter_context(LiveServer(process.url))
        asked = [value for flag, value in pairwise(flags) if flag in METHOD_FLAGS]
        side = look(self.inputs, name, process.url, server, "+".join(asked) or DENSE)
        line = shlex.join(["python", *process.command[1:]])
        self.record.add("server", arm=name, facts=side.target.facts, command=line, start_seconds=process.start_seconds)
        self.interval = max(self.interval, side.config.get("rectify_interval", 0))
        self.inputs.require_interval(self.interval)
        least = INTERVALS * self.interval
        if args.output_length < least:
            raise EvaluationError(f"--output-length: got {args.output_length}, allowed: at least {least} here")
        return side

    def measure(self, sides: Sequence[Side]) -> None:
        """Run the grid, the prefix hits and the cold prefills on servers that are up, in turn."""
        args = self.args
        plan = [(cell, run, side) for cell in grid(args) for run in range(args.runs) for side in sides]
        for cell, run, side in tqdm(plan, desc=" and ".join(side.name for side in sides), disable=not plan):
            work = partial(drive, args, side, cell, run, self.interval, self.scratch)
            self.attempt(side, cell.name, cell.tokens(args.output_length), work)
        hits = [(side, first_token.hits(args, side)) for side in sides] if args.prefix else []
        for _ in tqdm(range(first_token.hit_steps(args)), desc="prefix hits", disable=not hits):
            for side, hit in hits:
                self.attempt(side, first_token.HIT, prefix_tokens(args), partial(next, hit))
        contexts = args.contexts if args.sparse_prefill_method else []
        cold = [(context, run, side) for context in contexts for run in range(args.cold_runs) for side in sides]
        for context, run, side in tqdm(cold, desc="first tokens", disable=not cold):
            work = partial(first_token.measure, args, side, context, run)
            name = f"{first_token.TASK}/{short_length(context)}"
            self.attempt(side, name, context + ROOM, work)

    def attempt(self, side: Side, name: str, needed: int, work: Callable[[], dict[str, Any] | None]) -> None:
        """Keep what `work` returns, if anything; or say why there is nothing: it does not fit, or it failed."""
        if (side.name, name) in self.left_out:
            return
        why = unfit(side.target.facts, needed)
        if why is None:
            try:
                row = work()
            except EvaluationError as error:
                why, self.failed = str(error), True
            else:
                if row is not None:
                    row = self.placed(row)
                    row["chunked_prefill_size"] = side.target.facts.get("chunked_prefill_size")
                    self.items.append(row)
                    self.record.add("item", **row)
                return
        self.left_out.add((side.name, name))
        self.record.add("skipped", arm=side.name, cell=name, reason=why)
        tqdm.write(f"{self.inputs.command}: {side.name} {name} is left out: {why}", file=sys.stderr)

    def placed(self, row: dict[str, Any]) -> dict[str, Any]:
        """A row whose ``id`` tells it from those of other chunk sizes."""
        return row | ({"id": f"{row['id']}@{short_length(self.chunk)}"} if self.chunk else {})

    def judge(self) -> None:
        """Compare the servers of one chunk size, and go on with the next one's."""
        tasks = {row["task"]: [other for other in self.items if other["task"] == row["task"]] for row in self.items}
        cells = summarise(tasks.get("serving", []), self.inputs.cell_fields)
        cold = first_token.summarise(tasks.get(first_token.TASK, []), self.inputs.prompt_fields)
        rows = [*cells, *short_contexts(cells), *first_token.summarise_hits(tasks.get(first_token.HIT, []))]
        rows += [*cold, *first_token.below_crossover(cold)]
        if self.inputs.decode_alone:
            rows = [{name: value for name, value in row.items() if not OF_PREFILL.search(name)} for row in rows]
        sizes = {row["arm"]: row["chunked_prefill_size"] for row in self.items}
        self.summary += [{**self.placed(row), "chunked_prefill_size": sizes[row["arm"]]} for row in rows]
        self.items, self.left_out = [], set()


def run(inputs: Inputs) -> tuple[list[dict[str, Any]], bool]:
    """Start the servers, measure and write the file; returns the summary, and whether a cell failed."""
    args = inputs.args
    inputs.require()
    # The sparse one first: it knows how long the answers must be.
    own: dict[str, list[str]] = {SPARSE: sparse_flags(args), DENSE: []}
    for name, flags in args.server:
        own[name] = [*own.get(name, []), *shlex.split(flags)]
    header = {"arguments": arguments_of(args) | inputs.header(), "label": args.label, **this_machine()}
    with (
        tempfile.TemporaryDirectory() as name,
        SpeedRecord(args.out, inputs.command, args.revision, **header) as record,
    ):
        bench = Bench(inputs, record, Path(name))
        for bench.chunk in args.chunked_prefill_size or [None]:
            shared = [*server_flags(args, bench.chunk), *bench.flags, *shlex.split(args.server_args)]
            for group in [list(own)] if args.both else [[server] for server in own]:
                with contextlib.ExitStack() as stack:
                    bench.measure([bench.start(stack, server, [*shared, *own[server]]) for server in group])
            bench.judge()
        if not bench.summary:
            raise EvaluationError("nothing was measured on both servers")
        for row in bench.summary:
            record.add("summary", **row)
        return bench.summary, bench.failed


def parse(
    arguments: list[str] | None, description: str | None = None, inputs: type[Inputs] = Inputs
) -> argparse.Namespace:
    """The command line, checked."""
    parser = command_line(inputs.command, description)
    inputs.add_arguments(parser)
    parser.add_argument("--out", required=True, type=Path, help="JSONL file to write; the logs go beside it")
    parser.add_argument(
        "--contexts", type=list_of(length, some=True), default="4k,32k,128k,256k", help="tokens of a prompt"
    )
    parser.add_argument("--batch", type=list_of(positive, some=True), default="1,4", help="requests at once")
    parser.add_argument("--output-length", type=positive, default=256, help="tokens of an answer")
    parser.add_argument("--runs", type=positive, default=1, help="times that each cell is measured")
    parser.add_argument("--warmup", type=int, default=1, help="the client's warm-up requests before each batch")
    parser.add_argument(
        "--prefix",
        type=_length_or_none,
        help="cached tokens of prefix_hit (default: 128k; with a prefill method or robsa 0: none)",
    )
    parser.add_argument("--tail", type=positive, default=64, help="further tokens of such a prompt")
    parser.add_argument("--hits", type=positive, default=10, help="such prompts")
    parser.add_argument(
        "--cold-runs", type=int, default=first_token.LEAST_RUNS, help="times that a cold prefill is measured"
    )
    parser.add_argument(
        "--chunked-prefill-size", type=list_of(length), default=[], help="tokens prefilled at once, one after the other"
    )
    _add_servers(parser)
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    args = parser.parse_args(arguments)
    if args.prefix is None:
        args.prefix = 0 if args.sparse_prefill_method or args.sparse_method == ROBSA else PREFIX
    _check(parser, args)
    inputs.check(parser, args)
    return args


def _add_servers(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say which servers there are and how they are started."""
    parser.add_argument("--sparse-method", default="resa", help="of the sparse server; none for a prefill method alone")
    parser.add_argument("--sparse-config", default="{}", help="of the sparse server: inline JSON or a file")
    parser.add_argument("--sparse-prefill-method", help="of the sparse server (default: none)")
    parser.add_argument("--sparse-prefill-config", default="{}", help="of the sparse server: inline JSON or a file")
    parser.add_argument("--server-args", default="", help="further arguments of all servers, as one string")
    parser.add_argument("--server", type=named, action="append", default=[], metavar="NAME=ARGS", help="see above")
    parser.add_argument("--both", action="store_true", help="all servers at once; they share the GPU's memory")
    parser.add_argument("--start-timeout", type=float, default=900.0, help="seconds until a server must be ready")


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the command where arguments do not fit together."""
    if not methods(args):
        parser.error("--sparse-method none needs a --sparse-prefill-method")
    if args.cold_runs < first_token.LEAST_RUNS:
        parser.error(f"--cold-runs must be at least {first_token.LEAST_RUNS}, got {args.cold_runs}")


def _length_or_none(text: str) -> int:
    return 0 if text == "0" else length(text)


def named(text: str) -> tuple[str, str]:
    """``NAME=ARGS`` of a server."""
    name, found, flags = text.partition("=")
    if not found or not name.replace("-", "").isalnum():
        raise argparse.ArgumentTypeError(f"must be NAME=ARGS, got {text!r}")
    return name, flags


def main(arguments: list[str] | None = None, inputs: type[Inputs] = Inputs, description: str | None = __doc__) -> int:
    """Run the command; exit status 1 where a cell failed or nothing can be compared."""
    args = parse(arguments, description, inputs)
    try:
        summary, failed = run(inputs(args))
    except FAILURES as error:
        print(f"{inputs.command}: {error}", file=sys.stderr)
        return 1
    print(pd.DataFrame(summary).reindex(columns=list(SHOWN)).to_string(index=False, na_rep=""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
