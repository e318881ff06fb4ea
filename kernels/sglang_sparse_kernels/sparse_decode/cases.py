"""Shapes on which sparse decode attention is tested and measured."""

from dataclasses import dataclass
from typing import Any

import torch

from ..common.testing import PagedBatch, paged_batch, random_cache, seeded

FP32, FP16, BF16, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """Rows of ``lengths`` tokens (0 is a padded row) that attend to ``ratio`` of their pages, at least one.

    With more than one of ``queries`` every KV head selects the newest pages, as many as these tokens can be in.
    """

    lengths: tuple[int, ...]
    page_size: int
    heads: int
    group: int
    dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    ratio: float = 0.5
    v_dim: int = 0
    max_select: int = 0
    k_scale: float = 1.0
    v_scale: float = 1.0
    gpu_only: bool = False
    queries: int = 1

    @property
    def newest(self) -> int:
        """Pages at the end of each selection."""
        return 1 + (self.queries + self.page_size - 2) // self.page_size


CASES = [
    Case((150, 0, 33, 1), 16, 2, 4, 128, BF16, BF16),
    Case((90,), 16, 1, 1, 64, FP32, FP32),
    Case((200, 77), 8, 1, 7, 96, FP16, FP16),
    Case((130,), 32, 1, 2, 256, BF16, BF16),
    Case((300,), 64, 1, 8, 512, BF16, BF16),
    Case((140, 20), 64, 2, 4, 64, FP16, FP16),
    Case((70, 40), 1, 2, 4, 64, BF16, BF16, ratio=0.6),
    Case((50,), 2, 1, 8, 128, BF16, BF16, ratio=1.0),
    Case((100, 64), 4, 2, 2, 64, FP16, FP16, max_select=40),
    Case((150, 31), 16, 2, 4, 128, BF16, FP8, k_scale=0.5, v_scale=2.0),
    Case((60,), 16, 1, 7, 96, FP16, FP8, k_scale=1.5),
    Case((120,), 16, 2, 4, 128, BF16, BF16, v_dim=64),
    Case((65536,) * 4, 16, 8, 4, 128, BF16, BF16, ratio=0.1, max_select=820, gpu_only=True),
    Case((131072,), 16, 8, 4, 128, BF16, BF16, ratio=0.1, gpu_only=True),
    Case((40000, 17, 3001, 0, 9000), 16, 4, 7, 128, FP16, FP16, ratio=0.1, gpu_only=True),
    Case((40000, 1700), 64, 4, 8, 256, BF16, BF16, ratio=0.1, gpu_only=True),
    Case((20000, 1700), 1, 8, 2, 128, BF16, BF16, ratio=0.1, gpu_only=True),
    Case((20000, 1700), 16, 32, 1, 96, BF16, FP8, ratio=0.2, gpu_only=True),
    Case((16,) * 200, 16, 8, 4, 128, BF16, BF16, gpu_only=True),
]
# Their tokens are in one page, cross its end by one and by all but one, end with it, and are the whole row.
QUERIES = [
    Case((150, 0, 33, 2), 16, 2, 4, 128, BF16, BF16, queries=2),
    Case((90, 48, 49, 51), 16, 1, 1, 64, FP32, FP32, queries=4),
    Case((64, 65, 68, 5), 16, 2, 4, 64, FP16, FP16, queries=5),
    Case((70, 131), 4, 1, 8, 64, BF16, BF16, queries=5),
    Case((40, 21), 2, 1, 7, 96, FP16, FP16, queries=4, v_dim=64),
    Case((30, 9), 1, 2, 1, 64, FP16, FP16, queries=4),
    Case((150, 33), 16, 2, 4, 128, BF16, FP8, k_scale=0.5, v_scale=2.0, queries=5),
    Case((131072,) * 6, 16, 8, 4, 128, BF16, BF16, ratio=0.1, gpu_only=True, queries=5),
    Case((40000, 8, 3001, 0, 9000), 64, 4, 8, 128, FP16, FP8, ratio=0.1, gpu_only=True, queries=4),
]


def make(case: Case, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """Arguments of ``sparse_decode``; unwritten slots of the cache hold NaN."""
    generator = seeded(device, seed)
    batch = paged_batch(case.lengths, case.page_size, device, generator)
    caches = []
    for dim in (case.dim, case.v_dim or case.dim):
        shape = (batch.num_pages * case.page_size, case.heads, dim)
        caches.append(_poisoned(random_cache(shape, case.kv_dtype, device, generator), batch, case.page_size))
    indices, counts = _selection(case, batch, generator)
    shape = (len(case.lengths), case.heads * case.queries * case.group, case.dim)
    return {
        "q": torch.randn(shape, device=device, generator=generator).to(case.dtype),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "indices": indices,
        "counts": counts,
        "last_slots": batch.last_slots,
        "page_size": case.page_size,
        "sm_scale": case.dim**-0.5,
        "k_scale": case.k_scale,
        "v_scale": case.v_scale,
        **({"queries": case.queries} if case.queries > 1 else {}),
    }


def _poisoned(cache: torch.Tensor, batch: PagedBatch, page_size: int) -> torch.Tensor:
    """NaN in the dummy page and in the unwritten slots of each row's last page."""
    unwritten = [torch.arange(page_size, device=cache.device)]
    for last_slot in batch.last_slots.tolist():
        if last_slot >= 0:
            page_end = (last_slot // page_size + 1) * page_size
            unwritten.append(torch.arange(last_slot + 1, page_end, device=cache.device))
    # 0x7F is NaN in float8, and 0x7F7F or 0x7F7F7F7F are huge in the wider dtypes: fill those by value.
    if cache.dtype == FP8:
        cache.view(torch.uint8)[torch.cat(unwritten)] = 0x7F
    else:
        cache[torch.cat(unwritten)] = float("nan")
    return cache


def _selection(case: Case, batch: PagedBatch, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random pages in logical order, the newest one among them for every other KV head, or with queries for all."""
    rows, width = batch.page_table.shape
    device = batch.page_table.device
    least = case.newest if case.queries > 1 else 0
    wanted = (batch.n_pages * case.ratio).ceil().int().clamp(min=least).minimum(batch.n_pages)
    counts = wanted[:, None].expand(rows, case.heads).contiguous()
    indices = torch.full((rows, case.heads, max(case.max_select, int(counts.max()))), -1, device=device).int()
    priority = torch.rand(rows, case.heads, width, device=device, generator=generator)
    for row, pages in enumerate(batch.n_pages.tolist()):
        if pages:
            priority[row, :: 1 if least else 2, max(0, pages - max(1, least)) : pages] = 2.0
            picked = priority[row, :, :pages].topk(int(counts[row, 0])).indices.sort().values
            indices[row, :, : picked.shape[1]] = batch.page_table[row][picked]
    return indices, counts
