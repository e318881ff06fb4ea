"""A negative control of AnchorAttention: as many keys for each group as it would find, the newest that there are."""

from functools import partial
from typing import ClassVar

import torch

from sglang_sparse.methods.anchor import Anchor
from sglang_sparse_kernels.anchor_prefill import reference


def newest(active: torch.Tensor, always: int) -> torch.Tensor:
    """Those right before the ones that are always active: with the first block, sinks and a sliding window.

    Args:
        active: ``[kv_heads, group, candidates]`` bool, what was found.
        always: how many of the last candidates, the block before the group, are active whatever their score.
    """
    candidates = active.shape[2]
    count = active[..., : candidates - always].sum(-1) + always
    return torch.arange(candidates, device=active.device) >= candidates - count[..., None]


class NewestStripes(Anchor):
    """AnchorAttention in plain torch, on a GPU too: what it finds is counted, and as many of the newest are taken."""

    attention: ClassVar = staticmethod(partial(reference.anchor_prefill, replace=newest))
