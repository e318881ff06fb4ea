"""The only window from a method onto SGLang's ``ForwardBatch``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang_sparse.plan import DecodePlan


@dataclass(frozen=True)
class BatchView:
    """A decode batch as methods and kernels see it. Rows that pad a CUDA graph have ``n_select`` 0.

    Attributes:
        page_table: ``[rows, max_pages]`` int32, physical page of each logical page.
        n_pages: ``[rows]`` int32, pages held.
        n_select: ``[rows]`` int32, pages to attend to.
        usual_select: the largest ``n_select`` of a sparse row unless its request asks for more; what kernels are
            tuned for.
        scores: ``[rows, kv_heads, max_pages]`` float32 scratch.
        selected: scratch for the selection: ``[rows, kv_heads, max_pages]`` int32 and ``[rows, kv_heads]`` int32.
        stats: int64 ``[3]`` device counters: (row, KV head) pairs selected for, pages attended, pages held.
        page_size: tokens per page.
    """

    page_table: torch.Tensor
    n_pages: torch.Tensor
    n_select: torch.Tensor
    usual_select: int
    scores: torch.Tensor
    selected: tuple[torch.Tensor, torch.Tensor]
    stats: torch.Tensor
    page_size: int

    def rows(self, count: int) -> BatchView:
        """Return the view of the first ``count`` rows; the memory is the same."""
        return replace(
            self,
            page_table=self.page_table[:count],
            n_pages=self.n_pages[:count],
            n_select=self.n_select[:count],
            scores=self.scores[:count],
            selected=(self.selected[0][:count], self.selected[1][:count]),
        )

    @property
    def max_select(self) -> int:
        """The width of ``SparseIndices.indices``: all pages of the longest context, for rows that are dense."""
        return self.page_table.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(x.nbytes for x in (self.page_table, self.n_pages, self.n_select, self.scores, *self.selected))

    def load(self, plan: DecodePlan, forward_batch: Any, req_to_token: torch.Tensor) -> None:
        """Fill the view for a step, before the graph is replayed: inside it ``req_to_token`` may already be ahead.

        Args:
            plan: the decision for the real rows, which come first; the others pad a graph.
            forward_batch: SGLang's batch or replay view.
            req_to_token: ``[requests, max_context]``, SGLang's token table.
        """
        real = plan.n_pages.shape[0]
        width = int(plan.n_pages.max()) if real else 0
        columns = req_to_token[:, : width * self.page_size : self.page_size]
        pages = columns[forward_batch.req_pool_indices[:real]] // self.page_size
        self.page_table[:real, :width].copy_(pages)
        self.n_pages[:real].copy_(plan.n_pages, non_blocking=True)
        self.n_select[:real].copy_(plan.n_select, non_blocking=True)
        self.n_pages[real:].zero_()
        self.n_select[real:].zero_()


def allocate_view(
    rows: int, kv_heads: int, max_pages: int, usual_select: int, page_size: int, stats: torch.Tensor
) -> BatchView:
    """Allocate the buffers of a view on the device of ``stats``, as an empty batch.

    Args:
        rows: most rows of a batch.
        kv_heads: KV heads of this rank.
        max_pages: pages of the longest context; the buffers are up to three wider.
        usual_select: see ``BatchView``.
        page_size: tokens per page.
        stats: see ``BatchView.stats``.
    """
    device = stats.device
    # Rows of scores then begin at multiples of 16 bytes, which lets a kernel load four at once.
    max_pages = -(-max_pages // 4) * 4
    return BatchView(
        page_table=torch.zeros(rows, max_pages, dtype=torch.int32, device=device),
        n_pages=torch.zeros(rows, dtype=torch.int32, device=device),
        n_select=torch.zeros(rows, dtype=torch.int32, device=device),
        usual_select=usual_select,
        scores=torch.zeros(rows, kv_heads, max_pages, dtype=torch.float32, device=device),
        selected=(
            torch.full((rows, kv_heads, max_pages), -1, dtype=torch.int32, device=device),
            torch.zeros(rows, kv_heads, dtype=torch.int32, device=device),
        ),
        stats=stats,
        page_size=page_size,
    )
