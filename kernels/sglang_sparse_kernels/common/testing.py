"""Input builders that the operations' ``cases.py`` share."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PagedBatch:
    """Rows of a paged KV cache whose physical pages lie scattered in the pool.

    ``page_table`` is ``[B, width]`` int32 with -1 beyond a row's pages, ``n_pages`` ``[B]`` int32 and ``last_slots``
    ``[B]`` int64 (-1 for a row of length 0). ``num_pages`` counts the pool's pages with the dummy page 0.
    """

    page_table: torch.Tensor
    n_pages: torch.Tensor
    last_slots: torch.Tensor
    num_pages: int


def paged_batch(
    lengths: tuple[int, ...], page_size: int, device: torch.device | str, generator: torch.Generator, width: int = 0
) -> PagedBatch:
    """Lay rows of ``lengths`` tokens out over random pages; ``width`` of the table defaults to the longest row's."""
    n_pages = [math.ceil(length / page_size) for length in lengths]
    width = width or max(1, *n_pages)
    num_pages = 1 + sum(n_pages)
    pool = 1 + torch.randperm(num_pages - 1, device=device, generator=generator).to(torch.int32)
    page_table = torch.full((len(lengths), width), -1, dtype=torch.int32, device=device)
    last_slots = torch.full((len(lengths),), -1, dtype=torch.int64, device=device)
    for row, (length, pages) in enumerate(zip(lengths, pool.split(n_pages), strict=True)):
        page_table[row, : len(pages)] = pages
        if length:
            last_slots[row] = pages[-1].long() * page_size + (length - 1) % page_size
    return PagedBatch(page_table, torch.tensor(n_pages, dtype=torch.int32, device=device), last_slots, num_pages)


def random_cache(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, generator: torch.Generator
) -> torch.Tensor:
    """Normally distributed cache entries of any KV dtype."""
    wide = dtype if dtype.itemsize > 1 else torch.bfloat16
    return torch.randn(shape, dtype=wide, device=device, generator=generator).to(dtype)


def seeded(device: torch.device | str, seed: int) -> torch.Generator:
    """A generator on ``device``."""
    return torch.Generator(device=device).manual_seed(seed)
