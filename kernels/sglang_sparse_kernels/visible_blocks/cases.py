"""Shapes on which the visible blocks are tested and measured."""

from dataclasses import dataclass
from typing import Any

import torch

from ..common.testing import paged_batch, seeded

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
    max_kept: int = 0
    width: int = 0
    gpu_only: bool = False


_PADDED = Row(0)
CASES = [
    Case((Row(100, 10, 80, 30), Row(37, 5, 30, 0), _PADDED, Row(9, 2, 8, 8), Row(64, 16)), width=110),
    Case((Row(50, 50, 40, 10), Row(50, 90, 40, 10), Row(50, 49, 40, 10), Row(1, 1)), heads=1, max_kept=64),
    Case((Row(40, 30, 35, 7), Row(40, 12, 35, 7), Row(40, 11, 35, 7), Row(40, 0, 35, 7)), heads=3),
    Case((Row(3000, 64, 2990, 1100), Row(2100, 64, 3, 1), Row(1024, 64, 1000, 1000), _PADDED), width=5000),
    Case((Row(1400, 20, 1390, 1200), Row(1030)) * 5, heads=8),
    Case((_PADDED, _PADDED), width=8),
    Case((), width=4),
    Case((Row(8192, 64, 8000, 2048),), heads=8, gpu_only=True),
    Case((Row(8192, 64, 8000, 2048), Row(8192, 8192), Row(300, 64, 200, 100), _PADDED) * 8, heads=8, gpu_only=True),
    Case((Row(2304, 64, 2300, 2048), _PADDED) * 32, heads=8, width=262144, gpu_only=True),
    Case((Row(262144, 64, 262000, 2048), Row(262144, 262144)), heads=4, gpu_only=True),
]


def make(case: Case, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """Arguments of ``visible_blocks``: requests in no order among more slots, and poison wherever nothing counts."""
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
    return {
        "kept": kept,
        "n_kept": n_kept,
        "first_visible": first_visible,
        "requests": requests.masked_fill(batch.n_pages == 0, NO_REQUEST),
        "block_table": batch.page_table,
        "n_blocks": batch.n_pages,
        "n_select": torch.tensor([row.select for row in case.rows], **options),
    }
