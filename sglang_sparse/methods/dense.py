"""Decode of a server that has a prefill method alone: the dense backend attends to every page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_sparse.methods.base import AuxSpec, DecodeMethod, ModelShape

if TYPE_CHECKING:
    import torch

    from sglang_sparse.methods.aux_buffers import AuxBuffers
    from sglang_sparse.methods.base import SparseIndices
    from sglang_sparse.methods.views import BatchView


class Dense(DecodeMethod):
    """No row is ever sparse, so nothing is kept beside the KV pool."""

    def aux_specs(self, model: ModelShape) -> tuple[AuxSpec, ...]:
        """Nothing."""
        return ()

    def n_select(self, n_pages: torch.Tensor) -> torch.Tensor:
        """All pages."""
        return n_pages.clone()

    def select(self, view: BatchView, layer_id: int, query: torch.Tensor, pools: AuxBuffers) -> SparseIndices:
        """Never called: ``plan_decode`` finds no sparse row.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("a server without a decode method selected pages")
