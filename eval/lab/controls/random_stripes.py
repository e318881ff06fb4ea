"""A negative control of AnchorAttention: as many keys for each query block as it would find, chosen at random."""

from functools import partial
from typing import ClassVar

import torch

from sglang_sparse.methods.anchor import Anchor
from sglang_sparse_kernels.anchor_prefill import reference


def redraw(active: torch.Tensor, first: int, always: int) -> torch.Tensor:
    """Draw anew for each query block, query head and layer.

    Args:
        active: ``[kv_heads, group, keys]`` bool, keys before the query block that are attended to.
        first: how many of the first ones stay.
        always: how many of the last ones stay: those of the block's group, and the block before that.
    """
    front, found, last = active.tensor_split([first, active.shape[2] - always], -1)
    order = torch.rand(found.shape, device=found.device).argsort(-1)
    drawn = torch.arange(found.shape[-1], device=found.device) < found.sum(-1, keepdim=True)
    return torch.cat([front, torch.empty_like(found).scatter_(-1, order, drawn), last], -1)


class RandomStripes(Anchor):
    """AnchorAttention in plain torch, on a GPU too: what it finds is counted, and as much is drawn."""

    attention: ClassVar = staticmethod(partial(reference.anchor_prefill, replace=redraw))
