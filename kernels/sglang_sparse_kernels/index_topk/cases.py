"""Shapes and logits on which the token selection is tested and measured."""

from dataclasses import dataclass
from typing import Any

import torch

from ..common.testing import paged_batch, seeded
from ..index_keys import PAGE_SIZE


@dataclass(frozen=True)
class Case:
    """``lengths`` of each query and, if given, its ``first`` column, in rows of ``width`` (0: as wide as the longest)
    that are ``gap`` elements apart; ``kind`` names a distribution of ``scores``.
    """

    lengths: tuple[int, ...]
    topk: int
    first: tuple[int, ...] = ()
    width: int = 0
    gap: int = 0
    kind: str = "normal"
    wanted: tuple[int, ...] = ()
    gpu_only: bool = False

    def __str__(self) -> str:
        return f"{len(self.lengths)}x{max(self.lengths)} top {self.topk} {self.kind}" + " moved" * bool(self.first)


KINDS = ("normal", "ties", "constant", "zeros", "special", "wide", "rising", "lowest", "outliers")
CASES = [
    Case((100, 37, 1, 0, 20, 19, 21), 20),
    Case((300, 200, 299), 30, width=317, gap=3),
    Case((90, 0, 130, 61, 64), 16, first=(3, 0, 1, 200, 66), width=273, gap=1),
    *(Case((190, 61), 24, first=(2, 7), kind=kind, gap=5) for kind in KINDS[1:]),
    Case((80, 80, 80, 5), 40, wanted=(7, 0, 90, 3)),
    Case((1500, 700), 200, width=1501),
    Case((131072,), 2048, width=131136, gap=256, gpu_only=True),
    Case((131072, 2048, 0, 77777) * 8, 2048, width=131136, gpu_only=True),
    Case((32768, 5000, 2049, 4993) * 5, 2048, first=(0, 3, 70, 1) * 5, width=33001, gap=1, gpu_only=True),
    Case((1 << 20, (1 << 20) - 3), 2048, first=(0, 3), kind="wide", gpu_only=True),
    *(Case((131000, 9000), 2048, first=(1, 40), kind=kind, gpu_only=True) for kind in KINDS[1:]),
    *(Case((140000 - 7, 9000) * 150, 2048, first=(7, 40) * 150, kind=kind, gpu_only=True) for kind in KINDS[::3]),
    Case((100000, 4097, 4096) * 120, 4096, gpu_only=True),
]


def make(case: Case, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """Arguments of ``index_topk``; what is not a query's own is NaN, which would be selected first."""
    generator = seeded(device, seed)
    queries, integers = len(case.lengths), {"dtype": torch.int32, "device": device}
    first = torch.tensor(case.first or (0,) * queries, **integers)
    lengths = torch.tensor(case.lengths, **integers)
    width = case.width or max(1, int((first + lengths).max()))
    logits = torch.full((queries, width + case.gap), float("nan"), device=device)[:, :width]
    for query, (begin, length) in enumerate(zip(first.tolist(), case.lengths, strict=True)):
        logits[query, begin : begin + length] = scores(case.kind, length, device, generator)
    batch = paged_batch((max(case.lengths),) * 3, PAGE_SIZE, device, generator)
    rows = torch.randint(0, 3, (queries,), device=device, generator=generator).int()
    arguments = {
        "logits": logits,
        "lengths": lengths,
        "topk": case.topk,
        "page_table": batch.page_table,
        # That of a query without tokens is never read.
        "rows": torch.where(lengths > 0, rows, 1 << 30),
    }
    if case.first:
        arguments["first"] = first
    if case.wanted:
        arguments["wanted"] = torch.tensor(case.wanted, **integers)
    return arguments


def scores(kind: str, length: int, device: torch.device | str, generator: torch.Generator) -> torch.Tensor:
    """Logits of a row, by the name of their distribution."""
    normal = torch.randn(length, device=device, generator=generator)
    place = torch.arange(length, device=device)
    special = torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0, 3.4e38, -3.4e38], device=device)
    kinds = {
        "normal": normal,
        "ties": normal.round(),
        "constant": torch.full_like(normal, -2.5),
        "zeros": torch.where(normal > 0, 0.0, -0.0),
        "special": torch.where(normal.abs() < 0.5, special[(normal * 1000).long().abs() % 6], normal),
        "wide": normal.sign() * (20.0 * normal).exp(),
        "rising": place + normal,
        # Fewer that are more than the least than are wanted.
        "lowest": torch.where(normal > 2.0, normal, float("-inf")),
        # Neighbours alone are high, of which a sample sees few.
        "outliers": torch.where(place % 1000 < length // 70, normal.abs() + 50.0, normal * 1e-3),
    }
    return kinds[kind]
