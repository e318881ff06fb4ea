"""Tests of the rows that share a rectifying pass: FlashAttention-3's time by hand, and every row in one pass."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_sparse.methods.base import ModelShape
from sglang_sparse.scheduler.fa3_packing import PASS_TILES, Divider, divider_of

LONG = 131072
QWEN3_8B = Divider(q_per_kv=4, kv_heads=8, processors=132)


def test_six_rows_take_the_time_of_eight() -> None:
    # 96 tiles of queries, in two parts each: 192 parts, two rounds of half of 1,024 tiles of keys.
    assert QWEN3_8B.tiles([(64, LONG)] * 6) == 2 * 512
    assert QWEN3_8B.tiles([(64, LONG)] * 8) == 1024
    # One round of half of the keys, and one of a quarter.
    assert QWEN3_8B.tiles([(64, LONG)] * 4) == 512
    assert QWEN3_8B.tiles([(64, LONG)] * 2) == 256


def test_queries_of_half_a_tile_count_as_a_tile() -> None:
    assert QWEN3_8B.tiles([(16, LONG)] * 6) == QWEN3_8B.tiles([(32, LONG)] * 6) == 2 * 342


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        ([(64, LONG)] * 6, [2, 4]),
        ([(32, LONG)] * 7, [3, 4]),
        ([(64, LONG)] * 4, [4]),
        # Nothing to gain, where another pass costs more than the keys.
        ([(32, 8192)] * 6, [6]),
        ([(32, LONG)], [1]),
        # The second round is of short rows only.
        ([(32, LONG), *[(32, 4096)] * 5], [6]),
    ],
)
def test_rows_are_divided_where_that_is_faster(rows: list[tuple[int, int]], sizes: list[int]) -> None:
    assert sorted(map(len, QWEN3_8B.divide(rows))) == sizes


@given(
    st.lists(st.tuples(st.integers(2, 64), st.integers(1, 300_000)), max_size=12),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8]),
)
def test_each_row_is_in_one_pass_and_more_passes_are_faster(
    rows: list[tuple[int, int]], q_per_kv: int, kv_heads: int
) -> None:
    divider = Divider(q_per_kv, kv_heads, 132)
    parts = divider.divide(rows)
    assert sorted(row for part in parts for row in part) == list(range(len(rows)))
    assert all(part == sorted(part) for part in parts)
    if len(parts) > 1:
        taken = sum(divider.tiles([rows[row] for row in part]) + PASS_TILES for part in parts)
        assert taken < divider.tiles(rows) + PASS_TILES


def test_only_what_is_known_of_flash_attention_3_is_divided() -> None:
    model = ModelShape(36, 32, 8, 128, torch.bfloat16)
    assert divider_of("fa3", model, torch.device("cpu")) is None
    cuda = torch.device("cuda")
    for backend, shape in (
        ("flashinfer", model),
        ("fa3", ModelShape(36, 32, 8, 64, torch.bfloat16)),
        ("fa3", ModelShape(36, 32, 8, 128, torch.float8_e4m3fn)),
        ("fa3", ModelShape(36, 128, 1, 128, torch.bfloat16, rope_dim=64)),
    ):
        assert divider_of(backend, shape, cuda) is None
