"""Tests of a loaded decode batch, as methods and kernels see it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_rocketkv import BLOCK, HEADS, SMALL, Rows, rocketkv

from sglang_sparse.attention.batch import allocate_view, clear_views, load_views, real_rows, rows_and_queries
from sglang_sparse.attention.plan import DecodePlan, GroupPlan
from sglang_sparse.config.settings import build
from sglang_sparse.methods.base import VIEW_BUFFERS, ModelShape, ViewBuffer
from sglang_sparse.methods.views import BatchView
from sglang_sparse_kernels.common import nvrtc

REQUESTS, CONTEXT = 6, 70


def load(view: BatchView, n_pages: list[int], n_select: list[int], requests: list[int], table: torch.Tensor) -> None:
    held, attended = (torch.tensor(sizes, dtype=torch.int32) for sizes in (n_pages, n_select))
    covered = held == attended
    plan = DecodePlan(covered, ~covered, (GroupPlan(held, attended, covered, held / 8),))
    # SGLang pads the indices of a graph's rows.
    padded = requests + [0] * (view.n_pages.shape[0] - len(requests))
    load_views((view,), plan, SimpleNamespace(req_pool_indices=torch.tensor(padded)), table)


def make_view(rows: int, page_size: int) -> BatchView:
    return allocate_view(rows, 2, -(-CONTEXT // page_size), 3, page_size, torch.zeros(4, dtype=torch.int64))


def test_a_plan_of_bounds_ends_where_the_device_says() -> None:
    table = torch.arange(REQUESTS * CONTEXT, dtype=torch.int32).view(REQUESTS, CONTEXT)
    view = make_view(4, 4)
    held, attended = torch.tensor([9, 5, 3], dtype=torch.int32), torch.tensor([2, 5, 3], dtype=torch.int32)
    second = replace(view, n_select=torch.zeros_like(view.n_select))
    groups = tuple(GroupPlan(held, attended, held == attended, held / 8) for _ in range(2))
    batch: Any = SimpleNamespace(req_pool_indices=torch.tensor([2, 1, 0, 0]), seq_lens=torch.tensor([33, 12, 12, 1]))
    load_views((view, second), DecodePlan(held < 0, held > 0, groups, bounded=True), batch, table)
    assert view.n_pages.tolist() == [9, 3, 3, 0]
    assert view.n_select.tolist() == second.n_select.tolist() == [2, 3, 3, 0]


@pytest.mark.parametrize(
    ("fields", "real"),
    [({}, 8), ({"num_padding": 3}, 5), ({"_original_batch_size": None}, 8), ({"_original_batch_size": 0}, 0)],
)
def test_rows_that_pad_are_no_requests(fields: dict[str, Any], real: int) -> None:
    batch: Any = SimpleNamespace(batch_size=8, **fields)
    assert real_rows(batch) == real


@pytest.mark.parametrize(("name", "expected"), [("dsa", [(1, 1), (4, 1)]), ("resa", [(1, 1), (1, 4)])])
def test_drafts_are_rows_where_the_model_chooses(name: str, expected: list[tuple[int, int]]) -> None:
    method = build(name, {}).method
    assert [rows_and_queries(method, tokens) for tokens in (0, 4)] == expected


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_load_finds_the_pages_of_the_requests(page_size: int) -> None:
    pages = -(-CONTEXT // page_size)
    physical = torch.randperm(REQUESTS * pages, generator=torch.Generator().manual_seed(0)).view(REQUESTS, pages)
    slots = physical[:, :, None] * page_size + torch.arange(page_size)
    table = slots.flatten(1)[:, :CONTEXT].int()
    view = make_view(4, page_size)
    load(view, [pages, 1], [1, 1], [5, 2], table)
    assert view.n_pages.tolist() == [pages, 1, 0, 0]
    assert view.n_select.tolist() == [1, 1, 0, 0]
    assert view.row_thresholds.tolist() == [pages / 8, 1 / 8, 0, 0]
    expected = torch.zeros_like(view.page_table)
    expected[0, :pages] = physical[5]
    expected[1, 0] = physical[2, 0]
    assert torch.equal(view.page_table, expected)


def test_a_batch_leaves_nothing_of_the_one_before_but_valid_pages() -> None:
    table = torch.arange(REQUESTS * CONTEXT, dtype=torch.int32).view(REQUESTS, CONTEXT)
    view = make_view(3, 1)
    load(view, [5, 4, 3], [5, 2, 1], [0, 1, 2], table)
    load(view.rows(2), [2], [1], [3], table)
    assert view.n_pages.tolist() == [2, 0, 3], "the third row is not of the batch"
    assert view.n_select.tolist() == [1, 0, 1]
    assert view.page_table[0, :6].tolist() == [3 * CONTEXT, 3 * CONTEXT + 1, 2, 3, 4, 0]


def test_a_batch_of_padding_alone() -> None:
    view = make_view(2, 16)
    load(view, [3], [3], [1], torch.full((REQUESTS, CONTEXT), 32, dtype=torch.int32))
    load(view, [], [], [], torch.full((REQUESTS, CONTEXT), 48, dtype=torch.int32))
    assert view.n_pages.tolist() == view.n_select.tolist() == [0, 0]
    assert view.page_table[0, :4].tolist() == [2, 2, 2, 0]


def test_rows_begin_where_wide_loads_can() -> None:
    view = make_view(2, 1)
    assert view.max_select == 80
    assert view.scores.shape == view.selected[0].shape == (2, 2, 80)


@pytest.mark.parametrize("used", VIEW_BUFFERS)
def test_buffers_that_a_method_does_not_use_have_no_columns(used: ViewBuffer) -> None:
    """The numbers of each row are there all the same."""
    view = allocate_view(4, 2, CONTEXT, 3, 1, torch.zeros(4, dtype=torch.int64), (used,))
    load(view, [5, 3], [2, 3], [1, 0], torch.arange(REQUESTS * CONTEXT, dtype=torch.int32).view(REQUESTS, CONTEXT))
    assert view.n_pages.tolist() == [5, 3, 0, 0] and view.n_select.tolist() == [2, 3, 0, 0]
    widths = {"page_table": view.page_table, "scores": view.scores, "selected": view.selected[0]}
    assert {name: buffer.shape[-1] for name, buffer in widths.items()} == {name: 80 * (name == used) for name in widths}
    assert view.page_table[0, :6].tolist() == ([70, 71, 72, 73, 74, 0] if used == "page_table" else [])
    assert view.rows(3).scores.shape == (3, 2, 80 * (used == "scores"))
    clear_views((view,), torch.zeros(REQUESTS, CONTEXT, dtype=torch.int32))
    assert view.n_pages.tolist() == [0] * 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_step_allocates_nothing_on_the_device() -> None:
    table = torch.arange(REQUESTS * CONTEXT, dtype=torch.int32, device="cuda").view(REQUESTS, CONTEXT)
    view = allocate_view(4, 2, CONTEXT, 3, 1, torch.zeros(4, dtype=torch.int64, device="cuda"))
    sizes = torch.tensor([5, 4, 3], dtype=torch.int32)
    plan = DecodePlan(sizes < 0, sizes > 0, (GroupPlan(sizes, sizes - 1, sizes < 0, sizes / 8),))
    batch = SimpleNamespace(req_pool_indices=torch.tensor([3, 1, 0, 0], device="cuda"))
    load_views((view,), plan, batch, table)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(3):
        load_views((view,), plan, batch, table)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_lists_and_scores_are_there_where_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """RocketKV's, which the selection keeps to itself where it has a kernel of its own."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    shape, cpu = ModelShape(36, 32, 8, 128, torch.bfloat16), torch.device("cpu")
    sizes = (1000, torch.bfloat16, cpu)
    assert rocketkv().buffers(shape, *sizes) == VIEW_BUFFERS
    monkeypatch.setattr(nvrtc, "available", lambda _: True)
    few = rocketkv().buffers(shape, *sizes)
    assert few == ("page_table", "selected")
    for other in (replace(shape, head_dim=32), replace(shape, num_kv_heads=2)):
        assert rocketkv().buffers(other, *sizes) == VIEW_BUFFERS
    assert rocketkv(kt_cache_dtype="bfloat16").buffers(shape, *sizes) == VIEW_BUFFERS
    assert rocketkv().buffers(shape, (1 << 20) - 15, *sizes[1:]) == VIEW_BUFFERS
    assert rocketkv().buffers(shape, 1000, torch.float32, cpu) == VIEW_BUFFERS
    monkeypatch.setenv("SGLANG_SPARSE_REFERENCE", "1")
    assert rocketkv().buffers(shape, *sizes) == VIEW_BUFFERS
    # What selects all the same makes its own.
    rows = Rows(rocketkv(**SMALL))
    found = rows.method.select(rows.view, 0, rows.query, rows.aux)
    expected = found.indices.clone(), found.counts.clone()
    view = allocate_view(len(rows.table), HEADS, 90, 10, BLOCK, torch.zeros(4, dtype=torch.int64), few)
    without = replace(rows.view, scores=view.scores, visible=view.visible)
    again = rows.method.select(without, 0, rows.query, rows.aux)
    assert torch.equal(again.indices, expected[0]) and torch.equal(again.counts, expected[1])
