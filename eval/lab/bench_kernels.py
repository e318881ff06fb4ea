"""``python -m eval.lab.bench_kernels``: time of a sparse decode step's kernels, against their peers in the same run.

Every implementation of an operation is captured as a CUDA graph of several layers, each layer with caches of its own,
so that what an operation streams is not in the L2 cache (page_topk may find its scores there, as in a server, where
they were written just before). The graphs are replayed in turn (A/B/A/B); a row holds the median time of a layer and
the spread between the 10th and the 90th percentile. Bandwidth counts each byte that must be read once. ``dense_ratio``
is against the strongest dense peer with the same bfloat16 cache; dense attention over an fp8 cache stands beside.

This project's operations run as in a server with ``--context-length`` and ReSA: tables, scores and selections are as
wide as the longest context that a request may have, all layers share them, the attention is split for the selection of
that context, the two newest pages are always selected, and what is selected is counted. By default the server has room
for an answer of 2,048 tokens, as those of `eval.lab.bench_decode`. Peers have tables as wide as the rows.

Quality beside speed: the relative L2 error of each output against float64 attention over the same tokens, its distance
from dense attention, and the share of the dense softmax that the selected pages hold, over a sample of rows and heads.
What is read does not depend on the inputs, because budgets are fixed (page_topk alone may take longer where scores lie
close together), but this share and this distance do: queries, keys and values are normally distributed, which is
nothing like a model's, unless ``--recipe`` gives them a structure (``{}``: the default one of `eval.lab.structured`).

An operation with several kernels (page_score: `cuda` and `triton`) has a row for each; `sglang_sparse` is what it
picks. `vote` and `6 centroids+vote` are ReSA's other selection. ``--topk-shapes`` adds page_topk's CUDA kernel launched
in other ways, within ``score+topk+decode``: alone, its launches overlap one another, which hides what differs. What is
wrong is refused and not timed.

A peer that is not installed, or that does not take a shape, is reported and the others go on. The exit status is 1
where that happens to `sglang_sparse`. FlashInfer compiles its kernels at their first use, which can take minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch

from eval.lab.kernels import harness
from eval.lab.kernels.harness import (
    OURS,
    Implementation,
    Machine,
    Row,
    chosen,
    gpu,
    making_inputs,
    parse_shape,
    peers_of,
)
from eval.lab.kernels.kernel_inputs import OPS, Shape, Step, num_layers
from eval.lab.kernels.kernel_quality import quality, samples
from eval.lab.kernels.kernel_table import TABLE, identity, summarise, topk_table, with_ratios
from eval.lab.structured.structure import Recipe
from eval.lab.tables.files import measured
from eval.live.client import list_of
from eval.live.counters import EvaluationError
from eval.texts.lengths import length

COMMAND = "eval.lab.bench_kernels"
# Tokens of a request beyond its prompt that servers of `eval.lab.bench_decode` allow.
MAX_ANSWER = 2048
SUMMARY_DTYPES = ("bfloat16", "float8_e4m3fn")


def shapes(args: argparse.Namespace) -> list[Shape]:
    """The shapes of the command line, and the settings that they share.

    Raises:
        EvaluationError: names the argument and what is allowed.
    """
    pages = [2**power for power in range(7)]
    rules = (
        ("shapes", bool(args.shapes), "one at least"),
        ("page_size", args.page_size in pages, f"one of {', '.join(map(str, pages))}"),
        ("active_ratio", 0 < args.active_ratio <= 1, "more than 0 and at most 1"),
        ("n_min", args.n_min >= 1, "1 or more"),
        ("rounds", args.rounds >= 2, "2 or more"),
    )
    harness.check(args, rules)
    sizes = [parse_shape(text) for text in dict.fromkeys(args.shapes)]
    longest = max(tokens for _, tokens in sizes)
    if args.context_length is not None and args.context_length < longest:
        raise EvaluationError(f"--context-length must be {longest} or more, got {args.context_length}")
    options = {name: getattr(args, name) for name in ("page_size", "active_ratio", "n_min")}
    options["summary_dtype"] = getattr(torch, args.summary_dtype)
    return [
        Shape(batch, tokens, context_length=args.context_length or tokens + MAX_ANSWER, **options)
        for batch, tokens in sizes
    ]


def topk_shape(text: str) -> tuple[int, int]:
    """``2x512``: clusters of two blocks of 512 threads.

    Raises:
        EvaluationError: no such launch is possible.
    """
    clusters, threads = (1, 2, 4, 8), (32, 64, 128, 256, 512, 1024)
    known = {f"{cluster}x{count}": (cluster, count) for cluster in clusters for count in threads}
    if text not in known:
        raise EvaluationError(
            f"--topk-shapes: a shape is blocks of a cluster ({', '.join(map(str, clusters))}) x threads of a block "
            f"({', '.join(map(str, threads))}), such as 2x512, got {text!r}"
        )
    return known[text]


def measure(
    shape: Shape,
    plan: Sequence[Implementation[Step]],
    machine: Machine,
    rounds: int,
    recipe: Recipe | None = None,
) -> list[Row]:
    """A row for each implementation, in the order of the plan; what is unavailable has the reason instead of figures.

    Raises:
        EvaluationError: the inputs cannot be made, or an implementation broke the machine.
    """
    layers = num_layers(shape, machine.l2_bytes)
    with making_inputs(shape.name, layers, machine):
        step = Step(shape, machine.device, layers, recipe)
        over = samples(step)
    rows = harness.measure(
        *(COMMAND, shape.name, machine, rounds, plan, step),
        lambda one: identity(shape, one) | {"layers": layers},
        partial(quality, step, over),
        lambda one: shape.num_bytes(one.op, one.kv_dtype.itemsize),
    )
    return with_ratios(rows)


def run(args: argparse.Namespace, machine: Callable[[], Machine] = gpu, table: Sequence[Implementation] = TABLE) -> int:
    """Measure every shape and write the file.

    Args:
        args: the command line.
        machine: finds what to run on, asked after the command line was judged.
        table: who does what.

    Returns:
        The exit status.

    Raises:
        EvaluationError: see the functions that this one calls.
    """
    wanted = shapes(args)
    peers = peers_of(table) if args.peers is None else args.peers
    plan = chosen(args.ops, peers, [*table, *topk_table(args.topk_shapes)], OPS)
    recipe = None if args.recipe is None else harness.recipe_of(args.recipe)
    found = machine()
    names = ("page_size", "active_ratio", "n_min", "summary_dtype", "context_length", "topk_shapes", "recipe")
    inputs = {"inputs": "normal" if recipe is None else "structured"}
    asked = {"shapes": [shape.name for shape in wanted], "peers": peers, **inputs}
    header = harness.header_of(found, args, (*names, "rounds", "ops"), **asked)
    header |= {} if recipe is None else {"recipe": recipe.model_dump()}
    made = (measure(shape, plan, found, args.rounds, recipe) for shape in wanted)
    return harness.write(COMMAND, args, header, made, summarise, failed)


def failed(rows: Sequence[Row]) -> bool:
    """Whether what a server of this project runs was not measured."""
    return any("unavailable" in row and row["implementation"] == OURS for row in rows)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; `shapes` and `chosen` judge it."""
    parser = harness.parser_of(COMMAND, __doc__, TABLE)
    harness.add_ops(parser, OPS)
    harness.add_recipe(parser, None)
    parser.add_argument("--shapes", type=list_of(str), default="8x64k,1x128k,1x32k", help="batch x tokens of a row")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--active-ratio", type=float, default=0.1, help="share of a row's pages")
    parser.add_argument("--n-min", type=int, default=16, help="pages that are selected at least")
    parser.add_argument("--summary-dtype", choices=SUMMARY_DTYPES, default="bfloat16")
    parser.add_argument(
        "--context-length",
        type=length,
        help=f"tokens of the server's longest request (default: {MAX_ANSWER} more than a row)",
    )
    parser.add_argument(
        "--topk-shapes", type=list_of(topk_shape), default="", help="of page_topk, such as 1x512,2x512,4x1024"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 1 when there is nothing to measure on, or an operation of this project failed."""
    return measured(COMMAND, lambda: parse(arguments), run)


if __name__ == "__main__":
    sys.exit(main())
