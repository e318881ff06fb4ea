"""Shapes on which the page summary is tested and measured."""

from dataclasses import dataclass
from typing import Any

import torch

from ..common.testing import random_cache, seeded

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
FP8, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class Case:
    """``pages`` touched pages, each filled to a random slot, among ``skipped`` entries of -1."""

    pages: int
    skipped: int
    page_size: int
    heads: int
    dim: int
    kv_dtype: torch.dtype
    summary_dtype: torch.dtype
    spread: float = 1.0
    gpu_only: bool = False


CASES = [
    Case(5, 3, 16, 2, 128, BF16, BF16),
    Case(4, 0, 16, 2, 128, FP16, FP16),
    Case(4, 2, 16, 1, 64, FP32, FP32),
    Case(3, 1, 1, 2, 64, BF16, BF16),
    Case(3, 1, 2, 2, 64, FP16, FP16),
    Case(3, 1, 64, 1, 256, BF16, BF16),
    Case(3, 1, 16, 1, 512, BF16, BF16),
    Case(3, 1, 8, 2, 96, BF16, BF16),
    Case(4, 1, 16, 2, 64, FP32, BF16),
    Case(4, 1, 16, 2, 64, FP16, BF16, spread=100.0),
    Case(4, 1, 16, 2, 128, BF16, FP8),
    Case(4, 1, 4, 2, 96, FP16, FP8, spread=1e-3),
    Case(4, 1, 32, 2, 64, FP32, FP8, spread=200.0),
    Case(4, 1, 16, 2, 64, FP8, FP8),
    Case(4, 1, 16, 2, 64, FP8, BF16),
    Case(0, 4, 16, 2, 64, BF16, BF16),
    Case(4, 1, 4, 2, 128, BF16, E5M2),
    Case(4, 1, 4, 2, 96, FP16, E5M2, spread=1e-4),
    Case(4, 1, 32, 2, 64, FP32, E5M2, spread=3e4),
    Case(4, 1, 16, 2, 64, FP8, E5M2),
    Case(512, 8192 - 512, 16, 8, 128, BF16, BF16, gpu_only=True),
    Case(8, 0, 16, 8, 128, BF16, FP8, gpu_only=True),
    Case(8, 0, 4, 8, 128, BF16, E5M2, gpu_only=True),
]


def make(case: Case, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """Arguments of ``update_page_summary``."""
    generator = seeded(device, seed)
    num_pages = case.pages + 2
    shape = (num_pages * case.page_size, case.heads, case.dim)
    k_cache = random_cache(shape, case.kv_dtype, device, generator)
    if case.spread != 1.0:
        k_cache = (k_cache.float() * case.spread).to(case.kv_dtype)
    pages = 1 + torch.randperm(num_pages - 1, device=device, generator=generator)[: case.pages]
    filled = torch.randint(0, case.page_size, (case.pages,), device=device, generator=generator)
    entries = torch.cat([pages * case.page_size + filled, torch.full((case.skipped,), -1, device=device)])
    order = torch.randperm(len(entries), device=device, generator=generator)
    summary = torch.zeros(num_pages, case.heads, 2, case.dim, dtype=case.summary_dtype, device=device)
    return {
        "k_cache": k_cache,
        "summary": summary,
        "last_slots": entries[order],
        "page_size": case.page_size,
        "overflow": torch.zeros(1, dtype=torch.int32, device=device),
    }
