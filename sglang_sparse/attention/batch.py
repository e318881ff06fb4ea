"""Decode batches as views: their buffers, and what each step loads into them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from sglang_sparse.attention.plan import DecodePlan, usual_selection
from sglang_sparse.attention.protocols import ForwardBatch
from sglang_sparse.methods.base import VIEW_BUFFERS, DecodeMethod, ModelShape, ViewBuffer
from sglang_sparse.methods.views import SELECT_STATS, BatchView
from sglang_sparse_kernels.page_table import load_page_table

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

# Of a batch, one for each method.
Views = tuple[BatchView, ...]


class RowViews(dict[int, Views]):
    """Views of the first rows of buffers, by their number; made once, because making them delays a step.

    Args:
        views: of all rows.
    """

    def __init__(self, views: Views):
        super().__init__()
        self.views = views
        # The views that were filled last, and the plans whose counts they have.
        self._filled: tuple[Views, object] | None = None

    def load(self, views: Views, plan: DecodePlan, forward_batch: ForwardBatch, req_to_token: torch.Tensor) -> None:
        """Fill some of these, see `load_views`; counts that they have already are left."""
        counted = self._filled is not None and self._filled[0] is views and self._filled[1] is plan.groups
        load_views(views, plan, forward_batch, req_to_token, counted)
        self._filled = (views, None if plan.bounded else plan.groups)

    def __missing__(self, rows: int) -> Views:
        self[rows] = tuple(view.rows(rows) for view in self.views)
        return self[rows]


def real_rows(forward_batch: ForwardBatch) -> int:
    """Return how many rows of a batch are requests': the others pad a CUDA graph, or what a rank shares with others."""
    padded: int | None = getattr(forward_batch, "_original_batch_size", None)
    return forward_batch.batch_size - getattr(forward_batch, "num_padding", 0) if padded is None else padded


def rows_and_queries(method: DecodeMethod, verified: int) -> tuple[int, int]:
    """Return how many rows of a view a request has, and how many queries each: drafts share a selection, or a row.

    Args:
        method: the decode method; where its model chooses, each draft chooses for itself.
        verified: tokens of a request in a verification, 0 where none runs sparse.
    """
    tokens = verified or 1
    return (tokens, 1) if method.selects_in_model else (1, tokens)


