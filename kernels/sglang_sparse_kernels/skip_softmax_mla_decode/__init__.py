"""Skip-Softmax for the decode of MLA models: attention over latents that leaves out blocks of small weights.

Source: BLASST (arXiv:2512.12087) and the Skip Softmax Attention of TensorRT-LLM and FlashInfer, in the absorbed form of
MLA (all query heads share one key, of which the latent part is the value as well), split over a row's blocks as in
Flash-Decoding.
"""

import torch

from ..common import checks
from ..skip_softmax_decode import BLOCK_KEYS, LOCAL_BLOCKS, check_rows
from ..sparse_mla_decode import LATENT_DIMS, ROPE_DIMS, check_latents
from . import reference
from .reference import HEAD_GROUP

__all__ = [
    "BLOCK_KEYS",
    "HEAD_GROUP",
    "LATENT_DIMS",
    "LOCAL_BLOCKS",
    "ROPE_DIMS",
    "scratch_bytes",
    "skip_softmax_mla_decode",
]


def skip_softmax_mla_decode(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    n_pages: torch.Tensor,
    last_slots: torch.Tensor,
    threshold_scale_factor: torch.Tensor,
    page_size: int,
    sm_scale: float,
    kv_scale: float = 1.0,
    out: torch.Tensor | None = None,
    stats: torch.Tensor | None = None,
    usual_pages: int | None = None,
) -> torch.Tensor:
    """Attention of each row's newest token to latents that skips blocks of keys whose softmax weights would be small.

    The logit of a token is ``sm_scale * kv_scale * (q_nope . latent + q_rope . rotated key)``; the output is the mean
    of ``kv_scale * latent`` under the softmax. Blocks are skipped as in ``skip_softmax_decode``, with groups of
    ``HEAD_GROUP`` consecutive query heads, of which the last may be smaller, instead of those of a KV head: blocks
    of ``BLOCK_KEYS`` positions, the first and the ``LOCAL_BLOCKS`` newest always attended to and compared with, another
    one skipped when for every head of the group its largest logit is below theirs by more than ``-ln(lambda)``, where
    ``lambda`` is ``min(1, threshold_scale_factor / length)``. So are rows without a threshold, broken numbers, and
    what is compared with instead of a running maximum.

    What is saved is less than with KV heads: the exponentials and the product with the values. The values are the
    latents, which the scores have read already. A kernel of a larger tile of heads saves them where all of its groups
    skip; elsewhere the weights of those that do are 0, and an infinite latent may show in their output.

    Difference from the source: TensorRT-LLM and FlashInfer decide for each tile of rows that their kernels happen to
    have (64 or 128 heads of MLA's decode). Here the group is part of the definition, so that what is skipped depends
    neither on the GPU nor, where a rank has whole groups, on tensor parallelism.

    Nothing waits for the device, and sizes depend on shapes alone: calls may be captured in a CUDA graph. What the
    kernels allocate is in ``scratch_bytes``.

    Args:
        q_nope: ``[B, H, R]``, float32 (CPU only), float16 or bfloat16, the query absorbed into the latent space; ``R``
            is 64, 128, 256 or 512, and contiguous.
        q_rope: ``[B, H, r]`` in the dtype of ``q_nope``, the query's part after RoPE; ``r`` is 16, 32 or 64, and
            contiguous. Both queries may be slices of one ``[B, H, R + r]`` tensor.
        kv_cache: ``[S, R + r]``, the dtype of ``q_nope`` or float8_e4m3fn: latent, then rotated key, contiguous.
        page_table: ``[B, M]`` int32, the physical page of each logical page; entries past a row's pages are not read.
        n_pages: ``[B]`` int32, contiguous: pages of each row, at most ``M``. A row with 0 is padding and gives zeros.
        last_slots: ``[B]`` int64, contiguous: the slot of each row's newest token, in its last page.
        threshold_scale_factor: ``[B]`` float32, contiguous; rows with 0, a negative number or NaN attend densely.
        page_size: slots per page, a power of two from 1 to 64.
        sm_scale: softmax scale, the model's own.
        kv_scale: factor of what the cache holds (float8 caches).
        out: optional ``[B, H, R]`` in the dtype of ``q_nope``, contiguous.
        stats: optional ``[2]`` int64 on the device of ``q_nope``, contiguous, to which are added, over the groups of
            heads of all rows that do not attend densely: the blocks visited, and those of them that were skipped.
        usual_pages: the pages that most rows hold at most, for which the work is split; ``M`` if not given. Any number
            is served, whatever this says.

    Returns:
        ``[B, H, R]`` in the dtype of ``q_nope``.

    Raises:
        ValueError: a wrong dimension, dtype, device, shape, layout, page size or scale.

    Example:
        >>> import torch
        >>> from sglang_sparse_kernels.skip_softmax_mla_decode import skip_softmax_mla_decode
        >>> q_nope, q_rope, kv_cache = torch.ones(1, 2, 64), torch.zeros(1, 2, 16), torch.zeros(320, 80)
        >>> kv_cache[0] = 1.0
        >>> pages, n_pages = torch.arange(20, dtype=torch.int32)[None], torch.tensor([20], dtype=torch.int32)
        >>> stats, factor = torch.zeros(2, dtype=torch.int64), torch.tensor([8.0])
        >>> newest = torch.tensor([319])
        >>> out = skip_softmax_mla_decode(
        ...     q_nope, q_rope, kv_cache, pages, n_pages, newest, factor, page_size=16, sm_scale=0.125, stats=stats
        ... )
        >>> stats.tolist()
        [5, 2]
    """
    rows = (page_table, n_pages, last_slots, threshold_scale_factor)
    inputs = reference.Inputs(q_nope, q_rope, kv_cache, *rows, page_size, sm_scale, kv_scale)
    _check_arguments(inputs, stats)
    out = checks.result("out", out, tuple(q_nope.shape), q_nope.dtype, q_nope.device)
    checks.check_page_size(page_size)
    checks.check_logit_scale(sm_scale, kv_scale)
    if checks.use_reference(q_nope):
        return reference.skip_softmax_mla_decode(inputs, out, stats)
    from . import triton

    return triton.skip_softmax_mla_decode(inputs, out, stats, usual_pages=usual_pages)


