"""Shapes on which page votes are tested."""

from dataclasses import dataclass
from typing import Any

import torch

from ..common.testing import seeded
from ..page_centroids.reference import pack
from ..page_score import cases
from ..page_score.cases import BF16, FP8, FP16, FP32


@dataclass(frozen=True)
class Case(cases.Case):
    """As a case of ``page_score``; of bounds where there are no ``centroids``."""

    centroids: int = 6


CASES = [
    Case((700, 0, 33, 1), 2, 4, 128, BF16, BF16, width=720),
    Case((5,), 2, 1, 64, FP32, BF16, centroids=3),
    Case((12, 130), 1, 7, 96, FP16, BF16, local_pages=3, centroids=2),
    Case((9, 40), 2, 2, 256, BF16, BF16, centroids=8),
    Case((9, 40), 1, 8, 512, BF16, BF16),
    Case((9, 70), 1, 8, 512, BF16, BF16, centroids=0),
    Case((64, 17), 2, 20, 64, BF16, BF16, local_pages=0, centroids=1),
    Case((30,), 1, 3, 80, BF16, BF16),
    Case((70, 0, 64), 2, 4, 128, BF16, BF16, width=100, centroids=0),
    Case((8, 3), 2, 4, 96, FP16, FP8, local_pages=100, centroids=0),
    Case((8, 80), 2, 3, 90, FP32, FP32, centroids=0),
    Case((4096, 1, 3000, 0, 2049, 4095, 64, 4000), 8, 4, 128, BF16, BF16, width=70000, gpu_only=True),
    Case((8192,), 8, 4, 128, BF16, BF16, gpu_only=True),
    Case((4096, 1000), 2, 8, 256, BF16, BF16, gpu_only=True),
    Case((4096, 1000), 4, 7, 128, BF16, BF16, gpu_only=True, centroids=0),
]


def make(case: Case, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """Arguments of ``page_vote``."""
    made = cases.make(case, device, seed)
    if case.centroids:
        pages = made["summary"].shape[0]
        keys = torch.randn(pages, 16, case.heads, case.dim, generator=seeded(device, seed + 1), device=device)
        made["summary"] = pack(keys, torch.ones(pages, 16, dtype=torch.bool, device=device), case.centroids)
    return {**made, "sm_scale": case.dim**-0.5}
