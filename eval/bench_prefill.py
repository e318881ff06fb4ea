"""``python -m eval.bench_prefill``: time of sparse prefill attention against dense and sparse peers, at its quality.

    python -m eval.bench_prefill --lengths 32k,64k,128k --sparsity 0.89 --out prefill.jsonl

One layer of one prompt whose attention has sinks, a local band and stripes of known shares (`eval.structured`); dummy
weights would have nothing to find. This project's op and the dense peers prefill it in chunks over scattered pages, as
a server does. Every implementation runs with each value of its setting, in turn (A/B/A/B); a row holds the median time
of the whole prompt, and beside it what its output is worth: the attention mass that it keeps (`recall`) and its
distance from dense attention in float64 (`dense_l2`), over a sample of queries of all heads. Of this project's op also
the sparsity: the share of causal query-key pairs that it left out. ``--sparsity`` adds the threshold that gives so
much, found by bisection between the lowest and the highest of ``--thetas``; with ``--dense-below`` that at which a
server whose crossover is there leaves out so much, as ``eval.bench_serving`` needs it. What is measured is the same.

``dense_ratio`` is against the fastest dense peer. ``parts`` of this project's op are microseconds by kernel, from one
profiled run. A peer that is not installed or fails is reported and the others go on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from eval.figures import report_tables
from eval.figures.goals import SPARSITY_TOLERANCE
from eval.live.client import FAILURES, list_of
from eval.live.counters import EvaluationError
from eval.live.record import Record, versions
from eval.parts.kernel_table import UNAVAILABLE, report_unavailable
from eval.parts.prefill_inputs import Prompt, Shape
from eval.parts.prefill_table import ANCHOR, DENSE, TABLE, Plan, plans
from eval.structured.generator import read_recipe
from eval.texts.lengths import length, share_at, shares
from sglang_sparse_kernels.timing import Replay, in_turn, timed, usable

COMMAND = "eval.bench_prefill"
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


def theta_for(prompt: Prompt, sparsity: float, thetas: Sequence[float], dense_below: int = 0) -> float:
    """The threshold at which so much is left out.

    Raises:
        EvaluationError: none between the lowest and the highest of `thetas` comes near it.
    """

    def left_out(theta: float) -> float:
        return sparsity_of(prompt, Plan(ANCHOR, theta), dense_below)

    low, high = min(thetas), max(thetas)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        # A higher threshold leaves less out.
        low, high = (middle, high) if left_out(middle) > sparsity else (low, middle)
    if abs(left_out(high) - sparsity) > SPARSITY_TOLERANCE:
        ends = [left_out(theta) for theta in (min(thetas), max(thetas))]
        raise EvaluationError(
            f"--sparsity {sparsity}: at {prompt.shape.name} the thresholds {min(thetas):g} to {max(thetas):g} give "
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
    names = ("lengths", "positions", "chunk", "thetas", "sparsity", "dense_below", "peers", "heads", "page_size")
    names = (*names, "recipe", "rounds", "seed")
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
    """The thresholds of the command line, and the one of the sparsity asked for, if there is one."""
    found = [Plan(ANCHOR, theta) for theta in args.thetas]
    sparsity = share_at(args.sparsity, prompt.shape.length)
    if sparsity is not None:
        try:
            theta = theta_for(prompt, sparsity, args.thetas, args.dense_below)
            found.append(Plan(ANCHOR, theta, sparsity))
        except EvaluationError as error:
            # The other thresholds and lengths go on.
            tqdm.write(f"{COMMAND}: {error}", file=sys.stderr)
    return found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, checked.

    Raises:
        EvaluationError: names the argument and what is allowed.
    """
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [one.name for one in TABLE if one.peer]
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--lengths", type=list_of(length), default="32k,64k,128k", help="tokens of the prompt")
    parser.add_argument("--chunk", type=length, default="8k", help="tokens that are prefilled at once")
    thetas = ",".join(f"{theta:g}" for theta in ANCHOR.values)
    parser.add_argument("--thetas", type=list_of(float), default=thetas, help="thresholds of anchor")
    parser.add_argument(
        "--sparsity",
        type=shares,
        default={},
        help="also the threshold that leaves out this share, such as 0.89,32k=0.78",
    )
    parser.add_argument(
        "--dense-below", type=length, default=0, help="for --sparsity: a server's crossover_tokens, dense there"
    )
    parser.add_argument("--peers", type=list_of(str), default=",".join(known), help=f"of {', '.join(known)}")
    parser.add_argument("--heads", type=list_of(int), default="32,8,128", help="query heads, KV heads, head dimension")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--recipe", type=json.loads, default={}, help="of the structure, as JSON (eval/structured)")
    parser.add_argument("--positions", type=length, help="tokens of which a prompt is the first, as on a server")
    parser.add_argument("--rounds", type=int, default=7, help="times that each is measured")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs")
    parser.add_argument("--revision", help="of this code, where its git history is not at hand")
    args = parser.parse_args(arguments)
    for name in args.peers:
        if name not in known:
            raise EvaluationError(f"--peers: there is no {name!r}, there are {', '.join(known)}")
    for name, good, allowed in (
        ("lengths", bool(args.lengths) and min(args.lengths) > 128, "lengths above 128"),
        ("thetas", bool(args.thetas), "one at least"),
        ("dense_below", args.dense_below % args.chunk == 0, f"a multiple of --chunk, which is {args.chunk}"),
        (
            "positions",
            args.positions is None or args.positions >= max(args.lengths, default=0),
            "as many as a prompt has",
        ),
        ("heads", len(args.heads) == 3 and min(args.heads) > 0, "three numbers, such as 32,8,128"),
        ("page_size", args.page_size in (1, 2, 4, 8, 16, 32, 64), "a power of two up to 64"),
        ("rounds", args.rounds >= 2, "2 or more"),
    ):
        if not good:
            raise EvaluationError(f"--{name.replace('_', '-')} must be {allowed}, got {getattr(args, name)}")
    return args


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 1 when there is nothing to measure on, or this project's op failed."""
    try:
        args = parse(arguments)
        status = run(args)
        print(report_tables.any_table(args.out))
    except FAILURES as error:
        print(f"{COMMAND}: {error}", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
