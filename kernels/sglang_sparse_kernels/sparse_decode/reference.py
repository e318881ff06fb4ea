"""The definition of sparse decode attention in plain torch."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Inputs:
    """What ``sparse_decode.sparse_decode`` attends to, by its names."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    indices: torch.Tensor
    counts: torch.Tensor
    last_slots: torch.Tensor
    page_size: int
    sm_scale: float
    k_scale: float
    v_scale: float


def sparse_decode(inputs: Inputs, out: torch.Tensor) -> torch.Tensor:
    """See ``sparse_decode.sparse_decode``."""
    q, k_cache, v_cache = inputs.q, inputs.k_cache, inputs.v_cache
    batch, num_q_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    width = int(inputs.counts.max()) if batch else 0
    if width == 0:
        return out.zero_()
    slots, valid = token_slots(inputs.indices[:, :, :width], inputs.counts, inputs.last_slots, inputs.page_size)
    heads = torch.arange(num_kv_heads, device=q.device)[:, None]
    keys = k_cache[slots, heads].float()  # [B, Hkv, T, d]
    # An unwritten slot may hold NaN, which a weight of zero does not remove.
    values = v_cache[slots, heads].float().masked_fill_(~valid[..., None], 0.0)
    query = q.float().view(batch, num_kv_heads, num_q_heads // num_kv_heads, head_dim)
    logits = query @ keys.transpose(-1, -2) * (inputs.sm_scale * inputs.k_scale)
    weights = logits.masked_fill_(~valid[:, :, None], float("-inf")).softmax(dim=-1)
    result = weights @ values * inputs.v_scale
    # The softmax over no tokens at all is NaN.
    result.masked_fill_((inputs.counts == 0)[:, :, None, None], 0.0)
    out.copy_(result.reshape(out.shape))
    return out


def token_slots(
    indices: torch.Tensor, counts: torch.Tensor, last_slots: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots ``[B, Hkv, K * page_size]`` of the selected tokens, and which of them are valid."""
    last_slots = last_slots[:, None, None, None]
    selected = torch.arange(indices.shape[2], device=indices.device) < counts[:, :, None]
    pages = indices.masked_fill(~selected, 0).long()[..., None]
    slots = pages * page_size + torch.arange(page_size, device=indices.device)
    written = (pages != last_slots // page_size) | (slots <= last_slots)
    return slots.flatten(2), (selected[..., None] & written).flatten(2)
