"""A negative control: as many pages as ReSA would attend to, chosen at random instead of by score."""

import torch

from sglang_sparse.methods.aux_buffers import AuxBuffers
from sglang_sparse.methods.base import AuxSpec, ModelShape, SparseIndices
from sglang_sparse.methods.resa import Resa
from sglang_sparse.methods.views import BatchView
from sglang_sparse_kernels.page_topk import page_topk


class RandomPages(Resa):
    """ReSA with random scores; the newest pages are kept as ReSA keeps them."""

    def aux_specs(self, model: ModelShape) -> tuple[AuxSpec, ...]:
        """No summaries."""
        return ()

    def select(self, view: BatchView, layer_id: int, query: torch.Tensor, pools: AuxBuffers) -> SparseIndices:
        """Draw anew for each row, KV head, layer and step."""
        return best_pages(view, view.scores.uniform_(), self.config.local_pages)


def best_pages(view: BatchView, scores: torch.Tensor, local_pages: int) -> SparseIndices:
    """The pages with the largest scores ``[rows, kv_heads, max_pages]``, the newest ``local_pages`` among them."""
    newest = torch.arange(scores.shape[2], device=scores.device) >= view.n_pages[:, None] - local_pages
    scores.masked_fill_(newest[:, None], float("inf"))
    indices, counts = page_topk(
        scores, view.page_table, view.n_pages, view.n_select, view.max_select, view.selected, view.stats
    )
    return SparseIndices(indices, counts)
