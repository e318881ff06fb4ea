"""Sparse decode attention with the launch parameters that it takes by itself, called as a server calls it."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from exact_decode import exact, worst_error
from kernel_runs import assert_replays

from sglang_sparse_kernels.common import launch
from sglang_sparse_kernels.sparse_decode import plan as plans
from sglang_sparse_kernels.sparse_decode import sparse_decode
from sglang_sparse_kernels.sparse_decode.cases import Case, make
from sglang_sparse_kernels.sparse_decode.plan import combines, plan

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
NO_PAGE = 2**31 - 1
TOLERANCE = 1e-2


def served(lengths: tuple[int, ...], kv_dtype: torch.dtype) -> Case:
    """Llama-3.1-8B that attends to a tenth, in a table as wide as the longest row."""
    case = Case(lengths, 16, 8, 4, 128, BF16, kv_dtype, ratio=0.1, max_select=-(-max(lengths) // 16), gpu_only=True)
    return replace(case, k_scale=0.5, v_scale=2.0) if kv_dtype == FP8 else case


EVEN = [(65536,) * 8, (131072,), (262144,), (262144,) * 4]
RAGGED = [(65536, 1, 40007, 0, 65535, 17, 65521, 50000), (131057,), (262129,), (250001, 0, 1000, 262144)]
SERVED = [served(lengths, kv_dtype) for lengths in (*EVEN, *RAGGED) for kv_dtype in (BF16, FP8)]
# Deep on the few processors that the interpreter stands for: more than a tile for each split, or less for a row.
DEEP = [
    Case((1100,), 16, 2, 4, 128, BF16, BF16),
    Case((2100,), 16, 1, 4, 128, BF16, BF16, max_select=90),
    Case((2100, 90), 16, 1, 7, 128, BF16, BF16),
    Case((0, 1100), 16, 1, 2, 128, torch.float16, torch.float16),
]


def planned(case: Case, device: torch.device) -> tuple[plans.Config, bool]:
    """The launch parameters of a case, and whether its splits combine themselves."""
    usual = math.ceil(math.ceil(max(case.lengths) / case.page_size) * case.ratio)
    sizes = (len(case.lengths), case.group, case.heads, case.dim, case.dim, usual, case.page_size)
    config, _, splits = plan(*sizes, case.kv_dtype, device)
    return config, combines(splits, case.group, case.dim, config.num_warps)


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device that is planned for as an H200."""
    monkeypatch.setattr(launch, "stand_in", launch.Properties((9, 0), 132, 227 * 1024))
    return torch.device("cpu")


@pytest.mark.parametrize(
    ("batch", "group", "kv_dtype", "length", "block_tokens", "splits"),
    [
        (1, 4, torch.bfloat16, 131072, 128, 15),
        # Of 5 rows there are 40 pairs with a KV head, which leave 12 multiprocessors without a program.
        (5, 4, torch.bfloat16, 16384, 32, 17),
        # Eight heads of 16 splits are more than a program can hold.
        (1, 8, torch.bfloat16, 131072, 32, 82),
        (1, 4, torch.float8_e4m3fn, 131072, 32, 82),
        (1, 4, torch.bfloat16, 32768, 32, 51),
        (1, 4, torch.bfloat16, 49152, 128, 13),
        (8, 4, torch.bfloat16, 65536, 128, 2),
    ],
)
def test_deep_programs_where_they_fill_the_gpu_and_combine(
    batch: int, group: int, kv_dtype: torch.dtype, length: int, block_tokens: int, splits: int, h200: torch.device
) -> None:
    config, tile_pages, found = plan(batch, group, 8, 128, 128, length // 160, 16, kv_dtype, h200)
    assert (config.block_tokens, tile_pages, found) == (block_tokens, block_tokens // 16, splits)


@pytest.mark.parametrize(("dim", "kv_dtype", "block_tokens"), [(64, BF16, 128), (64, FP8, 64), (128, FP8, 64)])
def test_heads_of_64_have_large_tiles(dim: int, kv_dtype: torch.dtype, block_tokens: int, h200: torch.device) -> None:
    assert plan(8, 8, 8, dim, dim, 820, 16, kv_dtype, h200)[0].block_tokens == block_tokens


def test_deep_programs_combine_themselves_where_servers_need_them(h200: torch.device) -> None:
    for case in SERVED:
        config, together = planned(case, h200)
        assert (config is plans._DEEP) == (case.kv_dtype == BF16)
        assert together or (case.kv_dtype == FP8 and len(case.lengths) == 1)


def inputs(case: Case, device: str) -> dict[str, Any]:
    """A selection with anything beyond the counts, a poisoned result, and what a server gives beside these."""
    arguments = make(case, device)
    indices, counts = arguments["indices"], arguments["counts"]
    indices.masked_fill_(torch.arange(indices.shape[2], device=device) >= counts[..., None], NO_PAGE)
    out = torch.full_like(arguments["q"], float("nan"))
    return {**arguments, "out": out, "usual_pages": int(counts.max()), "arrivals": torch.zeros_like(counts)}


@pytest.mark.parametrize("case", DEEP, ids=str)
def test_small_deep_programs_combine_themselves(case: Case, device: str) -> None:
    if device == "cpu":
        assert planned(case, torch.device(device)) == (plans._DEEP, True)
    arguments = inputs(case, device)
    got = sparse_decode(**arguments)
    assert worst_error(got, exact(arguments)) < TOLERANCE
    again = sparse_decode(**{**arguments, "out": torch.full_like(got, float("nan"))})
    assert torch.equal(got, again) and arguments["arrivals"].count_nonzero() == 0


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_at_the_sizes_of_a_server(case: Case, device: str) -> None:
    """Against float64, and a hundred replays to the bit."""
    arguments = inputs(case, device)
    expected = sparse_decode(**arguments).clone()
    assert worst_error(expected, exact(arguments)) < TOLERANCE
    poisoned = [(arguments["out"], float("nan"))]
    assert_replays(lambda: sparse_decode(**arguments), poisoned, lambda: torch.equal(arguments["out"], expected))
    assert arguments["arrivals"].count_nonzero() == 0, "ready for the next call"
