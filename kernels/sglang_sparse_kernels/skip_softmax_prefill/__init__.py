"""Skip-Softmax for the prefill of GQA and MHA models: flash attention that leaves out blocks of small weights.

Source: BLASST (arXiv:2512.12087) and the Skip Softmax Attention of TensorRT-LLM, on a paged cache and in chunks.
"""

import torch

from ..common import checks
from . import reference
from .plan import BLOCK_KEYS, TILE_QUERIES, SkipSoftmaxPlan, Span, make_plan

__all__ = ["BLOCK_KEYS", "TILE_QUERIES", "SkipSoftmaxPlan", "Span", "make_plan", "skip_softmax_prefill"]


def skip_softmax_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    plan: SkipSoftmaxPlan,
    threshold_scale_factor: torch.Tensor,
    page_size: int,
    sm_scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    stats: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Causal attention of a ragged extend batch that skips blocks of keys whose softmax weights would be small.

    Each tile of queries of one head visits its blocks of keys one after the other. A block is skipped, without its
    exponentials, its product with the values and their loads, when in every query of the tile the largest logit of the
    block is below the largest logit of the blocks visited before by more than ``-ln(lambda)``; equality does not skip.
    ``lambda`` is ``min(1, threshold_scale_factor / context)``. Tiles and blocks are aligned to absolute positions. The
    order is fixed: the first block (attention sinks), then from the tile's own positions back to the second block.
    The first block is never skipped, so that no row is empty. A key that makes a logit +infinite or NaN is never
    skipped, nor is any block after it for its tile, so that it shows in the output as in dense attention; a broken
    value shows where its block is not skipped.

    An attention sink ``s`` adds ``exp(s)`` to the denominator of each softmax of its head. What is skipped is the same
    without it.

    Differences from the source: ``context`` is the position behind the tile, not the length of the sequence. What a
    tile skips is then the same in prompts of any length and in any chunks of whole tiles, and KV may be shared. In a
    chunk that cuts a tile, each part decides for itself, with the ``context`` of the whole. ``lambda`` is at most 1,
    or blocks would be skipped that hold a row's maximum. The source leaves tile, block and order to its kernels.

    Args:
        q: ``[N, Hq, d]``, float32 (CPU only), float16 or bfloat16, the query tokens of all spans one after the other;
            ``d`` is contiguous.
        k_cache: ``[S, Hkv, d]``, the dtype of ``q`` or float8_e4m3fn, with the keys of the queries too; ``d`` is
            contiguous.
        v_cache: ``[S, Hkv, dv]``, the dtype of ``k_cache``; ``dv`` is contiguous.
        page_table: ``[B, M]`` int32, the physical page of each logical page; entries past a row's pages are not read.
        plan: the tiles of the pass, see ``make_plan``.
        threshold_scale_factor: ``[B]`` float32, contiguous; rows with 0, a negative number or NaN attend densely.
        page_size: slots per page, a power of two from 1 to 64.
        sm_scale: softmax scale, usually ``d ** -0.5``.
        k_scale: factor of the stored keys (float8 caches).
        v_scale: factor of the stored values (float8 caches).
        out: optional ``[N, Hq, dv]`` in the dtype of ``q``, contiguous.
        stats: optional ``[4]`` int64 on the device of ``q``, contiguous, to which are added, over all query heads: the
            query-key pairs attended, the pairs of dense causal attention, and of sparse tiles the blocks skipped and
            those visited.
        sinks: optional ``[Hq]``, bfloat16 or float32, contiguous, in natural units; the kernel for Hopper knows none.
        soft_cap: optional, in natural units; the logits become ``soft_cap * tanh(logits / soft_cap)``. Blocks are
            compared by these. The kernel for Hopper knows none.

    Returns:
        ``[N, Hq, dv]`` in the dtype of ``q``.

    Raises:
        ValueError: a wrong dimension, dtype, device, head count, layout, page size or scale, or a plan of another
            batch.

    Example:
        >>> import torch
        >>> from sglang_sparse_kernels.skip_softmax_prefill import Span, make_plan, skip_softmax_prefill
        >>> q, k_cache, v_cache = torch.zeros(64, 2, 64), torch.zeros(64, 1, 64), torch.ones(64, 1, 64)
        >>> pages, factor = torch.arange(4, dtype=torch.int32)[None], torch.tensor([8.0])
        >>> plan = make_plan([Span(row=0, start=0, end=64)], num_rows=1, device="cpu")
        >>> stats = torch.zeros(4, dtype=torch.int64)
        >>> skip_softmax_prefill(q, k_cache, v_cache, pages, plan, factor, 16, sm_scale=0.125, stats=stats).shape
        torch.Size([64, 2, 64])
        >>> stats.tolist()
        [4160, 4160, 0, 2]
    """
    by_row = "threshold_scale_factor", threshold_scale_factor
    out = checks.check_paged_prefill(q, k_cache, v_cache, page_table, by_row, out, (stats, 4))
    checks.check_page_size(page_size)
    checks.check_plan(q, page_table, plan, page_size)
    checks.check_logit_scale(sm_scale, k_scale)
    checks.check_sinks(q, sinks)
    checks.check_soft_cap(soft_cap)
    scales = (sm_scale, k_scale, v_scale, sinks, soft_cap)
    inputs = reference.Inputs(q, k_cache, v_cache, page_table, plan, threshold_scale_factor, page_size, *scales)
    if checks.use_reference(q):
        return reference.skip_softmax_prefill(inputs, out, stats)
    from . import launch, triton

    plain = sinks is None and soft_cap is None
    kernels = launch.kernels(q, k_cache, v_cache, plan, page_size) if plain else triton
    return kernels.skip_softmax_prefill(inputs, out, stats)
