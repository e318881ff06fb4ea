"""A negative control of AnchorAttention: as many keys for each group as it would find, the newest that there are."""

from functools import partial
from typing import ClassVar

import torch

from sglang_sparse.methods.anchor import Anchor
from sglang_sparse_kernels.anchor_prefill import reference


def newest(active: torch.Tensor, first: int, always: int) -> torch.Tensor:
    """Those right before the ones that are always active: with the first block, sinks and a sliding window.

    Args:
        active: ``[kv_heads, group, keys]`` bool, keys before the query block that are attended to.
        first: how many of the first ones stay.
        always: how many of the last ones stay: those of the block's group, and the block before that.
    """
    front, found = active.tensor_split([first], -1)
    candidates = found.shape[2]
    count = found[..., : candidates - always].sum(-1) + always
    return torch.cat([front, torch.arange(candidates, device=active.device) >= candidates - count[..., None]], -1)


class NewestStripes(Anchor):
    """AnchorAttention in plain torch, on a GPU too: what it finds is counted, and as many of the newest are taken."""

    attention: ClassVar = staticmethod(partial(reference.anchor_prefill, replace=newest))
