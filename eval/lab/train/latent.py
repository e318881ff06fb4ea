"""Block-sparse attention of single rows over a latent cache, and how far RoPE-only scores are from the full ones.

One latent serves all heads, so the blocks are chosen for all heads at once: by the attention mass of a block, the mean
over the heads, of the full scores or of their RoPE part alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eval.lab.train.sparse import Rows, choose

LATENT_SELECTORS = ("rope", "mass", "random")
# Not infinite: a difference of two masked log-probabilities must be a number.
MASKED = -1e9


def divergence(full: Tensor, proxy: Tensor) -> Tensor:
    """Mean over rows and heads of KL(full || proxy) + KL(proxy || full), as a number; scores (B, H, R, T), masked.

    The gradient reaches both: the rotary part alone cannot say all that the rest of a score says, so the full scores
    have to come towards it.
    """
    one, other = full.log_softmax(-1), proxy.log_softmax(-1)
    return ((one.exp() - other.exp()) * (one - other)).sum(-1).mean()


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


def latent_scores(q: Tensor, k: Tensor, positions: Tensor, rope: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (B, H, R, T) of the queries at positions (B, R), full and of the RoPE part alone, and what is masked.

    Args:
        q, k: (B, T, H, d), the last `rope` dimensions rotated.

    Returns:
        Both scores in float32, masked, and the mask (B, 1, R, T) of the later tokens.
    """
    t, h, d = q.shape[1:]
    picked = q.gather(1, positions[:, :, None, None].expand(-1, -1, h, d)).transpose(1, 2).float() * d**-0.5
    keys = k.transpose(1, 2).float()
    later = torch.arange(t, device=q.device) > positions[:, None, :, None]
    full = (picked @ keys.mT).masked_fill(later, MASKED)
    return full, (picked[..., -rope:] @ keys[..., -rope:].mT).masked_fill(later, MASKED), later


def latent_rows(out: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Rows, rope: int) -> Tensor:
    """`out` (B, T, H, d_v) with the rows at `rows.positions` replaced by attention to the chosen blocks.

    Appends the divergence of the RoPE-only scores, at `rows.extra` too, to `rows.divergence` if there is such a list.

    Args:
        q, k: (B, T, H, d), the last `rope` dimensions rotated; v: (B, T, H, d_v); T a multiple of the block size.

    Raises:
        ValueError: if T is no multiple of the block size, or the selector neither "dense" nor one of
            `LATENT_SELECTORS`.
    """
    t, count = q.shape[1], rows.positions.shape[1]
    if t % rows.block:
        raise ValueError(f"length must be a multiple of the block size {rows.block}: got {t}")
    positions = rows.positions
    if rows.divergence is not None and rows.extra is not None:
        positions = torch.cat([positions, rows.extra], 1)
    full, proxy, later = latent_scores(q, k, positions, rope)
    if rows.divergence is not None:
        rows.divergence.append(divergence(full, proxy))
    if rows.selector == "dense":
        return out
    full, proxy, later = (x[:, :, :count] for x in (full, proxy, later))
    seen = latent_blocks(full, proxy, rows).repeat_interleave(rows.block, -1) & ~later
    new = full.masked_fill(~seen, MASKED).softmax(-1) @ v.transpose(1, 2).float()
    index = rows.positions[:, :, None, None].expand(-1, -1, *v.shape[2:])
    return out.scatter(1, index, new.transpose(1, 2).to(out.dtype))
