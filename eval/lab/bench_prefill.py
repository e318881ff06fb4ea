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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from eval.lab.kernels.kernel_table import UNAVAILABLE, report_unavailable
from eval.lab.kernels.length_shares import share_at
from eval.lab.kernels.prefill import COMMAND
from eval.lab.kernels.prefill_arguments import parse
from eval.lab.kernels.prefill_inputs import Prompt, Shape
from eval.lab.kernels.prefill_table import DENSE, OWN, Implementation, Plan, plans
from eval.lab.structured.generator import SPARSITY_TOLERANCE, read_recipe
from eval.lab.tables.files import measured
from eval.live.counters import EvaluationError
from eval.live.record import Record, versions
from sglang_sparse_kernels.timing import Replay, in_turn, timed, usable

PACKAGES = ("torch", "triton", "sglang", "sglang-kernel", "flashinfer-python", "minference")
BISECTIONS = 12

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Machine:
    """What the prefills run on.

    Attributes:
        name: of the device.
        device: torch's name of it.
        time: microseconds of one call.
        profile: microseconds of one call by kernel.
        usable: whether it can go on after an error.
    """

    name: str
    device: str
    time: Callable[[Call], float]
    profile: Callable[[Call], dict[str, float]]
    usable: Callable[[], bool]


def gpu() -> Machine:
    """The GPU of this process.

    Raises:
        EvaluationError: there is none.
    """
    if not torch.cuda.is_available():
        raise EvaluationError("prefill is measured on a CUDA device, and torch finds none")

    def profile(call: Call) -> dict[str, float]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            call()
            torch.cuda.synchronize()
        return {event.key: event.device_time_total for event in found.key_averages() if event.device_time_total}

    return Machine(torch.cuda.get_device_name(), "cuda", timed, profile, usable)


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


def measure(prompt: Prompt, todo: Sequence[Plan], machine: Machine, rounds: int) -> list[dict[str, Any]]:
    """A row for each plan; what is unavailable has the reason instead of figures.

    Raises:
        EvaluationError: an implementation broke the machine.
    """
    rows: list[dict[str, Any]] = []
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


def with_ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
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
    header = {"device": found.name, "versions": versions(PACKAGES), "recipe": recipe.model_dump()}
    header["arguments"] = {name: getattr(args, name) for name in names}
    failed = False
    with Record(args.out, COMMAND, args.revision, **header) as record, torch.inference_mode():
        for tokens in args.lengths:
            shape = Shape(tokens, args.chunk, *args.heads, page_size=args.page_size)
            try:
                prompt = Prompt(shape, recipe, found.device, args.seed, args.positions)
            except ValueError as error:
                raise EvaluationError(f"{shape.name}: {error}") from error
            rows = measure(prompt, plans(args.peers, own_plans(prompt, args)), found, args.rounds)
            for row in rows:
                record.add("item", **row)
                failed |= "unavailable" in row and not row["peer"]
            for row in rows:
                if "us" in row and not row["peer"]:
                    record.add("summary", **{key: value for key, value in row.items() if key != "parts"})
    return int(failed)


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


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 1 when there is nothing to measure on, or this project's op failed."""
    return measured(COMMAND, lambda: parse(arguments, __doc__), run)


if __name__ == "__main__":
    sys.exit(main())
