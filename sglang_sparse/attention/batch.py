"""Decode batches as views: their buffers, and what each step loads into them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from sglang_sparse.attention.plan import DecodePlan, dense_plan, usual_selection
from sglang_sparse.methods.base import VIEW_BUFFERS, DecodeMethod, ModelShape, ViewBuffer
from sglang_sparse.methods.views import SELECT_STATS, BatchView
from sglang_sparse_kernels.page_table import load_page_table

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


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
    method: DecodeMethod, model: ModelShape, width: int, dtype: torch.dtype, device: torch.device
) -> dict[int, tuple[ViewBuffer, ...]]:
    """Return which of a view's large buffers a method uses, or its parts, by the size of their blocks.

    Args:
        method: of the server.
        model: see ``DecodeMethod.buffers``, as are the others.
        width: blocks of the longest row, of the method's size.
        dtype: of the query.
        device: where batches run.
    """
    found: dict[int, tuple[ViewBuffer, ...]] = {}
    for part in method.parts or (method,):
        blocks = _blocks(width, method.block_size, part.block_size)
        used = (*found.get(part.block_size, ()), *part.buffers(model, blocks, dtype, device))
        found[part.block_size] = tuple(dict.fromkeys(used))
    return found


def _blocks(count: int, size: int, other: int) -> int:
    """How many blocks of another size hold what so many of this size do."""
    return -(-count * size // other)


def count_sizes(method: DecodeMethod) -> list[int]:
    """Return how many numbers each part of a method counts on the device, or the method itself."""
    return [SELECT_STATS + len(part.more_counts) for part in method.parts or (method,)]


def with_parts(
    view: BatchView,
    method: DecodeMethod,
    max_pages: int,
    buffers: Mapping[int, Collection[ViewBuffer]] | None = None,
) -> BatchView:
    """Return a view with a part for each part of a method; see ``BatchView.parts``.

    Args:
        view: of the whole batch, with the counts of all parts one behind the other.
        method: of the server; a view of one without parts is returned as it is.
        max_pages: pages of the longest context, which are blocks of the whole view.
        buffers: the large buffers that parts with other blocks use, see ``view_buffers``; all if not given.
    """
    if not method.parts:
        return view
    rows, kv_heads = view.arrivals.shape
    owners, parts = {view.page_size: view}, []
    for part, stats in zip(method.parts, view.stats.split(count_sizes(method)), strict=True):
        block = part.block_size
        width = _blocks(max_pages, view.page_size, block)
        usual = usual_selection(part, width)
        if block not in owners:
            used = VIEW_BUFFERS if buffers is None else buffers[block]
            owners[block] = allocate_view(rows, kv_heads, width, usual, block, stats, used)
        small = {"n_select": torch.zeros_like(view.n_select), "row_thresholds": torch.zeros_like(view.row_thresholds)}
        parts.append(replace(owners[block], **small, usual_select=usual, stats=stats))
    return replace(view, parts=tuple(parts))


def load_view(view: BatchView, plan: DecodePlan, forward_batch: Any, req_to_token: torch.Tensor) -> None:
    """Fill a view for a step, before the graph is replayed: inside it ``req_to_token`` may already be ahead.

    Args:
        view: to fill.
        plan: the decision for the real rows, which come first; the others pad a graph.
        forward_batch: SGLang's batch or replay view.
        req_to_token: ``[requests, max_context]``, SGLang's token table.
    """
    requests = forward_batch.req_pool_indices
    _load(view, req_to_token, requests, plan)
    for (part, owns), own in zip(view.owners(), plan.parts, strict=True):
        if owns:
            _load(part, req_to_token, requests, own)
        else:
            _load_counts(part, (part.n_select, own.n_select), (part.row_thresholds, own.row_thresholds))


def clear_view(view: BatchView, req_to_token: torch.Tensor) -> None:
    """Make all rows padding; by the same kernel, so that a server with CUDA graphs compiles it before it serves."""
    requests = torch.empty(0, dtype=torch.int64, device=req_to_token.device)
    for each in (view, *view.parts):
        _load(each, req_to_token, requests, dense_plan(0))


def _load_counts(view: BatchView, *loads: tuple[torch.Tensor, torch.Tensor]) -> None:
    rows = view.n_pages.shape[0]
    for target, counts in loads:
        # From pageable memory, which the driver has read when the call returns. A pinned buffer that is used again
        # could be overwritten before its copy: the host runs ahead of the device.
        target.copy_(torch.nn.functional.pad(counts, (0, rows - counts.shape[0])), non_blocking=True)


def _load(view: BatchView, req_to_token: torch.Tensor, requests: torch.Tensor, plan: DecodePlan) -> None:
    real = plan.n_pages.shape[0]
    _load_counts(
        view, (view.n_pages, plan.n_pages), (view.n_select, plan.n_select), (view.row_thresholds, plan.row_thresholds)
    )
    view.requests[:real].copy_(requests[:real])
    if view.page_table.shape[1] == 0:
        return
    widest = int(plan.n_pages.max()) if real else 0
    load_page_table(req_to_token, requests[:real], view.n_pages, widest, view.page_size, view.page_table)
