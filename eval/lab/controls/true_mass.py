"""A positive control: the pages that hold the most attention mass, as many as ReSA would attend to.

It computes what a selector is meant to estimate, so it reads every key at every step and keeps a second copy of them:
the selection is as good as one a KV head can be, and nothing is won by it.
"""

from collections.abc import Sequence

import torch
from random_pages import best_pages

from sglang_sparse.methods.aux_buffers import AuxBuffers
from sglang_sparse.methods.base import AuxSpec, ModelShape, SparseIndices
from sglang_sparse.methods.resa import Resa
from sglang_sparse.methods.views import BatchView

KEYS = "keys"


class TrueMass(Resa):
    """ReSA with the true mass, averaged over the query heads of a group, for a score."""

    def aux_specs(self, model: ModelShape) -> tuple[AuxSpec, ...]:
        """A copy of each page's keys ``[page_size, kv_heads, head_dim]``, NaN where none was written yet."""
        shape = (self.config.page_size, model.num_kv_heads, model.head_dim)
        return (AuxSpec(KEYS, shape, model.kv_dtype, copy_keys, before_select=True),)

    def select(self, view: BatchView, layer_id: int, query: torch.Tensor, pools: AuxBuffers) -> SparseIndices:
        """One selection a KV head."""
        keys = pools.buffer(KEYS, layer_id)
        mass = page_mass(query, keys, view.page_table, view.n_pages)
        return best_pages(view, view.scores.copy_(mass), self.config.local_pages)


def copy_keys(
    k_caches: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    last_slots: torch.Tensor,
    page_size: int,
    overflow: torch.Tensor,
) -> None:
    """Copy the pages of ``last_slots``; see `sglang_sparse.methods.base.AuxSpec`."""
    # Page 0 is SGLang's padding: what a slot of -1 writes there is nobody's.
    last = last_slots.clamp(min=0).long()
    pages = last // page_size
    slots = pages[:, None] * page_size + torch.arange(page_size, device=last.device)
    missing = (slots > last[:, None])[:, :, None, None]
    for k_cache, buffer in zip(k_caches, buffers, strict=True):
        buffer[pages] = k_cache[slots].masked_fill(missing, float("nan")).to(buffer.dtype)


def page_mass(query: torch.Tensor, keys: torch.Tensor, page_table: torch.Tensor, n_pages: torch.Tensor) -> torch.Tensor:
    """Attention mass of each page, as a mean over the query heads of a group.

    Args:
        query: ``[rows, q_heads, head_dim]``, after RoPE; the scale is ``head_dim ** -0.5``.
        keys: ``[pages, page_size, kv_heads, head_dim]``, NaN where there is no key.
        page_table: ``[rows, max_pages]`` int32.
        n_pages: ``[rows]`` int32.

    Returns:
        ``[rows, kv_heads, max_pages]`` float32, 0 beyond a row's pages.
    """
    rows, q_heads, dim = query.shape
    kv_heads = keys.shape[2]
    grouped = query.view(rows, kv_heads, q_heads // kv_heads, dim).float()
    held = keys[page_table.long()].float()
    logits = torch.einsum("rhgd,rpshd->rhgps", grouped, held) * dim**-0.5
    beyond = torch.arange(page_table.shape[1], device=query.device) >= n_pages[:, None]
    logits = logits.masked_fill(beyond[:, None, None, :, None] | logits.isnan(), float("-inf"))
    mass = logits.flatten(3).softmax(-1).view(logits.shape).sum(-1)
    # A row that pads a CUDA graph holds no page.
    return mass.mean(2).nan_to_num(0.0)
