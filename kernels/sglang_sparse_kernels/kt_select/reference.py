"""The definition of the KT selection in plain torch: what is visible, its scores, and the choice."""

import math
from collections.abc import Callable

import torch

from ..common import checks
from ..page_score.reference import UNBOUNDED
from ..page_topk import page_topk


def visible_blocks(
    kept: torch.Tensor,
    n_kept: torch.Tensor,
    first_visible: torch.Tensor,
    requests: torch.Tensor,
    block_table: torch.Tensor,
    n_blocks: torch.Tensor,
    n_select: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    stats: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """List the kept blocks of each row's request and then all its blocks from ``first_visible`` on.

    A row with ``n_select[b] >= n_blocks[b]`` is dense: all its blocks are listed and wanted, and what was kept is not
    read. The request of a dense or padded row is not used and may be any number.

    Numbers that contradict one another are an error of the caller, and lead to a wrong list but to no access out of
    bounds: ``n_blocks`` counts as 0 to ``M``, ``first_visible`` as 0 to ``n_blocks``, ``n_kept`` as 0 to
    ``first_visible`` and at most ``K``, and a kept block as the row's nearest. The request of any other row is not
    checked.

    The tables and counters are those of ``kt_select.kt_select``; ``out`` is ``blocks`` ``[B, Hkv, M]``, and ``counts``
    and ``wanted`` ``[B, Hkv]``, contiguous int32.

    Returns:
        ``out``: physical blocks in ascending logical order, of which the first ``counts`` are meant, and the smaller of
        ``n_select`` and ``counts``. Both are the same for all heads of a row. What lies beyond the counts is -1 here
        and left unwritten by the kernel.
    """
    blocks, counts, wanted = out
    _, heads, width = blocks.shape
    held, select = n_blocks.clamp(0, width), n_select.clamp(min=0)
    first, ahead = torch.zeros_like(held), torch.zeros_like(held)  # from here on all; kept before it
    sparse = select < held
    slots = requests[sparse]
    first[sparse] = first_visible[slots].clamp(min=0).minimum(held[sparse])
    ahead[sparse] = n_kept[slots].clamp(0, kept.shape[2]).minimum(first[sparse])
    count = ahead + held - first
    counts.copy_(count[:, None].expand_as(counts))
    wanted.copy_(select[:, None].minimum(counts))
    position = torch.arange(width, device=blocks.device)
    logical = (position + (first - ahead)[:, None]).clamp(max=width - 1)[:, None].repeat(1, heads, 1)  # [B, Hkv, M]
    row, entry = (position < ahead[:, None]).nonzero(as_tuple=True)
    logical[row, :, entry] = kept[requests[row], :, entry].clamp(min=0).minimum(held[row, None] - 1).long()
    physical = block_table[:, None].expand_as(logical).gather(2, logical)
    blocks.copy_(physical.masked_fill((position >= count[:, None])[:, None], -1))
    if stats is not None:
        active = wanted[:, :1] > 0
        stats[:3] += heads * torch.stack([active.sum(), wanted[:, :1].sum(), (held[:, None] * active).sum()])
    return out


def kt_score(
    q: torch.Tensor,
    summary: torch.Tensor,
    candidates: torch.Tensor,
    n_candidates: torch.Tensor,
    topr: int,
    sm_scale: float,
    out: torch.Tensor,
    local_pages: int = 1,
) -> torch.Tensor:
    """Score the candidate blocks of each row and KV head.

    A group of query heads chooses its dimensions together: the ``topr`` with the largest ``sum_g |q[g, j]|``, ties to
    the lower dimension. Of a chosen dimension the block counts with its maximum where ``sum_g q[g, j] > 0``, else with
    its minimum; call that ``bound[j]``. A head's logit of the block is then ``sum_j q[g, j] * bound[j]``, times
    ``sm_scale`` and ``sqrt(|q[g]|_1 / |chosen q[g]|_1)`` (SparQ's temperature; 1 where all dimensions are chosen). With
    one head to a group this is an upper bound of the block's logits on these dimensions. With more it is one for their
    sum, not for each head: the sign is the group's, as in the source. Each head's softmax runs over the candidates, and
    the score is the natural logarithm of the mean over the heads. Scores order as the source's means do, and do not
    vanish where a mean would be 0 in float32.

    The newest ``local_pages`` candidates score +inf, and still take part in the softmax. A block whose logit is
    infinite or NaN in any head, as after NaN in a bound that counts, is left out of the softmax and scores the largest
    finite float32: it is selected before every other block but never instead of a local one. A NaN in ``q`` makes that
    of all blocks.

    A row's scores are a function of the row alone: the same bits in any batch and at any width on one kind of GPU.

    Args:
        q: ``[B, Hq, d]``.
        summary: ``[num_blocks, Hkv, 2, d]``.
        candidates: ``[B, Hkv, M]`` int32, contiguous: blocks of ``summary`` by row and KV head, oldest first. Only the
            first ``n_candidates[b, h]`` count.
        n_candidates: ``[B, Hkv]`` int32, contiguous, at most ``M``.
        topr: dimensions that count, 1 to ``d``.
        sm_scale: scale of the products of query and stored key.
        out: ``[B, Hkv, M]`` float32, contiguous.
        local_pages: newest candidates that always score +inf.

    Returns:
        ``out``. Entries at or beyond ``n_candidates`` are -inf here and left unwritten by the kernels.
    """
    out.fill_(float("-inf"))
    width = int(n_candidates.max()) if n_candidates.numel() else 0
    if width == 0:
        return out
    heads = summary.shape[1]
    query = q.float().unflatten(1, (heads, -1))  # [B, Hkv, G, d]
    order = query.abs().sum(dim=2, keepdim=True).argsort(dim=-1, descending=True, stable=True)
    chosen = torch.zeros_like(order, dtype=torch.bool).scatter(-1, order[..., :topr], True)
    total, kept = query.abs().sum(dim=-1), query.abs().masked_fill(~chosen, 0.0).sum(dim=-1)
    temperature = torch.where(kept > 0, (total / kept).sqrt(), 1.0)
    logical = torch.arange(width, device=q.device)
    held = logical < n_candidates[..., None]  # [B, Hkv, width]
    # Entries beyond a row's candidates may hold anything; page 0 always exists.
    pages = candidates[..., :width].masked_fill(~held, 0).long()
    bounds = summary[pages, torch.arange(heads, device=q.device)[:, None]].float()  # [B, Hkv, width, 2, d]
    positive = query.sum(dim=2, keepdim=True) > 0
    bound = torch.where(positive, bounds[..., 0, :], bounds[..., 1, :]).masked_fill(~chosen, 0.0)
    logits = torch.einsum("bhgd,bhmd->bhgm", query.masked_fill(~chosen, 0.0), bound)
    logits *= temperature[..., None] * sm_scale
    broken = ~logits.isfinite().all(dim=2)
    shares = logits.masked_fill((broken | ~held)[:, :, None], float("-inf")).log_softmax(dim=-1)
    score = shares.logsumexp(dim=2) - math.log(query.shape[2])
    local = logical >= n_candidates[..., None] - local_pages
    score = score.masked_fill(broken, UNBOUNDED).masked_fill(local, float("inf"))
    out[..., :width] = score.masked_fill(~held, float("-inf"))
    return out


def kt_select(
    q: torch.Tensor,
    summary: torch.Tensor,
    tables: tuple[torch.Tensor, ...],
    topr: int,
    scale: float,
    out: tuple[torch.Tensor, torch.Tensor],
    stats: torch.Tensor | None = None,
    scratch: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    parts: tuple[Callable[..., object], Callable[..., object]] = (visible_blocks, kt_score),
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``kt_select.kt_select``, whose tables these are, in its order; ``parts`` list and score the blocks."""
    shape, given = tuple(out[0].shape), scratch or (None,) * 4
    sizes = (shape, shape[:2], shape[:2], shape)
    kinds = (torch.int32, torch.int32, torch.int32, torch.float32)
    names = ("blocks", "counts", "wanted", "scores")
    visible, counts, wanted, scores = (
        checks.result(*one, q.device) for one in zip(names, given, sizes, kinds, strict=True)
    )
    parts[0](*tables, (visible, counts, wanted), stats)
    if visible.numel() == 0:
        return out[0], out[1].zero_()
    parts[1](q, summary, visible, counts, topr, scale, scores)
    # The blocks differ from head to head, which to the selection is a row of its own.
    pairs = (visible.flatten(0, 1), counts.flatten(), wanted.flatten(), shape[2])
    page_topk(scores.flatten(0, 1)[:, None], *pairs, (out[0].flatten(0, 1)[:, None], out[1].view(-1, 1)))
    return out
