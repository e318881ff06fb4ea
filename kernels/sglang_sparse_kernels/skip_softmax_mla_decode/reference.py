"""The definition of Skip-Softmax decode over latents in plain torch."""

import torch

from ..skip_softmax_decode import reference

# Part of the definition: the rows of the smallest product of tensor cores, and what a rank of many has at least.
HEAD_GROUP = 16


def skip_softmax_mla_decode(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    n_pages: torch.Tensor,
    last_slots: torch.Tensor,
    threshold_scale_factor: torch.Tensor,
    page_size: int,
    sm_scale: float,
    kv_scale: float,
    out: torch.Tensor,
    stats: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``skip_softmax_mla_decode.skip_softmax_mla_decode``: each group of heads is one that shares a KV head."""
    queries = torch.cat([q_nope, q_rope], dim=-1)
    keys = kv_cache[:, None]
    values = keys[..., : q_nope.shape[2]]
    rows = (page_table, n_pages, last_slots, threshold_scale_factor, page_size, sm_scale, kv_scale, kv_scale)
    for query, result in zip(queries.split(HEAD_GROUP, dim=1), out.split(HEAD_GROUP, dim=1), strict=True):
        reference.skip_softmax_decode(query, keys, values, *rows, out=result, stats=stats)
    return out
