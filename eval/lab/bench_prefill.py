"""``python -m eval.lab.bench_prefill``: sparse prefill attention against dense and sparse peers, at its quality.

    python -m eval.lab.bench_prefill --lengths 32k,64k,128k --sparsity 0.89 --out prefill.jsonl

One layer of one prompt whose attention has sinks, a local band and stripes of known shares (`eval.lab.structured`);
dummy weights would have nothing to find. This project's op and the dense peers prefill it in chunks over scattered
pages, as a server does. Every implementation runs with each value of its setting, in turn (A/B/A/B); a row holds the
median time of the whole prompt, and beside it what its output is worth: the attention mass that it keeps (`recall`) and
its distance from dense attention in float64 (`dense_l2`), over a sample of queries of all heads. Of this project's op,
anchor or ``--method skip_softmax``, also the sparsity: the share of causal query-key pairs that it left out.
``--sparsity`` adds the value of its setting, anchor's threshold or Skip-Softmax's factor, that gives so much, found by
bisection between the lowest and the highest of ``--values``; with ``--dense-below`` that at which a
server whose crossover is there leaves out so much, as ``eval.bench_serving`` needs it. What is measured is the same.

``dense_ratio`` is against the fastest dense peer. ``parts`` of this project's op are microseconds by kernel, from one
profiled run. A peer that is not installed or fails is reported and the others go on.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from tqdm import tqdm

from eval.lab.kernels import harness
from eval.lab.kernels.harness import UNAVAILABLE, Row, report_unavailable
from eval.lab.kernels.length_shares import share_at, shares
from eval.lab.kernels.prefill import COMMAND
from eval.lab.kernels.prefill_inputs import Prompt, Shape
from eval.lab.kernels.prefill_table import DENSE, OWN, TABLE, Implementation, Plan, plans
from eval.lab.structured.generator import SPARSITY_TOLERANCE, read_recipe
from eval.lab.tables.files import measured
from eval.live.client import list_of
from eval.live.counters import EvaluationError
from eval.texts.lengths import length
from sglang_sparse_kernels.common.timing import Replay, in_turn, timed

BISECTIONS = 12

Call = Callable[[], torch.Tensor]


def profiled(call: Call) -> dict[str, float]:
    """Microseconds of one call by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    return {event.key: event.device_time_total for event in found.key_averages() if event.device_time_total}


@dataclass(frozen=True)
class Machine(harness.Machine):
    """The machine that the prefills run on.

    Attributes:
        time: microseconds of one call.
        profile: microseconds of one call by kernel.
    """

    time: Callable[[Call], float] = timed
    profile: Callable[[Call], dict[str, float]] = profiled


def gpu() -> Machine:
    """The GPU of this process.

    Raises:
        EvaluationError: there is none.
    """
    if not torch.cuda.is_available():
        raise EvaluationError("prefill is measured on a CUDA device, and torch finds none")

    return Machine(**vars(harness.gpu("prefill is")))


def sparsity_of(prompt: Prompt, plan: Plan, dense_below: int = 0) -> float:
    """Share of the causal query-key pairs that this project's op leaves out.

    Args:
        prompt: the inputs.
        plan: of this project's op.
        dense_below: chunks up to this position count as dense.
    """
    chunks = prompt.shape.chunks
    stats = torch.zeros(len(chunks), 2, dtype=torch.int64, device=prompt.q.device)
    plan.implementation.prepare(prompt, plan.value)(stats)
    attended, causal = stats.unbind(1)
    dense = torch.tensor([end <= dense_below for _, end in chunks], device=stats.device)
    return 1 - (torch.where(dense, causal, attended).sum() / causal.sum()).item()


