"""Shapes on which Skip-Softmax decode is tested and measured."""

from dataclasses import dataclass
from typing import Any

import torch

from ..anchor_prefill import cases as anchor
from ..anchor_prefill.cases import BF16, FP8, FP16, FP32


@dataclass(frozen=True)
class Case:
    """Rows of ``lengths`` tokens (0 is a padded row), in which ``stripes`` of the keys stand out."""

    lengths: tuple[int, ...]
    page_size: int
    heads: int
    group: int
    dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    factor: float = 30.0
    v_dim: int = 0
    k_scale: float = 1.0
    v_scale: float = 1.0
    stripes: float = 0.01
    gpu_only: bool = False


_LARGE: dict[str, Any] = {"stripes": 0.005, "gpu_only": True}
CASES = [
    Case((500, 0, 130, 1), 16, 2, 4, 128, BF16, BF16),
    Case((450,), 16, 1, 1, 64, FP32, FP32),
    Case((700, 321), 8, 1, 7, 96, FP16, FP16),
    Case((400,), 32, 1, 2, 256, BF16, BF16),
    Case((400,), 16, 1, 8, 512, BF16, BF16),
    Case((640, 65), 64, 2, 8, 64, FP16, FP16, factor=50.0),
    Case((391, 256), 1, 1, 4, 64, BF16, BF16, factor=100.0),
    Case((500,), 2, 2, 2, 128, BF16, BF16),
    Case((449, 64), 4, 1, 2, 64, FP16, FP16),
    Case((500, 31), 16, 2, 4, 128, BF16, FP8, k_scale=0.5, v_scale=2.0),
    Case((400,), 16, 1, 4, 128, BF16, BF16, v_dim=80),
    Case((131072,), 16, 8, 4, 128, BF16, BF16, factor=20000.0, **_LARGE),
    Case((65536,) * 4, 64, 8, 4, 128, BF16, BF16, factor=10000.0, **_LARGE),
    Case((40000, 17, 3001, 0, 9000), 1, 4, 7, 128, FP16, FP16, factor=300.0, **_LARGE),
    Case((40000, 1700), 64, 4, 8, 256, BF16, BF16, factor=600.0, **_LARGE),
    Case((20000, 1700), 16, 8, 2, 64, BF16, BF16, factor=1200.0, **_LARGE),
    Case((20000, 1700), 16, 32, 1, 96, BF16, FP8, factor=300.0, k_scale=0.5, **_LARGE),
    Case((3000, 500) * 100, 16, 8, 4, 128, BF16, BF16, factor=50.0, **_LARGE),
    Case((9000,), 16, 1, 32, 128, BF16, BF16, factor=2400.0, **_LARGE),
]


def make(case: Case, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """Arguments of ``skip_softmax_decode``: keys of anchor attention, with the queries of each row's last position.

    Unwritten slots of the caches hold NaN, and so does the query of a padded row.
    """
    prefixes = tuple(max(length - 1, 0) for length in case.lengths)
    extends = tuple(min(length, 1) for length in case.lengths)
    shared = (prefixes, extends, case.page_size, case.heads, case.group, case.dim, case.dtype, case.kv_dtype)
    scales = {"v_dim": case.v_dim, "k_scale": case.k_scale, "v_scale": case.v_scale}
    arguments = anchor.make(anchor.Case(*shared, **scales, stripes=case.stripes), device, seed)
    del arguments["theta"], arguments["plan"]
    lengths = torch.tensor(case.lengths, device=device)
    q = torch.full((len(lengths), *arguments["q"].shape[1:]), float("nan"), dtype=case.dtype, device=device)
    q[lengths > 0] = arguments["q"]
    last = (lengths - 1).clamp(min=0)
    last_pages = arguments["page_table"].gather(1, (last // case.page_size)[:, None])[:, 0].long()
    return {
        **arguments,
        "q": q,
        "n_pages": (-(-lengths // case.page_size)).int(),
        "last_slots": torch.where(lengths > 0, last_pages * case.page_size + last % case.page_size, -1),
        "threshold_scale_factor": torch.full((len(lengths),), case.factor, device=device),
    }
