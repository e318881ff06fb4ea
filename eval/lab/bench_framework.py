"""``python -m eval.lab.bench_framework``: time of a decode step of RocketKV and Skip-Softmax, against dense decode.

    python -m eval.lab.bench_framework --shapes 1x32k,32x32k,1x128k --out framework.jsonl

The inputs have a known structure (`eval.lab.structured`): in random keys there is nothing to find or to skip. RocketKV
has TensorRT-LLM's default budgets; what is timed is the step (``rocketkv_predict+attend``, and its first part alone),
not the choice at the prompt's end, which is made beforehand. Skip-Softmax has the ``threshold_scale_factor`` at which
it skips the share of the blocks that is asked for; where no factor does, it is refused.

As in ``eval.lab.bench_kernels``, whose dense peers stand beside: every implementation is a CUDA graph of several
layers, which are replayed in turn (A/B/A/B); bandwidth counts each byte that must be read once; ``dense_ratio`` is
against the fastest dense peer over the same bfloat16 cache. Beside the times the relative L2 error against float64
attention over the same tokens, the distance from dense attention, and the attention mass kept, over a sample of rows
and heads.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from eval.lab.kernels import harness
from eval.lab.kernels.framework import COMMAND, DENSE
from eval.lab.kernels.framework_inputs import OPS, PREDICT, ROCKET, SKIP, FrameworkStep, Settings
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
    strongest,
)
from eval.lab.kernels.kernel_inputs import Layer, Shape, num_layers
from eval.lab.kernels.kernel_quality import logits_and_values, sampled_pairs
from eval.lab.kernels.kernel_table import TABLE
from eval.lab.structured.structure import Recipe
from eval.lab.tables.files import measured
from eval.live.client import list_of
from sglang_sparse_kernels.common.timing import Run

# Of 64 keys each, about a quarter of the blocks have a stripe then.
RECIPE = {"stripe_ratio": 0.0048}


def _ours(op: str, method: Callable[[FrameworkStep, Layer], torch.Tensor]) -> Implementation[FrameworkStep]:
    def prepare(step: FrameworkStep) -> list[Run]:
        if op == SKIP:
            step.require_share()
        return [partial(method, step, layer) for layer in step.layers]

    return Implementation(op, OURS, prepare, peer=False)


PEERS: tuple[Implementation[Any], ...] = tuple(one for one in TABLE if one.op == DENSE)
OWN = (
    _ours(PREDICT, FrameworkStep.predict),
    _ours(ROCKET, FrameworkStep.rocket),
    _ours(SKIP, FrameworkStep.skip),
)


def quality(step: FrameworkStep, op: str, output: torch.Tensor | None) -> Row:
    """Return the quality of an output of the first layer; see the command."""
    if output is None:
        return {}
    got, wanted, dense, mass = [], [], [], []
    for row, head in sampled_pairs(step.shape):
        logits, values = logits_and_values(step, row, head)
        weights = logits.softmax(-1)
        dense.append(weights @ values)
        tokens = torch.ones_like(weights[0], dtype=torch.bool)
        if op != DENSE:
            tokens = step.attended(op, row, head, logits)
            mass.append(weights[:, tokens].sum(-1).mean())
        wanted.append(logits.masked_fill(~tokens, -torch.inf).softmax(-1) @ values)
        if op != PREDICT:
            got.append(output[row].unflatten(0, (step.shape.kv_heads, -1))[head].double())
    found: Row = {"recall": torch.stack(mass).mean().item()} if mass else {}
    for name, expected in (("relative_l2", wanted), ("dense_l2", dense)):
        if got:
            exact = torch.stack(expected)
            found[name] = ((torch.stack(got) - exact).norm() / exact.norm()).item()
    return found


def identity(step: FrameworkStep, one: Implementation[Any]) -> Row:
    """Return the fields that identify a row."""
    facts = {name: getattr(step.shape, name) for name in ("batch", "length", "q_heads", "kv_heads", "dim", "page_size")}
    settings = asdict(step.settings)
    # Of what a row has nothing to do with the header tells.
    own = {"target_sparsity": settings.pop("skipped")} if one.op == SKIP else {}
    own |= {"sparsity": step.skipped, "threshold_scale_factor": step.factor} if one.op == SKIP else {}
    own |= settings if one.op in (PREDICT, ROCKET) else {}
    return {
        "id": f"framework/{step.shape.name}/p{step.shape.page_size}/{one.op}/{one.name}",
        **one.facts(),
        "shape": step.shape.name,
        **facts,
        **own,
        "layers": len(step.layers),
    }


def measure(
    shape: Shape,
    recipe: Recipe,
    settings: Settings,
    plan: Sequence[Implementation[Any]],
    machine: Machine,
    rounds: int,
    seed: int = 0,
) -> list[Row]:
    """A row for each implementation, in the order of the plan; what is unavailable has the reason instead of figures.

    Raises:
        EvaluationError: the inputs cannot be made, or an implementation broke the machine.
    """
    layers = num_layers(shape, machine.l2_bytes)
    with making_inputs(shape.name, layers, machine):
        step = FrameworkStep(shape, machine.device, layers, recipe, settings, seed)
    rows = harness.measure(
        *(COMMAND, shape.name, machine, rounds, plan, step),
        partial(identity, step),
        lambda one, output: quality(step, one.op, output),
        lambda one: step.num_bytes(one.op, one.kv_dtype.itemsize),
    )
    dense = strongest(row for row in rows if row["op"] == DENSE)
    for row in rows:
        if dense is not None and "us" in row and row["op"] != PREDICT:
            row |= {"dense": dense["implementation"], "dense_us": dense["us"], "dense_ratio": dense["us"] / row["us"]}
    return rows


def run(
    args: argparse.Namespace,
    machine: Callable[[], Machine] = gpu,
    table: Sequence[Implementation[Any]] = (*PEERS, *OWN),
) -> int:
    """Measure every shape and write the file.

    Args:
        args: the command line.
        machine: finds what to run on, asked after the command line was judged.
        table: who does what.

    Returns:
        The exit status: 1 where an operation of this project was not measured.

    Raises:
        EvaluationError: see the functions that this one calls.
    """
    peers = peers_of(table) if args.peers is None else args.peers
    plan = chosen(args.ops, peers, table, OPS)
    shapes = [Shape(*parse_shape(text), page_size=args.page_size) for text in dict.fromkeys(args.shapes)]
    recipe = harness.recipe_of({**RECIPE, **args.recipe})
    found = machine()
    settings = Settings(skipped=args.skipped, topk=args.topk, topr=args.topr, prompt_budget=args.prompt_budget)
    asked = {"shapes": [shape.name for shape in shapes], "peers": peers, **asdict(settings)}
    header = harness.header_of(found, args, ("ops", "page_size", "recipe", "rounds", "seed"), **asked)
    made = (measure(shape, recipe, settings, plan, found, args.rounds, args.seed) for shape in shapes)
    return harness.write(COMMAND, args, header | {"base_recipe": recipe.model_dump()}, made)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, checked.

    Raises:
        EvaluationError: names the argument and what is allowed.
    """
    parser, own = harness.parser_of(COMMAND, __doc__, PEERS), Settings()
    harness.add_ops(parser, OPS)
    harness.add_recipe(parser, {})
    parser.add_argument("--shapes", type=list_of(str), default="1x32k,32x32k,1x128k", help="batch x tokens of a row")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--prompt-budget", type=int, default=own.prompt_budget, help="tokens that a KV head keeps")
    parser.add_argument("--topk", type=int, default=own.topk, help="blocks of four tokens that a step attends to")
    parser.add_argument("--topr", type=int, help="dimensions that score a block (default: all)")
    parser.add_argument("--skipped", type=float, default=own.skipped, help="share of the blocks that is skipped")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs")
    args = parser.parse_args(arguments)
    least = own.window_size + own.kt_page_size
    rules = (
        ("shapes", bool(args.shapes), "one at least"),
        ("page_size", args.page_size in (4, 8, 16, 32, 64), "4, 8, 16, 32 or 64"),
        ("prompt_budget", args.prompt_budget >= least, f"{least} or more"),
        ("topk", args.topk >= 1, "1 or more"),
        ("topr", args.topr is None or 1 <= args.topr <= Shape(1, 1).dim, f"1 to {Shape(1, 1).dim}"),
        ("skipped", 0 < args.skipped < 1, "between 0 and 1"),
        ("rounds", args.rounds >= 2, "2 or more"),
    )
    harness.check(args, rules)
    return args


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 1 when there is nothing to measure on, or an operation of this project failed."""
    return measured(COMMAND, lambda: parse(arguments), run)


if __name__ == "__main__":
    sys.exit(main())
