"""Shapes on which sparse MLA decode attention is tested and measured."""

from dataclasses import dataclass
from typing import Any

import torch

from ..latent_rows import reference, row_bytes
from ..sparse_decode import cases as decode

FP32, FP16, BF16, FP8 = decode.FP32, decode.FP16, decode.BF16, decode.FP8
# Rows of float8 latents.
ROWS = torch.uint8


@dataclass(frozen=True)
class Case:
    """Rows of ``lengths`` tokens (0 is a padded row) that attend to ``ratio`` of their blocks, at least one.

    With ``fused`` the two queries are slices of one tensor.
    """

    lengths: tuple[int, ...]
    block_size: int
    heads: int
    latent_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    rope_dim: int = 64
    ratio: float = 0.5
    max_select: int = 0
    kv_scale: float = 1.0
    fused: bool = True
    gpu_only: bool = False


CASES = [
    Case((150, 0, 33, 1), 16, 16, 128, BF16, BF16),
    Case((90, 40), 16, 8, 64, FP32, FP32, rope_dim=16, fused=False),
    Case((70, 40), 1, 20, 64, FP16, FP16, rope_dim=32, ratio=0.6),
    Case((130, 64), 64, 128, 64, BF16, BF16, fused=False),
    Case((100, 20), 4, 8, 256, FP16, FP16, max_select=40),
    Case((150, 31), 16, 20, 128, BF16, FP8, kv_scale=0.5),
    Case((60,), 2, 16, 64, FP16, FP8, kv_scale=1.5),
    Case((80,), 16, 16, 512, BF16, BF16),
    Case((70, 0, 33), 1, 20, 128, BF16, ROWS, ratio=0.6),
    Case((40, 3), 1, 16, 512, BF16, ROWS),
    Case((60, 21), 16, 8, 256, FP32, ROWS, rope_dim=32, kv_scale=0.5),
    Case((60,), 2, 128, 128, FP16, ROWS, rope_dim=16, fused=False),
    Case((65536,) * 8, 16, 128, 512, BF16, BF16, ratio=0.12, max_select=1024, gpu_only=True),
    Case((131072,), 16, 128, 512, BF16, BF16, ratio=0.06, gpu_only=True),
    Case((131072,) * 4, 16, 16, 512, BF16, BF16, ratio=0.06, gpu_only=True),
    Case((40000, 17, 3001, 0, 9000), 32, 32, 512, FP16, FP16, ratio=0.1, gpu_only=True),
    Case((20000, 1700), 64, 64, 512, BF16, FP8, ratio=0.2, kv_scale=0.5, gpu_only=True),
    Case((20000, 1700), 1, 128, 512, BF16, BF16, ratio=0.1, gpu_only=True),
    Case((20000, 1700), 1, 16, 512, BF16, FP8, ratio=0.1, gpu_only=True),
    Case((20000, 1700), 1, 128, 512, BF16, ROWS, ratio=0.1, gpu_only=True),
    Case((20000, 1700), 1, 64, 512, BF16, ROWS, ratio=0.1, gpu_only=True),
    Case((20000, 1700), 1, 32, 512, FP16, ROWS, ratio=0.1, gpu_only=True),
    Case((20000, 1700), 1, 16, 512, BF16, ROWS, ratio=0.1, gpu_only=True),
    Case((3000,) * 500, 1, 128, 512, BF16, ROWS, max_select=2048, gpu_only=True),
    Case((16,) * 200, 16, 20, 512, BF16, BF16, fused=False, gpu_only=True),
    Case((9000, 400), 8, 8, 256, FP16, FP8, ratio=0.3, gpu_only=True),
]


def make(case: Case, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """Arguments of ``sparse_mla_decode``; unwritten slots of the cache hold NaN."""
    dim = case.latent_dim + case.rope_dim
    shape = (case.heads, dim, case.dtype, BF16 if case.kv_dtype == ROWS else case.kv_dtype)
    drawn = decode.make(
        decode.Case(case.lengths, case.block_size, 1, *shape, ratio=case.ratio, v_dim=1, max_select=case.max_select),
        device,
        seed,
    )
    q_nope, q_rope = drawn["q"][..., : case.latent_dim], drawn["q"][..., case.latent_dim :]
    cache = drawn["k_cache"][:, 0]
    return {
        "q_nope": q_nope if case.fused else q_nope.contiguous(),
        "q_rope": q_rope if case.fused else q_rope.contiguous(),
        "kv_cache": _rows(cache, case.latent_dim) if case.kv_dtype == ROWS else cache,
        **{name: drawn[name] for name in ("indices", "counts", "last_slots")},
        "block_size": case.block_size,
        "sm_scale": drawn["sm_scale"],
        "kv_scale": case.kv_scale,
    }


def _rows(cache: torch.Tensor, latent_dim: int) -> torch.Tensor:
    """Rows of float8 latents of a cache, tiles of several magnitudes; 0xFF, which is NaN, where it holds NaN."""
    size, rope_dim = len(cache), cache.shape[1] - latent_dim
    rows = torch.full((size, row_bytes(latent_dim, rope_dim)), 0xFF, dtype=torch.uint8, device=cache.device)
    written = (~cache.isnan().any(-1)).nonzero()[:, 0]
    latent, rotated = cache[written].split([latent_dim, rope_dim], -1)
    tiles = torch.arange(latent_dim, device=cache.device) // reference.TILE
    latent = latent * 2.0 ** ((written[:, None] + tiles) % 3 - 1)
    reference.write_latents(latent, rotated, written, rows)
    return rows
