"""Block-sparse attention of single rows, for sparse-aware training and for judging block selectors.

Selection is per KV head, one for all query heads of its group (see ReSA: mean query, Quest's bound per block).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SELECTORS = ("quest", "quest_scores", "mass", "random")


@dataclass(frozen=True)
class Rows:
    """Which queries attend sparsely, and to how many blocks.

    Attributes:
        positions: (B, R) int64; repetitions are harmless.
        selector: "quest" (bound for the mean query), "quest_scores" (mean of the heads' bounds), "mass" (true
            attention mass) or "random".
        ratio: share of the blocks seen so far.
        least: lower limit of the number of blocks.
        divergence: a model with RoPE-only scores appends one number per layer here (see `latent`).
        extra: (B, E) int64, further queries that count for the divergence alone; they attend as they would without.
    """

    positions: Tensor
    selector: str
    ratio: float
    least: int = 16
    block: int = 16
    divergence: list[Tensor] | None = None
    extra: Tensor | None = None


def _products(q: Tensor, k: Tensor) -> Tensor:
    """q (B, Hkv, G, R, d) with k (B, Hkv, T, d) -> (B, Hkv, G, R, T), without a copy of k per query head."""
    return (q.flatten(2, 3) @ k.mT).unflatten(2, q.shape[2:4])


def _pick(q: Tensor, positions: Tensor, kv_heads: int) -> Tensor:
    """Queries (B, Hkv, G, R, d) float32 of q (B, T, Hq, d) at positions (B, R)."""
    b, _, hq, d = q.shape
    picked = q.gather(1, positions[..., None, None].expand(-1, -1, hq, d))
    return picked.view(b, -1, kv_heads, hq // kv_heads, d).permute(0, 2, 3, 1, 4).float()


def _mass(q: Tensor, k: Tensor, positions: Tensor, block: int) -> Tensor:
    """Mass (B, Hkv, R, M) of the blocks, the mean of a group's heads; q (B, Hkv, G, R, d), positions (B, R)."""
    later = torch.arange(k.shape[2], device=k.device) > positions[:, None, None, :, None]
    weight = (_products(q, k) * k.shape[3] ** -0.5).masked_fill(later, -torch.inf).softmax(-1)
    return weight.view(*weight.shape[:-1], -1, block).sum(-1).mean(2)


def block_scores(q: Tensor, k: Tensor, rows: Rows) -> Tensor:
    """Scores (B, Hkv, R, M) of the blocks; q (B, Hkv, G, R, d), k (B, Hkv, T, d), T a multiple of the block."""
    b, h, t, d = k.shape
    pages = k.view(b, h, t // rows.block, rows.block, d)
    if rows.selector == "random":
        return torch.rand(b, h, q.shape[3], pages.shape[2], device=k.device)
    if rows.selector == "mass":
        return _mass(q, k, rows.positions, rows.block)
    if rows.selector not in SELECTORS:
        raise ValueError(f"unknown selector: got {rows.selector!r}, allowed are {', '.join(SELECTORS)}")
    if rows.selector == "quest":
        q = q.mean(2, keepdim=True)
    return (_products(q.clamp(min=0), pages.amax(3)) + _products(q.clamp(max=0), pages.amin(3))).mean(2)


@torch.no_grad()
def select(q: Tensor, k: Tensor, rows: Rows) -> Tensor:
    """Mask (B, Hkv, R, M) of the chosen blocks; q (B, Hkv, G, R, d), k (B, Hkv, T, d)."""
    return choose(block_scores(q, k, rows), rows)


def choose(scores: Tensor, rows: Rows) -> Tensor:
    """Mask of the chosen blocks: those of the best scores (B, H, R, M), the row's own block always among them."""
    own = (rows.positions // rows.block)[:, None, :, None]
    block = torch.arange(scores.shape[-1], device=scores.device)
    scores = scores.masked_fill(block > own, -torch.inf).masked_fill(block == own, torch.inf)
    count = torch.ceil((own + 1) * rows.ratio).clamp(min=rows.least)
    most = min(scores.shape[-1], max(rows.least, int(scores.shape[-1] * rows.ratio) + 1))
    best = scores.topk(most, -1).indices
    ranked = (torch.arange(most, device=scores.device) < count).expand(best.shape)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, ranked) & (block <= own)


def sparse_rows(out: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    """`out` (B, T, Hq, d) with the rows at `rows.positions` replaced by attention to the chosen blocks.

    Args:
        q: (B, T, Hq, d); k, v: (B, T, Hkv, d), T a multiple of the block size.
    """
    b, t, hq, d = q.shape
    hkv = k.shape[2]
    if t % rows.block:
        raise ValueError(f"length must be a multiple of the block size {rows.block}: got {t}")
    index = rows.positions[:, :, None, None].expand(-1, -1, hq, d)
    picked = _pick(q, rows.positions, hkv)
    keys, values = k.transpose(1, 2).float(), v.transpose(1, 2).float()
    chosen = select(picked, keys, rows).repeat_interleave(rows.block, -1)
    seen = chosen & (torch.arange(t, device=q.device) <= rows.positions[:, None, :, None])
    weights = (_products(picked, keys) * d**-0.5).masked_fill(~seen[:, :, None], -torch.inf).softmax(-1)
    new = (weights.flatten(2, 3) @ values).unflatten(2, weights.shape[2:4])
    new = new.permute(0, 3, 1, 2, 4).reshape(b, -1, hq, d)
    return out.scatter(1, index, new.to(out.dtype))
