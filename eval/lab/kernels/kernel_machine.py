"""What kernels are timed on, and how: for ``eval.lab.bench_kernels``, ``eval.lab.bench_mla`` and
``eval.lab.bench_dsa``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from tqdm import tqdm

from eval.lab.kernels.kernel_rows import Row, timing
from eval.lab.kernels.kernel_table import UNAVAILABLE, Implementation, StepT, report_unavailable
from eval.live.counters import EvaluationError
from sglang_sparse_kernels.common.timing import Replay, Run, capture, in_turn, repeated, usable

# GB (10^9 bytes) a second, as the vendor says, by what the driver calls the device.
CEILING_GBPS = {"NVIDIA H200": 4800}
# 10^12 floating-point operations a second in dense bfloat16, as measured: what the vendor says, 989, is a quarter more
# than the chip was seen to deliver, so that a share of it would not say how much is left.
CEILING_TFLOPS = {"NVIDIA H200": 790}
# The same in dense float8, as the vendor says: what the chip delivers of it was not measured.
CEILING_FP8_TFLOPS = {"NVIDIA H200": 1979}


@dataclass(frozen=True)
class Machine:
    """What the kernels run on.

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


def gpu() -> Machine:
    """The GPU of this process.

    Raises:
        EvaluationError: there is none.
    """
    if not torch.cuda.is_available():
        raise EvaluationError("the kernels are measured on a CUDA device, and torch finds none")
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


@dataclass(frozen=True)
class Bench:
    """How one command measures one shape.

    Attributes:
        command: its name.
        shape: name of the shape.
        machine: what to measure on.
        rounds: times that each is measured.
    """

    command: str
    shape: str
    machine: Machine
    rounds: int

    def measure(
        self,
        plan: Sequence[Implementation[StepT]],
        step: StepT,
        identity: Callable[[Implementation[StepT]], Row],
        quality: Callable[[Implementation[StepT], torch.Tensor | None], Row],
        num_bytes: Callable[[Implementation[StepT]], int],
    ) -> list[Row]:
        """A row for each implementation, in the order of the plan; what is unavailable has the reason instead of
        figures.

        Args:
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
        bar = tqdm(plan, desc=self.shape)
        for place, one in enumerate(bar):
            bar.set_postfix_str(f"{one.op}, {one.name}")
            row = identity(one)
            try:
                runs = one.prepare(step)
                row |= quality(one, runs[0]())
                replay = self.machine.capture(runs)
                # Here, so that an error is known to be this one's.
                replay()
                replays[place] = replay
            except UNAVAILABLE as error:
                what = f"{self.shape}, {one.op}: no {one.name}"
                row["unavailable"] = report_unavailable(self.command, what, error, self.machine.usable)
            rows.append(row)
        for place, times in zip(replays, in_turn(list(replays.values()), self.rounds), strict=True):
            rows[place] |= timing(times, num_bytes(plan[place]))
        return rows
