"""What a method's selection looks like to a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SparseIndices:
    """The pages (or tokens) each KV head of each decode row attends to.

    Attributes:
        indices: ``[rows, kv_heads, width]`` int32, physical ids in the KV pool in ascending order of position; a
            static shape, so that the buffer can live in a CUDA graph. What lies beyond the counts is not read.
        counts: ``[rows, kv_heads]`` int32, how many entries of each list are meant.
        unit: what an id names: a block of the method's, a page of the pool in most, of which what lies behind the row's
            newest token is not attended to; or a token slot, of which all are.
    """

    indices: torch.Tensor
    counts: torch.Tensor
    unit: Literal["page", "token"] = "page"
