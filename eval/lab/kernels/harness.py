"""Common parts of the kernel benchmarks: implementations of an operation, their timing and quality, and the file.

A benchmark has a table of `Implementation`, a step that is their input, and for each row its identity, the quality of
its output and the bytes that it moves. ``eval.lab.bench_prefill`` times by itself and shares the rest.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from tqdm import tqdm
from triton.errors import TritonError

from eval.lab.structured.generator import read_recipe
from eval.lab.structured.structure import Recipe
from eval.live.client import list_of
from eval.live.counters import EvaluationError
from eval.live.gpu_watch import SpeedRecord
from eval.live.record import versions
from sglang_sparse_kernels.common.timing import Replay, Run, capture, in_turn, repeated, usable

StepT = TypeVar("StepT")
Row = dict[str, Any]
Rules = Sequence[tuple[str, bool, str]]
# What a server of this project runs: the public entry of an operation, which picks the kernel.
OURS = "sglang_sparse"
PACKAGES = (
    *("torch", "triton", "sglang", "sgl-kernel", "sglang-kernel", "sgl-deep-gemm"),
    *("flashinfer-python", "minference"),
)
# All that a library that is absent, too old, not made for a shape, or not able to build its kernels was seen to raise.
UNAVAILABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    TritonError,
    subprocess.SubprocessError,
)
# By what the driver calls the device. GB (10^9 bytes) a second, as the vendor says. 10^12 floating-point operations a
# second in dense bfloat16, as measured: what the vendor says, 989, is a quarter more than the chip was seen to deliver,
# so that a share of it would not say how much is left. The same in dense float8, as the vendor says: what the chip
# delivers of it was not measured.
CEILINGS = {"gbps": {"NVIDIA H200": 4800}, "tflops": {"NVIDIA H200": 790}, "fp8_tflops": {"NVIDIA H200": 1979}}


@dataclass(frozen=True)
class Implementation(Generic[StepT]):
    """One way to do an operation.

    Attributes:
        op: which.
        name: `OURS`, that of one of this project's kernels for it, or the peer's.
        prepare: makes the calls, one a layer, from the inputs.
        peer: whether it is somebody else's.
        kv_dtype: element type of the KV cache that it reads.
    """

    op: str
    name: str
    prepare: Callable[[StepT], list[Run]]
    peer: bool = True
    kv_dtype: torch.dtype = torch.bfloat16

    def facts(self) -> Row:
        """The fields that a row of results has of it."""
        named = {"op": self.op, "implementation": self.name, "peer": self.peer}
        return {**named, "kv_dtype": str(self.kv_dtype).removeprefix("torch.")}


def peers_of(table: Sequence[Any]) -> list[str]:
    """The names of a table's peers, each once."""
    return list(dict.fromkeys(one.name for one in table if one.peer))


def chosen(
    ops: Sequence[str], peers: Sequence[str], table: Sequence[Implementation[StepT]], known_ops: Sequence[str]
) -> list[Implementation[StepT]]:
    """Return the implementations to measure: some operations, by this project and by some peers.

    Args:
        ops: of `known_ops`.
        peers: names of the table.
        table: all there is.
        known_ops: operations that the command has.

    Raises:
        EvaluationError: an operation or a peer is unknown, or nothing is left to measure.
    """
    for option, names, allowed in (("--ops", ops, known_ops), ("--peers", peers, peers_of(table))):
        for name in names:
            if name not in allowed:
                raise EvaluationError(f"{option}: there is no {name!r}, there are {', '.join(allowed)}")
    found = [one for one in table if one.op in ops and (not one.peer or one.name in peers)]
    if not found:
        raise EvaluationError(f"none of the peers {', '.join(peers)} does {', '.join(ops)}")
    return found


def report_unavailable(command: str, what: str, error: BaseException, usable: Callable[[], bool]) -> str:
    """Say on stderr that an implementation is not there, and why.

    Args:
        command: that says it.
        what: is missing, such as "1x128k, page_topk: no flashinfer".
        error: of `UNAVAILABLE`.
        usable: whether the machine can go on.

    Returns:
        The reason.

    Raises:
        EvaluationError: the machine cannot go on.
    """
    why = reason(error)
    if not usable():
        raise EvaluationError(
            f"{what}: {why}; nothing can be measured after it in this process: leave it out with --peers"
        ) from error
    tqdm.write(f"{command}: {what}: {why}", file=sys.stderr)
    return why