def allocate_view(
    rows: int,
    kv_heads: int,
    max_pages: int,
    usual_select: int,
    page_size: int,
    stats: torch.Tensor,
    buffers: Collection[ViewBuffer] = VIEW_BUFFERS,
) -> BatchView:
    """Allocate the buffers of a view on the device of ``stats``, as an empty batch.

    Args:
        rows: most rows of a batch.
        kv_heads: KV heads of this rank.
        max_pages: pages of the longest context; the buffers are up to fifteen wider.
        usual_select: see ``BatchView``.
        page_size: tokens per page.
        stats: see ``BatchView.stats``.
        buffers: which of the large buffers the method uses, see ``DecodeMethod.view_buffers``.
    """
    device = stats.device
    # Rows then begin at multiples of 16 bytes, which lets a kernel load four entries at once; Triton sees that only
    # where their number is a multiple of 16.
    max_pages = -(-max_pages // 16) * 16
    columns = {name: max_pages if name in buffers else 0 for name in VIEW_BUFFERS}
    return BatchView(
        page_table=torch.zeros(rows, columns["page_table"], dtype=torch.int32, device=device),
        n_pages=torch.zeros(rows, dtype=torch.int32, device=device),
        n_select=torch.zeros(rows, dtype=torch.int32, device=device),
        row_thresholds=torch.zeros(rows, dtype=torch.float32, device=device),
        usual_select=usual_select,
        scores=torch.zeros(rows, kv_heads, columns["scores"], dtype=torch.float32, device=device),
        selected=(
            torch.full((rows, kv_heads, columns["selected"]), -1, dtype=torch.int32, device=device),
            torch.zeros(rows, kv_heads, dtype=torch.int32, device=device),
        ),
        requests=torch.zeros(rows, dtype=torch.int64, device=device),
        visible=(
            torch.zeros(rows, kv_heads, columns["visible"], dtype=torch.int32, device=device),
            torch.zeros(rows, kv_heads, dtype=torch.int32, device=device),
            torch.zeros(rows, kv_heads, dtype=torch.int32, device=device),
        ),
        arrivals=torch.zeros(rows, kv_heads, dtype=torch.int32, device=device),
        stats=stats,
        page_size=page_size,
    )


def view_buffers(
    methods: Sequence[DecodeMethod], model: ModelShape, tokens: int, dtype: torch.dtype, device: torch.device
) -> dict[int, tuple[ViewBuffer, ...]]:
    """Return which of the large buffers methods use, by the size of their blocks: those of one size share them.

    Args:
        methods: of the server.
        model: see ``DecodeMethod.buffers``, as are dtype and device.
        tokens: of the longest row.
        dtype: of the query.
        device: where batches run.
    """
    found: dict[int, tuple[ViewBuffer, ...]] = {}
    for method in methods:
        block = method.block_size
        used = (*found.get(block, ()), *method.buffers(model, -(-tokens // block), dtype, device))
        found[block] = tuple(dict.fromkeys(used))
    return found


def count_sizes(methods: Sequence[DecodeMethod]) -> list[int]:
    """Return how many numbers each method counts on the device."""
    return [SELECT_STATS + len(method.more_counts) for method in methods]


def allocate_views(
    methods: Sequence[DecodeMethod],
    rows: int,
    kv_heads: int,
    tokens: int,
    stats: torch.Tensor,
    buffers: Mapping[int, Collection[ViewBuffer]] | None = None,
    queries: int = 1,
) -> Views:
    """Allocate a view for each method, on the device of ``stats``, as empty batches.

    Layers take turns, so views whose blocks have one size share their buffers but for ``n_select``, ``row_thresholds``
    and ``stats``.

    Args:
        methods: of the server.
        rows: most rows of a batch.
        kv_heads: KV heads of this rank.
        tokens: of the longest row.
        stats: see ``BatchView.stats``, of all methods one behind the other.
        buffers: see ``view_buffers``; all if not given.
        queries: see ``BatchView.queries``.
    """
    owners: dict[int, BatchView] = {}
    views = []
    for method, own in zip(methods, stats.split(count_sizes(methods)), strict=True):
        block = method.block_size
        width = -(-tokens // block)
        usual = usual_selection(method, width)
        if first := owners.get(block):
            small = {name: torch.zeros_like(getattr(first, name)) for name in ("n_select", "row_thresholds")}
            views.append(replace(first, **small, usual_select=usual, stats=own))
        else:
            used = VIEW_BUFFERS if buffers is None else buffers[block]
            owners[block] = replace(allocate_view(rows, kv_heads, width, usual, block, own, used), queries=queries)
            views.append(owners[block])
    return tuple(views)


def regrouped_bytes(model: ModelShape, rows: int, queries: int, dtype: torch.dtype) -> int:
    """Return the bytes of queries and output by KV head and of the query that selects, where tokens share a selection.

    Args:
        model: the model; values have at most its ``head_dim``.
        rows: of the batch.
        queries: see ``BatchView.queries``.
        dtype: of the query.
    """
    copies = 2 * queries + 1 if queries > 1 else 0
    return copies * rows * model.num_q_heads * model.head_dim * dtype.itemsize


def views_nbytes(views: Views) -> int:
    """Return the bytes of all buffers, those that views share once."""
    return sum({id(buffer): buffer.nbytes for view in views for buffer in view.buffers}.values())


def load_views(
    views: Views, plan: DecodePlan, forward_batch: ForwardBatch, req_to_token: torch.Tensor, counted: bool = False
) -> None:
    """Fill views for a step, before the graph is replayed: inside it ``req_to_token`` may already be ahead.

    Args:
        views: to fill.
        plan: the decision for the real rows, which come first; the others pad a graph.
        forward_batch: SGLang's batch or replay view.
        req_to_token: ``[requests, max_context]``, SGLang's token table.
        counted: whether the views have this plan's counts already.
    """
    loaded: set[int] = set()
    for view, own in zip(views, plan.groups, strict=True):
        if not counted:
            counts = () if view.page_size in loaded else ((view.n_pages, own.n_pages),)
            _load_counts(view, *counts, (view.n_select, own.n_select), (view.row_thresholds, own.row_thresholds))
        if view.page_size not in loaded:
            _load_table(view, req_to_token, forward_batch.req_pool_indices, own.n_pages)
            loaded.add(view.page_size)
        if plan.bounded:
            _bound(view, forward_batch.seq_lens[: len(plan.covered)])


def clear_views(views: Views, req_to_token: torch.Tensor) -> None:
    """Make all rows padding; by the same kernel, so that a server with CUDA graphs compiles it before it serves."""
    nothing = torch.empty(0, dtype=torch.int32)
    requests = torch.empty(0, dtype=torch.int64, device=req_to_token.device)
    for view in views:
        for counts in (view.n_pages, view.n_select, view.row_thresholds):
            counts.zero_()
        _load_table(view, req_to_token, requests, nothing)


def _load_counts(view: BatchView, *loads: tuple[torch.Tensor, torch.Tensor]) -> None:
    rows = view.n_pages.shape[0]
    for target, counts in loads:
        if rows > counts.shape[0]:
            counts = torch.nn.functional.pad(counts, (0, rows - counts.shape[0]))
        # From pageable memory, which the driver has read when the call returns. A pinned buffer that is used again
        # could be overwritten before its copy: the host runs ahead of the device.
        target.copy_(counts, non_blocking=True)


def _bound(view: BatchView, lengths: torch.Tensor) -> None:
    """Take off what rows of these lengths, ``[rows]`` on the device, do not hold."""
    n_pages, n_select = view.n_pages[: len(lengths)], view.n_select[: len(lengths)]
    torch.minimum(n_pages, ((lengths + view.page_size - 1) // view.page_size).to(torch.int32), out=n_pages)
    torch.minimum(n_select, n_pages, out=n_select)


def _load_table(view: BatchView, req_to_token: torch.Tensor, requests: torch.Tensor, n_pages: torch.Tensor) -> None:
    if view.page_table.shape[1] == 0:
        # A model that chooses finds its rows itself.
        return
    real = n_pages.shape[0]
    view.requests[:real].copy_(requests[:real])
    widest = int(n_pages.max()) if real else 0
    load_page_table(req_to_token, requests[:real], view.n_pages, widest, view.page_size, view.page_table)
