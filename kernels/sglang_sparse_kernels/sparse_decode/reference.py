"""The definition of sparse decode attention in plain torch."""

from dataclasses import dataclass

import torch

from ..common.row_by_row import row_by_row


@dataclass(frozen=True)
class Inputs:
    """Arguments of ``sparse_decode.sparse_decode``."""

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
    queries: int = 1
    sinks: torch.Tensor | None = None
    soft_cap: float | None = None


@row_by_row("q", "indices", "counts", "last_slots")
def sparse_decode(inputs: Inputs, out: torch.Tensor) -> torch.Tensor:
    """See ``sparse_decode.sparse_decode``."""
    q, k_cache, v_cache = inputs.q, inputs.k_cache, inputs.v_cache
    batch, num_q_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    width = int(inputs.counts.max()) if batch else 0
    if width == 0:
        return out.zero_()
    slots, valid = token_slots(inputs.indices[:, :, :width], inputs.counts, inputs.last_slots, inputs.page_size)
    # An unwritten slot may hold NaN, which a weight of zero does not remove; that of a row's newest token is written.
    newest = torch.where(inputs.counts > 0, inputs.last_slots[:, None], 0)
    slots = torch.where(valid, slots, newest[:, :, None])
    keys, values = _gather(k_cache, slots), _gather(v_cache, slots)
    query = q.float().view(batch, num_kv_heads, num_q_heads // num_kv_heads, head_dim)
    logits = cap_logits(query @ keys.transpose(-1, -2) * (inputs.sm_scale * inputs.k_scale), inputs.soft_cap)
    seen = _causal(inputs, valid).repeat_interleave(num_q_heads // num_kv_heads // inputs.queries, dim=2)
    weights = softmax(logits.masked_fill_(~seen, float("-inf")), inputs.sinks)
    result = weights @ values * inputs.v_scale
    # The softmax over no tokens at all is NaN.
    result.masked_fill_((inputs.counts == 0)[:, :, None, None], 0.0)
    out.copy_(result.reshape(out.shape))
    return out


def cap_logits(logits: torch.Tensor, soft_cap: float | None) -> torch.Tensor:
    """Return ``soft_cap * tanh(logits / soft_cap)``, or the logits themselves where the cap is None."""
    return logits if soft_cap is None else (logits / soft_cap).tanh_().mul_(soft_cap)


def softmax(logits: torch.Tensor, sinks: torch.Tensor | None, inner: int = 1) -> torch.Tensor:
    """Return the softmax over the last dimension, of one more column where there are sinks, which is left out again.

    Args:
        logits: ``[..., Hkv, G, T]`` in natural units, or ``[..., Hkv, G, n, T]``.
        sinks: ``[Hkv * G]``, or None.
        inner: dimensions behind those of the heads, 1 or 2.
    """
    if sinks is None:
        return logits.softmax(-1)
    heads = logits.shape[-inner - 2 : -inner]
    column = sinks.float().view(*heads, *(1,) * inner).expand(*logits.shape[:-1], 1)
    return torch.cat([logits, column], -1).softmax(-1)[..., :-1]


def _gather(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return what a cache holds for each KV head in its slots ``[B, Hkv, T]``, float32 ``[B, Hkv, T, d]``."""
    heads = torch.arange(cache.shape[1], device=cache.device)[:, None]
    if cache.is_contiguous() and cache.dtype.itemsize > 1:
        # Several times as fast as two indices; it knows no float8.
        found = cache.flatten(0, 1).index_select(0, (slots * cache.shape[1] + heads).flatten())
        return found.view(*slots.shape, -1).float()
    return cache[slots, heads].float()


def _causal(inputs: Inputs, valid: torch.Tensor) -> torch.Tensor:
    """Return the selected tokens that each query token of a row sees, ``[B, Hkv, queries, K * page_size]``.

    Args:
        inputs: the call's.
        valid: ``[B, Hkv, K * page_size]``, the tokens that are written.
    """
    if inputs.queries == 1:
        return valid[:, :, None]
    page, newest = inputs.page_size, inputs.last_slots[:, None, None] % inputs.page_size
    # Every list ends with the newest pages, so that a token's place in it says how many are newer.
    newer = (inputs.counts[:, :, None] - 1) * page + newest - torch.arange(valid.shape[2], device=valid.device)
    unseen = torch.arange(inputs.queries - 1, -1, -1, device=valid.device)
    return valid[:, :, None] & (newer[:, :, None] >= unseen[:, None])


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
