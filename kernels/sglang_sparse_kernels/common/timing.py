"""Times graphs of kernels in turn. What needs a GPU are `capture` and `repeated` alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

# Calls of a graph, at least: about the layers of a step. Kernels that may start before the one ahead of them has ended
# (programmatic dependent launch) slow down in longer chains: on an H200 page_summary took 1.5 us a layer in graphs of
# 40 calls and 5.7 in those of 600.
MIN_CALLS = 40
# Microseconds. The launch of a graph takes about 8, which are then a hundredth of what is timed; those of its further
# replays pass while it runs.
MIN_REPLAY = 1000.0
# Replays that say how long a call takes: the first one uploads the graph.
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
    """A CUDA graph of ``calls`` calls that is replayed ``replays`` times in a row.

    ``runs`` are kept because the graph uses the memory of tensors that they alone may hold.
    """

    graph: torch.cuda.CUDAGraph
    calls: int
    runs: Sequence[Run]
    replays: int = 1

    def __call__(self) -> float:
        """Replay it; microseconds a call, by CUDA events."""

        def replay() -> None:
            for _ in range(self.replays):
                self.graph.replay()

        return timed(replay) / (self.calls * self.replays)


def replays_for(calls: int, us: float) -> int:
    """Return the number of replays of a graph in a row: for about `MIN_REPLAY`, or longer.

    Args:
        calls: of the graph.
        us: microseconds of one of them, its share of the launch of the graph included.
    """
    return math.ceil(MIN_REPLAY / (us * calls))


def capture(runs: Sequence[Run]) -> Graph:
    """Capture a call for each layer as one CUDA graph, over and over until it has `MIN_CALLS`.

    Args:
        runs: one call a layer, each already called once.
    """
    for run in runs:
        run()
    torch.cuda.synchronize()
    rounds = math.ceil(MIN_CALLS / len(runs))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for run in runs:
                run()
    once = Graph(graph, rounds * len(runs), runs)
    return replace(once, replays=replays_for(once.calls, min(once() for _ in range(PROBES))))


def repeated(runs: Sequence[Run]) -> Replay:
    """A call for each layer without a graph: for calls that take far longer than their launches.

    Args:
        runs: one call a layer, each already called once.
    """

    def once() -> None:
        for run in runs:
            run()

    return lambda: timed(once) / len(runs)


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
