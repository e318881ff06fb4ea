"""Shapes on which the page score is tested and measured."""

from dataclasses import dataclass
from typing import Any

import torch

from ..common.testing import paged_batch, random_cache, seeded

FP32, FP16, BF16, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """``n_pages`` per row (0 is a padded row) in a table of ``width`` pages (0: as wide as the longest row)."""

    n_pages: tuple[int, ...]
    heads: int
    group: int
    dim: int
    dtype: torch.dtype
    summary_dtype: torch.dtype
    width: int = 0
    local_pages: int = 1
    gpu_only: bool = False


CASES = [
    Case((70, 0, 33, 1), 2, 4, 128, BF16, BF16, width=100),
    Case((5,), 2, 1, 64, FP32, FP32),
    Case((12, 30), 1, 7, 96, FP16, FP16, local_pages=3),
    Case((9, 40), 2, 2, 256, BF16, BF16),
    Case((9, 40), 1, 8, 512, BF16, BF16),
    Case((64, 17), 2, 8, 128, BF16, FP8, local_pages=0),
    Case((20,), 1, 4, 64, FP16, BF16, width=150),
    Case((8, 3), 2, 4, 96, BF16, FP8, local_pages=100),
    Case((8, 3), 2, 1, 90, BF16, FP8),
    Case((8192,), 8, 4, 128, BF16, BF16, gpu_only=True),
    Case((4096, 1, 3000, 0, 2049, 4095, 64, 4000), 8, 4, 128, BF16, BF16, width=70000, gpu_only=True),
    Case((4096, 1000), 4, 7, 128, FP16, FP8, gpu_only=True),
]


def make(case: Case, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """Arguments of ``page_score``."""
    generator = seeded(device, seed)
    batch = paged_batch(case.n_pages, 1, device, generator, case.width)
    shape = (batch.num_pages, case.heads, case.dim)
    # Maximum and minimum of two keys: bounds that are in order, as real ones are.
    keys = torch.stack([random_cache(shape, torch.float32, device, generator) for _ in range(2)])
    summary = torch.stack([keys.amax(dim=0), keys.amin(dim=0)], dim=2).to(case.summary_dtype)
    q = torch.randn(len(case.n_pages), case.heads * case.group, case.dim, device=device, generator=generator)
    return {
        "q": q.to(case.dtype),
        "summary": summary,
        "page_table": batch.page_table,
        "n_pages": batch.n_pages,
        "local_pages": case.local_pages,
    }
