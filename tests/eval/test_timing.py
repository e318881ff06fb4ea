"""The clock of the kernel benchmarks: turns, and how many calls a graph holds."""

import weakref
from collections.abc import Callable

import pytest
import torch

from sglang_sparse_kernels.timing import MAX_CALLS, MIN_CALLS, calls_for, capture, in_turn


def test_graphs_are_replayed_in_turn() -> None:
    played: list[str] = []

    def replay(name: str) -> Callable[[], float]:
        return lambda: float(played.append(name) or len(played))

    times = in_turn([replay("a"), replay("b")], 3)
    assert "".join(played) == "ab" * 5 and times == [[5, 7, 9], [6, 8, 10]]


def test_short_calls_are_many_in_a_graph() -> None:
    # 40 calls of 4 us and a launch of 8 us: so many calls that the launch is a hundredth.
    calls = calls_for(40, (40 * 4.0 + 8) / 40)
    assert 1.0 < (calls * 4 + 8) / (calls * 4) < 1.01
    assert calls_for(40, 25.0) == calls_for(40, 400.0) == 40 and calls_for(128, 10.0) == 128
    assert calls_for(40, 0.1) == MAX_CALLS and calls_for(40, 24.9) == 41


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
    assert MIN_CALLS < graph.calls <= MAX_CALLS
    before = short[:, 0].tolist()
    graph()
    calls = [after - earlier for after, earlier in zip(short[:, 0].tolist(), before, strict=True)]
    assert sum(calls) == graph.calls and max(calls) - min(calls) <= 1
    assert capture([lambda row=row: row.add_(1) for row in long]).calls == MIN_CALLS
