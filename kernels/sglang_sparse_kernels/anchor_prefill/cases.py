"""Shapes on which anchor attention is tested and measured."""

from dataclasses import dataclass
from typing import Any

import torch

from ..common.testing import paged_batch, seeded
from .plan import make_plan

FP32, FP16, BF16, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn

# Mean logit between a query and a full stripe key, far above the spread of the other keys' mean logits.
_STRIPE_LOGIT = 8.0


@dataclass(frozen=True)
class Case:
    """Rows of ``prefixes`` cached tokens and ``extends`` query tokens, in which ``stripes`` of the keys stand out."""

    prefixes: tuple[int, ...]
    extends: tuple[int, ...]
    page_size: int
    heads: int
    group: int
    dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    block_size: int = 16
    step: int = 2
    theta: float = 4.0
    v_dim: int = 0
    k_scale: float = 1.0
    v_scale: float = 1.0
    stripes: float = 0.1
    gpu_only: bool = False


CASES = [
    Case((0,), (101,), 16, 2, 4, 64, BF16, BF16),
    Case((37, 0, 64, 95), (50, 0, 1, 33), 16, 1, 4, 64, FP16, FP16),
    Case((0, 70), (96, 30), 1, 2, 1, 64, FP32, FP32),
    Case((41,), (60,), 8, 1, 7, 96, FP16, FP16),
    Case((5,), (70,), 4, 1, 4, 128, BF16, BF16, step=1),
    Case((20,), (180,), 64, 1, 2, 64, BF16, BF16, block_size=64, step=1),
    Case((48,), (51,), 16, 1, 4, 128, BF16, FP8, k_scale=0.5, v_scale=2.0),
    Case((50,), (47,), 16, 1, 2, 128, BF16, BF16, v_dim=64),
    Case((33,), (90,), 2, 1, 2, 64, FP16, FP16, step=3),
    Case((48,), (51,), 1, 1, 4, 64, BF16, FP8, k_scale=0.5, v_scale=2.0),
    Case((20,), (180,), 64, 1, 2, 64, BF16, FP8, block_size=64, step=1, k_scale=2.0, v_scale=0.5),
    Case((0,), (32768,), 16, 8, 4, 128, BF16, BF16, block_size=128, step=16, stripes=0.03, gpu_only=True),
    Case((24576,), (8192,), 64, 8, 4, 128, BF16, BF16, block_size=128, step=16, stripes=0.03, gpu_only=True),
    Case((12001, 0, 5, 2048), (3001, 1, 0, 4096), 1, 4, 7, 128, FP16, FP16, block_size=128, step=16, gpu_only=True),
    Case((9000, 100), (4000, 3000), 16, 8, 2, 64, BF16, BF16, block_size=64, step=8, gpu_only=True),
    Case((7000,), (5000,), 16, 8, 4, 128, BF16, FP8, block_size=128, step=16, k_scale=0.5, gpu_only=True),
    Case((7000,), (3000,), 1, 8, 4, 64, BF16, FP8, block_size=128, step=16, k_scale=0.5, v_scale=2.0, gpu_only=True),
    Case((7000,), (3000,), 64, 8, 4, 64, FP16, FP8, block_size=128, step=16, k_scale=2.0, v_scale=0.5, gpu_only=True),
    Case((7000, 31), (3000, 100), 32, 8, 4, 128, BF16, BF16, block_size=128, step=16, gpu_only=True),
    Case((7000,), (3000,), 16, 8, 1, 96, FP16, FP16, block_size=128, step=16, gpu_only=True),
    Case((7000,), (3000,), 16, 2, 8, 256, BF16, BF16, block_size=128, step=4, gpu_only=True),
]


def make(case: Case, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """Arguments of ``anchor_prefill``; unwritten slots of the caches hold NaN.

    All queries of a KV head lean the same way, and so do its stripes, some more than others, and the key of position 0.
    """
    generator = seeded(device, seed)
    lengths = tuple(prefix + extend for prefix, extend in zip(case.prefixes, case.extends, strict=True))
    batch = paged_batch(lengths, case.page_size, device, generator)
    k_shape = (batch.num_pages * case.page_size, case.heads, case.dim)
    k_cache = torch.full(k_shape, float("nan"), device=device)
    v_cache = torch.full((*k_shape[:2], case.v_dim or case.dim), float("nan"), device=device)
    lean = (_STRIPE_LOGIT * case.dim**0.5) ** 0.5
    signs = torch.randint(0, 2, (case.heads, case.dim), device=device, generator=generator) * 2.0 - 1.0
    direction = signs * (lean * case.dim**-0.5)
    for row, length in enumerate(lengths):
        slots = row_slots(batch.page_table, row, length, case.page_size)
        strength = torch.rand(length, case.heads, 1, device=device, generator=generator) * 0.7 + 0.5
        chosen = torch.rand(length, case.heads, 1, device=device, generator=generator) < case.stripes
        strength = strength * chosen
        strength[:1] = 1.0
        noise = torch.randn(length, case.heads, case.dim, device=device, generator=generator)
        k_cache[slots] = (noise + strength * direction) / case.k_scale
        v_cache[slots] = torch.randn(length, *v_cache.shape[1:], device=device, generator=generator)
    q = torch.randn(sum(case.extends), case.heads, case.group, case.dim, device=device, generator=generator)
    return {
        "q": (q + direction[:, None]).flatten(1, 2).to(case.dtype),
        "k_cache": k_cache.to(case.kv_dtype),
        "v_cache": v_cache.to(case.kv_dtype),
        "page_table": batch.page_table,
        "plan": make_plan(case.prefixes, case.extends, case.block_size, case.step, device),
        "theta": torch.full((len(lengths),), case.theta, device=device),
        "page_size": case.page_size,
        "sm_scale": case.dim**-0.5,
        "k_scale": case.k_scale,
        "v_scale": case.v_scale,
    }


def row_slots(page_table: torch.Tensor, row: int, length: int, page_size: int) -> torch.Tensor:
    """Slots of the first ``length`` tokens of a row."""
    positions = torch.arange(length, device=page_table.device)
    return page_table[row, positions // page_size].long() * page_size + positions % page_size
