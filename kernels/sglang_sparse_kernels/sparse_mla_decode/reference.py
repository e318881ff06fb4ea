"""The definition of sparse MLA decode attention in plain torch."""

from dataclasses import dataclass

import torch

from ..latent_rows.reference import read_latents
from ..sparse_decode.reference import token_slots

# Rows at a time: bounds the keys that are gathered.
_ROWS = 16


@dataclass(frozen=True)
class Inputs:
    """What ``sparse_mla_decode.sparse_mla_decode`` attends to, by its names."""

    q_nope: torch.Tensor
    q_rope: torch.Tensor
    kv_cache: torch.Tensor
    indices: torch.Tensor
    counts: torch.Tensor
    last_slots: torch.Tensor
    block_size: int
    sm_scale: float
    kv_scale: float


def sparse_mla_decode(inputs: Inputs, out: torch.Tensor) -> torch.Tensor:
    """See ``sparse_mla_decode.sparse_mla_decode``: all query heads share one key, which holds its value."""
    q_nope, q_rope, counts = inputs.q_nope, inputs.q_rope, inputs.counts
    for first in range(0, len(out), _ROWS):
        part = slice(first, first + _ROWS)
        width = int(counts[part].max())
        if width == 0:
            out[part] = 0.0
            continue
        chosen = inputs.indices[part, :, :width], counts[part], inputs.last_slots[part]
        slots, valid = token_slots(*chosen, inputs.block_size)
        # An unwritten slot may hold NaN, which a weight of zero does not remove.
        latents = _latents(inputs.kv_cache, slots[:, 0], q_nope.shape[2])  # [rows, T, R + r]
        latents[(~valid[:, 0]).nonzero(as_tuple=True)] = 0.0
        query = torch.cat([q_nope[part], q_rope[part]], dim=-1).float()
        logits = query @ latents.mT * (inputs.sm_scale * inputs.kv_scale)
        weights = logits.masked_fill_(~valid, float("-inf")).softmax(dim=-1)
        result = weights @ latents[..., : q_nope.shape[2]] * inputs.kv_scale
        # The softmax over no tokens at all is NaN.
        out[part] = result.masked_fill_((counts[part] == 0)[..., None], 0.0)
    return out


def _latents(kv_cache: torch.Tensor, slots: torch.Tensor, latent_dim: int) -> torch.Tensor:
    if kv_cache.dtype != torch.uint8:
        return kv_cache[slots].float()
    # Neighbours choose much the same, and what they choose is read once.
    named, places = slots.unique(return_inverse=True)
    return read_latents(kv_cache[named], latent_dim)[places]
