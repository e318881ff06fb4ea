"""Shapes on which the KT score is tested and measured."""

from dataclasses import dataclass
from typing import Any

import torch

from ..common.testing import random_cache, seeded

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class Case:
    """Rows of at most ``candidates`` pages for each KV head (0 is a padded row) among ``width`` (0: as many).

    The first KV head of a row has as many, the others some fewer.
    """

    candidates: tuple[int, ...]
    heads: int
    group: int
    dim: int
    topr: int
    dtype: torch.dtype
    summary_dtype: torch.dtype
    width: int = 0
    local_pages: int = 1
    k_scale: float = 1.0
    gpu_only: bool = False


CASES = [
    Case((150, 0, 33, 1), 2, 4, 128, 32, BF16, BF16, width=200),
    Case((70, 32), 1, 1, 64, 64, FP32, FP32, local_pages=0),
    Case((40,), 2, 8, 64, 8, FP16, FP16, local_pages=5),
    Case((64, 65), 2, 2, 128, 128, BF16, E4M3, k_scale=0.5),
    Case((50, 9), 2, 4, 128, 16, BF16, E5M2),
    Case((30,), 1, 4, 64, 20, FP16, E5M2, local_pages=100),
    Case((30,), 1, 2, 64, 1, FP32, E4M3),
    Case((45,), 2, 3, 64, 63, FP16, BF16),
    Case((20,), 1, 20, 16, 5, BF16, FP16),
    Case((600,), 8, 4, 128, 128, BF16, E5M2, gpu_only=True),
    Case((600,) * 32, 8, 4, 128, 32, BF16, E5M2, gpu_only=True),
    Case((600,), 8, 4, 128, 32, BF16, BF16, width=10240, gpu_only=True),
    Case((8704, 1, 3000, 0, 2049), 4, 8, 128, 64, FP16, E4M3, gpu_only=True),
    Case((600, 70), 8, 1, 64, 64, BF16, BF16, gpu_only=True),
]


def make(case: Case, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """Arguments of ``kt_score``; what lies beyond a row's candidates is no page."""
    generator = seeded(device, seed)
    batch, width = len(case.candidates), case.width or max(1, *case.candidates, 0)
    most = torch.tensor(case.candidates, dtype=torch.int32, device=device)[:, None]
    fewer = torch.arange(case.heads, dtype=torch.int32, device=device)
    n_candidates = (most - 3 * fewer).clamp(min=0).minimum(most)
    num_pages = 1 + width
    order = torch.rand(batch, case.heads, num_pages - 1, device=device, generator=generator).argsort(dim=-1)
    beyond = torch.arange(width, device=device) >= n_candidates[..., None]
    candidates = (1 + order[..., :width].int()).masked_fill(beyond, 2**31 - 1)
    shape = (num_pages, case.heads, case.dim)
    # Maximum and minimum of two keys: bounds that are in order, as real ones are.
    keys = torch.stack([random_cache(shape, FP32, device, generator) for _ in range(2)])
    q = torch.randn(batch, case.heads * case.group, case.dim, device=device, generator=generator)
    return {
        "q": q.to(case.dtype),
        "summary": torch.stack([keys.amax(dim=0), keys.amin(dim=0)], dim=2).to(case.summary_dtype),
        "candidates": candidates.contiguous(),
        "n_candidates": n_candidates.contiguous(),
        "topr": case.topr,
        "sm_scale": case.dim**-0.5,
        "k_scale": case.k_scale,
        "local_pages": case.local_pages,
    }
