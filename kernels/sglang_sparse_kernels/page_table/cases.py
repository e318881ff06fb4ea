"""Shapes on which the page table is tested and measured."""

from dataclasses import dataclass
from typing import Any

import torch

from ..common.testing import paged_batch, seeded

# Stands wherever nothing may be read, or nothing written.
POISON = -(2**31)


@dataclass(frozen=True)
class Case:
    """``n_pages`` of each request's row, ``padding`` rows behind them, in a table of ``width`` pages."""

    n_pages: tuple[int, ...]
    padding: int
    page_size: int
    width: int
    index_dtype: torch.dtype = torch.int64
    gpu_only: bool = False


CASES = [
    Case((5, 1, 12), 0, 16, 12),
    Case((3,), 3, 64, 20),
    Case((300, 256, 257, 1), 4, 1, 600),
    Case((40, 0, 7), 1, 2, 41, torch.int32),
    Case((9, 2), 0, 4, 50),
    Case((0, 0), 2, 8, 4),
    Case((), 3, 32, 4),
    Case((8192, 1, 4096, 513), 4, 16, 8208, gpu_only=True),
    Case((16384,) * 8, 0, 16, 65536, torch.int32, gpu_only=True),
]


def make(case: Case, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """Arguments of ``load_page_table``: requests in no order, a slot of every page beyond its first one poisoned."""
    generator = seeded(device, seed)
    requests, rows = len(case.n_pages), len(case.n_pages) + case.padding
    pages = paged_batch(case.n_pages, 1, device, generator, case.width).page_table
    indices = torch.randperm(requests + 3, device=device, generator=generator)[:requests]
    req_to_token = torch.full((requests + 3, case.width * case.page_size), POISON, dtype=torch.int32, device=device)
    firsts = torch.where(pages >= 0, pages * case.page_size, POISON)
    req_to_token[indices, :: case.page_size] = firsts
    n_pages = torch.tensor([*case.n_pages, *[0] * case.padding], dtype=torch.int32, device=device)
    return {
        "req_to_token": req_to_token,
        "req_pool_indices": indices.to(case.index_dtype),
        "n_pages": n_pages,
        "widest": max(case.n_pages, default=0),
        "page_size": case.page_size,
        "page_table": torch.full((rows, case.width), POISON, dtype=torch.int32, device=device),
    }
