"""What the parts of a step group that chunks cut hand on to the later ones."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .plan import AnchorPlan, GroupPart, QueryBlock


@dataclass(frozen=True)
class GroupMeans:
    """Means of the query blocks of one row's group so far, for one layer; the first block that has a query comes first.

    Written by a pass that ends within the group and read by the next one, whose plan says of how many queries they are
    (``make_plan``'s ``carried``).

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


def carried_means(part: GroupPart, first: QueryBlock) -> int:
    """How many means are carried to a part whose first block is ``first``, which may have one of them itself."""
    return part.num_means - part.num_blocks + (first.earlier > 0)


def is_cut(plan: AnchorPlan, part: GroupPart, last: QueryBlock) -> bool:
    """Whether a part whose last block is ``last`` ends within its group, which has keys to look for."""
    return part.candidates > 0 and (last.first_position + last.num_queries) % (plan.block_size * plan.step) > 0


def check_means(q: torch.Tensor, plan: AnchorPlan, means: Mapping[int, GroupMeans]) -> None:
    """Raise ValueError unless each row that reads means has some, and all are of the shape and dtype of ``q``."""
    for piece in plan.slices:
        for part in piece.parts:
            if carried_means(part, piece.blocks[part.first_block]) and part.row not in means:
                raise ValueError(f"row {part.row} has carried queries in the plan, and no means")
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
