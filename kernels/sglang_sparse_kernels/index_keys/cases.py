"""Shapes on which the index keys are tested and measured."""

from dataclasses import dataclass
from typing import Any

import torch

from ..common.testing import seeded
from .reference import PAGE_SIZE

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Case:
    """Rows of ``shape``, each of another magnitude between ``10 ** -spread`` and ``10 ** spread``."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    rotate: bool = True
    powers: bool = True
    spread: float = 3.0
    gpu_only: bool = False


CASES = [
    Case((70, 128), BF16),
    Case((3, 20, 128), BF16, rotate=False),
    Case((33, 128), FP16, spread=2.0),
    Case((40, 128), FP16, rotate=False, spread=2.0),
    Case((5, 7, 128), FP32, spread=20.0),
    Case((65, 128), FP32, rotate=False, spread=30.0),
    Case((9, 64), BF16),
    Case((17, 256), BF16),
    Case((70, 128), BF16, rotate=False, powers=False),
    Case((33, 128), FP16, spread=2.0, powers=False),
    Case((65, 128), FP32, rotate=False, spread=30.0, powers=False),
    Case((8192, 128), BF16, gpu_only=True),
    Case((8192, 128), BF16, rotate=False, powers=False, gpu_only=True),
    Case((8192, 64, 128), BF16, gpu_only=True),
    Case((64, 64, 128), FP16, rotate=False, spread=2.0, gpu_only=True),
]


def make(case: Case, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """Arguments of ``quantize``; a row of zeros is among them."""
    generator = seeded(device, seed)
    x = torch.randn(case.shape, device=device, generator=generator)
    magnitude = 2 * torch.rand(case.shape[:-1], device=device, generator=generator) - 1
    x *= 10 ** (case.spread * magnitude)[..., None]
    x.flatten(0, -2)[-1] = 0.0
    return {"x": x.to(case.dtype), "rotate": case.rotate, "powers": case.powers}


def slots_of(entries: int, skipped: int, device: torch.device | str, seed: int = 0) -> tuple[torch.Tensor, int]:
    """Slots of ``entries`` keys in no order, ``skipped`` of which are -1, and the number of pages that hold them."""
    generator = seeded(device, seed)
    pages = 2 + entries // PAGE_SIZE
    slots = PAGE_SIZE + torch.randperm((pages - 1) * PAGE_SIZE, device=device, generator=generator)[:entries]
    slots[torch.randperm(entries, device=device, generator=generator)[:skipped]] = -1
    return slots, pages