def reason(error: BaseException) -> str:
    """Return the reason that an implementation is unavailable, on one line and without the paths of the machine."""
    first = next((line for line in str(error).splitlines() if line.strip()), "").strip()
    return re.sub(r"(?<![\w.:/])/(?:[^\s/:'\"]+/)+", "", ": ".join(filter(None, (type(error).__name__, first)))[:300])


@dataclass(frozen=True)
class Machine:
    """The machine that the kernels run on.

    Attributes:
        name: of the device.
        device: torch's name of it.
        l2_bytes: size of its L2 cache.
        capture: makes calls, one a layer, into something that can be timed again and again.
        usable: whether it can go on after an error.
        repeat: makes long calls, one a layer, into something that can be timed, as `capture` does.
    """

    name: str
    device: str
    l2_bytes: int
    capture: Callable[[Sequence[Run]], Replay]
    usable: Callable[[], bool]
    repeat: Callable[[Sequence[Run]], Replay] = repeated


def gpu(what: str = "the kernels are") -> Machine:
    """The GPU of this process.

    Raises:
        EvaluationError: there is none.
    """
    if not torch.cuda.is_available():
        raise EvaluationError(f"{what} measured on a CUDA device, and torch finds none")
    properties = torch.cuda.get_device_properties("cuda")
    return Machine(properties.name, "cuda", properties.L2_cache_size, capture, usable)


@contextmanager
def making_inputs(shape: str, layers: int, machine: Machine) -> Iterator[None]:
    """Name the shape of inputs that cannot be made.

    Raises:
        EvaluationError: they do not fit into the machine's memory, or there are none of this shape.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise EvaluationError(f"{layers} layers of {shape} do not fit into the memory of {machine.name}") from error
    except ValueError as error:
        raise EvaluationError(f"{shape}: {error}") from error


def parse_shape(text: str) -> tuple[int, int]:
    """``8x64k`` is a batch of 8 rows of 65,536 tokens, ``1x100`` one row of 100 tokens.

    Raises:
        EvaluationError: it is something else.
    """
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(k?)", text)
    if match is None:
        raise EvaluationError(f"--shapes: a shape is batch x tokens, such as 8x64k or 1x100, got {text!r}")
    return int(match[1]), int(match[2]) * (1024 if match[3] else 1)


@dataclass
class First(Generic[StepT]):
    """The call for the first layer, with what it wrote last: a graph writes there again.

    Attributes:
        run: the call.
        one: whose it is.
        output: of the last time.
    """

    run: Run
    one: Implementation[StepT]
    output: torch.Tensor | None = None

    def __call__(self) -> torch.Tensor | None:
        """Do it."""
        self.output = self.run()
        return self.output


def kept(one: Implementation[StepT], clear: Callable[[StepT], None]) -> Implementation[StepT]:
    """An implementation whose first call is `First`; what another one has left in the buffers is cleared beforehand."""

    def prepare(step: StepT) -> list[Run]:
        clear(step)
        first, *rest = one.prepare(step)
        return [First(first, one), *rest]

    return replace(one, prepare=prepare)


def measure(
    command: str,
    shape: str,
    machine: Machine,
    rounds: int,
    plan: Sequence[Implementation[StepT]],
    step: StepT,
    identity: Callable[[Implementation[StepT]], Row],
    quality: Callable[[Implementation[StepT], torch.Tensor | None], Row],
    num_bytes: Callable[[Implementation[StepT]], int],
) -> list[Row]:
    """A row for each implementation, in the order of the plan; what is unavailable has the reason instead of figures.

    Args:
        command: its name.
        shape: name of the shape.
        machine: what to measure on.
        rounds: times that each is measured.
        plan: what to measure.
        step: the inputs.
        identity: what a row is about.
        quality: what the output for the first layer is worth; raises of `UNAVAILABLE` where it is wrong.
        num_bytes: that have to be moved for a layer.

    Raises:
        EvaluationError: an implementation broke the machine.
    """
    rows: list[Row] = []
    replays: dict[int, Replay] = {}
    bar = tqdm(plan, desc=shape)
    for place, one in enumerate(bar):
        bar.set_postfix_str(f"{one.op}, {one.name}")
        row = identity(one)
        try:
            runs = one.prepare(step)
            row |= quality(one, runs[0]())
            replay = machine.capture(runs)
            # Here, so that an error is known to be this one's.
            replay()
            replays[place] = replay
        except UNAVAILABLE as error:
            row["unavailable"] = report_unavailable(command, f"{shape}, {one.op}: no {one.name}", error, machine.usable)
        rows.append(row)
    for place, times in zip(replays, in_turn(list(replays.values()), rounds), strict=True):
        rows[place] |= timing(times, num_bytes(plan[place]))
    return rows


def timing(times: Sequence[float], num_bytes: int) -> Row:
    """The figures of one implementation.

    Args:
        times: microseconds a layer, of each round; two at least.
        num_bytes: that it has to move.

    Returns:
        ``us`` (median), ``spread`` (between the 10th and the 90th percentile), ``us_range`` (these two), ``bytes`` and
        ``gbps`` (achieved, in 1e9 bytes a second).
    """
    median, deciles = statistics.median(times), statistics.quantiles(times, n=10)
    return {
        "us": round(median, 3),
        "spread": round(deciles[-1] - deciles[0], 3),
        "us_range": [round(deciles[0], 3), round(deciles[-1], 3)],
        "bytes": num_bytes,
        "gbps": round(num_bytes / median / 1e3, 1),
    }


def strongest(rows: Iterable[Row]) -> Row | None:
    """The fastest over a bfloat16 cache, None where nothing was measured."""
    measured = [row for row in rows if "us" in row and row["kv_dtype"] == "bfloat16"]
    return min(measured, key=lambda row: row["us"], default=None)


def ours(rows: Sequence[Row]) -> list[Row]:
    """This project's rows; what could not be done is left out."""
    return [row for row in rows if "us" in row and not row["peer"]]