def scratch_bytes(
    batch: int,
    num_heads: int,
    latent_dim: int,
    pages: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Bytes that the kernels of one call allocate beside the output: what the splits of a row hand on.

    Not monotonic: small batches are split, large ones are not and need nothing. The reference allocates more.

    Args:
        batch: rows, at least one.
        num_heads: query heads.
        latent_dim: dimension of the latents.
        pages: the call's ``usual_pages``.
        page_size: slots per page.
        dtype: of the queries.
        device: where the call runs.
    """
    from ..common.flash_decode import split_bytes
    from . import triton

    config, _, splits = triton.plan(batch, num_heads, pages, page_size, device)
    return split_bytes(batch * num_heads, splits, latent_dim, dtype, config.narrow)


def _check_arguments(inputs: reference.Inputs, stats: torch.Tensor | None) -> None:
    q_nope, page_table, factor = inputs.q_nope, inputs.page_table, inputs.threshold_scale_factor
    checks.check_query("q_nope", q_nope, 3)
    checks.check_tensor("kv_cache", inputs.kv_cache, 2, (q_nope.dtype, torch.float8_e4m3fn))
    check_latents(q_nope, inputs.q_rope, inputs.kv_cache)
    checks.check_tensor("page_table", page_table, 2, (torch.int32,))
    checks.check_last(page_table=page_table)
    check_rows(q_nope, page_table, inputs.n_pages, inputs.last_slots)
    by_row = {"page_table": page_table, "threshold_scale_factor": factor}
    checks.check_device(q_nope.device, **by_row, stats=stats)
    checks.check_exactly("threshold_scale_factor", factor, (q_nope.shape[0],), torch.float32)
    if stats is not None:
        checks.check_exactly("stats", stats, (2,), torch.int64)
