"""Shapes on which page centroids are tested."""

from dataclasses import dataclass
from typing import Any

import torch

from ..page_summary import cases
from ..page_summary.cases import BF16, FP8, FP16, FP32


@dataclass(frozen=True)
class Case(cases.Case):
    """As a case of ``page_summary``, of ``count`` centroids a page."""

    count: int = 4


CASES = [
    Case(5, 3, 16, 2, 128, BF16, FP8),
    Case(4, 1, 16, 2, 64, FP16, BF16, count=3),
    Case(4, 2, 16, 1, 96, FP32, FP8, count=2, spread=200.0),
    Case(3, 1, 1, 2, 64, BF16, FP8),
    Case(3, 1, 2, 2, 64, BF16, BF16),
    Case(3, 1, 64, 1, 256, BF16, FP8, count=8),
    Case(4, 1, 32, 2, 64, FP8, FP8, count=2),
    Case(4, 1, 16, 2, 64, BF16, FP8, count=1),
    Case(0, 4, 16, 2, 64, BF16, FP8),
    Case(512, 8192 - 512, 16, 8, 128, BF16, FP8, gpu_only=True),
    Case(8, 0, 16, 8, 128, BF16, FP8, gpu_only=True),
]


def make(case: Case, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """Arguments of ``update_page_centroids``, of one layer."""
    made = cases.make(case, device, seed)
    k_cache, summary = made.pop("k_cache"), made.pop("summary")
    shape = (summary.shape[0], case.heads, case.count, case.dim)
    return {"k_caches": [k_cache], "centroids": [torch.zeros(shape, device=device).to(case.summary_dtype)], **made}
