"""The definition of sparse MLA decode attention in plain torch."""

from dataclasses import dataclass

import torch

from ..common.row_by_row import row_by_row
from ..latent_rows.reference import read_latents
from ..sparse_decode.reference import token_slots

# Rows at a time, and how many times the tokens of one they may name together: rows of different requests share none.
_ROWS, _SHARED = 16, 2


@dataclass(frozen=True)
class Inputs:
    """Arguments of ``sparse_mla_decode.sparse_mla_decode``."""

    q_nope: torch.Tensor
    q_rope: torch.Tensor
    kv_cache: torch.Tensor
    indices: torch.Tensor
    counts: torch.Tensor
    last_slots: torch.Tensor
    block_size: int
    sm_scale: float
    kv_scale: float


@row_by_row("q_nope", "q_rope", "indices", "counts", "last_slots")
def sparse_mla_decode(inputs: Inputs, out: torch.Tensor) -> torch.Tensor:
    """See ``sparse_mla_decode.sparse_mla_decode``: all query heads share one key, which holds its value."""
    for first in range(0, len(out), _ROWS):
        _attend(inputs, out, slice(first, min(first + _ROWS, len(out))))
    return out


def _attend(inputs: Inputs, out: torch.Tensor, part: slice) -> None:
    counts, latent_dim = inputs.counts[part], inputs.q_nope.shape[2]
    width = int(counts.max())
    if width == 0:
        out[part] = 0.0
        return
    chosen = inputs.indices[part, :, :width], counts, inputs.last_slots[part]
    slots, valid = (found[:, 0] for found in token_slots(*chosen, inputs.block_size))
    # Neighbours in a prompt choose much the same, which is read and multiplied once. An unwritten slot may hold NaN,
    # which a weight of zero does not remove.
    named, places = slots[valid].unique(return_inverse=True)
    if len(named) > _SHARED * slots.shape[1] and len(counts) > 1:
        for row in range(part.start, part.stop):
            _attend(inputs, out, slice(row, row + 1))
        return
    seen = torch.zeros(len(counts), len(named), dtype=torch.bool, device=slots.device)
    seen[valid.nonzero(as_tuple=True)[0], places] = True
    stored = inputs.kv_cache[named]
    latents = read_latents(stored, latent_dim) if stored.dtype == torch.uint8 else stored.float()  # [named, R + r]
    query = torch.cat([inputs.q_nope[part], inputs.q_rope[part]], dim=-1).float()
    logits = query @ latents.T * (inputs.sm_scale * inputs.kv_scale)
    weights = logits.masked_fill_(~seen[:, None], float("-inf")).softmax(dim=-1)
    result = weights @ latents[:, :latent_dim] * inputs.kv_scale
    # The softmax over no tokens at all is NaN.
    out[part] = result.masked_fill_((counts == 0)[..., None], 0.0)
