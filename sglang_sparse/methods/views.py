"""The view of a decode batch and its layers that a method gets; ``attention/batch.py`` fills it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from sglang_sparse_kernels.sparse_decode import scratch_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_sparse.methods.base import ModelShape


# Counts of the selection in ``BatchView.stats``.
SELECT_STATS = 4


@dataclass(frozen=True)
class LatentQuery:
    """The queries of a decode batch for an MLA layer, and the latents that they attend to.

    Attributes:
        nope: ``[rows, q_heads, latent]``, the query without position, absorbed into the latent space.
        rope: ``[rows, q_heads, rope]``, its rotary part, after RoPE.
        cache: ``[slots, latent + rope]``, the layer's KV pool; the newest tokens are written.
        last_slots: ``[rows]`` int64, the slot of each row's newest token.
        scaling: factor of the logits, the model's own.
        kv_scale: factor of what is stored.
        mean_over_ranks: returns a tensor's mean over the tensor-parallel ranks; it may overwrite its argument.
    """

    nope: torch.Tensor
    rope: torch.Tensor
    cache: torch.Tensor
    last_slots: torch.Tensor
    scaling: float
    kv_scale: float
    mean_over_ranks: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class BatchView:
    """A decode batch as methods and kernels see it. Rows that pad a CUDA graph have ``n_pages`` and ``n_select`` 0.

    A page here is the method's block, the unit of its selection: a KV page, or an equal part of one. Those of the large
    buffers that are not among the method's ``view_buffers`` have no columns.

    Attributes:
        page_table: ``[rows, max_pages]`` int32, physical page of each logical page; beyond a row's pages those of
            an earlier batch, or page 0.
        n_pages: ``[rows]`` int32, pages held.
        n_select: ``[rows]`` int32, pages to attend to, or at most where the data decides.
        row_thresholds: ``[rows]`` float32, each row's ``DecodeMethod.row_threshold``.
        usual_select: the largest ``n_select`` of a sparse row unless its request asks for more; what kernels are
            tuned for.
        scores: ``[rows, kv_heads, max_pages]`` float32 scratch.
        requests: ``[rows]`` int64, each row's place in SGLang's request pool; of a row that pads a graph, that of an
            earlier batch.
        visible: scratch for the pages that a row may attend to, by KV head: ``[rows, kv_heads, max_pages]`` int32, how
            many of them there are and how many it takes, both ``[rows, kv_heads]`` int32.
        selected: scratch for the selection: ``[rows, kv_heads, max_pages]`` int32 and ``[rows, kv_heads]`` int32.
        arrivals: ``[rows, kv_heads]`` int32 zeros, scratch of the attention, which leaves it so.
        stats: int64 device counters: (row, KV head) pairs selected for, pages attended, pages held, pairs that needed
            more than ``n_select`` and got all; behind these four, ``method_stats``.
        page_size: tokens per page.
        logit_scale: of the layer that selects, what its products of query and stored key are multiplied with.
        last_slots: ``[rows]`` int64 while a layer selects, the slot of each row's newest token. What lies behind it in
            its page is not the row's, which a method whose unit is the token has to leave out.
        queries: tokens of a row that share its selection: one in a decode step, the drafts in a verification.
    """

    page_table: torch.Tensor
    n_pages: torch.Tensor
    n_select: torch.Tensor
    row_thresholds: torch.Tensor
    usual_select: int
    scores: torch.Tensor
    selected: tuple[torch.Tensor, torch.Tensor]
    requests: torch.Tensor
    visible: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    arrivals: torch.Tensor
    stats: torch.Tensor
    page_size: int
    logit_scale: float = 1.0
    last_slots: torch.Tensor | None = None
    queries: int = 1

    def rows(self, count: int) -> BatchView:
        """Return the view of the first ``count`` rows; the memory is the same."""
        return replace(
            self,
            page_table=self.page_table[:count],
            n_pages=self.n_pages[:count],
            n_select=self.n_select[:count],
            row_thresholds=self.row_thresholds[:count],
            scores=self.scores[:count],
            selected=(self.selected[0][:count], self.selected[1][:count]),
            requests=self.requests[:count],
            visible=(self.visible[0][:count], self.visible[1][:count], self.visible[2][:count]),
            arrivals=self.arrivals[:count],
        )

    @property
    def max_select(self) -> int:
        """The width of ``SparseIndices.indices``: all pages of the longest context, for rows that are dense."""
        return self.page_table.shape[1]

    @property
    def method_stats(self) -> torch.Tensor:
        """Device counters of the method's ``more_counts``, int64."""
        return self.stats[SELECT_STATS:]

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """All that it takes memory for."""
        small = (self.n_pages, self.n_select, self.row_thresholds, self.requests, self.arrivals)
        return (self.page_table, self.scores, *self.selected, *self.visible, *small)


def attention_bytes(model: ModelShape, view: BatchView, dtype: torch.dtype, device: torch.device) -> int:
    """Return the bytes that ``sparse_decode`` allocates over the pages of a view; see ``DecodeMethod.scratch_bytes``.

    Values have at most the model's ``head_dim``.
    """
    return scratch_bytes(
        len(view.n_pages),
        num_q_heads=model.num_q_heads * view.queries,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        v_head_dim=model.head_dim,
        pages=view.usual_select,
        page_size=view.page_size,
        dtype=dtype,
        kv_dtype=model.kv_dtype,
        device=device,
    )
