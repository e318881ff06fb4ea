"""The definition of the page selection in plain torch."""

import torch


def page_topk(
    scores: torch.Tensor,
    page_table: torch.Tensor,
    n_pages: torch.Tensor,
    n_select: torch.Tensor,
    max_select: int,
    out: tuple[torch.Tensor, torch.Tensor],
    stats: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``page_topk.page_topk``."""
    indices, counts = out
    batch, num_kv_heads, _ = scores.shape
    indices.fill_(-1)
    wanted = torch.minimum(n_select, n_pages).clamp(min=0, max=max_select)  # [B]
    counts.copy_(wanted[:, None].expand_as(counts))
    width = int(n_pages.max()) if batch else 0
    selected = _selected(scores[:, :, :width], n_pages, wanted)
    row, head, logical = selected.nonzero(as_tuple=True)
    position = selected.cumsum(dim=-1)[row, head, logical] - 1
    indices[row, head, position] = page_table[row, logical]
    if stats is not None:
        active = wanted > 0
        stats[:3] += num_kv_heads * torch.stack([active.sum(), wanted.sum(), (n_pages * active).sum()])
    return out


def _selected(scores: torch.Tensor, n_pages: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Boolean mask ``[B, Hkv, width]`` of the ``wanted[b]`` highest of the first ``n_pages[b]`` scores."""
    logical = torch.arange(scores.shape[-1], device=scores.device)
    held = (logical < n_pages[:, None])[:, None]
    # Adding zero turns -0.0 into 0.0. Dense rows do not depend on their scores, which may be uninitialised.
    keys = (scores + 0.0).masked_fill(scores.isnan(), float("inf"))
    order = keys.masked_fill(~held, float("-inf")).argsort(dim=-1, descending=True, stable=True)
    # A held page may score -inf as well, and then still precedes, by the stable sort, every page not held.
    chosen = (logical < wanted[:, None])[:, None].expand_as(order)
    return torch.zeros_like(chosen).scatter(-1, order, chosen)
