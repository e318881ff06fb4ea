"""A negative control: as many pages as ReSA would attend to, chosen at random instead of by score.

Installed for a test by putting this folder on PYTHONPATH, as a third party would ship a method.
"""

import torch

from sglang_sparse.indices import SparseIndices
from sglang_sparse.method import AuxSpec, ModelShape
from sglang_sparse.methods.resa import Resa
from sglang_sparse.pools import AuxPools
from sglang_sparse.view import BatchView
from sglang_sparse_kernels.page_topk import page_topk


class RandomPages(Resa):
    def aux_specs(self, model: ModelShape) -> tuple[AuxSpec, ...]:
        return ()

    def select(self, view: BatchView, layer_id: int, query: torch.Tensor, pools: AuxPools) -> SparseIndices:
        scores = view.scores.uniform_()
        newest = torch.arange(scores.shape[2], device=scores.device) >= view.n_pages[:, None] - self.config.local_pages
        scores.masked_fill_(newest[:, None], float("inf"))
        indices, counts = page_topk(
            scores, view.page_table, view.n_pages, view.n_select, view.max_select, view.selected, view.stats
        )
        return SparseIndices(indices, counts)
