"""The loss of the paper's score itself: ReSA's bound by its definition, in plain torch and from the keys themselves.

No summary is kept and no kernel scores; all else is as on any sparse server. So where a server with this selection
loses as much as one with ReSA by ``{"summary": "minmax", "group": "mean_query"}``, and one with `true_mass` loses
nothing, the loss is the score's at this budget.
"""

import torch
from random_pages import best_pages
from true_mass import KEYS, TrueMass

from sglang_sparse.methods.aux_buffers import AuxBuffers
from sglang_sparse.methods.base import SparseIndices
from sglang_sparse.methods.views import BatchView


class Definition(TrueMass):
    """ReSA with a bound that is worked out anew at every step."""

    def select(self, view: BatchView, layer_id: int, query: torch.Tensor, pools: AuxBuffers) -> SparseIndices:
        """One selection a KV head."""
        bound = page_bound(query, pools.buffer(KEYS, layer_id), view.page_table)
        return best_pages(view, view.scores.copy_(bound), self.config.local_pages)


def page_bound(query: torch.Tensor, keys: torch.Tensor, page_table: torch.Tensor) -> torch.Tensor:
    """The largest product with the mean query of a group that keys within each page's bounds can have.

    Source: Quest (arXiv:2406.10774, section 3.3), with the group query of ReSA (arXiv:2506.04108, section 3.1).

    Args:
        query: ``[rows, q_heads, head_dim]``, after RoPE.
        keys: ``[pages, page_size, kv_heads, head_dim]``, NaN where there is no key.
        page_table: ``[rows, max_pages]`` int32.

    Returns:
        ``[rows, kv_heads, max_pages]`` float32; anything beyond a row's pages.
    """
    rows, q_heads, dim = query.shape
    mean = query.float().view(rows, -1, q_heads // keys.shape[2], dim).mean(2)
    held = keys[page_table.long()].float()
    highest = held.nan_to_num(float("-inf")).amax(2)
    lowest = held.nan_to_num(float("inf")).amin(2)
    products = torch.maximum(mean[:, None] * highest, mean[:, None] * lowest)
    return products.sum(-1).transpose(1, 2)
