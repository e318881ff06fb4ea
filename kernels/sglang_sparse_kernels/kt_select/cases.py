"""Shapes on which the KT selection is tested and measured."""

from dataclasses import dataclass
from typing import Any

import torch

from ..common.testing import paged_batch, random_cache, seeded

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Stands wherever nothing may be read.
POISON = -(2**31)
# Far from all memory even in bytes, where 2**62 int32 would come round to 0.
NO_REQUEST = 2**60


@dataclass(frozen=True)
class Row:
    """A row of ``blocks`` (0: padded) that attends to ``select`` of them and kept ``kept`` of its ``first`` ones."""

    blocks: int
    select: int = 0
    first: int = 0
    kept: int = 0


@dataclass(frozen=True)
class Case:
    """Rows in a table of ``width`` blocks (0: as wide as the longest), for slots of ``max_kept`` (0: as needed)."""

    rows: tuple[Row, ...]
    heads: int = 2
    group: int = 4
    dim: int = 128
    topr: int = 128
    dtype: torch.dtype = BF16
    summary_dtype: torch.dtype = E5M2
    max_kept: int = 0
    width: int = 0
    gpu_only: bool = False


_PADDED = Row(0)
# Kept blocks and none, one that is selected alone, as many as are visible, dense ones.
_MIXED = (Row(100, 10, 80, 30), Row(37, 5, 30, 0), _PADDED, Row(9, 2, 8, 8), Row(64, 1), Row(40, 30, 35, 7), Row(5, 9))
_STEP = Row(8192, 64, 8184, 504)
_LONG = Row(262144, 64, 262000, 2048)
CASES = [
    Case(_MIXED, width=110),
    Case(_MIXED, topr=32),
    Case(_MIXED, heads=1, group=8, dim=64, topr=64, dtype=FP16),
    Case(_MIXED, heads=3, group=1, dim=64, topr=16, dtype=FP16),
    Case((Row(90, 20, 60, 9),), group=2, dim=16, topr=5, dtype=FP32, summary_dtype=BF16),
    Case((), width=4),
    Case((_PADDED, _PADDED), width=8),
    Case((Row(50, 50, 40, 10), Row(50, 90, 40, 10), Row(50, 49, 40, 10), Row(1, 1)), heads=1, group=1, max_kept=64),
    Case((Row(40, 12, 35, 7), Row(40, 11, 35, 7), Row(40, 0, 35, 7)), heads=3, group=3, dim=64, topr=63, dtype=FP16),
    Case((Row(150, 9), _PADDED, Row(33, 1), Row(1, 1)), topr=32, summary_dtype=BF16, width=200),
    Case((Row(70, 3), Row(32, 4)), 1, 1, 64, 64, FP32, FP32),
    Case((Row(40, 3),), 2, 8, 64, 8, FP16, FP16),
    Case((Row(64, 3), Row(65, 3)), group=2, summary_dtype=E4M3),
    Case((Row(30, 3),), 1, 2, 64, 1, FP32, E4M3),
    Case((Row(45, 3),), 2, 3, 64, 63, FP16, BF16),
    Case((Row(20, 3),), 1, 20, 16, 5, BF16, FP16),
    Case((_STEP,), heads=8, gpu_only=True),
    Case((_STEP,) * 32, heads=8, gpu_only=True),
    Case((_STEP, Row(8192, 8192), _PADDED, Row(3000, 64), Row(700, 699, 100, 99)), heads=8, topr=32, gpu_only=True),
    Case((Row(40000, 64, 30000, 504), Row(2049, 64), Row(2048, 2)), heads=4, group=8, width=65536, gpu_only=True),
    Case((Row(8192, 64, 8000, 2048), Row(8192, 8192), Row(300, 64, 200, 100), _PADDED) * 8, heads=8, gpu_only=True),
    Case((Row(2304, 64, 2300, 2048), _PADDED) * 32, heads=8, width=262144, summary_dtype=BF16, gpu_only=True),
    Case((_LONG, Row(262144, 262144)), heads=4, dim=64, topr=64, dtype=FP16, summary_dtype=E4M3, gpu_only=True),
]


def make_tables(case: Case, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """The tables of ``kt_select``: requests in no order among more slots, and poison wherever nothing counts."""
    generator = seeded(device, seed)
    batch = paged_batch(tuple(row.blocks for row in case.rows), 1, device, generator, case.width)
    slots, max_kept = len(case.rows) + 3, case.max_kept or max((row.kept for row in case.rows), default=0)
    options = {"dtype": torch.int32, "device": device}
    kept = torch.full((slots, case.heads, max_kept), POISON, **options)
    n_kept, first_visible = torch.full((2, slots), POISON, **options)
    requests = torch.randperm(slots, device=device, generator=generator)[: len(case.rows)]
    for slot, row in zip(requests.tolist(), case.rows, strict=True):
        n_kept[slot], first_visible[slot] = row.kept, row.first
        order = torch.rand(case.heads, row.first, device=device, generator=generator).argsort(dim=-1)
        kept[slot, :, : row.kept] = order[:, : row.kept].sort(dim=-1).values.int()
    beyond = torch.arange(batch.page_table.shape[1], device=device) >= batch.n_pages[:, None]
    return {
        "kept": kept,
        "n_kept": n_kept,
        "first_visible": first_visible,
        "requests": requests.masked_fill(batch.n_pages == 0, NO_REQUEST),
        "block_table": batch.page_table.masked_fill(beyond, 2**31 - 1),
        "n_blocks": batch.n_pages,
        "n_select": torch.tensor([row.select for row in case.rows], **options),
    }


def make(case: Case, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """Arguments of ``kt_select``; what lies beyond a row's blocks is no block."""
    generator = seeded(device, seed)
    shape = (1 + sum(row.blocks for row in case.rows), case.heads, case.dim)
    # Maximum and minimum of two keys: bounds that are in order, as real ones are.
    keys = torch.stack([random_cache(shape, FP32, device, generator) for _ in range(2)])
    q = torch.randn(len(case.rows), case.heads * case.group, case.dim, device=device, generator=generator)
    return {
        "q": q.to(case.dtype),
        "summary": torch.stack([keys.amax(dim=0), keys.amin(dim=0)], dim=2).to(case.summary_dtype),
        **make_tables(case, device, seed),
        "topr": case.topr,
        "sm_scale": case.dim**-0.5,
    }
