"""The KT selection by the three operations that it consists of, which define it and run where its kernel does not."""

import torch

from ..common.scratch import LIMIT, most_bytes
from ..kt_score import kt_score
from ..page_topk import page_topk
from ..visible_blocks import visible_blocks


def kt_select(
    q: torch.Tensor,
    summary: torch.Tensor,
    tables: tuple[torch.Tensor, ...],
    topr: int,
    scale: float,
    out: tuple[torch.Tensor, torch.Tensor],
    stats: torch.Tensor | None = None,
    scratch: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``kt_select.kt_select``, whose tables these are, in its order."""
    lists, scores = (scratch[:3], scratch[3]) if scratch else (None, None)
    visible, counts, wanted = visible_blocks(*tables, out=lists, stats=stats)
    if visible.numel() == 0:
        return out[0], out[1].zero_()
    scores = kt_score(q, summary, visible, counts, topr, scale, out=scores)
    # The blocks differ from head to head, which to the selection is a row of its own.
    pairs = (visible.flatten(0, 1), counts.flatten(), wanted.flatten(), visible.shape[2])
    page_topk(scores.flatten(0, 1)[:, None], *pairs, (out[0].flatten(0, 1)[:, None], out[1].view(-1, 1)))
    return out


def scratch_bytes(batch: int, num_q_heads: int, num_kv_heads: int, width: int, given: bool) -> int:
    """See ``kt_select.scratch_bytes``, by the kernels of the operations."""
    from ..kt_score.triton import row_bytes

    lists = 0 if given else batch * num_kv_heads * (2 * width + 2) * torch.int32.itemsize
    return lists + most_bytes(batch, row_bytes(num_q_heads, width), LIMIT)
