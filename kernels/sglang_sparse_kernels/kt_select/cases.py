"""Shapes on which the KT selection is tested and measured."""

from dataclasses import dataclass
from typing import Any

import torch

from ..common.testing import random_cache, seeded
from ..visible_blocks import cases as visible
from ..visible_blocks.cases import Row

FP32, FP16, BF16, E5M2 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2


@dataclass(frozen=True)
class Case:
    """Rows as those of ``visible_blocks``, in a table of ``width`` blocks (0: as wide as the longest)."""

    rows: tuple[Row, ...]
    heads: int = 2
    group: int = 4
    dim: int = 128
    topr: int = 128
    dtype: torch.dtype = BF16
    summary_dtype: torch.dtype = E5M2
    width: int = 0
    gpu_only: bool = False


_PADDED = Row(0)
# Kept blocks and none, one that is selected alone, as many as are visible, dense ones.
_MIXED = (Row(100, 10, 80, 30), Row(37, 5, 30, 0), _PADDED, Row(9, 2, 8, 8), Row(64, 1), Row(40, 30, 35, 7), Row(5, 9))
_STEP = Row(8192, 64, 8184, 504)
CASES = [
    Case(_MIXED, width=110),
    Case(_MIXED, topr=32),
    Case(_MIXED, heads=1, group=8, dim=64, topr=64, dtype=FP16),
    Case(_MIXED, heads=3, group=1, dim=64, topr=16, dtype=FP16),
    Case((Row(90, 20, 60, 9),), group=2, dim=16, topr=5, dtype=FP32, summary_dtype=BF16),
    Case((), width=4),
    Case((_STEP,), heads=8, gpu_only=True),
    Case((_STEP,) * 32, heads=8, gpu_only=True),
    Case((_STEP, Row(8192, 8192), _PADDED, Row(3000, 64), Row(700, 699, 100, 99)), heads=8, topr=32, gpu_only=True),
    Case((Row(40000, 64, 30000, 504), Row(2049, 64), Row(2048, 2)), heads=4, group=8, width=65536, gpu_only=True),
]


def make(case: Case, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """Arguments of ``kt_select``; what lies beyond a row's blocks is no block."""
    generator = seeded(device, seed)
    tables = visible.make(visible.Case(case.rows, case.heads, width=case.width), device, seed)
    beyond = torch.arange(tables["block_table"].shape[1], device=device) >= tables["n_blocks"][:, None]
    tables["block_table"].masked_fill_(beyond, 2**31 - 1)
    shape = (1 + sum(row.blocks for row in case.rows), case.heads, case.dim)
    # Maximum and minimum of two keys: bounds that are in order, as real ones are.
    keys = torch.stack([random_cache(shape, FP32, device, generator) for _ in range(2)])
    q = torch.randn(len(case.rows), case.heads * case.group, case.dim, device=device, generator=generator)
    return {
        "q": q.to(case.dtype),
        "summary": torch.stack([keys.amax(dim=0), keys.amin(dim=0)], dim=2).to(case.summary_dtype),
        **tables,
        "topr": case.topr,
        "sm_scale": case.dim**-0.5,
    }
