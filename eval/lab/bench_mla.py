"""``python -m eval.lab.bench_mla``: time of RoBSA's sensitive layer in a decode step, against dense MLA decode.

    python -m eval.lab.bench_mla --shapes 8x64k,24x128k,1x128k --out mla.jsonl
    python -m eval.lab.bench_mla --shapes 24x128k --heads 16 --out mla-v2-lite.jsonl

A sensitive layer weighs the blocks by the attention of the RoPE dimensions (``block_mass``), selects the heaviest that
hold theta1 of it (``block_topp``) and attends to those (``sparse_mla_decode``). Measured are each of the three and all
together (``mass+topp+attend``), launched one after the other into one CUDA graph as a server does: by the RoPE part of
the latent cache (``rope``), by a copy of it that lies side by side (``rope_copy``; keeping it up to date is not timed),
and by all dimensions (``full_score``). Dense peers are called as SGLang's backends call them. Every layer of a graph
has caches of its own, together larger than the L2 cache; the graphs are replayed in turn (A/B/A/B), and a row has the
median time of a layer with its spread, the bytes and operations that it needs at least, and what its output is worth:
distance from float64 attention over the same tokens and from dense attention, the attention mass of the full scores
that the blocks hold, and how many blocks are active. What is wrong, when called or when its graph is replayed, is not
timed.

``dense_ratio`` is against the strongest dense peer over a cache of the same dtype, FlashMLA, FA3 or FlashInfer; without
FlashMLA there is none. SGLang's Triton decode and FlashMLA over a float8 cache stand beside. ``--active`` says how
concentrated the attention is: by default as the paper reports of DeepSeek's models (its table 10: 500 of 8,192 blocks
at 128k), reached by the number of stripes in a structure (`eval.lab.structured`) whose RoPE scores are nearly its full
ones. A row whose share of active blocks comes out more than two points off, or more than a tenth of its size, is
refused.

Two things are best cases. All heads attend to the same tokens in nearly the same shares, so the mass kept, the distance
from dense attention and the cosine of the scores are better than in a model, whose heads differ; times do not depend on
it. And all rows of a batch have the same length and need nearly as many blocks, so uneven loads are not seen.

Of FlashMLA's sparse kernels, which attend to the tokens of the selected blocks, ``flashmla-tokens`` is that of
*prefill*: it takes a bfloat16 cache and does not split a row's tokens over processors. ``flashmla-fp8-tokens`` is that
of decode, over a cache quantised as SGLang's DSA backend does.

``--positions`` makes the inputs of a server that generates so many: rows are the first of them, and all shapes have the
structure that is found for the longest one.

A peer that is not installed, or does not take a shape, is reported and the others go on. The exit status is 1 where
that happens to one of this project's own operations.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from eval.lab.kernels import harness
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
from eval.lab.kernels.mla import COMMAND, OPS, ROPE, SCORES
from eval.lab.kernels.mla_inputs import RECIPE, Shape, Step, recipe_for, target_share
from eval.lab.kernels.mla_quality import active, judged_capture, quality, samples
from eval.lab.kernels.mla_table import identity, table, with_ratios
from eval.lab.structured.structure import Recipe
from eval.lab.tables.files import measured
from eval.live.client import list_of
from eval.live.counters import EvaluationError
from eval.texts.lengths import length

KV_DTYPES = ("bfloat16", "float8_e4m3fn")
ACTIVE = ("paper", "any")
SIZES = ("heads", "latent", "rope", "page_size", "block_size", "theta1", "max_active_ratio", "positions")


def active_share(text: str) -> str | float:
    """ "paper", "any" or a share.

    Raises:
        argparse.ArgumentTypeError: it is none of them.
    """
    try:
        found = text if text in ACTIVE else float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(ACTIVE)} and no number") from error
    if isinstance(found, float) and not 0 < found < 1:
        raise argparse.ArgumentTypeError(f"a share of the blocks is between 0 and 1, got {text}")
    return found


def shapes(args: argparse.Namespace) -> list[Shape]:
    """The shapes of the command line, and the settings that they share.

    Raises:
        EvaluationError: names the argument and what is allowed.
    """
    sizes = [16, 32, 64]
    rules = (
        ("shapes", bool(args.shapes), "one at least"),
        ("heads", args.heads >= 1, "1 or more"),
        ("latent", args.latent in (64, 128, 256, 512), "64, 128, 256 or 512"),
        ("rope", args.rope in (32, 64), "32 or 64"),
        ("page_size", args.page_size in sizes, "16, 32 or 64"),
        ("block_size", args.block_size in sizes and args.block_size <= args.page_size, "16, 32 or 64, at most a page"),
        ("theta1", 0 < args.theta1 <= 1, "more than 0 and at most 1"),
        ("max_active_ratio", 0 < args.max_active_ratio < 1, "between 0 and 1"),
        ("rounds", args.rounds >= 2, "2 or more"),
    )
    harness.check(args, rules)
    options = {name: getattr(args, name) for name in SIZES} | {"kv_dtype": getattr(torch, args.kv_dtype)}
    made = [Shape(*parse_shape(text), **options) for text in dict.fromkeys(args.shapes)]
    longest = max(shape.length for shape in made)
    if args.positions is not None and args.positions < longest:
        raise EvaluationError(f"--positions must be {longest} or more, got {args.positions}")
    return [replace(shape, target_share=target_share(shape, args.active)) for shape in made]


def measure(
    shape: Shape,
    base: Recipe,
    plan: Sequence[Implementation[Step]],
    machine: Machine,
    rounds: int,
    seed: int = 0,
    made_for: Shape | None = None,
) -> list[Row]:
    """A row for each implementation, in the order of the plan; what is unavailable has the reason instead of figures.

    The structure is that of the shape `made_for`; None: of the shape itself.

    Raises:
        EvaluationError: the inputs cannot be made, or an implementation broke the machine.
    """
    layers = shape.num_layers(machine.l2_bytes)
    with making_inputs(shape.name, layers, machine):
        recipe = recipe_for(made_for or shape, base, seed, machine.device)
        step = Step(shape, recipe, machine.device, layers, seed)
        over = samples(step)
    blocks = {score: active(step, score)["active_blocks"] for score in SCORES}

    def work(one: Implementation[Step]) -> tuple[str, str, float]:
        score = one.name if one.name in SCORES else ROPE
        return one.op, score, blocks[score]

    judge = partial(quality, step, over)
    # A graph can be wrong where a call was right, when it reads what only the call was given.
    machine = replace(machine, capture=partial(judged_capture, step, judge, machine.capture))
    rows = harness.measure(
        *(COMMAND, shape.name, machine, rounds, [kept(one, Step.clear) for one in plan], step),
        lambda one: identity(shape, one) | {"layers": layers, "stripe_ratio": recipe.stripe_ratio},
        judge,
        lambda one: shape.num_bytes(*work(one), one.kv_dtype.itemsize),
    )
    for row, one in zip(rows, plan, strict=True):
        flops = shape.flops(*work(one))
        row |= {"flops": flops, "tflops": round(flops / row["us"] / 1e6, 1)} if flops and "us" in row else {}
    return with_ratios(rows)


def run(
    args: argparse.Namespace,
    machine: Callable[[], Machine] = gpu,
    known: Callable[[torch.dtype], Sequence[Implementation[Step]]] = table,
) -> int:
    """Measure every shape and write the file.

    Args:
        args: the command line.
        machine: finds what to run on, asked after the command line was judged.
        known: who does what over a cache of a dtype.

    Returns:
        The exit status.

    Raises:
        EvaluationError: see the functions that this one calls.
    """
    wanted = shapes(args)
    everybody = known(getattr(torch, args.kv_dtype))
    peers = peers_of(everybody) if args.peers is None else args.peers
    plan = chosen(args.ops, peers, everybody, OPS)
    base = harness.recipe_of({**RECIPE, **args.recipe})
    found = machine()
    names = (*SIZES, "kv_dtype", "active", "recipe", "rounds", "seed", "ops")
    header = harness.header_of(found, args, names, shapes=[shape.name for shape in wanted], peers=peers)
    made_for = max(wanted, key=lambda shape: shape.length) if args.positions else None
    made = (measure(shape, base, plan, found, args.rounds, args.seed, made_for) for shape in wanted)
    return harness.write(COMMAND, args, header | {"base_recipe": base.model_dump()}, made)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; `shapes` and `chosen` judge it."""
    parser = harness.parser_of(COMMAND, __doc__, table())
    harness.add_ops(parser, OPS)
    harness.add_recipe(parser, {})
    parser.add_argument("--shapes", type=list_of(str), default="8x64k,24x128k,1x128k", help="batch x tokens of a row")
    parser.add_argument("--heads", type=int, default=128, help="query heads; 128 is DeepSeek-V3, 16 V2-Lite")
    parser.add_argument("--latent", type=int, default=512, help="dimensions of the latent")
    parser.add_argument("--rope", type=int, default=64, help="rotated dimensions")
    parser.add_argument("--page-size", type=int, default=64, help="tokens; FlashMLA takes 64 only")
    parser.add_argument("--block-size", type=int, default=16, help="tokens that are selected together")
    parser.add_argument("--theta1", type=float, default=0.9, help="share of the mass that the blocks hold")
    parser.add_argument("--max-active-ratio", type=float, default=0.5, help="rows that need more attend to all")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="bfloat16")
    parser.add_argument("--active", type=active_share, default="paper", help="paper, any, or a share of the blocks")
    parser.add_argument("--positions", type=length, help="tokens of which a row is the first, as on a server")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 1 when there is nothing to measure on, or an operation of this project failed."""
    return measured(COMMAND, lambda: parse(arguments), run)


if __name__ == "__main__":
    sys.exit(main())
