"""Negative controls of AnchorAttention: as many keys for each query block as it would find, others than it finds.

They are in plain torch, on a GPU too: what AnchorAttention finds is counted, and another rule takes as many keys.
"""

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


def redraw_all(active: torch.Tensor, *_: int) -> torch.Tensor:
    """See `redraw`; none stay, neither of the first block nor of the window."""
    return redraw(active, 0, 0)


def newest(active: torch.Tensor, first: int, always: int) -> torch.Tensor:
    """Take those before the ones that are always active: with the first block, sinks and a sliding window."""
    front, found = active.tensor_split([first], -1)
    candidates = found.shape[2]
    count = found[..., : candidates - always].sum(-1) + always
    return torch.cat([front, torch.arange(candidates, device=active.device) >= candidates - count[..., None]], -1)


class RandomStripes(Anchor):
    """As many at random; the first block, the own group and the block before it stay."""

    attention: ClassVar = staticmethod(partial(reference.anchor_prefill, replace=redraw))


class RandomKeys(Anchor):
    """As many at random, of which the own block and the number of keys are left."""

    attention: ClassVar = staticmethod(partial(reference.anchor_prefill, replace=redraw_all))


class NewestStripes(Anchor):
    """As many of the newest that there are."""

    attention: ClassVar = staticmethod(partial(reference.anchor_prefill, replace=newest))
