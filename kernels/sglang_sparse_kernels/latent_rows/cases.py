"""Shapes on which rows of float8 latents are tested and measured."""

from dataclasses import dataclass
from typing import Any

import torch

from ..common.testing import seeded
from . import row_bytes

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Case:
    """Tokens whose tiles have magnitudes between ``10 ** -spread`` and ``10 ** spread``."""

    tokens: int
    latent_dim: int
    rope_dim: int
    dtype: torch.dtype
    spread: float = 2.0
    gpu_only: bool = False


CASES = [
    Case(9, 512, 64, BF16),
    Case(1, 512, 64, BF16),
    Case(33, 128, 16, FP16),
    Case(6, 256, 32, FP32, spread=20.0),
    Case(32, 512, 64, BF16, gpu_only=True),
    Case(8192, 512, 64, BF16, gpu_only=True),
]


def make(case: Case, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """Arguments of ``write_latents``; the last token's first tile is zeros, and all rows of the cache are 0xFF."""
    generator = seeded(device, seed)
    tiles = case.latent_dim // 128
    magnitude = 2 * torch.rand(case.tokens, tiles, device=device, generator=generator) - 1
    latent = torch.randn(case.tokens, tiles, 128, device=device, generator=generator)
    latent *= 10 ** (case.spread * magnitude)[..., None]
    latent[-1, 0] = 0.0
    rotated = torch.randn(case.tokens, case.rope_dim, device=device, generator=generator)
    size = case.tokens + 3
    return {
        "latent": latent.flatten(1).to(case.dtype),
        "rotated": rotated.to(case.dtype),
        "slots": torch.randperm(size, device=device, generator=generator)[: case.tokens],
        "rows": torch.full((size, row_bytes(case.latent_dim, case.rope_dim)), 0xFF, dtype=torch.uint8, device=device),
    }
