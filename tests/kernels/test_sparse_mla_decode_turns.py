"""Sparse MLA decode attention on Hopper, without one: the Gluon kernel's own functions in random turns."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from gluon_memory import Deadlock
from gluon_stand_in import Kernel, Program
from mla_decode import poisoned
from mla_hopper import RAGGED, SMALL, assert_as_the_reference, run
from triton_interpreter import HAS_GPU

from sglang_sparse_kernels.sparse_mla_decode import segments
from sglang_sparse_kernels.sparse_mla_decode.cases import Case, make

pytestmark = pytest.mark.skipif(HAS_GPU, reason="on a GPU the kernel itself runs")
FP16 = torch.float16


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, device: str) -> Callable[[int, int], Kernel]:
    """Puts the stand-in in the place of the kernel, with a seed, for a GPU of so many multiprocessors."""
    from sglang_sparse_kernels.sparse_mla_decode import hopper

    kernel = hopper._segments_hopper_kernel

    def set_up(processors: int, seed: int) -> Kernel:
        stand_in = Kernel(kernel, seed)
        monkeypatch.setattr(hopper, "_segments_hopper_kernel", stand_in)
        monkeypatch.setattr(hopper, "num_processors", lambda _: processors)
        return stand_in

    return set_up


@pytest.mark.parametrize("values_first", [False, True])
@pytest.mark.parametrize(("processors", "least_tiles"), [(1, 1), (3, 1), (40, 1), (4, 3)])
def test_in_turns_it_equals_the_reference(
    processors: int, least_tiles: int, values_first: bool, programs: Callable[[int, int], Kernel]
) -> None:
    """Programs with all rows, with parts of several, with one tile of one row, with none."""
    kernel = programs(processors, processors)
    arguments = poisoned(make(RAGGED, "cpu"))
    assert_as_the_reference(arguments, least_tiles=least_tiles, values_first=values_first)
    assert kernel.launches == [(1, processors)]


@pytest.mark.parametrize("case", [replace(SMALL, block_size=32), replace(SMALL, block_size=64, kv_scale=0.5)], ids=str)
def test_in_turns_with_other_blocks(case: Case, programs: Callable[[int, int], Kernel]) -> None:
    programs(2, 7)
    assert_as_the_reference(poisoned(make(case, "cpu")))


def test_in_turns_with_two_tiles_of_heads(programs: Callable[[int, int], Kernel]) -> None:
    kernel = programs(4, 11)
    assert_as_the_reference(poisoned(make(replace(SMALL, heads=70, dtype=FP16, kv_dtype=FP16), "cpu")))
    assert kernel.launches == [(2, 2)]


@pytest.mark.parametrize("seed", range(4))
def test_in_turns_any_selection(seed: int, programs: Callable[[int, int], Kernel]) -> None:
    """The newest slot anywhere in the cache: within a selected block, or in none of them."""
    draw = random.Random(seed)
    programs(draw.randint(1, 5), seed)
    lengths = tuple(draw.choice([0, 1, 20, 100, 300]) for _ in range(draw.randint(1, 3)))
    arguments = poisoned(make(replace(SMALL, lengths=lengths, ratio=0.7), "cpu", seed))
    cache = arguments["kv_cache"]
    arguments["kv_cache"] = torch.where(cache.isnan(), 1.0, cache)
    arguments["last_slots"] = torch.tensor([draw.randrange(len(cache)) for _ in lengths])
    assert_as_the_reference(arguments, least_tiles=1)


@pytest.mark.parametrize("block", range(4))
def test_in_turns_a_block_that_is_cut_anywhere_in_a_tile(block: int, programs: Callable[[int, int], Kernel]) -> None:
    programs(1, block)
    arguments = make(replace(SMALL, lengths=(64,)), "cpu")
    for kept in (15, 8, 1):
        arguments["last_slots"] = arguments["indices"][0, :, block].long() * 16 + kept - 1
        unwritten = torch.arange(kept, 16) + arguments["indices"][0, 0, block].long() * 16
        arguments["kv_cache"] = arguments["kv_cache"].index_fill(0, unwritten, float("nan"))
        assert_as_the_reference(arguments)


@pytest.mark.parametrize("without", ["fence", "wait", "arrive"])
def test_the_stand_in_finds_what_is_missing(
    without: str, programs: Callable[[int, int], Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel without its fences is wrong, as is one that awaits no barrier; one that gives nothing back hangs."""
    programs(1, 3)
    arguments = poisoned(make(replace(SMALL, lengths=(400,)), "cpu"))
    monkeypatch.setattr(Program, without, lambda *_, **__: iter(()))
    if without == "arrive":
        with pytest.raises(Deadlock):
            run(arguments)
    else:
        with pytest.raises(AssertionError):
            assert_as_the_reference(arguments)


def test_segments_of_a_row_are_combined(device: str) -> None:
    """Of three programs with two tiles each: a row in two of them, one within one, an empty one, one in two."""
    counts = torch.tensor([[12], [4], [0], [5]], dtype=torch.int32)
    partial = torch.full((6, 2, 128), float("nan"))
    lse = torch.full((6, 2), float("nan"))
    # By the program, the first or the second place, and heads.
    for place, value, weight in ((0, 1.0, 0.0), (2, 3.0, 1.0), (3, 99.0, 0.0), (4, 5.0, 2.0)):
        partial[place], lse[place] = value, weight
    out = torch.full((4, 2, 128), 7.0)
    segments.combine(partial.flatten(), lse.flatten(), counts, out, 16, 3, 1, False)
    # 12 blocks are three tiles, 4 are one and 5 are two: the last row has all of program 2.
    assert torch.allclose(out[0], torch.full((2, 128), (1.0 + 2 * 3.0) / 3))
    assert (out[1] == 7.0).all() and (out[2] == 0.0).all() and (out[3] == 7.0).all()
    # In programs of four tiles the last row is begun in the first one, in its second place.
    partial[1], lse[1], partial[2], lse[2] = 2.0, 1.0, 4.0, 1.0
    longer = torch.tensor([[12], [0], [0], [9]], dtype=torch.int32)
    segments.combine(partial.flatten(), lse.flatten(), longer, out, 16, 3, 4, False)
    assert torch.allclose(out[3], torch.full((2, 128), 3.0)) and (out[1] == 0.0).all()
