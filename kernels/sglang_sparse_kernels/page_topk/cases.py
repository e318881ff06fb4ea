"""Shapes and score distributions on which the page selection is tested and measured."""

from dataclasses import dataclass
from typing import Any

import torch

from ..common.testing import paged_batch, seeded


@dataclass(frozen=True)
class Case:
    """``n_pages`` and ``n_select`` per row; ``scores`` names a distribution of ``_scores``."""

    n_pages: tuple[int, ...]
    n_select: tuple[int, ...]
    max_select: int
    heads: int = 2
    scores: str = "normal"
    width: int = 0
    gpu_only: bool = False


CASES = [
    Case((100, 37, 1, 64), (10, 16, 1, 16), 20),
    Case((100, 100, 5, 0), (0, 100, 16, 4), 128, width=130),
    Case((300, 200), (30, 400), 40),
    Case((150, 90), (13, 40), 40, scores="ties"),
    Case((150, 90), (13, 89), 89, scores="constant"),
    Case((128, 129), (60, 64), 64, scores="zeros"),
    Case((90, 200), (30, 64), 64, scores="special"),
    Case((64, 64), (63, 1), 64, scores="wide"),
    Case((1500, 300), (150, 30), 150, width=1600),
    Case((4096,) * 8, (410,) * 8, 820, heads=8, width=8192, gpu_only=True),
    Case((8192, 20000, 1, 9000), (820, 2000, 1, 8999), 2000, heads=8, gpu_only=True),
    Case((65536, 65535), (6554, 16), 6554, heads=8, gpu_only=True),
    Case((65536, 30000), (6554, 16), 6554, heads=4, scores="ties", gpu_only=True),
    Case((20000, 8193), (6000, 8000), 6554, heads=4, scores="special", gpu_only=True),
]


def make(case: Case, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """Arguments of ``page_topk``."""
    generator = seeded(device, seed)
    batch = paged_batch(case.n_pages, 1, device, generator, case.width)
    shape = (len(case.n_pages), case.heads, batch.page_table.shape[1])
    # Positions beyond a row's pages must never be read: NaN there would be selected first.
    held = torch.arange(shape[2], device=device) < batch.n_pages[:, None]
    scores = _scores(case.scores, torch.randn(shape, device=device, generator=generator))
    return {
        "scores": scores.masked_fill(~held[:, None], float("nan")),
        "page_table": batch.page_table,
        "n_pages": batch.n_pages,
        "n_select": torch.tensor(case.n_select, dtype=torch.int32, device=device),
        "max_select": case.max_select,
    }


def _scores(kind: str, normal: torch.Tensor) -> torch.Tensor:
    if kind == "ties":
        return normal.round()
    if kind == "constant":
        return torch.full_like(normal, -2.5)
    if kind == "zeros":
        return torch.where(normal > 0, 0.0, -0.0)
    if kind == "wide":
        return normal.sign() * (20.0 * normal).exp()
    if kind == "special":
        special = torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0], device=normal.device)
        picked = special[(normal * 1000).long().abs() % 4]
        return torch.where(normal.abs() < 0.5, picked, normal)
    return normal
