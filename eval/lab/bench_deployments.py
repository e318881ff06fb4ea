r"""``python -m eval.lab.bench_deployments``: what a deployment costs a sparse and a dense server.

    python -m eval.lab.bench_deployments --shape qwen3-8b --deployments one,tp,dp,pp,pair --input-length 32k \
        --output-length 256 --batch 4 --sparse "--sparse-method resa" --out deployments.jsonl

Every deployment is started twice, dense and with the flags of ``--sparse``: ``one``, a server on one GPU; ``host``, the
same with a pool of one batch and a hierarchical cache in host memory; ``tp``, ``dp`` and ``pp`` with tensor
parallelism, data-parallel attention and pipeline parallelism on ``--gpus`` GPUs; ``pair``, a prefill and a decode
server. A run sends ``--batch`` prompts of random tokens at once, of ``dp`` that many for each rank, and times the
streams: ``ttft``, the median of all, and ``throughput``, tokens of answers a second, prefill included. Then it sends
them again, so that decoding begins at once everywhere: ``tpot`` is that of the window in which all decode, in whole
intervals of rectification. The first run does not count.
``ttft_cached``, of ``one`` and ``host``, is the median over prompts that were all asked before, one more of them than
fit the pool of ``host``, so that there each comes back from host memory. Seconds everywhere.

The summary has the ratio of each figure to that on one GPU, sparse and dense, and how long answers stay the same: as on
one GPU, and as the dense server's. Answers of dummy weights (``--shape``) hardly depend on the context, so that only a
checkpoint's say something.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from eval.lab.servers import model_shapes
from eval.lab.servers.deployments import (
    CACHED,
    COMMAND,
    DENSE,
    DEPLOYMENTS,
    DP,
    HOST,
    ONE,
    PAIR,
    SPARSE,
    Ask,
    started,
    summarise,
)
from eval.lab.tables.files import measured
from eval.live.client import LiveServer, command_line, list_of, positive, request_of
from eval.live.counters import EvaluationError, moved, require_sparse
from eval.live.gpu_watch import SpeedRecord
from eval.live.record import Record, this_machine
from eval.live.tokens import random_prompts
from eval.serving.grid import batch_flags
from eval.serving.measurement import decode_figures
from eval.texts.lengths import length
from launch.server import ServerProcess

# Of KV, behind the last token of a request.
ROOM = 256


def server_flags(args: argparse.Namespace, name: str, arm: str) -> list[str]:
    """The flags of a server of a deployment, but those that the deployment itself needs."""
    tokens = args.input_length + args.output_length + ROOM
    # Other pools keep the prompts of all runs.
    pool = tokens * (args.batch if name == HOST else 2 * args.batch + 1)
    flags = [
        "--context-length",
        str(tokens),
        "--max-total-tokens",
        str(pool),
        *batch_flags(args.batch * ranks(args, name)),
    ]
    flags += model_shapes.load_flags(args)
    flags += ["--disaggregation-transfer-backend", args.transfer] if name == PAIR else []
    return [*flags, *shlex.split(args.server_args), *(shlex.split(args.sparse) if arm == SPARSE else [])]


def ranks(args: argparse.Namespace, name: str) -> int:
    """Return the number of ranks of a deployment that take separate requests."""
    return args.gpus if name == DP else 1


class Arm:
    """A deployment under measurement: its server that decodes, and what asks it."""

    def __init__(self, args: argparse.Namespace, name: str, arm: str, process: ServerProcess, ask: Ask) -> None:
        self.args, self.name, self.arm, self.ask = args, name, arm, ask
        self.batch = args.batch * ranks(args, name)
        # A request to a pair holds a connection to each server.
        self.server = LiveServer(process.url, concurrency=2 * self.batch)
        self.alone = LiveServer(process.url)
        self.vocabulary = self.server.vocabulary_size()
        state = self.server.sparse_state() if arm == SPARSE else {}
        self.interval = (state.get("config") or {}).get("rectify_interval", 0)

    def load(self, run: int) -> dict[str, Any]:
        """Ask a batch at once, then again from the prefix cache; refused where a sparse server ran dense."""
        args = self.args
        prompts = random_prompts(self.batch, args.input_length, self.vocabulary, args.seed + run)
        requests = [request_of(prompt, args.output_length, {}) for prompt in prompts]
        counts, before = None, self.server.counters() if self.arm == SPARSE else None
        cold, warm = (self.server.each(self.ask, requests) for _ in range(2))
        if before is not None:
            counts = moved(before, self.server.counters())
            require_sparse(f"{self.name}/{self.arm}", counts, self.interval > 0)
        figures = decode_figures(warm, max(self.interval, 1))
        seconds = max(answer.chunks[-1].seconds for answer in cold) - min(answer.sent for answer in cold)
        row: dict[str, Any] = {"id": f"{self.name}/{self.arm}/{run}", "task": "deployment", "deployment": self.name}
        row |= {"arm": self.arm, "run": run, "requests": self.batch, "ranks": ranks(args, self.name)}
        row |= {"ttft": median(answer.chunks[0].seconds - answer.sent for answer in cold)}
        row |= {"tpot": figures["tpot_mean"], "itl_p99": figures["itl_p99"], "ttft_cached": None}
        row["throughput"] = self.batch * args.output_length / seconds
        return row | {"tokens": [answer.tokens for answer in cold], "counters": counts}

    def cached(self) -> dict[str, Any]:
        """Ask one prompt more than the pool of `HOST` keeps in turn, ``--hits`` rounds; the first fills the cache."""
        args = self.args
        prompts = random_prompts(self.batch + 1, args.input_length, self.vocabulary, args.seed + 1000)
        seconds, missing = [], []
        for round_ in range(args.hits + 1):
            for prompt in prompts:
                (answer,) = self.alone.each(self.ask, [request_of(prompt, 1, {})])
                if round_:
                    seconds.append(answer.chunks[0].seconds - answer.sent)
                    missing.append(args.input_length - answer.cached_tokens)
        if max(missing) > ROOM:
            raise EvaluationError(f"{self.name}/{self.arm}: {max(missing)} tokens of a prompt were not in the cache")
        return {"ttft_cached": median(seconds), "ttfts_cached": seconds, "uncached_tokens": missing}


def measure(args: argparse.Namespace, folder: Path, name: str, arm: str, record: Record) -> list[dict[str, Any]]:
    """Start a deployment and run all loads on it; returns the counted rows."""
    log = args.out.with_suffix(f".{name}.{arm}.log")
    with ExitStack() as stack:
        try:
            deployment = started(name, args.gpus, folder, server_flags(args, name, arm), log, args.start_timeout)
            process, ask = stack.enter_context(deployment)
        except (RuntimeError, TimeoutError) as error:
            raise EvaluationError(f"the {name}/{arm} server did not start, see {log}") from error
        side = Arm(args, name, arm, process, ask)
        line = shlex.join(["python", *process.command[1:]])
        record.add("server", arm=f"{name}/{arm}", facts=side.server.facts(), command=line)
        rows = [side.load(run) for run in range(args.runs + 1)][1:]
        if args.hits and name in CACHED:
            rows[-1] |= side.cached()
    for row in rows:
        record.add("item", **row)
    return rows


def run(args: argparse.Namespace) -> int:
    """Measure every deployment and write the file.

    Returns:
        The exit status: 1 where a deployment was not measured.

    Raises:
        EvaluationError: nothing was measured on both servers.
    """
    names = ("shape", "model_path", "input_length", "output_length", "batch", "gpus", "runs", "hits", "sparse", "seed")
    header = {
        "arguments": {name: getattr(args, name) for name in (*names, "server_args", "transfer")},
        "label": args.label,
        **this_machine(),
    }
    items: list[dict[str, Any]] = []
    failed = False
    plan = [(name, arm) for name in args.deployments for arm in (DENSE, SPARSE)]
    with tempfile.TemporaryDirectory() as scratch, SpeedRecord(args.out, COMMAND, args.revision, **header) as record:
        folder = model_shapes.folder_of(args, Path(scratch))
        for name, arm in tqdm(plan):
            try:
                items += measure(args, folder, name, arm, record)
            except EvaluationError as error:
                failed = True
                record.add("skipped", arm=f"{name}/{arm}", reason=str(error))
                tqdm.write(f"{COMMAND}: {error}", file=sys.stderr)
        summary = summarise(items)
        if not summary:
            raise EvaluationError("no deployment was measured dense and sparse")
        for row in summary:
            record.add("summary", **row)
    return int(failed)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = command_line(COMMAND, __doc__)
    model_shapes.add_arguments(parser)
    parser.add_argument("--out", required=True, type=Path, help="JSONL file to write, with the logs next to it")
    parser.add_argument("--sparse", required=True, metavar="ARGS", help="arguments of the sparse server, as one string")
    parser.add_argument(
        "--deployments", type=list_of(str, DEPLOYMENTS), default=ONE, help=f"of {', '.join(DEPLOYMENTS)}"
    )
    parser.add_argument("--gpus", type=positive, default=2, help="that tp, dp and pp share")
    parser.add_argument("--input-length", type=length, default="32k", help="tokens of a prompt")
    parser.add_argument("--output-length", type=length, default="256", help="tokens of an answer")
    parser.add_argument("--batch", type=positive, default=4, help="prompts at once of a rank")
    parser.add_argument("--runs", type=positive, default=2, help="that count")
    parser.add_argument("--hits", type=int, default=0, help="rounds of prompts that hit the prefix cache")
    parser.add_argument("--transfer", default="nixl", help="SGLang's --disaggregation-transfer-backend of a pair")
    parser.add_argument("--server-args", default="", help="further arguments of all servers, as one string")
    parser.add_argument("--start-timeout", type=float, default=900.0, help="seconds until a server must be ready")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 1 where something was not measured."""
    return measured(COMMAND, lambda: parse(arguments), run)


if __name__ == "__main__":
    sys.exit(main())
