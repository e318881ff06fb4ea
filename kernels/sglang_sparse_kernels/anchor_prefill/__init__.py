"""Anchor attention for the prefill of GQA and MHA models: stripes of keys close to an anchor score.

Source: AnchorAttention (arXiv:2505.23520, section 3 and algorithms 1 to 3), on a paged cache and in chunks of any size.
"""

from collections.abc import Mapping

import torch

from ..common import checks
from . import reference
from .means import GroupMeans, check_means, means_bytes
from .plan import AnchorPlan, make_plan, scratch_bound

__all__ = ["AnchorPlan", "GroupMeans", "anchor_prefill", "make_plan", "means_bytes", "scratch_bound"]


def anchor_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    plan: AnchorPlan,
    theta: torch.Tensor,
    page_size: int,
    sm_scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    stats: torch.Tensor | None = None,
    means: Mapping[int, GroupMeans] | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of a ragged extend batch in which each step group of queries picks the earlier keys it attends to.

    A query at position ``p`` of the group that starts at ``s`` attends to the keys of the first block and to those from
    ``s`` to ``p``. Of the keys between, every query of the group attends to those for which, in any of the group's
    query blocks, the mean maximum logit so far exceeds the mean query's logit by at most ``theta``; and always to the
    block of keys that ends at ``s``. Blocks and groups are aligned to absolute positions, so that chunks of whole
    groups give what one piece gives. Differences from the paper: the block before a group, without which the first
    queries of the group do not see what stands right before them, such as the beginning of a number; equality counts as
    a hit, and so does a difference that is infinite or NaN, so that a broken key shows in the output as in dense
    attention; blocks of queries and keys have one size.

    Of a group that a pass ends within, the queries pick keys by those of the group so far: its blocks up to the end of
    the pass, the last of which may be cut, with those of earlier passes as far as ``means`` hands them on. What earlier
    parts of the group have attended to stays as it is. The last part so picks what all of the group would in one piece.
    A part before it, of whose group fewer than three eighths of the blocks that it will have are known, picks keys by
    the last blocks of the group before, too, so many that they are three eighths in all: it would pick far less than
    one piece does.

    An attention sink ``s`` adds ``exp(s)`` to the denominator of each softmax of its head. It is no anchor: which keys
    a group attends to is the same without it.

    Args:
        q: ``[N, Hq, d]``, float32 (CPU only), float16 or bfloat16, the query tokens of all rows one after the other;
            ``d`` is contiguous.
        k_cache: ``[S, Hkv, d]``, the dtype of ``q`` or float8_e4m3fn, with the keys of the queries too; ``d`` is
            contiguous.
        v_cache: ``[S, Hkv, dv]``, the dtype of ``k_cache``; ``dv`` is contiguous.
        page_table: ``[B, M]`` int32, the physical page of each logical page; entries past a row's pages are not read.
        plan: the blocks and groups of the pass, see ``make_plan``.
        theta: ``[B]`` float32, contiguous, in natural logarithm units; infinity makes a row dense.
        page_size: slots per page, a power of two from 1 to 64 that divides the block size.
        sm_scale: softmax scale, usually ``d ** -0.5``.
        k_scale: factor of the stored keys (float8 caches).
        v_scale: factor of the stored values (float8 caches).
        out: optional ``[N, Hq, dv]`` in the dtype of ``q``, contiguous.
        stats: optional ``[2]`` int64 on the device of ``q``, to which the query-key pairs attended and the pairs of
            dense causal attention are added, over all query heads.
        means: by row, what passes hand on: read where the plan has carried queries, or cuts a group in a slice that
            does not have the group before; written for each of these rows that has queries in the pass.
        sinks: optional ``[Hq]``, bfloat16 or float32, contiguous, in natural units.

    Returns:
        ``[N, Hq, dv]`` in the dtype of ``q``.

    Raises:
        ValueError: a wrong dimension, dtype, device, head count, layout, page size or scale, a plan of another batch,
            or no means for a row that reads some.

    Example:
        >>> import torch
        >>> from sglang_sparse_kernels.anchor_prefill import anchor_prefill, make_plan
        >>> q, k_cache, v_cache = torch.zeros(64, 2, 64), torch.zeros(64, 1, 64), torch.ones(64, 1, 64)
        >>> pages, theta = torch.arange(4, dtype=torch.int32)[None], torch.tensor([12.0])
        >>> plan = make_plan([0], [64], block_size=16, step=2, device="cpu")
        >>> out = anchor_prefill(q, k_cache, v_cache, pages, plan, theta, page_size=16, sm_scale=0.125)
        >>> out.shape, out.unique().tolist()
        (torch.Size([64, 2, 64]), [1.0])
    """
    out = checks.check_paged_prefill(q, k_cache, v_cache, page_table, ("theta", theta), out, (stats, 2))
    checks.check_page_size(page_size)
    if plan.block_size % page_size:
        raise ValueError(f"block_size must be a multiple of page_size, got {plan.block_size} and {page_size}")
    checks.check_plan(q, page_table, plan, page_size)
    checks.check_logit_scale(sm_scale, k_scale)
    checks.check_sinks(q, sinks)
    means = means or {}
    check_means(q, plan, means)
    arguments = (q, k_cache, v_cache, page_table, plan, theta, page_size, sm_scale, k_scale, v_scale, out, stats, means)
    if checks.use_reference(q):
        return reference.anchor_prefill(*arguments, sinks=sinks)
    from . import triton

    return triton.anchor_prefill(*arguments, sinks=sinks)
