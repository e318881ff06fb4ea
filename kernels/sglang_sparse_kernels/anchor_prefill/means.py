"""Means that a prompt's pieces pass on to later pieces, which select keys for the queries of both."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .plan import AnchorPlan, Slice


@dataclass(frozen=True)
class GroupMeans:
    """Means of one row's last query blocks, for one layer, at the end of both tensors: as many as looked for its keys.

    What stands before these is not valid. Written where a pass, or a slice of one, ends with queries of the row, and
    read by the next, whose plan says how many queries they may be of (``make_plan``'s ``carried``).

    Attributes:
        queries: ``[step, Hq, d]`` in the dtype of the query, mean queries.
        anchors: ``[step, Hq]`` float32, mean anchors, products of query and key before any scale.
    """

    queries: torch.Tensor
    anchors: torch.Tensor

    @classmethod
    def allocate(
        cls, step: int, num_q_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> "GroupMeans":
        """Means of groups of ``step`` blocks that hold nothing yet."""
        return cls(
            torch.empty(step, num_q_heads, head_dim, dtype=dtype, device=device),
            torch.empty(step, num_q_heads, dtype=torch.float32, device=device),
        )


def means_bytes(step: int, num_q_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of a ``GroupMeans``."""
    return step * num_q_heads * (head_dim * dtype.itemsize + torch.float32.itemsize)


def carried_means(piece: Slice, number: int) -> int:
    """Return the number of means carried to a slice's ``number``-th part, whose first block may have one of them."""
    part = piece.parts[number]
    if number and piece.parts[number - 1].row == part.row:
        return 0
    return earlier_means(piece, number)


def earlier_means(piece: Slice, number: int) -> int:
    """Return the number of means of a part from earlier parts, in any slice; see ``carried_means``."""
    part = piece.parts[number]
    return part.num_means - part.num_blocks + (piece.blocks[part.first_block].earlier > 0)


def hands_on(piece: Slice, number: int) -> bool:
    """Whether the ``number``-th part of a slice is its row's last."""
    return number + 1 == len(piece.parts) or piece.parts[number + 1].row != piece.parts[number].row


def check_means(q: torch.Tensor, plan: AnchorPlan, means: Mapping[int, GroupMeans]) -> None:
    """Raise ValueError unless each row that reads means has some, and all are of the shape and dtype of ``q``."""
    for piece in plan.slices:
        for number, part in enumerate(piece.parts):
            if carried_means(piece, number) and part.row not in means:
                raise ValueError(f"row {part.row} has means of earlier queries in the plan, and none are given")
    heads, dim = q.shape[1:]
    for row, held in means.items():
        for name, tensor, shape, dtype in (
            ("queries", held.queries, (plan.step, heads, dim), q.dtype),
            ("anchors", held.anchors, (plan.step, heads), torch.float32),
        ):
            if (tensor.shape, tensor.dtype, tensor.device) != (shape, dtype, q.device):
                raise ValueError(
                    f"the {name} of the means of row {row} must be {shape} {dtype} on {q.device}, got "
                    f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
                )
