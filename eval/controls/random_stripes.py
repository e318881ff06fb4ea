"""A negative control of AnchorAttention: as many keys for each group as it would find, chosen at random."""

from functools import partial
from typing import ClassVar

import torch

from sglang_sparse.methods.anchor import Anchor
from sglang_sparse_kernels.anchor_prefill import reference


def redraw(active: torch.Tensor, always: int) -> torch.Tensor:
    """Draw anew for each group, query head and layer.

    Args:
        active: ``[kv_heads, group, candidates]`` bool, what was found.
        always: how many of the last candidates, the block before the group, are active whatever their score.
    """
    found = active[..., : active.shape[2] - always]
    rank = torch.rand(found.shape, device=found.device).argsort(-1).argsort(-1)
    return torch.cat([rank < found.sum(-1, keepdim=True), active[..., found.shape[2] :]], -1)


class RandomStripes(Anchor):
    """AnchorAttention in plain torch, on a GPU too: what it finds is counted, and as much is drawn."""

    attention: ClassVar = staticmethod(partial(reference.anchor_prefill, replace=redraw))
