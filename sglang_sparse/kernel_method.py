"""The contract of a decode method whose kernel decides while it attends."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from sglang_sparse.methods.base import AuxSpec, DecodeMethod, ModelShape

if TYPE_CHECKING:
    import torch

    from sglang_sparse.indices import SparseIndices
    from sglang_sparse.methods.views import BatchView, LatentQuery
    from sglang_sparse.pools import AuxPools


class KernelMethod(DecodeMethod):
    """A decode method that chooses nothing beforehand: its kernel looks at every key.

    TensorRT-LLM calls it kernel-level sparse attention: prediction is bypassed, config and dispatch are shared. So
    there are no indices; a row runs with its ``row_value``, and one of 0 attends densely. That is what makes a row
    dense here, as its pages tell nothing: those whose config says 0, and those that are dense in a sparse batch
    (asked for, or short), whose value is set to 0. All pages count as attended to.
    """

    decides_on_device = True
    view_buffers = ("page_table",)

    def aux_specs(self, model: ModelShape) -> tuple[AuxSpec, ...]:
        """Nothing: the keys themselves are looked at."""
        return ()

    def n_select(self, n_pages: torch.Tensor) -> torch.Tensor:
        """All pages."""
        return n_pages.clone()

    def select(self, view: BatchView, layer_id: int, query: Any, pools: AuxPools) -> SparseIndices:
        """Never called: ``attend`` takes its place, and that of the attention kernel.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("a kernel-level method selects nothing")

    @abstractmethod
    def attend(
        self,
        view: BatchView,
        layer_id: int,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        last_slots: torch.Tensor,
        scaling: float,
        k_scale: float,
        v_scale: float,
    ) -> torch.Tensor:
        """Attend in one layer, of which K and V of the newest tokens are written.

        Runs inside CUDA graphs: no host synchronisation, no shape that depends on data.

        Args:
            view: the batch; ``values`` has the value of each row, 0 for those that attend densely, and what lies in
                ``stats`` behind its own four counts is for ``more_counts``.
            layer_id: the layer.
            query: ``[rows, q_heads, head_dim]``, after RoPE.
            k_cache: ``[slots, kv_heads, head_dim]``.
            v_cache: ``[slots, kv_heads, v_head_dim]``.
            last_slots: ``[rows]`` int64, the slot of each row's newest token.
            scaling: softmax scale.
            k_scale: factor of the stored keys.
            v_scale: factor of the stored values.

        Returns:
            ``[rows, q_heads, v_head_dim]``; zeros for rows that pad a graph.
        """

    def attend_latents(self, view: BatchView, layer_id: int, query: LatentQuery) -> torch.Tensor:
        """Attend in one layer of an MLA model; of methods with `latents`.

        Runs inside CUDA graphs, see `attend`.

        Args:
            view: the batch.
            layer_id: the layer.
            query: both parts of the query, and the layer's latents, of which the newest tokens' are written.

        Returns:
            ``[rows, q_heads, latent_dim]``; zeros for rows that pad a graph.

        Raises:
            NotImplementedError: the method has no `latents`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not attend to latents")
