"""Skip-Softmax for the decode of GQA and MHA models: attention that leaves out blocks of small weights.

Source: BLASST (arXiv:2512.12087) and the Skip Softmax Attention of TensorRT-LLM, on a paged cache, split over a row's
blocks as in Flash-Decoding.
"""

import torch

from ..common import checks
from . import reference
from .reference import BLOCK_KEYS, LOCAL_BLOCKS

__all__ = ["BLOCK_KEYS", "LOCAL_BLOCKS", "scratch_bytes", "skip_softmax_decode"]


def skip_softmax_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    n_pages: torch.Tensor,
    last_slots: torch.Tensor,
    threshold_scale_factor: torch.Tensor,
    page_size: int,
    sm_scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    stats: torch.Tensor | None = None,
    usual_pages: int | None = None,
    arrivals: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Attention of each row's newest token that skips blocks of keys whose softmax weights would be small.

    A row's keys are cut into blocks of ``BLOCK_KEYS`` positions, from position 0 on. The first block (attention sinks)
    and the ``LOCAL_BLOCKS`` newest, of which the last may be partly filled, are always attended to, and their largest
    logit is what a query head compares with. Any other block is skipped, without its exponentials, its product with the
    values and their loads, when for every query head of its KV head the largest logit of the block is below that one by
    more than ``-ln(lambda)``; equality does not skip. ``lambda`` is ``min(1, threshold_scale_factor / length)``, with
    the row's length in tokens. So a skipped key weighs less than ``lambda`` times the row's heaviest one.

    A query head whose first or newest blocks hold a logit that is +infinite or NaN, or -infinite ones alone, skips
    nothing, and neither do the others of its KV head. Elsewhere such a block is not skipped. So a broken key shows in
    the output as in dense attention; a broken value shows where its block is not skipped. Where a query head's logits
    are all -infinite its output is 0.

    Difference from the source: what a block is compared with is the largest logit of the first and the newest blocks,
    not of all blocks visited before. Many programs share a row, and what it skips is to be a function of its queries
    and keys alone, not of the order of visits, the number of programs, or the rest of the batch. Against a running
    maximum that starts from the same blocks as many blocks are skipped or fewer, never others. ``lambda`` is at most 1,
    or the heaviest keys of other blocks could be skipped. The source leaves block and order to its kernels.

    An attention sink ``s`` adds ``exp(s)`` to the denominator of each softmax of its head. What is skipped is the same
    without it.

    Nothing waits for the device, and sizes depend on shapes alone: calls may be captured in a CUDA graph. What the
    kernels allocate is in ``scratch_bytes``.

    Args:
        q: ``[B, Hq, d]``, float32 (CPU only), float16 or bfloat16; ``d`` is contiguous.
        k_cache: ``[S, Hkv, d]``, the dtype of ``q`` or float8_e4m3fn; ``d`` is contiguous.
        v_cache: ``[S, Hkv, dv]``, the dtype of ``k_cache``; ``dv`` is contiguous.
        page_table: ``[B, M]`` int32, the physical page of each logical page; entries past a row's pages are not read.
        n_pages: ``[B]`` int32, contiguous: pages of each row, at most ``M``. A row with 0 is padding and gives zeros.
        last_slots: ``[B]`` int64, contiguous: the slot of each row's newest token, in its last page.
        threshold_scale_factor: ``[B]`` float32, contiguous; rows with 0, a negative number or NaN attend densely.
        page_size: slots per page, a power of two from 1 to 64.
        sm_scale: softmax scale, usually ``d ** -0.5``.
        k_scale: factor of the stored keys (float8 caches).
        v_scale: factor of the stored values (float8 caches).
        out: optional ``[B, Hq, dv]`` in the dtype of ``q``, contiguous.
        stats: optional ``[2]`` int64 on the device of ``q``, contiguous, to which are added, over the KV heads of all
            rows that do not attend densely: the blocks visited, and those of them that were skipped.
        usual_pages: the pages that most rows hold at most, for which the work is split; ``M`` if not given. Any number
            is served, whatever this says.
        arrivals: optional ``[B, Hkv]`` int32, contiguous, all 0 and left so: by it the parts of a row that run beside
            each other may be combined without another launch. Calls that may run at the same time need their own.
        sinks: optional ``[Hq]``, bfloat16 or float32, contiguous, in natural units; the kernel in CUDA C++ knows none.
        soft_cap: optional, in natural units; the logits become ``soft_cap * tanh(logits / soft_cap)``. Blocks are
            compared by these. The kernel in CUDA C++ knows none.

    Returns:
        ``[B, Hq, dv]`` in the dtype of ``q``.

    Raises:
        ValueError: a wrong dimension, dtype, device, head count, layout, page size or scale.

    Example:
        >>> import torch
        >>> from sglang_sparse_kernels.skip_softmax_decode import skip_softmax_decode
        >>> q, k_cache, v_cache = torch.ones(1, 2, 64), torch.zeros(320, 1, 64), torch.ones(320, 1, 64)
        >>> k_cache[0] = 1.0
        >>> pages, n_pages = torch.arange(20, dtype=torch.int32)[None], torch.tensor([20], dtype=torch.int32)
        >>> stats, factor = torch.zeros(2, dtype=torch.int64), torch.tensor([8.0])
        >>> newest = torch.tensor([319])
        >>> out = skip_softmax_decode(
        ...     q, k_cache, v_cache, pages, n_pages, newest, factor, page_size=16, sm_scale=0.125, stats=stats
        ... )
        >>> stats.tolist()
        [5, 2]
    """
    by_row = "threshold_scale_factor", threshold_scale_factor
    out = checks.check_paged_prefill(q, k_cache, v_cache, page_table, by_row, out, (stats, 2))
    check_rows(q, page_table, n_pages, last_slots)
    if arrivals is not None:
        checks.check_exactly("arrivals", arrivals, (q.shape[0], k_cache.shape[1]), torch.int32)
        checks.check_device(q.device, arrivals=arrivals)
    checks.check_page_size(page_size)
    checks.check_logit_scale(sm_scale, k_scale)
    checks.check_sinks(q, sinks)
    checks.check_soft_cap(soft_cap)
    rows = (page_table, n_pages, last_slots, threshold_scale_factor)
    inputs = reference.Inputs(q, k_cache, v_cache, *rows, page_size, sm_scale, k_scale, v_scale, sinks, soft_cap)
    if checks.use_reference(q):
        return reference.skip_softmax_decode(inputs, out, stats)
    from . import cuda, triton

    if sinks is None and soft_cap is None and cuda.faster(q.device) and cuda.takes(q, k_cache, v_cache, out):
        return cuda.skip_softmax_decode(inputs, out, stats, usual_pages=usual_pages, arrivals=arrivals)
    return triton.skip_softmax_decode(inputs, out, stats, usual_pages=usual_pages)


def scratch_bytes(
    batch: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    pages: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Bytes that the kernels of one call allocate beside the output, at most: what the splits of a row hand on.

    Not monotonic: small batches are split, large ones are not and need nothing. The reference allocates more.

    Args:
        batch: rows, at least one.
        num_q_heads: query heads.
        num_kv_heads: KV heads.
        head_dim: dimension of queries and keys.
        v_head_dim: dimension of values.
        pages: the call's ``usual_pages``.
        page_size: slots per page.
        dtype: of the queries.
        device: where the call runs.
    """
    from ..common.flash_decode import split_bytes
    from . import cuda, triton

    config, splits = triton.plan(batch, num_q_heads, num_kv_heads, head_dim, v_head_dim, pages, page_size, device)
    most = split_bytes(batch * num_q_heads, splits, v_head_dim, dtype, config.narrow)
    heads = num_q_heads, num_kv_heads
    if cuda.faster(device) and cuda.takes_sizes(heads, head_dim, v_head_dim, dtype, device):
        most = max(most, cuda.scratch_bytes(batch, heads, head_dim, pages, page_size, device))
    return most


def check_rows(
    q: torch.Tensor,
    page_table: torch.Tensor,
    n_pages: torch.Tensor,
    last_slots: torch.Tensor,
) -> None:
    """Raise ValueError unless a page table, pages and newest slots are those of the rows of ``q``, ``[B, …]``."""
    batch = q.shape[0]
    checks.check_shape("page_table", page_table, (batch, page_table.shape[1]))
    checks.check_exactly("n_pages", n_pages, (batch,), torch.int32)
    checks.check_exactly("last_slots", last_slots, (batch,), torch.int64)
    checks.check_device(q.device, n_pages=n_pages, last_slots=last_slots)
