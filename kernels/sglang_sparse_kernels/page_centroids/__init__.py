"""Page centroids: a few means of each page's keys, each of keys that lie together, kept beside the KV cache.

A few means describe a page better than its bounds (``page_summary``), which say what *could* be there, and than one
mean, which hides an outlier. Not from a paper; the seeds are those of Gonzalez' farthest-first traversal (1985).
"""

from collections.abc import Sequence

import torch

from .. import dispatch
from ..page_summary import check_arguments
from . import reference

MAX_CENTROIDS = 8


def update_page_centroids(
    k_caches: Sequence[torch.Tensor],
    centroids: Sequence[torch.Tensor],
    last_slots: torch.Tensor,
    page_size: int,
    overflow: torch.Tensor | None = None,
) -> None:
    """Recompute the centroids of the pages that were just written, in place and in all layers at once.

    For every ``last_slots[n] >= 0`` and KV head: of the keys in the slots ``p * page_size .. last_slots[n]`` of page
    ``p = last_slots[n] // page_size`` the one farthest from their mean is the first seed, and the one farthest from all
    seeds so far is the next. Each key belongs to its nearest seed (of equals the first), and a centroid is the mean of
    a seed's keys. Those of more keys come first; a seed without any, as keys are fewer or the same, has the mean of
    all. Nothing is patched: centroids are a pure function of the page's written keys. Entries of -1 are skipped; of the
    pages only 0 may occur more than once.

    Args:
        k_caches: for each layer ``[S, Hkv, d]``, float32, float16, bfloat16 or float8_e4m3fn (stored values,
            unscaled); finite. ``d`` is contiguous, the other strides are free; all layers have the same.
        centroids: for each layer ``[num_pages, Hkv, C, d]``, contiguous, C from 1 to 8; bfloat16 or float8_e4m3fn,
            rounded to nearest. In float8 a value outside +-448 is stored as NaN, which ``page_vote`` reads as "always
            select". Overwritten in the touched pages.
        last_slots: ``[N]`` int64, contiguous: the last written slot of a touched page, or -1.
        page_size: slots per page, a power of two from 1 to 64.
        overflow: optional ``[1]`` int32 counter, incremented by the number of values stored as NaN.

    Raises:
        ValueError: a wrong dimension, dtype, device, page size or number of centroids, or layers that differ or do not
            begin at multiples of 16 elements from one another.

    Example:
        >>> import torch
        >>> from sglang_sparse_kernels.page_centroids import update_page_centroids
        >>> k_cache = torch.tensor([1.0, 9.0, 3.0, 2.0]).view(4, 1, 1).expand(4, 1, 64).contiguous()
        >>> centroids = torch.zeros(1, 1, 2, 64, dtype=torch.bfloat16)
        >>> update_page_centroids([k_cache], [centroids], torch.tensor([3]), page_size=4)
        >>> centroids[0, 0, :, 0].tolist()
        [2.0, 9.0]
    """
    dtypes, counts = (torch.bfloat16, torch.float8_e4m3fn), range(1, MAX_CENTROIDS + 1)
    check_arguments(k_caches, centroids, last_slots, page_size, overflow, dtypes, counts)
    if dispatch.use_reference(k_caches[0]):
        for k_cache, layer in zip(k_caches, centroids, strict=True):
            reference.update_page_centroids(k_cache, layer, last_slots, page_size, overflow)
        return
    from . import triton

    triton.update_page_centroids(k_caches, centroids, last_slots, page_size, overflow)
