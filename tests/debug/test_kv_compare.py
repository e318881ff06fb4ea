"""Tests of the comparisons in the exactness checks, on a small pool without a model."""

from types import SimpleNamespace

import pytest
import torch

from sglang_sparse.attention import memory
from sglang_sparse.debug import kv_compare
from sglang_sparse.debug.kv_compare import borrowed, checksums, compare, default_tolerance, stale_summaries
from sglang_sparse.methods import aux_buffers
from sglang_sparse.methods.base import AuxSpec
from sglang_sparse.scheduler.inserted_keys import InexactTreeError
from sglang_sparse_kernels.page_summary import update_page_summaries

PAGES, SIZE, HEADS, DIM = 6, 4, 2, 64


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=["fp32", "bf16", "fp8"])
def kv_pool(request) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(0)
    shape = (PAGES * SIZE, HEADS, DIM)
    keys, values = ([torch.randn(shape, generator=generator).to(request.param) for _ in range(2)] for _ in range(2))
    spec = AuxSpec("summary", (HEADS, 2, DIM), request.param, update_page_summaries)
    aux = aux_buffers.AuxBuffers((spec,), (0, 1), PAGES, SIZE, "cpu")
    pool = SimpleNamespace(
        start_layer=0, layer_num=2, get_key_buffer=keys.__getitem__, get_value_buffer=values.__getitem__
    )
    setattr(pool, memory.ATTRIBUTE, aux)
    for layer in (0, 1):
        aux.refresh({layer: keys[layer]}, torch.arange(PAGES) * SIZE + SIZE - 1)
    return pool


def test_fresh_summaries_are_not_stale(kv_pool) -> None:
    assert not stale_summaries(kv_pool, torch.tensor([7, 19, 23])).any()


def test_a_changed_bound_or_key_is_stale(kv_pool) -> None:
    getattr(kv_pool, memory.ATTRIBUTE).buffer("summary", 1)[2, 0, 1, 5] = -9.0
    kv_pool.get_key_buffer(0)[3 * SIZE, 1, 3] = 9.0
    assert stale_summaries(kv_pool, torch.arange(1, 5) * SIZE + SIZE - 1).tolist() == [False, True, True, False]


def test_a_page_is_judged_up_to_its_last_written_slot(kv_pool) -> None:
    aux = getattr(kv_pool, memory.ATTRIBUTE)
    last = torch.tensor([2 * SIZE + 1])
    for layer in (0, 1):
        aux.refresh({layer: kv_pool.get_key_buffer(layer)}, last)
    kv_pool.get_key_buffer(0)[2 * SIZE + 2] = 9.0
    assert not stale_summaries(kv_pool, last).any()
    assert stale_summaries(kv_pool, last + 1).all()


@pytest.mark.parametrize("part", ["keys", "values", "summary"])
def test_a_checksum_sees_every_part_of_its_page_alone(kv_pool, part) -> None:
    before = checksums(kv_pool, [1, 2, 3])
    buffers = {
        "keys": kv_pool.get_key_buffer(1)[2 * SIZE],
        "values": kv_pool.get_value_buffer(0)[3 * SIZE - 1],
        "summary": getattr(kv_pool, memory.ATTRIBUTE).buffer("summary", 1)[2],
    }
    buffers[part].view(torch.uint8).flatten()[7] ^= 1
    after = checksums(kv_pool, [1, 2, 3])
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]
    assert len(set(before)) == 3


def everything(kv_pool: SimpleNamespace) -> list[torch.Tensor]:
    """The bytes of all buffers."""
    aux = getattr(kv_pool, memory.ATTRIBUTE)
    gets = (kv_pool.get_key_buffer, kv_pool.get_value_buffer, lambda layer: aux.buffer("summary", layer))
    return [get(layer).view(torch.uint8).clone() for layer in (0, 1) for get in gets]


# The last page is incomplete.
SLOTS = torch.tensor([12, 13, 14, 15, 4, 5, 6, 7, 16, 17])


@pytest.mark.parametrize("rows", [3, 8192])
def test_borrowed_slots_come_back_as_they_were(kv_pool, monkeypatch, rows) -> None:
    monkeypatch.setattr(kv_compare, "ROWS_AT_ONCE", rows)
    before = everything(kv_pool)
    with borrowed(kv_pool, SLOTS):
        lent = everything(kv_pool)
    for part, (old, new) in enumerate(zip(before, lent, strict=True)):
        changed = {3, 1, 4} if part % 3 == 2 else set(SLOTS.tolist())
        assert {row for row in range(len(old)) if not new[row].any()} == changed
        assert {row for row in range(len(old)) if not torch.equal(old[row], new[row])} == changed
    assert all(map(torch.equal, everything(kv_pool), before))


@pytest.mark.parametrize("rows", [3, 8192])
def test_compare_names_what_differs(kv_pool, monkeypatch, rows) -> None:
    monkeypatch.setattr(kv_compare, "ROWS_AT_ONCE", rows)
    tokens, positions = list(range(50, 60)), torch.tensor([1, 2, 5, 8, 9])
    before = [get(layer).clone() for layer in (0, 1) for get in (kv_pool.get_key_buffer, kv_pool.get_value_buffer)]

    def compared() -> float:
        with borrowed(kv_pool, SLOTS) as stored:
            for layer in (0, 1):
                kv_pool.get_key_buffer(layer).copy_(before[2 * layer])
                kv_pool.get_value_buffer(layer).copy_(before[2 * layer + 1])
            return compare(kv_pool, tokens, positions, SLOTS, stored)

    assert compared() == 0.0
    kv_pool.get_value_buffer(1)[SLOTS[3]] = 100.0
    assert compared() == 0.0
    kv_pool.get_value_buffer(1)[SLOTS[[5, 8]]] = 100.0
    message = r"V of layer 1 differs by .* at 2 of the tokens 5 to 8 of the path of 10 tokens that starts with \[50, 51"
    with pytest.raises(InexactTreeError, match=message):
        compared()


def test_not_a_number_is_never_equal(kv_pool) -> None:
    keys, slots = kv_pool.get_key_buffer(0), torch.arange(4, 8)
    for stored, dense in ((float("nan"), 1.0), (1.0, float("nan")), (float("nan"), float("nan"))):
        keys[5] = stored
        with borrowed(kv_pool, slots) as before:
            keys[5] = dense
            with pytest.raises(InexactTreeError, match="K of layer 0"):
                compare(kv_pool, [1, 2], torch.tensor([1]), slots, before, tolerance=1e9)


@pytest.mark.parametrize(
    ("dtype", "magnitude", "tolerance"),
    [(torch.float32, 3.0, 1e-4), (torch.float32, 40.0, 1e-3), (torch.bfloat16, 4.0, 0.5), (torch.float16, 4.0, 0.0625)],
)
def test_default_tolerance(dtype, magnitude, tolerance) -> None:
    assert default_tolerance(dtype, magnitude) == pytest.approx(tolerance)