def lacking(rows: Sequence[Row]) -> bool:
    """Whether something of this project was not measured."""
    return any("unavailable" in row and not row["peer"] for row in rows)


def parser_of(command: str, description: str | None, table: Sequence[Any], rounds: int = 20) -> argparse.ArgumentParser:
    """The command line, with what all benchmarks have."""
    parser = argparse.ArgumentParser(
        prog=command, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    peers = f"of {', '.join(peers_of(table))} (default: all; '' for none)"
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--peers", type=list_of(str), help=peers)
    parser.add_argument("--rounds", type=int, default=rounds, help="times that each is measured")
    parser.add_argument("--revision", help="of this code, where its git history is not at hand")
    return parser


def add_ops(parser: argparse.ArgumentParser, ops: Sequence[str]) -> None:
    """Add the argument that chooses the operations to measure."""
    parser.add_argument("--ops", type=list_of(str), default=",".join(ops), help=f"of {', '.join(ops)} (default: all)")


def add_recipe(parser: argparse.ArgumentParser, default: Mapping[str, Any] | None) -> None:
    """The structure of the inputs."""
    told = "changes to the structure" if default is not None else "of the structure of the inputs"
    parser.add_argument("--recipe", type=json.loads, default=default, help=f"{told}, as JSON (eval/lab/structured)")


def check(args: argparse.Namespace, rules: Rules) -> None:
    """Refuse an argument: of each rule its name, whether it is good, and what is allowed.

    Raises:
        EvaluationError: names the argument and what is allowed.
    """
    for name, good, allowed in rules:
        if not good:
            raise EvaluationError(f"--{name.replace('_', '-')} must be {allowed}, got {getattr(args, name)}")


def recipe_of(given: dict[str, Any]) -> Recipe:
    """The structure that ``--recipe`` asks for.

    Raises:
        EvaluationError: there is none.
    """
    try:
        return read_recipe(given)
    except ValueError as error:
        raise EvaluationError(f"--recipe: {error}") from error


def header_of(machine: Machine, args: argparse.Namespace, names: Sequence[str], **more: Any) -> dict[str, Any]:
    """Of a file: the device and its ceilings, the packages, and the arguments `names`, with `more` of them."""
    ceilings = {f"ceiling_{kind}": known.get(machine.name) for kind, known in CEILINGS.items()}
    arguments = {name: getattr(args, name) for name in names} | more
    return {"device": machine.name, **ceilings, "versions": versions(PACKAGES), "arguments": arguments}


def write(
    command: str,
    args: argparse.Namespace,
    header: Mapping[str, Any],
    measured: Iterable[Sequence[Row]],
    summarise: Callable[[Sequence[Row]], Iterable[Row]] = ours,
    failed: Callable[[Sequence[Row]], bool] = lacking,
) -> int:
    """Write the file, the rows of a shape at once, and what they come to at its end.

    Returns:
        The exit status.
    """
    rows: list[Row] = []
    with SpeedRecord(args.out, command, args.revision, **header) as record, torch.inference_mode():
        for some in measured:
            for row in some:
                record.add("item", **row)
            rows += some
        for row in summarise(rows):
            record.add("summary", **row)
    return int(failed(rows))
