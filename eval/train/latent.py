"""Block-sparse attention of single rows over a latent cache, and how far RoPE-only scores are from the full ones.

One latent serves all heads, so the blocks are chosen for all heads at once: by the attention mass of a block, the mean
over the heads, of the full scores or of their RoPE part alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eval.train.sparse import Rows, choose

LATENT_SELECTORS = ("rope", "mass", "random")
# Not infinite: a difference of two masked log-probabilities must be a number.
MASKED = -1e9


def divergence(full: Tensor, proxy: Tensor) -> Tensor:
    """Mean over rows and heads of KL(full || proxy), no gradient through `full`; scores (B, H, R, T), masked."""
    target, guess = full.detach().log_softmax(-1), proxy.log_softmax(-1)
    return (target.exp() * (target - guess)).sum(-1).mean()


@torch.no_grad()
def latent_blocks(full: Tensor, proxy: Tensor, rows: Rows) -> Tensor:
    """Mask (B, 1, R, M) of the blocks of all heads; scores (B, H, R, T), masked, T a multiple of the block."""
    if rows.selector == "random":
        b, _, r, t = full.shape
        return choose(torch.rand(b, 1, r, t // rows.block, device=full.device), rows)
    if rows.selector not in LATENT_SELECTORS:
        raise ValueError(f"unknown selector: got {rows.selector!r}, allowed are {', '.join(LATENT_SELECTORS)}")
    mass = (proxy if rows.selector == "rope" else full).softmax(-1).mean(1, keepdim=True)
    return choose(mass.unflatten(-1, (-1, rows.block)).sum(-1), rows)


def latent_rows(out: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Rows, rope: int) -> Tensor:
    """`out` (B, T, H, d_v) with the rows at `rows.positions` replaced by attention to the chosen blocks.

    Appends the divergence of the RoPE-only scores to `rows.divergence` where there is such a list.

    Args:
        q, k: (B, T, H, d), the last `rope` dimensions rotated; v: (B, T, H, d_v); T a multiple of the block size.
    """
    t, h, d = q.shape[1:]
    if t % rows.block:
        raise ValueError(f"length must be a multiple of the block size {rows.block}: got {t}")
    index = rows.positions[:, :, None, None].expand(-1, -1, h, -1)
    picked = q.gather(1, index.expand(-1, -1, -1, d)).transpose(1, 2).float() * d**-0.5
    keys, values = (x.transpose(1, 2).float() for x in (k, v))
    later = torch.arange(t, device=q.device) > rows.positions[:, None, :, None]
    full = (picked @ keys.mT).masked_fill(later, MASKED)
    proxy = (picked[..., -rope:] @ keys[..., -rope:].mT).masked_fill(later, MASKED)
    if rows.divergence is not None:
        rows.divergence.append(divergence(full, proxy))
    if rows.selector == "dense":
        return out
    seen = latent_blocks(full, proxy, rows).repeat_interleave(rows.block, -1) & ~later
    new = full.masked_fill(~seen, MASKED).softmax(-1) @ values
    return out.scatter(1, index.expand(-1, -1, -1, v.shape[-1]), new.transpose(1, 2).to(out.dtype))
