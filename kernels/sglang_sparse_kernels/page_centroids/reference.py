"""The definition of page centroids in plain torch."""

import torch

from ..page_summary.reference import store, touched


def update_page_centroids(
    k_cache: torch.Tensor,
    centroids: torch.Tensor,
    last_slots: torch.Tensor,
    page_size: int,
    overflow: torch.Tensor | None = None,
) -> None:
    """See ``page_centroids.update_page_centroids``, of one layer."""
    pages, keys, written = touched(k_cache, last_slots, page_size)
    found = means(keys, written, centroids.shape[2])
    rounded = found.to(centroids.dtype)
    if centroids.dtype == torch.float8_e4m3fn:
        outside = found.abs() > torch.finfo(centroids.dtype).max
        rounded = torch.where(outside, torch.nan, found).to(centroids.dtype)
        if overflow is not None:
            overflow += outside.sum()
    store(centroids, pages, rounded)


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
