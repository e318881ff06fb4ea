"""The definition of sparse MLA decode attention in plain torch."""

import torch

from ..sparse_decode import reference


def sparse_mla_decode(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    counts: torch.Tensor,
    last_slots: torch.Tensor,
    block_size: int,
    sm_scale: float,
    kv_scale: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """See ``sparse_mla_decode.sparse_mla_decode``: all query heads are one group, whose key holds its value."""
    q = torch.cat([q_nope, q_rope], dim=-1)
    keys, values = kv_cache[:, None], kv_cache[:, None, : q_nope.shape[2]]
    return reference.sparse_decode(
        q, keys, values, indices, counts, last_slots, block_size, sm_scale, kv_scale, kv_scale, out
    )
