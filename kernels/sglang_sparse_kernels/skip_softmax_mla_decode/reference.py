"""The definition of Skip-Softmax decode over latents in plain torch."""

from dataclasses import dataclass

import torch

from ..skip_softmax_decode import reference

# Part of the definition: the rows of the smallest product of tensor cores, and what a rank of many has at least.
HEAD_GROUP = 16


@dataclass(frozen=True)
class Inputs:
    """Arguments of ``skip_softmax_mla_decode.skip_softmax_mla_decode``."""

    q_nope: torch.Tensor
    q_rope: torch.Tensor
    kv_cache: torch.Tensor
    page_table: torch.Tensor
    n_pages: torch.Tensor
    last_slots: torch.Tensor
    threshold_scale_factor: torch.Tensor
    page_size: int
    sm_scale: float
    kv_scale: float


def skip_softmax_mla_decode(inputs: Inputs, out: torch.Tensor, stats: torch.Tensor | None = None) -> torch.Tensor:
    """See ``skip_softmax_mla_decode.skip_softmax_mla_decode``: each group of heads is one that shares a KV head."""
    keys = inputs.kv_cache[:, None]
    values = keys[..., : inputs.q_nope.shape[2]]
    rows = (inputs.page_table, inputs.n_pages, inputs.last_slots, inputs.threshold_scale_factor, inputs.page_size)
    scales = (inputs.sm_scale, inputs.kv_scale, inputs.kv_scale)
    queries = torch.cat([inputs.q_nope, inputs.q_rope], dim=-1).split(HEAD_GROUP, dim=1)
    for query, result in zip(queries, out.split(HEAD_GROUP, dim=1), strict=True):
        reference.skip_softmax_decode(reference.Inputs(query, keys, values, *rows, *scales), result, stats)
    return out
