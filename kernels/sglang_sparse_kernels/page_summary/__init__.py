"""Page summaries: the element-wise maximum and minimum of each page's keys, kept beside the KV cache.

Source: the block representation of ReSA (arXiv:2506.04108, section 3.1), which is that of Quest (arXiv:2406.10774).
RocketKV (arXiv:2502.14051) has the same in its KT cache, which TensorRT-LLM keeps in float8_e5m2 and rounds to nearest.
"""

from collections.abc import Sequence

import torch

from ..common import checks
from . import reference


def update_page_summaries(
    k_caches: Sequence[torch.Tensor],
    summaries: Sequence[torch.Tensor],
    last_slots: torch.Tensor,
    page_size: int,
    overflow: torch.Tensor | None = None,
) -> None:
    """Recompute the summaries of the pages that were just written, in place and in all layers at once.

    For every ``last_slots[n] >= 0`` the page ``p = last_slots[n] // page_size`` gets the maximum (index 0) and minimum
    (index 1) over the slots ``p * page_size .. last_slots[n]``, both ends included. Nothing is patched: a summary is
    a pure function of the page's written keys. Entries of -1 are skipped. Of the pages only 0, to which a server writes
    what pads a batch, may occur more than once.

    One launch serves all layers: a decode step touches one page a row, which is next to no work in each of them.

    A summary dtype coarser than the KV dtype keeps the bound: maxima are rounded up and minima down. In float8 a value
    outside +-448 (``float8_e4m3fn``) or +-57,344 (``float8_e5m2``, whose infinities are never stored) is stored as NaN.
    ``page_score`` and ``kt_select`` read that as "always select", the latter where the bound counts.

    Args:
        k_caches: for each layer ``[S, Hkv, d]``, float32, float16, bfloat16 or float8_e4m3fn (stored values,
            unscaled); finite. ``d`` is contiguous, the other strides are free; all layers have the same.
        summaries: for each layer ``[num_pages, Hkv, 2, d]``, contiguous; the KV dtype, bfloat16, float8_e4m3fn, or
            float8_e5m2, which ``kt_select`` reads and ``page_score`` refuses. Overwritten in the touched pages.
        last_slots: ``[N]`` int64, contiguous: the last written slot of a touched page, or -1.
        page_size: slots per page, a power of two from 1 to 64.
        overflow: optional ``[1]`` int32 counter, incremented by the number of values stored as NaN.

    Raises:
        ValueError: a wrong dimension, dtype, device or page size, or layers that differ or do not begin at multiples of
            16 elements from one another.

    Example:
        >>> import torch
        >>> from sglang_sparse_kernels.page_summary import update_page_summaries
        >>> k_cache = torch.arange(8.0).view(8, 1, 1).expand(8, 1, 64).contiguous()
        >>> summary = torch.zeros(2, 1, 2, 64)
        >>> update_page_summaries([k_cache], [summary], torch.tensor([6, -1]), page_size=4)
        >>> summary[1, 0, :, 0].tolist()
        [6.0, 4.0]
    """
    dtypes = (*(cache.dtype for cache in k_caches[:1]), torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
    check_layers(k_caches, summaries, last_slots, page_size, overflow)
    summary = summaries[0]
    checks.check_tensor("summary", summary, 4, dtypes)
    checks.check_shape("summary", summary, (summary.shape[0], k_caches[0].shape[1], 2, k_caches[0].shape[2]))
    if checks.use_reference(k_caches[0]):
        for k_cache, summary in zip(k_caches, summaries, strict=True):
            reference.update_page_summary(k_cache, summary, last_slots, page_size, overflow)
        return
    from . import triton

    triton.update_page_summaries(k_caches, summaries, last_slots, page_size, overflow)


def update_page_summary(
    k_cache: torch.Tensor,
    summary: torch.Tensor,
    last_slots: torch.Tensor,
    page_size: int,
    overflow: torch.Tensor | None = None,
) -> None:
    """``update_page_summaries`` of one layer."""
    update_page_summaries((k_cache,), (summary,), last_slots, page_size, overflow)


def check_layers(
    k_caches: Sequence[torch.Tensor],
    summaries: Sequence[torch.Tensor],
    last_slots: torch.Tensor,
    page_size: int,
    overflow: torch.Tensor | None,
) -> None:
    """Raise ValueError unless these are the K caches of layers that are alike, and as many summaries that are.

    Args:
        k_caches: see ``update_page_summaries``, and so for what is not said here.
        summaries: contiguous, of whatever shape and dtype.
        last_slots: likewise.
        page_size: likewise.
        overflow: likewise.
    """
    if len(k_caches) != len(summaries) or not k_caches:
        raise ValueError(f"k_caches and summaries must be as many, got {len(k_caches)} and {len(summaries)}")
    k_cache, summary = k_caches[0], summaries[0]
    checks.check_tensor("k_cache", k_cache, 3, checks.KV_DTYPES)
    checks.check_tensor("last_slots", last_slots, 1, (torch.int64,))
    checks.check_page_size(page_size)
    checks.check_last(k_cache=k_cache)
    checks.check_device(k_cache.device, summary=summary, last_slots=last_slots, overflow=overflow)
    checks.check_contiguous("summary", summary)
    checks.check_contiguous("last_slots", last_slots)
    if overflow is not None:
        checks.check_exactly("overflow", overflow, (1,), torch.int32)
    for name, tensors in (("k_caches", k_caches), ("summaries", summaries)):
        if len({(tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors}) > 1:
            raise ValueError(f"{name} must have the same dtype, shape and strides in all layers")
        for tensor in tensors:
            checks.check_device(k_cache.device, **{name: tensor})
