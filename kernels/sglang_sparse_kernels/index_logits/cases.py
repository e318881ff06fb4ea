"""Shapes on which the index logits are tested and measured."""

from dataclasses import dataclass
from typing import Any

import torch

from ..common.testing import paged_batch, seeded
from ..index_keys import PAGE_SIZE
from ..index_keys.reference import quantize, store


@dataclass(frozen=True)
class Case:
    """``queries`` are pairs of a row and a length in a table of ``width`` pages (0: as wide as the longest row)."""

    queries: tuple[tuple[int, int], ...]
    heads: int = 16
    width: int = 0
    gpu_only: bool = False

    def __str__(self) -> str:
        return f"{len(self.queries)} queries from {self.queries[0]} to {self.queries[-1]}, {self.heads} heads"

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """Tokens of each row: those of its longest query."""
        rows = 1 + max(row for row, _ in self.queries)
        return tuple(max([length for own, length in self.queries if own == row], default=0) for row in range(rows))


def decode(*lengths: int) -> tuple[tuple[int, int], ...]:
    """One query a row."""
    return tuple(enumerate(lengths))


def chunk(row: int, first: int, end: int) -> tuple[tuple[int, int], ...]:
    """The queries of the tokens ``first`` to ``end - 1`` of a prompt, each of which sees itself."""
    return tuple((row, position + 1) for position in range(first, end))


CASES = [
    Case(decode(1, 63, 64, 65, 127, 128, 129, 0, 300), width=9),
    Case(decode(700), heads=64),
    Case(decode(130, 5, 0), heads=32, width=40),
    Case(chunk(0, 0, 21)),
    Case(chunk(0, 120, 133), heads=33),
    Case((*chunk(0, 126, 131), *chunk(1, 0, 6), *chunk(2, 60, 70), *chunk(1, 6, 8))),
    Case((*chunk(1, 60, 66), (0, 0), (0, 0), *chunk(1, 66, 70), *((0, 0),) * 3), heads=20, width=3),
    Case(((0, 0),) * 9, width=2),
    Case(decode(*(32768, 17, 8191, 0) * 8), heads=64, width=2048, gpu_only=True),
    Case(chunk(0, 30000, 30512), heads=64, gpu_only=True),
    Case((*chunk(0, 4000, 4100), *chunk(1, 0, 77), *chunk(2, 9000, 9300)), heads=32, gpu_only=True),
]


def make(case: Case, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """Arguments of ``index_logits``; whatever no token was written to is NaN, in the keys and in their scales."""
    generator = seeded(device, seed)
    batch = paged_batch(case.row_lengths, PAGE_SIZE, device, generator, case.width)
    buffer = torch.full((batch.num_pages, PAGE_SIZE * (128 + 4)), 0xFF, dtype=torch.uint8, device=device)
    for pages, length in zip(batch.page_table.long(), case.row_lengths, strict=True):
        keys = _quantized((length, 128), device, generator)
        token = torch.arange(length, device=device)
        store(*keys, pages[token // PAGE_SIZE] * PAGE_SIZE + token % PAGE_SIZE, buffer)
    rows, lengths = torch.tensor(case.queries, dtype=torch.int32, device=device).T.contiguous()
    q, scales = _quantized((len(case.queries), case.heads, 128), device, generator)
    gates = torch.randn(scales.shape, device=device, generator=generator)
    return {
        "q": q,
        "weights": gates * scales * (128 * case.heads) ** -0.5,
        "buffer": buffer,
        "page_table": batch.page_table,
        "rows": rows,
        "lengths": lengths,
    }


def _quantized(
    shape: tuple[int, ...], device: torch.device | str, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty(shape[:-1], device=device)
    return quantize(torch.randn(shape, device=device, generator=generator), True, (values, scales))
