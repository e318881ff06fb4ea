"""``python -m eval.lab.agree_dsa``: does this project's DSA choose and answer as SGLang's own kernels do?

    python -m eval.lab.agree_dsa --out dsa_agreement.jsonl

On a GPU that has both (Hopper: DeepGEMM, FlashMLA, FA3), with a random model (`eval.lab.agreement.dsa_checkpoint`) that
is written for the run: 4 layers, DeepSeek-V3.2's indexer of 64 heads of 128 and ``index_topk`` 2048. Two servers run
one after the other, both with ``--sparse-method dsa``: the native one makes logits and attends with SGLang's kernels,
the other one has all stages "portable". Both choose exactly. Both get the same prompts of random tokens, and decode the
same random tokens (``forced_tokens``).

Selections (rows ``selection`` and ``replays``) are compared *within the native server*, layer by layer, on the very
hidden states that its own indexer sees: see ``eval/lab/agreement/server``. Between two servers they would differ for
what the layers before have rounded differently. Every token of every prompt counts that leaves something out, and every
decode step. ``keys``: "native", the portable logits and choice over the keys that the server has stored; "own", over
keys that the portable indexer quantised, too, as in its own server.

Distributions are compared *between the servers* (``arm`` "portable"): KL(native, portable) over the whole vocabulary
at each of the ``--tokens`` positions, the first from prefill, the others from decode. ``arm`` "native" is the native
server asked a second time with its cache flushed, the noise of that.

The native server runs without CUDA graphs, as selections are looked at from the host; the portable one with them. The
exit status is 1 where something but the noise does not agree: a query with less than 99.9 % of its tokens in common, a
differing token further than 1e-4 from the k-th logit, relative to it, a replay that chose others, or a mean KL of .003
or more. The file is whole nevertheless.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from eval.lab.agreement import dsa_checkpoint
from eval.lab.agreement.agreement import COMMAND, NATIVE, PORTABLE, required, summarise
from eval.lab.agreement.dsa_checkpoint import SIZES
from eval.lab.agreement.dsa_servers import ask, distributions, make_asked, serve, watched_answers
from eval.lab.tables.files import measured
from eval.live.counters import EvaluationError
from eval.live.record import Record, this_machine, versions
from eval.texts.lengths import length

# The implementations of both servers, the watched one first: SGLang's kernels but for the selection.
ARMS: Mapping[str, str] = {NATIVE: "auto", PORTABLE: PORTABLE}
PACKAGES = ("sgl-deep-gemm",)
ARGUMENTS = ("layers", "topk", "prompts", "length", "tokens", "chunk", "replays", "concurrency", "server_args", "seed")


def require_gpu() -> None:
    """Refuse a machine that cannot run SGLang's kernels.

    Raises:
        EvaluationError: says what it lacks.
    """
    if not torch.cuda.is_available():
        raise EvaluationError("needs a CUDA GPU: SGLang's own DSA kernels, which it compares with, run nowhere else")
    if (major := torch.cuda.get_device_capability()[0]) not in (9, 10):
        raise EvaluationError(f"needs a GPU of compute capability 9.x or 10.x for SGLang's DSA kernels, got {major}.x")


def run(
    args: argparse.Namespace,
    sizes: Mapping[str, int] = SIZES,
    arms: Mapping[str, str] = ARMS,
    require: Callable[[], None] = require_gpu,
) -> int:
    """Start both servers, compare and write the file.

    Args:
        args: the command line.
        sizes: of the model, see `eval.lab.agreement.dsa_checkpoint.SIZES`.
        arms: the implementations of the native server and the other one.
        require: refuses a machine on which there is nothing to compare.

    Returns:
        The exit status: 1 where something does not agree.

    Raises:
        EvaluationError: see the functions that this one calls.
    """
    require()
    sizes = {**sizes, "num_hidden_layers": args.layers, "index_topk": args.topk}
    machine = this_machine()
    machine["versions"] |= versions(PACKAGES)
    header = {"arguments": {name: getattr(args, name) for name in ARGUMENTS}, "sizes": sizes, **machine}
    with tempfile.TemporaryDirectory() as scratch, Record(args.out, COMMAND, args.revision, **header) as record:
        folder = dsa_checkpoint.write(Path(scratch) / "model", sizes, args.seed)
        found = compare(args, folder, arms, record, sizes["vocab_size"])
        summary = summarise(found)
        for row in summary:
            record.add("summary", **row)
    return int(not all(row["agrees"] for row in summary if required(row)))


def compare(
    args: argparse.Namespace, folder: Path, arms: Mapping[str, str], record: Record, vocabulary: int
) -> list[dict[str, Any]]:
    """Start the servers one after the other, and write how they compare.

    Args:
        args: the command line.
        folder: of the model.
        arms: see `run`.
        record: the result file.
        vocabulary: number of the model's tokens.

    Returns:
        The rows of selections, replays and distributions.

    Raises:
        EvaluationError: see `serve`, `ask` and `watched_answers`.
    """
    asked = make_asked(args, vocabulary)

    def keep(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            record.add(**row)
        found.extend(rows)

    found: list[dict[str, Any]] = []
    selections, native, again = watched_answers(
        args, asked, arms[NATIVE], folder, record, folder.parent / "watch.jsonl"
    )
    keep([*selections, *distributions(NATIVE, again, NATIVE, native)])
    with ExitStack() as stack:
        _, server = serve(stack, args, PORTABLE, arms[PORTABLE], folder, record, {})
        portable = ask(server, asked, PORTABLE)
    keep(distributions(PORTABLE, portable, NATIVE, native))
    return found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write; the servers' logs go beside it")
    parser.add_argument("--prompts", type=int, default=8, help="prompts")
    parser.add_argument("--length", type=length, default="8k", help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=16, help="tokens that are decoded after it")
    parser.add_argument("--chunk", type=length, default="4k", help="tokens that are prefilled at once")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model")
    parser.add_argument("--topk", type=int, default=2048, help="index_topk; SGLang's kernels take 2048")
    parser.add_argument("--replays", type=int, default=100, help="times that each selection is made again")
    parser.add_argument("--concurrency", type=int, default=8, help="requests in flight")
    parser.add_argument("--server-args", default="", help="further arguments of both servers, as one string")
    parser.add_argument("--start-timeout", type=float, default=900.0, help="seconds until a server must be ready")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the prompts")
    parser.add_argument("--revision", help="of this code, where its git history is not at hand")
    args = parser.parse_args(arguments)
    for name in ("prompts", "layers", "topk", "concurrency"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be 1 or more, got {getattr(args, name)}")
    for name in ("tokens", "replays"):
        if getattr(args, name) < 2:
            parser.error(f"--{name} must be 2 or more, got {getattr(args, name)}")
    if args.length <= args.topk:
        parser.error(f"--length must be above the {args.topk} of --topk, got {args.length}: nothing would be left out")
    return args


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 1 where something does not agree, or nothing can be compared."""
    return measured(COMMAND, lambda: parse(arguments), run)


if __name__ == "__main__":
    sys.exit(main())
