"""What the exactness checks compare, on a small pool without a model."""

from types import SimpleNamespace

import pytest
import torch

from sglang_sparse import pools
from sglang_sparse.kv_check import InexactTreeError, checksums, compare, default_tolerance, stale_summaries
from sglang_sparse.method import AuxSpec
from sglang_sparse_kernels.page_summary import update_page_summary

PAGES, SIZE, HEADS, DIM = 6, 4, 2, 64


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=["fp32", "bf16", "fp8"])
def kv_pool(request) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(0)
    shape = (PAGES * SIZE, HEADS, DIM)
    keys, values = ([torch.randn(shape, generator=generator).to(request.param) for _ in range(2)] for _ in range(2))
    spec = AuxSpec("summary", (HEADS, 2, DIM), request.param, update_page_summary)
    aux = pools.AuxPools((spec,), (0, 1), PAGES, SIZE, "cpu")
    pool = SimpleNamespace(
        start_layer=0, layer_num=2, get_key_buffer=keys.__getitem__, get_value_buffer=values.__getitem__
    )
    setattr(pool, pools.ATTRIBUTE, aux)
    for layer in (0, 1):
        aux.refresh(layer, keys[layer], torch.arange(PAGES) * SIZE + SIZE - 1)
    return pool


def test_fresh_summaries_are_not_stale(kv_pool) -> None:
    assert not stale_summaries(kv_pool, torch.tensor([7, 19, 23])).any()


def test_a_changed_bound_or_key_is_stale(kv_pool) -> None:
    getattr(kv_pool, pools.ATTRIBUTE).buffer("summary", 1)[2, 0, 1, 5] = -9.0
    kv_pool.get_key_buffer(0)[3 * SIZE, 1, 3] = 9.0
    assert stale_summaries(kv_pool, torch.arange(1, 5) * SIZE + SIZE - 1).tolist() == [False, True, True, False]


def test_a_page_is_judged_up_to_its_last_written_slot(kv_pool) -> None:
    aux = getattr(kv_pool, pools.ATTRIBUTE)
    last = torch.tensor([2 * SIZE + 1])
    for layer in (0, 1):
        aux.refresh(layer, kv_pool.get_key_buffer(layer), last)
    kv_pool.get_key_buffer(0)[2 * SIZE + 2] = 9.0
    assert not stale_summaries(kv_pool, last).any()
    assert stale_summaries(kv_pool, last + 1).all()


@pytest.mark.parametrize("part", ["keys", "values", "summary"])
def test_a_checksum_sees_every_part_of_its_page_alone(kv_pool, part) -> None:
    before = checksums(kv_pool, [1, 2, 3])
    buffers = {
        "keys": kv_pool.get_key_buffer(1)[2 * SIZE],
        "values": kv_pool.get_value_buffer(0)[3 * SIZE - 1],
        "summary": getattr(kv_pool, pools.ATTRIBUTE).buffer("summary", 1)[2],
    }
    buffers[part].view(torch.uint8).flatten()[7] ^= 1
    after = checksums(kv_pool, [1, 2, 3])
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]
    assert len(set(before)) == 3


def test_compare_names_what_differs(kv_pool) -> None:
    tokens, stored, dense = list(range(50, 58)), torch.arange(4, 8), torch.arange(8, 12)
    for get in (kv_pool.get_key_buffer, kv_pool.get_value_buffer):
        for layer in (0, 1):
            get(layer)[dense] = get(layer)[stored]
    assert compare(kv_pool, tokens, torch.arange(4, 8), stored, dense) == 0.0
    kv_pool.get_value_buffer(1)[6] = 100.0
    message = r"V of layer 1 differs by .* at 1 of the tokens 6 to 6 of the path of 8 tokens that starts with \[50, 51"
    with pytest.raises(InexactTreeError, match=message):
        compare(kv_pool, tokens, torch.arange(4, 8), stored, dense)


def test_not_a_number_is_never_equal(kv_pool) -> None:
    kv_pool.get_key_buffer(0)[5] = float("nan")
    with pytest.raises(InexactTreeError, match="K of layer 0"):
        compare(kv_pool, [1], torch.tensor([0]), torch.tensor([5]), torch.tensor([5]), tolerance=1e9)


@pytest.mark.parametrize(
    ("dtype", "magnitude", "tolerance"),
    [(torch.float32, 3.0, 1e-4), (torch.float32, 40.0, 1e-3), (torch.bfloat16, 4.0, 0.5), (torch.float16, 4.0, 0.0625)],
)
def test_default_tolerance(dtype, magnitude, tolerance) -> None:
    assert default_tolerance(dtype, magnitude) == pytest.approx(tolerance)
