"""Shapes on which page centroids are tested."""

from dataclasses import dataclass
from typing import Any

import torch

from ..page_summary import cases
from ..page_summary.cases import BF16, FP8, FP16, FP32
from . import record_bytes


@dataclass(frozen=True)
class Case(cases.Case):
    """As a case of ``page_summary``, of ``count`` centroids a page, which are kept in one way alone."""

    summary_dtype: torch.dtype = torch.bfloat16
    count: int = 6


CASES = [
    Case(5, 3, 16, 2, 128, BF16),
    Case(4, 1, 16, 2, 64, FP16, count=3),
    Case(4, 2, 16, 1, 96, FP32, count=2, spread=200.0),
    Case(3, 1, 16, 1, 80, BF16),
    Case(3, 1, 1, 2, 64, BF16),
    Case(3, 1, 2, 2, 64, BF16),
    Case(3, 1, 64, 1, 256, BF16, count=8),
    Case(3, 1, 16, 1, 512, BF16, count=6),
    Case(4, 1, 32, 2, 64, FP8, count=2),
    Case(4, 1, 16, 2, 64, BF16, count=1),
    Case(0, 4, 16, 2, 64, BF16),
    Case(512, 8192 - 512, 16, 8, 128, BF16, gpu_only=True),
    Case(8, 0, 16, 8, 128, BF16, gpu_only=True),
]


def make(case: Case, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """Arguments of ``update_page_centroids``, of one layer."""
    made = cases.make(case, device, seed)
    k_cache, summary = made.pop("k_cache"), made.pop("summary")
    shape = (summary.shape[0], case.heads, record_bytes(case.count, case.dim))
    return {"k_caches": [k_cache], "records": [torch.zeros(shape, dtype=torch.uint8, device=device)], **made}
