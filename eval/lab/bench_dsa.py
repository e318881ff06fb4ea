"""``python -m eval.lab.bench_dsa``: time of DSA's stages in a layer, SGLang's own kernels beside this project's.

    python -m eval.lab.bench_dsa --out bench_dsa.jsonl
    python -m eval.lab.bench_dsa --shapes 32x128k --prefill "" --ops dsa_attention --out attention.jsonl

In DeepSeek-V3.2's sizes: 64 index heads of 128, 2,048 tokens chosen, 128 query heads over a latent of 512 + 64. Decode
(``--shapes``) has a query a row; prefill (``--prefill``) the last ``--chunk`` tokens of a prompt. Stages are the
selection as a whole (index logits, the best of them, their slots in the KV cache), the selection without the logits,
which are given, and sparse attention over given slots. Each is done by SGLang (``native``, what it runs by default on
Hopper, and what it has beside that), by this project's kernels (``portable``), and a selection also by this project's
choice behind SGLang's logits (``auto``, what a server with ``--sparse-method dsa`` runs where there are such).

Decode is captured as CUDA graphs of several layers, each with inputs of its own that together are larger than the L2
cache, which are replayed in turn (A/B/A/B); prefill is called in turn without a graph, as in a server. A row has the
median time of a layer and its spread; ``over_floor`` is that time over what moving each byte once takes at the memory's
ceiling, or the products at the tensor cores', whichever is longer (``floor_us``); ``native_ratio`` is against the
fastest of SGLang's implementations over a cache of the same dtype.

Quality beside speed, over all rows of decode and 64 tokens of a prompt: the share of the tokens that a selection has
in common with the highest logits in float64 (``overlap``) and how far off the others are (``off_by``), the same
against SGLang's selection, and whether ``--replays`` replays chose the same tokens (``repeatable``). Of attention the
relative L2 error. What is wrong is not timed; nor is a selection of this project that is not always the same.

A peer that is not installed, or does not take a shape, is reported and the others go on. The exit status is 1 where
that happens to one of this project's own, but for float8 rows (``portable-fp8``) of a latent of 64: there are none.
SGLang compiles some kernels at their first use, which can take minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from eval.lab.kernels import harness
from eval.lab.kernels.dsa import ATTEND, COMMAND, OPS
from eval.lab.kernels.dsa_inputs import MOST_SLOTS, Shape, Step
from eval.lab.kernels.dsa_quality import Judge, clear, samples
from eval.lab.kernels.dsa_table import TABLE, failed, floor, identity, with_ratios
from eval.lab.kernels.harness import (
    Implementation,
    Machine,
    Row,
    chosen,
    gpu,
    kept,
    making_inputs,
    parse_shape,
    peers_of,
)
from eval.lab.tables.files import measured
from eval.live.client import list_of
from eval.live.counters import EvaluationError
from eval.texts.lengths import length
from sglang_sparse_kernels.index_keys import PAGE_SIZE

SIZES = ("heads", "latent", "rope", "index_heads", "topk")


def shapes(args: argparse.Namespace) -> list[Shape]:
    """The shapes of the command line: decode, then prefill.

    Raises:
        EvaluationError: names the argument and what is allowed.
    """
    rules = (
        ("heads", args.heads >= 1, "1 or more"),
        ("latent", args.latent in (64, 128, 256, 512), "64, 128, 256 or 512"),
        ("rope", args.rope in (16, 32, 64), "16, 32 or 64"),
        ("index_heads", 1 <= args.index_heads <= 64, "1 to 64"),
        ("topk", args.topk >= 1, "1 or more"),
        ("rounds", args.rounds >= 2, "2 or more"),
        ("replays", args.replays >= 2, "2 or more"),
        ("chunk", args.chunk >= 1, "1 or more"),
    )
    harness.check(args, rules)
    sizes = {name: getattr(args, name) for name in SIZES}
    decode = [Shape(*parse_shape(text), **sizes) for text in dict.fromkeys(args.shapes)]
    prefill = [Shape(*parse_shape(text), chunk=args.chunk, **sizes) for text in dict.fromkeys(args.prefill)]
    if not decode and not prefill:
        raise EvaluationError("--shapes and --prefill are both empty; allowed: one shape at least")
    most = MOST_SLOTS - PAGE_SIZE
    for shape in decode:
        if ATTEND in args.ops and (named := shape.batch * min(shape.topk, shape.length)) > most:
            raise EvaluationError(
                f"--shapes: {shape.name} attends to {named} tokens with --topk {shape.topk}, and the cache has {most}; "
                f"allowed: as many, or --ops without {ATTEND}"
            )
    for shape in prefill:
        if shape.batch != 1 or shape.length < args.chunk:
            raise EvaluationError(
                f"--prefill must be one row of at least the {args.chunk} tokens of --chunk, got {shape.name}"
            )
    return decode + prefill


def measure(
    shape: Shape,
    op: str,
    plan: Sequence[Implementation[Step]],
    machine: Machine,
    rounds: int,
    replays: int = 2,
    seed: int = 0,
) -> list[Row]:
    """A row for each implementation of one operation, in the order of the plan; what is unavailable has the reason
    instead of figures.

    Raises:
        EvaluationError: the inputs do not fit into the machine's memory, or an implementation broke the machine.
    """
    layers = shape.num_layers(op, machine.l2_bytes)
    with making_inputs(f"{shape.name}, {op}", layers, machine):
        step = Step(shape, op, machine.device, layers, seed)
        judge = Judge(step, samples(step), replays)
    # A server has no graph of a prompt's selection either, whose kernels take longer than their launches.
    timed = machine.repeat if shape.chunk else machine.capture
    machine = replace(machine, capture=partial(judge.capture, timed))
    rows = harness.measure(
        *(COMMAND, shape.name, machine, rounds, [kept(one, clear) for one in plan], step),
        lambda one: identity(shape, one) | {"layers": layers},
        judge.quality,
        lambda one: shape.num_bytes(one.op, one.kv_dtype),
    )
    for row in rows:
        if "us" in row and row["implementation"] in judge.repeatable:
            row["repeatable"] = judge.repeatable[row["implementation"]]
    return rows


def run(
    args: argparse.Namespace,
    machine: Callable[[], Machine] = gpu,
    known: Sequence[Implementation[Step]] = TABLE,
) -> int:
    """Measure every shape and write the file.

    Args:
        args: the command line.
        machine: finds what to run on, asked after the command line was judged.
        known: who does what.

    Returns:
        The exit status.

    Raises:
        EvaluationError: see the functions that this one calls.
    """
    wanted = shapes(args)
    peers = peers_of(known) if args.peers is None else args.peers
    plan = chosen(args.ops, peers, known, OPS)
    found = machine()
    asked = {"shapes": [shape.name for shape in wanted], "peers": peers, "inputs": "normal"}
    header = harness.header_of(found, args, (*SIZES, "chunk", "rounds", "replays", "seed", "ops"), **asked)

    def made() -> Iterator[list[Row]]:
        for shape in wanted:
            for op in (op for op in shape.ops if op in args.ops):
                mine = [one for one in plan if one.op == op]
                rows = measure(shape, op, mine, found, args.rounds, args.replays, args.seed)
                for row, one in zip(rows, mine, strict=True):
                    row |= floor(shape, one, row, header)
                yield with_ratios(rows)

    return harness.write(COMMAND, args, header, made(), failed=failed)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; `shapes` and `chosen` judge it."""
    parser = harness.parser_of(COMMAND, __doc__, TABLE)
    harness.add_ops(parser, OPS)
    parser.add_argument("--shapes", type=list_of(str), default="1x128k,32x128k", help="of decode: batch x tokens")
    parser.add_argument("--prefill", type=list_of(str), default="1x32k,1x128k", help="of prompts: 1 x tokens")
    parser.add_argument("--chunk", type=length, default="8k", help="last tokens of a prompt, which choose")
    parser.add_argument("--heads", type=int, default=128, help="query heads")
    parser.add_argument("--latent", type=int, default=512, help="dimensions of the latent; SGLang's kernels: 512")
    parser.add_argument("--rope", type=int, default=64, help="rotated dimensions; SGLang's kernels: 64")
    parser.add_argument("--index-heads", type=int, default=64, help="heads of the indexer")
    parser.add_argument("--topk", type=int, default=2048, help="tokens chosen; SGLang's kernels take 2048")
    parser.add_argument("--replays", type=int, default=100, help="times that each selection is made again")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 1 when there is nothing to measure on, or a stage of this project failed."""
    return measured(COMMAND, lambda: parse(arguments), run)


if __name__ == "__main__":
    sys.exit(main())
