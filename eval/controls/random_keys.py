"""A negative control of AnchorAttention: `random_stripes` that draws the keys of the first block too."""

from functools import partial
from typing import ClassVar

import torch
from random_stripes import redraw

from sglang_sparse.methods.anchor import Anchor
from sglang_sparse_kernels.anchor_prefill import reference


def redraw_all(active: torch.Tensor, first: int, always: int) -> torch.Tensor:
    """See ``redraw``; no key has a better chance for being one of the ``first``."""
    return redraw(active, 0, always)


class RandomKeys(Anchor):
    """AnchorAttention in plain torch, on a GPU too: what it attends to before a group is drawn."""

    attention: ClassVar = staticmethod(partial(reference.anchor_prefill, replace=redraw_all))