def value_for(
    prompt: Prompt, own: Implementation, sparsity: float, values: Sequence[float], dense_below: int = 0
) -> float:
    """The value of an op's setting at which so much is left out.

    Raises:
        EvaluationError: none between the lowest and the highest of `values` comes near it.
    """

    def left_out(value: float) -> float:
        return sparsity_of(prompt, Plan(own, value), dense_below)

    low, high = min(values), max(values)
    for _ in range(BISECTIONS):
        # The factors of skip_softmax span powers of ten.
        middle = (low + high) / 2 if own.keeps else math.sqrt(low * high)
        low, high = (middle, high) if (left_out(middle) > sparsity) == own.keeps else (low, middle)
    if abs(left_out(high) - sparsity) > SPARSITY_TOLERANCE:
        ends = [left_out(value) for value in (min(values), max(values))]
        raise EvaluationError(
            f"--sparsity {sparsity}: at {prompt.shape.name} {own.setting} {min(values):g} to {max(values):g} gives "
            f"{ends[0]:.3f} to {ends[1]:.3f}, and nothing within {SPARSITY_TOLERANCE} of it"
        )
    return round(high, 4)


def measure(prompt: Prompt, todo: Sequence[Plan], machine: Machine, rounds: int) -> list[Row]:
    """A row for each plan; what is unavailable has the reason instead of figures.

    Raises:
        EvaluationError: an implementation broke the machine.
    """
    rows: list[Row] = []
    replays: dict[int, Replay] = {}
    facts = prompt.shape.facts()
    for place, plan in enumerate(tqdm(todo, desc=prompt.shape.name)):
        one = plan.implementation
        row = {"id": f"prefill/{prompt.shape.name}/{plan.label}", "op": one.op, "implementation": one.name, **facts}
        row |= {"peer": one.peer, "label": plan.label}
        row |= {"setting": one.setting, "value": plan.value} if one.setting else {}
        row |= {} if plan.target_sparsity is None else {"target_sparsity": plan.target_sparsity}
        try:
            call = plan.prepare(prompt)
            # What another one has left there is no output of this one.
            prompt.out.fill_(torch.nan)
            row |= prompt.quality(call())
            if not one.peer:
                row["sparsity"] = sparsity_of(prompt, plan)
                row["parts"] = {name: round(us, 1) for name, us in machine.profile(call).items()}
            replays[place] = partial(machine.time, call)
        except UNAVAILABLE as error:
            what = f"{prompt.shape.name}: no {plan.label}"
            row["unavailable"] = report_unavailable(COMMAND, what, error, machine.usable)
        rows.append(row)
    for place, mine in zip(replays, in_turn(list(replays.values()), rounds), strict=True):
        rows[place] |= {"us": statistics.median(mine), "us_range": [min(mine), max(mine)]}
        if todo[place].implementation.op == DENSE:
            rows[place]["tflops"] = prompt.causal_flops() / rows[place]["us"] / 1e6
    return with_ratios(rows)


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """The rows of one shape with ``dense_ratio``: the time of the fastest dense peer over theirs."""
    dense = min((row for row in rows if row["op"] == DENSE and "us" in row), key=lambda row: row["us"], default=None)
    if dense is None:
        return list(rows)
    beside = {"dense": dense["implementation"], "dense_us": dense["us"]}
    return [{**row, **beside, "dense_ratio": dense["us"] / row["us"]} if "us" in row else row for row in rows]


def run(args: argparse.Namespace, machine: Callable[[], Machine] = gpu) -> int:
    """Measure every length and write the file.

    Returns:
        The exit status: 1 where this project's op was not measured.

    Raises:
        EvaluationError: see the functions that this one calls.
    """
    found, recipe = machine(), read_recipe(args.recipe)
    names = ("method", "lengths", "positions", "chunk", "values", "sparsity", "dense_below", "peers")
    names = (*names, "heads", "page_size", "recipe", "rounds", "seed")
    header = harness.header_of(found, args, names) | {"recipe": recipe.model_dump()}

    def made() -> Iterator[list[Row]]:
        for tokens in args.lengths:
            shape = Shape(tokens, args.chunk, *args.heads, page_size=args.page_size)
            with harness.making_inputs(shape.name, 1, found):
                prompt = Prompt(shape, recipe, found.device, args.seed, args.positions)
            yield measure(prompt, plans(args.peers, own_plans(prompt, args)), found, args.rounds)

    return harness.write(COMMAND, args, header, made(), without_parts)


