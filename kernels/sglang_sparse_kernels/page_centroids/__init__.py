"""Page centroids: a few means of each page's keys, each of keys that lie together, kept beside the KV cache.

A few means describe a page better than its bounds (``page_summary``), which say what *could* be there, and than one
mean, which hides an outlier. More of them in four bits find more than fewer in eight. Not from a paper; the seeds are
those of Gonzalez' farthest-first traversal (1985).
"""

from collections.abc import Sequence

import torch

from ..common import checks
from ..page_summary import check_layers

MAX_CENTROIDS = 8
# The smallest heads whose halves tensor cores multiply.
LEAST_DIM = 32
# Bytes of a record before the first centroid: up to seven steps, one for each other centroid, then the scale.
HEADER, SCALE = 16, MAX_CENTROIDS - 1
# Records begin at multiples of it, two sectors of memory, where so much padding is less than a centroid.
_ALIGNMENT = 64


def record_bytes(count: int, dim: int) -> int:
    """Bytes of the record of one page and KV head: ``count`` centroids of ``dim`` elements, an even number.

    Of ``HEADER`` bytes the first ``count - 1`` are steps, each the upper byte of a float16, and the one at ``SCALE`` is
    the exponent of a power of two, 127 more, by which all else is multiplied: the least with which the centroids are
    inside float8's range. Then come the first centroid in float8_e4m3fn, and for each other one its difference from the
    first, in steps: four bits an element, 8 more than the level, of which a byte has the one of element ``i`` below the
    one of ``i + dim / 2``.
    """
    alignment = min(_ALIGNMENT, 1 << (dim // 2).bit_length() - 1)
    return -(-(HEADER + dim + (count - 1) * dim // 2) // alignment) * alignment


def count_of(num_bytes: int, dim: int) -> int:
    """Return the number of centroids of ``dim`` elements in a record of ``num_bytes``."""
    return 1 + (num_bytes - HEADER - dim) // (dim // 2)


def holds(dim: int) -> bool:
    """Whether records hold heads of ``dim`` elements: an even number, ``LEAST_DIM`` at least."""
    return dim % 2 == 0 and dim >= LEAST_DIM


def check_records(name: str, records: torch.Tensor, dim: int) -> None:
    """Raise ValueError unless these are records of 1 to ``MAX_CENTROIDS`` centroids."""
    checks.check_tensor(name, records, 3, (torch.uint8,))
    if not holds(dim):
        raise ValueError(f"{name}: head_dim must be even and at least {LEAST_DIM}, got {dim}")
    # Every layer of a step asks: the list of what is allowed is for the message.
    count = count_of(records.shape[2], dim)
    if not 1 <= count <= MAX_CENTROIDS or record_bytes(count, dim) != records.shape[2]:
        allowed = [record_bytes(count, dim) for count in range(1, MAX_CENTROIDS + 1)]
        raise ValueError(f"{name} must have one of {allowed} bytes a page and head, got {records.shape[2]}")
    checks.check_contiguous(name, records)


def update_page_centroids(
    k_caches: Sequence[torch.Tensor],
    records: Sequence[torch.Tensor],
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
            unscaled); finite. ``d`` is contiguous, even and at least 32, the other strides are free; all layers have
            the same.
        records: for each layer ``[num_pages, Hkv, record_bytes(C, d)]`` uint8, contiguous, C from 1 to 8. Overwritten
            in the touched pages.
        last_slots: ``[N]`` int64, contiguous: the last written slot of a touched page, or -1.
        page_size: slots per page, a power of two from 1 to 64.
        overflow: as of ``page_summary``; untouched, since every finite key is inside the range of a record.

    Raises:
        ValueError: a wrong dimension, dtype, device, page size or number of centroids, or layers that differ or do not
            begin at multiples of 16 elements from one another.

    Example:
        >>> import torch
        >>> from sglang_sparse_kernels.page_centroids import record_bytes, reference, update_page_centroids
        >>> k_cache = torch.tensor([1.0, 9.0, 3.0, 2.0]).view(4, 1, 1).expand(4, 1, 64).contiguous()
        >>> records = torch.zeros(1, 1, record_bytes(2, 64), dtype=torch.uint8)
        >>> update_page_centroids([k_cache], [records], torch.tensor([3]), page_size=4)
        >>> reference.unpack(records, 64)[0, 0, :, 0].tolist()
        [2.0, 9.0]
    """
    check_layers(k_caches, records, last_slots, page_size, overflow)
    heads, dim = k_caches[0].shape[1:]
    check_records("records", records[0], dim)
    checks.check_shape("records", records[0], (records[0].shape[0], heads, records[0].shape[2]))
    if checks.use_reference(k_caches[0]):
        from . import reference

        reference.update_page_centroids(k_caches, records, last_slots, page_size)
        return
    from . import triton

    triton.update_page_centroids(k_caches, records, last_slots, page_size)
