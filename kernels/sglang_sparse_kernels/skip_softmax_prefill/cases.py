"""Shapes on which Skip-Softmax prefill is tested and measured."""

from dataclasses import dataclass
from typing import Any

import torch

from ..anchor_prefill import cases as anchor
from ..anchor_prefill.cases import BF16, FP8, FP16, FP32
from .plan import BLOCK_KEYS, TILE_QUERIES, Span, make_plan


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
    tile_queries: int = 16
    block_keys: int = 16
    factor: float = 10.0
    v_dim: int = 0
    k_scale: float = 1.0
    v_scale: float = 1.0
    stripes: float = 0.05
    gpu_only: bool = False


_FULL: dict[str, Any] = {"tile_queries": TILE_QUERIES, "block_keys": BLOCK_KEYS}
_LARGE: dict[str, Any] = {**_FULL, "factor": 300.0, "stripes": 0.002, "gpu_only": True}
CASES = [
    Case((0,), (101,), 16, 2, 4, 64, BF16, BF16),
    Case((37, 0, 64, 95), (50, 0, 1, 33), 16, 1, 4, 64, FP16, FP16),
    Case((0, 70), (96, 30), 1, 2, 1, 64, FP32, FP32),
    Case((41,), (60,), 8, 1, 7, 96, FP16, FP16),
    Case((5,), (70,), 4, 1, 4, 128, BF16, BF16, tile_queries=32),
    Case((20,), (180,), 64, 1, 2, 64, BF16, BF16, block_keys=32),
    Case((48,), (51,), 16, 1, 4, 128, BF16, FP8, k_scale=0.5, v_scale=2.0),
    Case((50,), (47,), 16, 1, 2, 128, BF16, BF16, v_dim=64),
    Case((33,), (90,), 2, 1, 2, 80, FP16, FP16, tile_queries=16, block_keys=64),
    Case((300,), (200,), 32, 1, 1, 64, BF16, BF16, factor=50.0, stripes=0.01, **_FULL),
    Case((400, 0), (250, 70), 16, 1, 2, 128, BF16, BF16, factor=50.0, stripes=0.01, **_FULL),
    Case((500,), (100,), 64, 1, 2, 64, FP16, FP16, v_dim=128, factor=50.0, stripes=0.01, **_FULL),
    Case((0,), (32768,), 16, 8, 4, 128, BF16, BF16, **_LARGE),
    Case((24576,), (8192,), 64, 8, 4, 128, BF16, BF16, **_LARGE),
    Case((12001, 0, 5, 2048), (3001, 1, 0, 4096), 1, 4, 7, 128, FP16, FP16, **_LARGE),
    Case((9000, 100), (4000, 3000), 16, 8, 2, 64, BF16, BF16, **_LARGE),
    Case((7000,), (5000,), 16, 8, 4, 128, BF16, FP8, k_scale=0.5, **_LARGE),
    Case((7000,), (3000,), 16, 8, 1, 96, FP16, FP16, **_LARGE),
    Case((7000,), (3000,), 16, 2, 8, 256, BF16, BF16, **_LARGE),
]


def make(case: Case, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """Arguments of ``skip_softmax_prefill``: the queries and keys of anchor attention, with all spans sparse."""
    shared = (case.prefixes, case.extends, case.page_size, case.heads, case.group, case.dim, case.dtype, case.kv_dtype)
    scales = {"v_dim": case.v_dim, "k_scale": case.k_scale, "v_scale": case.v_scale}
    arguments = anchor.make(anchor.Case(*shared, **scales, stripes=case.stripes), device, seed)
    del arguments["theta"]
    lengths = enumerate(zip(case.prefixes, case.extends, strict=True))
    spans = [Span(row, prefix, prefix + extend) for row, (prefix, extend) in lengths if extend]
    arguments["plan"] = make_plan(spans, len(case.prefixes), device, case.tile_queries, case.block_keys)
    arguments["threshold_scale_factor"] = torch.full((len(case.prefixes),), case.factor, device=device)
    return arguments
