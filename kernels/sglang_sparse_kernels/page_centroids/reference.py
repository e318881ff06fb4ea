"""The definition of page centroids in plain torch."""

from collections.abc import Sequence

import torch

from ..page_summary.reference import store, touched
from . import HEADER, SCALE, count_of, record_bytes

# The largest level of a difference, and what is added to levels so that they are no less than 1.
LARGEST_LEVEL, ZERO_LEVEL = 7, 8


def update_page_centroids(
    k_caches: Sequence[torch.Tensor], records: Sequence[torch.Tensor], last_slots: torch.Tensor, page_size: int
) -> None:
    """See ``page_centroids.update_page_centroids``."""
    pages, keys, written = zip(*(touched(k_cache, last_slots, page_size) for k_cache in k_caches), strict=True)
    count = count_of(records[0].shape[2], keys[0].shape[3])
    found = pack(torch.cat(keys), torch.cat(written), count)
    for layer, values in zip(records, found.unflatten(0, (len(records), len(pages[0]))), strict=True):
        store(layer, pages[0], values)


def pack(keys: torch.Tensor, written: torch.Tensor, count: int) -> torch.Tensor:
    """Return the records of pages, ``[pages, Hkv, bytes]`` uint8.

    Args:
        keys: ``[pages, P, Hkv, d]`` float32.
        written: ``[pages, P]`` bool, which of them count; at least one of each page.
        count: centroids of a page.
    """
    found, dim = means(keys, written, count), keys.shape[3]
    # The smallest power of two that brings the largest element to at most float8's largest number, 448 = 1.75 * 2^8.
    largest = found.abs().amax((-2, -1)).view(torch.int32)
    exponent = ((largest + 0x1FFFFF >> 23) - 8).clamp_min(1)
    found = found * (254 - exponent << 23).view(torch.float32)[..., None, None]
    base = found[:, :, 0].to(torch.float8_e4m3fn)
    differences = found[:, :, 1:] - base.float()[:, :, None]
    # Float16 without its lower byte, rounded up.
    bits = (differences.abs().amax(-1) / LARGEST_LEVEL).half().view(torch.int16).int() + 0xFF & 0xFF00
    step = bits.to(torch.int16).view(torch.float16).float()[..., None]
    tiny = torch.finfo(torch.float32).tiny
    levels = torch.floor(differences / step.clamp_min(tiny) + 0.5).clamp(-LARGEST_LEVEL, LARGEST_LEVEL)
    lower, upper = (levels.to(torch.int32) + ZERO_LEVEL).to(torch.uint8).chunk(2, -1)
    records = torch.zeros(*base.shape[:2], record_bytes(count, dim), dtype=torch.uint8, device=keys.device)
    records[..., : count - 1], records[..., SCALE] = (bits >> 8).to(torch.uint8), exponent.to(torch.uint8)
    records[..., HEADER : HEADER + dim] = base.view(torch.uint8)
    packed = (lower | upper << 4).flatten(-2)
    records[..., HEADER + dim : HEADER + dim + packed.shape[-1]] = packed
    return records


def unpack(records: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the centroids ``[..., C, d]`` in float32 that records ``[..., bytes]`` hold."""
    others = count_of(records.shape[-1], dim) - 1
    base = records[..., HEADER : HEADER + dim].contiguous().view(torch.float8_e4m3fn).float()[..., None, :]
    step = (records[..., :others].to(torch.int16) << 8).view(torch.float16).float()[..., None]
    start = HEADER + dim
    packed = records[..., start : start + others * dim // 2].unflatten(-1, (others, dim // 2))
    levels = torch.cat([packed & 0xF, packed >> 4], -1).float() - ZERO_LEVEL
    scale = (records[..., SCALE].int() << 23).view(torch.float32)[..., None, None]
    return torch.cat([base, base + step * levels], -2) * scale


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
