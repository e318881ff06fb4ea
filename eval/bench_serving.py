"""``python -m eval.bench_serving``: a dense and a sparse server on this machine, driven by SGLang's benchmark client.

    python -m eval.bench_serving --shape qwen3-1.7b --contexts 4k,32k,128k,256k --batch 1,4 --out serving.jsonl

The servers run one after the other (``--both``: at once, asked in turn), each with room for the largest cell of the
grid; a cell that does not fit is skipped. For each context and batch size the client sends that many prompts at once:
ids in a row from random starts (the client's "random-ids"), so that no two share a prefix, the prefix cache flushed
before. Further ``--runs`` ask the same again and find the prompts cached, so only the first counts for the time to the
first token and for throughput.

``decode_tpot`` and ``decode_itl_*`` are ours, from the client's times: they count the window in which all requests of
the batch decode, in whole intervals between rectifications. The client's own ``tpot_*`` and ``itl_*`` stand beside; of
a batch they hold the time for which the first request waits until the others are prefilled. Seconds everywhere.

Two measures have rows of their own. ``prefix_hit``: the time to the first token of prompts whose first ``--prefix``
tokens are cached, sent as token ids by our own client, since the texts that SGLang's shared-prefix prompts are take
longer to tokenize than to prefill; and the pages that the sparse server summarised beyond what was not cached, which
must be none. ``below_crossover``: the least ratio at contexts up to 8k in cells that the server decoded dense by
itself.

``--sparse-prefill-method`` adds a prefill method to the sparse server; with ``--sparse-method none`` it is alone.
Dummy weights have no structure to find: ``--structured '{}'`` has every layer of every server attend with generated
queries, keys and values (`eval.structured`), and the row says which share of the query-key pairs was left out
(``sparsity``).

A server's arguments are those of the grid, then ``--server-args``, then its own; the later ones win. ``--server
dense="--page-size 1"`` gives the dense one some of its own, and any other name starts one more dense server, such as
``--server dense-fp8="--kv-cache-dtype fp8_e4m3"``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tqdm import tqdm

from eval.live.client import FAILURES, LiveServer, list_of
from eval.live.counters import EvaluationError
from eval.live.record import Record, versions
from eval.live.runner import arguments_of
from eval.parts import model_shapes
from eval.parts.judge_commands import reach
from eval.parts.serving_grid import (
    DENSE,
    NO_METHOD,
    Cell,
    below_crossover,
    environment,
    methods,
    prefix_hits,
    prefix_tokens,
    require_inputs,
    server_flags,
    sparse_flags,
    summarise,
    unfit,
)
from eval.parts.serving_runs import Side, drive, hit
from eval.texts.lengths import length
from launch.server import ServerProcess

INTERVALS = 8
SPARSE = "sparse"
PACKAGES = ("torch", "triton", "sglang", "sglang-kernel", "flashinfer-python")
# Of the summary, what is printed.
SHOWN = ("id", "decode_tpot", "dense_decode_tpot", "decode_tpot_ratio", "ttft_median_ratio", "output_throughput_ratio")
SHOWN = (*SHOWN, "density", "dense_rows", "sparsity", "ttft", "dense_ttft", "ttft_over_dense", "recomputed")


class Bench:
    """The run: what was measured so far, and where it is written.

    Args:
        args: the command line.
        record: the result file.
        scratch: folder for the client's files.
    """

    def __init__(self, args: argparse.Namespace, record: Record, scratch: Path) -> None:
        self.args, self.record, self.scratch = args, record, scratch
        self.items: list[dict[str, Any]] = []
        self.left_out: set[tuple[str, str]] = set()
        self.failed = False
        self.config: dict[str, Any] = {}

    def start(self, stack: contextlib.ExitStack, folder: Path, name: str, flags: Sequence[str]) -> Side:
        """Start a server that ends with `stack`.

        Raises:
            EvaluationError: it does not start, is not what it should be, or its answers would be too short.
        """
        args = self.args
        log = args.out.with_suffix(f".{name}.log")
        process = ServerProcess(folder, *flags, log_path=log, timeout=args.start_timeout, env=environment(args))
        try:
            stack.enter_context(process)
        except (RuntimeError, TimeoutError) as error:
            said = [line for line in process.log().splitlines() if "error" in line.lower()] or ["no reason in its log"]
            raise EvaluationError(f"the {name} server did not start: {said[-1].strip()} (all of it: {log})") from error
        server = stack.enter_context(LiveServer(process.url))
        require_inputs(args, server)
        expect = "+".join(methods(args)) if name == SPARSE else DENSE
        asked = argparse.Namespace(expect=expect, model=None, tokenizer=None, custom_params={})
        side = Side(name, process.url, server, reach(asked, server, max(args.contexts) + args.output_length))
        line = shlex.join(["python", *process.command[1:]])
        self.record.add("server", arm=name, facts=side.target.facts, command=line, start_seconds=process.start_seconds)
        if name == SPARSE and args.sparse_method != NO_METHOD:
            self.config = server.sparse_state()["config"]
            least = INTERVALS * self.interval
            if args.output_length < least:
                raise EvaluationError(f"--output-length: got {args.output_length}, allowed: at least {least} here")
        return side

    @property
    def interval(self) -> int:
        """Tokens between rectifications; 0 for never."""
        return self.config.get("rectify_interval", 0)

    def measure(self, sides: Sequence[Side]) -> None:
        """Run the grid and the prefix hits on servers that are up, in turn."""
        cells = [Cell(context, batch) for context in self.args.contexts for batch in self.args.batch]
        plan = [(cell, run, side) for cell in cells for run in range(self.args.runs) for side in sides]
        for cell, run, side in tqdm(plan, desc=" and ".join(side.name for side in sides)):
            needed = cell.tokens(self.args.output_length)
            self.attempt(
                side,
                cell.name,
                needed,
                lambda c=cell, r=run, s=side: drive(self.args, s, c, r, self.config, self.scratch),
            )
        for side in sides if self.args.prefix else ():
            self.attempt(side, "prefix_hit", prefix_tokens(self.args), lambda s=side: hit(self.args, s))

    def attempt(self, side: Side, name: str, needed: int, work: Callable[[], dict[str, Any]]) -> None:
        """Keep what `work` returns, or say why there is nothing: it does not fit, or it failed."""
        if (side.name, name) in self.left_out:
            return
        why = unfit(side.target.facts, needed)
        if why is None:
            try:
                row = work()
            except EvaluationError as error:
                why, self.failed = str(error), True
            else:
                self.items.append(row)
                self.record.add("item", **row)
                return
        self.left_out.add((side.name, name))
        self.record.add("skipped", arm=side.name, cell=name, reason=why)
        tqdm.write(f"eval.bench_serving: {side.name} {name} is left out: {why}", file=sys.stderr)

    def summary(self) -> list[dict[str, Any]]:
        """Judge what was measured, and write that too.

        Raises:
            EvaluationError: no server was measured beside the dense one.
        """
        cells = summarise([row for row in self.items if row["task"] == "serving"])
        hits = prefix_hits([row for row in self.items if row["task"] == "prefix_hit"])
        rows = [*cells, *below_crossover(cells), *hits]
        if not rows:
            raise EvaluationError("nothing was measured on both servers")
        for row in rows:
            self.record.add("summary", **row)
        return rows


def run(args: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """Start the servers, measure and write the file.

    Returns:
        The summary, and whether a cell failed.

    Raises:
        EvaluationError: see the functions that this one calls.
    """
    # The sparse one first: it knows how long the answers must be.
    own: dict[str, list[str]] = {SPARSE: sparse_flags(args), DENSE: []}
    for name, flags in args.server:
        own[name] = [*own.get(name, []), *shlex.split(flags)]
    shared = [*server_flags(args), *shlex.split(args.server_args)]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    header = {"arguments": arguments_of(args), "label": args.label, "device": device}
    header["versions"] = versions(PACKAGES)
    with (
        tempfile.TemporaryDirectory() as name,
        Record(args.out, "eval.bench_serving", args.revision, **header) as record,
    ):
        folder = model_shapes.write(args.shape, Path(name)) if args.shape else Path(args.model_path)
        bench = Bench(args, record, Path(name))
        for group in [list(own)] if args.both else [[server] for server in own]:
            with contextlib.ExitStack() as stack:
                bench.measure([bench.start(stack, folder, server, [*shared, *own[server]]) for server in group])
        return bench.summary(), bench.failed


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        prog="eval.bench_serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--shape", choices=list(model_shapes.SHAPES), help="a public model's shape, without its weights")
    model.add_argument("--model-path", help="a checkpoint")
    parser.add_argument("--out", required=True, type=Path, help="JSONL file to write; the logs go beside it")
    parser.add_argument("--contexts", type=list_of(length), default="4k,32k,128k,256k", help="tokens of a prompt")
    parser.add_argument("--batch", type=list_of(int), default="1,4", help="requests at once")
    parser.add_argument("--output-length", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--runs", type=int, default=1, help="times that each cell is measured")
    parser.add_argument("--warmup", type=int, default=1, help="the client's warm-up requests before each batch")
    parser.add_argument("--prefix", type=_length_or_none, default="128k", help="cached tokens of prefix_hit; 0: none")
    parser.add_argument("--tail", type=int, default=64, help="further tokens of such a prompt")
    parser.add_argument("--hits", type=int, default=10, help="such prompts")
    parser.add_argument("--sparse-method", default="resa", help="of the sparse server; none for a prefill method alone")
    parser.add_argument("--sparse-config", default="{}", help="of the sparse server: inline JSON or a file")
    parser.add_argument("--sparse-prefill-method", help="of the sparse server (default: none)")
    parser.add_argument("--sparse-prefill-config", default="{}", help="of the sparse server: inline JSON or a file")
    parser.add_argument(
        "--structured", type=json.loads, help="generated inputs: a recipe and seed as JSON, {} for its own"
    )
    parser.add_argument("--server-args", default="", help="further arguments of all servers, as one string")
    parser.add_argument("--server", type=_named, action="append", default=[], metavar="NAME=ARGS", help="see above")
    parser.add_argument("--both", action="store_true", help="all servers at once; they share the GPU's memory")
    parser.add_argument("--start-timeout", type=float, default=900.0, help="seconds until a server must be ready")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--label", help="kept in the file's header")
    parser.add_argument("--revision", help="of this code, where its git history is not at hand")
    args = parser.parse_args(arguments)
    for name in ("output_length", "runs", "tail", "hits", *(["batch"] if args.batch else [])):
        if min([getattr(args, name)] if name != "batch" else args.batch) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if not args.contexts or not args.batch:
        parser.error("--contexts and --batch must name something")
    if args.structured is not None and not isinstance(args.structured, dict):
        parser.error("--structured must be a JSON object")
    if not methods(args):
        parser.error("--sparse-method none needs a --sparse-prefill-method")
    return args


def _length_or_none(text: str) -> int:
    return 0 if text == "0" else length(text)


def _named(text: str) -> tuple[str, str]:
    name, found, flags = text.partition("=")
    if not found or not name.replace("-", "").isalnum():
        raise argparse.ArgumentTypeError(f"must be NAME=ARGS, got {text!r}")
    return name, flags


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 1 where a cell failed or nothing can be compared."""
    args = parse(arguments)
    try:
        summary, failed = run(args)
    except FAILURES as error:
        print(f"eval.bench_serving: {error}", file=sys.stderr)
        return 1
    print(pd.DataFrame(summary).reindex(columns=list(SHOWN)).to_string(index=False, na_rep=""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
