"""The definition of page centroids in plain torch."""

import torch

from ..page_summary.reference import store, touched
from . import HEADER, count_of, record_bytes

# The largest level of a difference, and what is added to levels so that they are no less than 1.
LARGEST_LEVEL, ZERO_LEVEL = 7, 8


def update_page_centroids(
    k_cache: torch.Tensor,
    records: torch.Tensor,
    last_slots: torch.Tensor,
    page_size: int,
    overflow: torch.Tensor | None = None,
) -> None:
    """See ``page_centroids.update_page_centroids``, of one layer."""
    pages, keys, written = touched(k_cache, last_slots, page_size)
    found, outside = pack(keys, written, count_of(records.shape[2], keys.shape[3]))
    if overflow is not None:
        overflow += outside
    store(records, pages, found)


def pack(keys: torch.Tensor, written: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the records of pages, ``[pages, Hkv, bytes]`` uint8, and how many of their numbers are out of range.

    Args:
        keys: ``[pages, P, Hkv, d]`` float32.
        written: ``[pages, P]`` bool, which of them count; at least one of each page.
        count: centroids of a page.
    """
    found, dim = means(keys, written, count), keys.shape[3]
    first = found[:, :, 0]
    outside = first.abs() > torch.finfo(torch.float8_e4m3fn).max
    base = torch.where(outside, torch.nan, first).to(torch.float8_e4m3fn)
    differences = found[:, :, 1:] - base.float().nan_to_num(0)[:, :, None]
    # Float16 without its lower byte, rounded up.
    bits = (differences.abs().amax(-1) / LARGEST_LEVEL).half().view(torch.int16).int() + 0xFF & 0xFF00
    step = bits.to(torch.int16).view(torch.float16).float()[..., None]
    tiny = torch.finfo(torch.float32).tiny
    levels = torch.floor(differences / step.clamp_min(tiny) + 0.5).clamp(-LARGEST_LEVEL, LARGEST_LEVEL)
    lower, upper = (levels.to(torch.int32) + ZERO_LEVEL).to(torch.uint8).chunk(2, -1)
    records = torch.zeros(*first.shape[:2], record_bytes(count, dim), dtype=torch.uint8, device=keys.device)
    records[..., : count - 1] = (bits >> 8).to(torch.uint8)
    records[..., HEADER : HEADER + dim] = base.view(torch.uint8)
    packed = (lower | upper << 4).flatten(-2)
    records[..., HEADER + dim : HEADER + dim + packed.shape[-1]] = packed
    return records, outside.sum() + step.isinf().sum()


def unpack(records: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the centroids ``[..., C, d]`` in float32 that records ``[..., bytes]`` hold."""
    others = count_of(records.shape[-1], dim) - 1
    base = records[..., HEADER : HEADER + dim].contiguous().view(torch.float8_e4m3fn).float()[..., None, :]
    step = (records[..., :others].to(torch.int16) << 8).view(torch.float16).float()[..., None]
    start = HEADER + dim
    packed = records[..., start : start + others * dim // 2].unflatten(-1, (others, dim // 2))
    levels = torch.cat([packed & 0xF, packed >> 4], -1).float() - ZERO_LEVEL
    return torch.cat([base, base + step * levels], -2)


def means(keys: torch.Tensor, written: torch.Tensor, count: int) -> torch.Tensor:
    """Return the centroids of pages.

    Args:
        keys: ``[pages, P, Hkv, d]`` float32.
        written: ``[pages, P]`` bool, which of them count; at least one of each page.
        count: centroids of a page.

    Returns:
        ``[pages, Hkv, count, d]`` float32.
    """
    held = written[:, None, :, None]
    keys = keys.transpose(1, 2).masked_fill(~held, 0)
    mean = keys.sum(2) / held.sum(2)
    nearest = torch.full(keys.shape[:3], torch.inf, device=keys.device)
    owner = torch.zeros_like(nearest, dtype=torch.int64)
    distance = (keys - mean[:, :, None]).square().sum(-1)
    for seed in range(count):
        farthest = distance.masked_fill(~held[..., 0], -1).argmax(-1)
        key = keys.gather(2, farthest[..., None, None].expand(-1, -1, 1, keys.shape[3]))
        to_seed = (keys - key).square().sum(-1)
        owner = torch.where(to_seed < nearest, seed, owner)
        distance = nearest = torch.minimum(nearest, to_seed)
    members = torch.nn.functional.one_hot(owner, count) * held
    counts = members.sum(2)
    sums = torch.einsum("nhpc,nhpd->nhcd", members.float(), keys)
    found = torch.where(counts[..., None] > 0, sums / counts[..., None].clamp_min(1), mean[:, :, None])
    order = counts.sort(dim=-1, descending=True, stable=True).indices
    return found.gather(2, order[..., None].expand_as(found))
