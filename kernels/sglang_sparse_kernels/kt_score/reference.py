"""The definition of the KT score in plain torch."""

import math

import torch

from ..page_score.reference import UNBOUNDED


def kt_score(
    q: torch.Tensor,
    summary: torch.Tensor,
    candidates: torch.Tensor,
    n_candidates: torch.Tensor,
    topr: int,
    sm_scale: float,
    k_scale: float,
    out: torch.Tensor,
    local_pages: int = 1,
) -> torch.Tensor:
    """See ``kt_score.kt_score``; entries at or beyond ``n_candidates`` are -inf."""
    out.fill_(float("-inf"))
    width = int(n_candidates.max()) if n_candidates.numel() else 0
    if width == 0:
        return out
    heads = summary.shape[1]
    query = q.float().unflatten(1, (heads, -1))  # [B, Hkv, G, d]
    order = query.abs().sum(dim=2, keepdim=True).argsort(dim=-1, descending=True, stable=True)
    chosen = torch.zeros_like(order, dtype=torch.bool).scatter(-1, order[..., :topr], True)
    total, kept = query.abs().sum(dim=-1), query.abs().masked_fill(~chosen, 0.0).sum(dim=-1)
    temperature = torch.where(kept > 0, (total / kept).sqrt(), 1.0)
    logical = torch.arange(width, device=q.device)
    held = logical < n_candidates[..., None]  # [B, Hkv, width]
    # Entries beyond a row's candidates may hold anything; page 0 always exists.
    pages = candidates[..., :width].masked_fill(~held, 0).long()
    bounds = summary[pages, torch.arange(heads, device=q.device)[:, None]].float()  # [B, Hkv, width, 2, d]
    positive = query.sum(dim=2, keepdim=True) > 0
    bound = torch.where(positive, bounds[..., 0, :], bounds[..., 1, :]).masked_fill(~chosen, 0.0)
    logits = torch.einsum("bhgd,bhmd->bhgm", query.masked_fill(~chosen, 0.0), bound)
    logits *= temperature[..., None] * (sm_scale * k_scale)
    broken = ~logits.isfinite().all(dim=2)
    shares = logits.masked_fill((broken | ~held)[:, :, None], float("-inf")).log_softmax(dim=-1)
    score = shares.logsumexp(dim=2) - math.log(query.shape[2])
    local = logical >= n_candidates[..., None] - local_pages
    score = score.masked_fill(broken, UNBOUNDED).masked_fill(local, float("inf"))
    out[..., :width] = score.masked_fill(~held, float("-inf"))
    return out