def without_parts(rows: Sequence[Row]) -> list[Row]:
    """This project's rows without what each kernel took."""
    return [{name: value for name, value in row.items() if name != "parts"} for row in harness.ours(rows)]


def own_plans(prompt: Prompt, args: argparse.Namespace) -> list[Plan]:
    """The values of the command line, and the one of the sparsity asked for, if there is one."""
    own = next(one for one in OWN if one.name == args.method)
    found = [Plan(own, value) for value in args.values]
    sparsity = share_at(args.sparsity, prompt.shape.length)
    if sparsity is not None:
        try:
            value = value_for(prompt, own, sparsity, args.values, args.dense_below)
            found.append(Plan(own, value, sparsity))
        except EvaluationError as error:
            # The other values and lengths go on.
            tqdm.write(f"{COMMAND}: {error}", file=sys.stderr)
    return found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, checked.

    Raises:
        EvaluationError: names the argument and what is allowed.
    """
    parser = harness.parser_of(COMMAND, __doc__, TABLE, rounds=7)
    harness.add_recipe(parser, {})
    parser.add_argument("--lengths", type=list_of(length), default="32k,64k,128k", help="tokens of the prompt")
    parser.add_argument("--chunk", type=length, default="8k", help="tokens that are prefilled at once")
    methods = [one.name for one in OWN]
    parser.add_argument("--method", choices=methods, default=methods[0], help="this project's op that is measured")
    values = "; ".join(f"{one.setting} of {one.name} {_listed(one)}" for one in OWN)
    parser.add_argument("--values", type=list_of(float), help=f"of its setting (default: {values})")
    parser.add_argument(
        "--sparsity",
        type=shares,
        default={},
        help="also the value that leaves out this share, such as 0.89,32k=0.78",
    )
    parser.add_argument(
        "--dense-below", type=length, default=0, help="for --sparsity: a server's crossover_tokens, dense there"
    )
    parser.add_argument("--heads", type=list_of(int), default="32,8,128", help="query heads, KV heads, head dimension")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--positions", type=length, help="tokens of which a prompt is the first, as on a server")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs")
    args = parser.parse_args(arguments)
    _check(args)
    return args


def _check(args: argparse.Namespace) -> None:
    if args.values is None:
        args.values = list(next(one for one in OWN if one.name == args.method).values)
    known = harness.peers_of(TABLE)
    args.peers = known if args.peers is None else args.peers
    for name in args.peers:
        if name not in known:
            raise EvaluationError(f"--peers: there is no {name!r}, there are {', '.join(known)}")
    rules = (
        ("lengths", bool(args.lengths) and min(args.lengths) > 128, "lengths above 128"),
        ("values", bool(args.values) and min(args.values) > 0, "one at least, above 0"),
        ("dense_below", args.dense_below % args.chunk == 0, f"a multiple of --chunk, which is {args.chunk}"),
        (
            "positions",
            args.positions is None or args.positions >= max(args.lengths, default=0),
            "as many as a prompt has",
        ),
        ("heads", len(args.heads) == 3 and min(args.heads) > 0, "three numbers, such as 32,8,128"),
        ("page_size", args.page_size in (1, 2, 4, 8, 16, 32, 64), "a power of two up to 64"),
        ("rounds", args.rounds >= 2, "2 or more"),
    )
    harness.check(args, rules)


def _listed(one: Implementation) -> str:
    return ",".join(f"{value:g}" for value in one.values)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 1 when there is nothing to measure on, or this project's op failed."""
    return measured(COMMAND, lambda: parse(arguments), run)


if __name__ == "__main__":
    sys.exit(main())
