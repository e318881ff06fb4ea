"""The clock of the kernel benchmarks: turns, and how many calls a graph holds."""

import weakref
from collections.abc import Callable

import pytest
import torch

from sglang_sparse_kernels.common.timing import MIN_CALLS, MIN_REPLAY, capture, in_turn, replays_for


def test_graphs_are_replayed_in_turn() -> None:
    played: list[str] = []

    def replay(name: str) -> Callable[[], float]:
        return lambda: float(played.append(name) or len(played))

    times = in_turn([replay("a"), replay("b")], 3)
    assert "".join(played) == "ab" * 5 and times == [[5, 7, 9], [6, 8, 10]]


def test_short_graphs_are_replayed_in_a_row() -> None:
    # 40 calls of 4 us and a launch of 8 us: so often that one launch is a hundredth.
    replays = replays_for(40, (40 * 4.0 + 8) / 40)
    assert 40 * 4 * replays + 8 < 1.01 * 40 * 4 * replays
    assert replays_for(40, 25.0) == replays_for(40, 400.0) == replays_for(128, 10.0) == 1
    assert replays_for(40, 24.9) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_graph_keeps_what_its_calls_hold() -> None:
    table = torch.ones(1024, device="cuda")
    alive = weakref.ref(table)
    replay = capture([lambda table=table: table.sum()])
    del table
    assert replay() > 0 and alive() is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_graph_goes_round_the_layers_for_long_enough() -> None:
    short, long = (torch.zeros(3, size, device="cuda") for size in (64, 2**28))
    graph = capture([lambda row=row: row.add_(1) for row in short])
    assert graph.calls == MIN_CALLS + 2 and graph.replays > 1
    before = short[:, 0].tolist()
    us = graph()
    calls = [after - earlier for after, earlier in zip(short[:, 0].tolist(), before, strict=True)]
    assert calls == [graph.calls * graph.replays / 3] * 3 and us * sum(calls) > MIN_REPLAY / 2
    assert capture([lambda row=row: row.add_(1) for row in long]).replays == 1
