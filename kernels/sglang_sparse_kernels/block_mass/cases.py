"""Shapes on which the block mass is tested and measured."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..common.testing import paged_batch, random_cache, seeded

FP32, FP16, BF16, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """Rows of ``lengths`` tokens (0 is a padded row) in a table of ``width`` blocks (0: as wide as the longest row).

    Queries and keys are the last ``dim`` of ``stored`` dimensions (0: there are no others). The larger
    ``sm_scale``, the fewer blocks hold most of the mass.
    """

    lengths: tuple[int, ...]
    block_size: int
    heads: int
    dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    stored: int = 0
    sm_scale: float = 0.125
    k_scale: float = 1.0
    width: int = 0
    gpu_only: bool = False


CASES = [
    Case((300, 0, 33, 1), 16, 16, 64, BF16, BF16, stored=576, width=40),
    Case((500, 257), 16, 128, 64, BF16, BF16, stored=576, sm_scale=0.6),
    Case((90, 144), 16, 5, 64, FP32, FP32),
    Case((200, 77), 32, 7, 64, FP16, FP16, sm_scale=0.5),
    Case((140, 400), 64, 32, 64, BF16, BF16, stored=576),
    Case((150, 31), 16, 16, 64, BF16, FP8, stored=576, k_scale=0.5),
    Case((260, 16), 16, 16, 576, BF16, BF16, sm_scale=0.05),
    Case((100,), 32, 3, 576, FP16, FP8, k_scale=1.5),
    Case((70, 9), 16, 4, 96, BF16, BF16),
    Case((40,), 16, 2, 208, FP16, FP16),
    Case((130, 50), 16, 130, 32, FP16, FP16),
    Case((37, 5), 4, 6, 16, FP16, FP16),
    Case((20, 300), 1, 2, 64, BF16, BF16),
    Case((65536,) * 8, 16, 128, 64, BF16, BF16, stored=576, sm_scale=0.6, gpu_only=True),
    Case((65536,) * 8, 16, 128, 64, BF16, BF16, sm_scale=0.6, gpu_only=True),
    Case((131072,) * 24, 16, 16, 64, BF16, BF16, stored=576, gpu_only=True),
    Case((131072,), 16, 128, 64, BF16, BF16, stored=576, sm_scale=0.6, gpu_only=True),
    Case((40000, 17, 3001, 0, 9000), 64, 128, 64, FP16, FP16, stored=576, width=2048, gpu_only=True),
    Case((40000, 1700), 16, 32, 64, BF16, FP8, stored=576, k_scale=0.5, gpu_only=True),
    Case((20000, 1700), 32, 128, 576, BF16, BF16, sm_scale=0.05, gpu_only=True),
    Case((20000, 1700), 16, 16, 576, BF16, FP8, sm_scale=0.05, gpu_only=True),
    Case((3000, 170), 16, 96, 128, FP16, FP16, gpu_only=True),
]


def make(case: Case, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """Arguments of ``block_mass``; slots that hold no token are NaN."""
    generator = seeded(device, seed)
    batch = paged_batch(case.lengths, case.block_size, device, generator, case.width)
    stored = case.stored or case.dim
    written = torch.zeros(batch.num_pages * case.block_size, dtype=torch.bool, device=device)
    for blocks, length in zip(batch.page_table.long(), case.lengths, strict=True):
        slots = blocks[: math.ceil(length / case.block_size), None] * case.block_size
        written[(slots + torch.arange(case.block_size, device=device)).flatten()[:length]] = True
    wide = case.kv_dtype if case.kv_dtype.itemsize > 1 else BF16
    latent = random_cache((len(written), stored), wide, device, generator)
    latent = latent.masked_fill_(~written[:, None], float("nan")).to(case.kv_dtype)
    q = torch.randn(len(case.lengths), case.heads, stored, device=device, generator=generator).to(case.dtype)
    return {
        "q": q[..., stored - case.dim :],
        "k_cache": latent[:, stored - case.dim :],
        "block_table": batch.page_table,
        "n_blocks": batch.n_pages,
        "last_slots": batch.last_slots,
        "block_size": case.block_size,
        "sm_scale": case.sm_scale,
        "k_scale": case.k_scale,
    }
