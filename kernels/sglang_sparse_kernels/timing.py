"""Times graphs of kernels in turn. What needs a GPU is `capture` alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

MIN_CALLS = 40
WARM_UP_ROUNDS = 2

Run = Callable[[], "torch.Tensor | None"]
Replay = Callable[[], float]


def capture(runs: Sequence[Run]) -> Replay:
    """Capture a call for each layer as one CUDA graph, over and over until there are `MIN_CALLS` at least.

    Args:
        runs: one call a layer, each already called once.

    Returns:
        A function that replays the graph and returns microseconds a call, by CUDA events.
    """
    calls = max(MIN_CALLS, len(runs))
    for run in runs:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            runs[call % len(runs)]()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / calls

    return replay


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
