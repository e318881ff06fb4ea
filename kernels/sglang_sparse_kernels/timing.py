"""Times graphs of kernels in turn. What needs a GPU are `capture` and `repeated` alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

MIN_CALLS = 40
# A graph of more would take long to capture.
MAX_CALLS = 1000
# Microseconds. The launch of a graph takes about 8, which are then a hundredth of what is timed.
MIN_REPLAY = 1000.0
# Calls between two of which all kernels have to end. Kernels that may start before the one ahead of them has ended
# (programmatic dependent launch) slow down in long chains: on an H200 page_summary took 1.5 us a layer
# in graphs of 40 calls and 5.7 in those of 600. In a server matrix products stand between the few of each layer, and
# a step is a graph of about 40 layers; after a fence the first call starts with nothing ahead of it.
CHAIN = MIN_CALLS
# Replays of the graph that says how long a call takes: the first one uploads it.
PROBES = 3
WARM_UP_ROUNDS = 2

Run = Callable[[], "torch.Tensor | None"]
Replay = Callable[[], float]


def timed(call: Callable[[], object]) -> float:
    """Microseconds of a call on the GPU, by CUDA events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def usable() -> bool:
    """Whether this process can still use the GPU after an error."""
    # An access to memory that is not mapped ends the whole CUDA context, unlike a launch that is refused.
    try:
        torch.cuda.synchronize()
    except torch.AcceleratorError:
        return False
    return True


@dataclass(frozen=True)
class Graph:
    """A CUDA graph of ``calls`` calls.

    ``runs`` and ``fence`` are kept because the graph uses the memory of tensors that they alone may hold.
    """

    graph: torch.cuda.CUDAGraph
    calls: int
    runs: Sequence[Run]
    fence: torch.Tensor

    def __call__(self) -> float:
        """Replay it; microseconds a call, by CUDA events."""
        return timed(self.graph.replay) / self.calls


def calls_for(calls: int, us: float) -> int:
    """How many calls a graph should have: a replay takes about `MIN_REPLAY` then, or longer; less beyond `MAX_CALLS`.

    Args:
        calls: of a graph that was timed; no fewer are wanted.
        us: microseconds of one of them, its share of the launch of that graph included.
    """
    return max(calls, min(MAX_CALLS, math.ceil(MIN_REPLAY / us)))


def capture(runs: Sequence[Run]) -> Graph:
    """Capture a call for each layer as one CUDA graph, over and over until a replay takes long enough (`calls_for`).

    Args:
        runs: one call a layer, each already called once.
    """
    for run in runs:
        run()
    torch.cuda.synchronize()
    first = _captured(runs, max(MIN_CALLS, len(runs)))
    calls = calls_for(first.calls, min(first() for _ in range(PROBES)))
    return first if calls == first.calls else _captured(runs, calls)


def repeated(runs: Sequence[Run]) -> Replay:
    """A call for each layer without a graph: for calls that take far longer than their launches.

    Args:
        runs: one call a layer, each already called once.
    """

    def once() -> None:
        for run in runs:
            run()

    return lambda: timed(once) / len(runs)


def _captured(runs: Sequence[Run], calls: int) -> Graph:
    graph, fence = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        for call in range(calls):
            if call and call % CHAIN == 0:
                fence.zero_()
            runs[call % len(runs)]()
    return Graph(graph, calls, runs, fence)


def in_turn(replays: Sequence[Replay], rounds: int) -> list[list[float]]:
    """Replay one after the other, round after round (A/B/A/B).

    Args:
        replays: what to time.
        rounds: measured ones, after `WARM_UP_ROUNDS` that bring the clocks up.

    Returns:
        For each replay its times in the order of the rounds.
    """
    times = [[replay() for replay in replays] for _ in range(WARM_UP_ROUNDS + rounds)]
    return [[row[i] for row in times[WARM_UP_ROUNDS:]] for i in range(len(replays))]
