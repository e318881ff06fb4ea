"""A negative control of AnchorAttention: as many keys for each query block as it attends to before it, at random."""

from functools import partial
from typing import ClassVar

import torch
from random_stripes import redraw

from sglang_sparse.methods.anchor import Anchor
from sglang_sparse_kernels.anchor_prefill import reference


def redraw_all(active: torch.Tensor, *_: int) -> torch.Tensor:
    """See ``redraw``; none stay, neither of the first block nor of the window."""
    return redraw(active, 0, 0)


class RandomKeys(Anchor):
    """AnchorAttention in plain torch, on a GPU too, of which the own block and the number of keys are left."""

    attention: ClassVar = staticmethod(partial(reference.anchor_prefill, replace=redraw_all))
