"""Shapes and distributions of mass on which the top-p selection is tested and measured."""

from dataclasses import dataclass
from typing import Any

import torch

from ..common.testing import paged_batch, seeded


@dataclass(frozen=True)
class Case:
    """Per row ``n_blocks``, ``capacity`` and ``top_p``; ``mass`` names a distribution of ``_masses``."""

    n_blocks: tuple[int, ...]
    capacity: tuple[int, ...]
    top_p: tuple[float, ...]
    mass: str = "concentrated"
    width: int = 0
    gpu_only: bool = False


CASES = [
    Case((100, 37, 1, 64), (60, 20, 0, 40), (0.9, 0.5, 0.9, 0.99)),
    Case((100, 100, 5, 0, 1), (99, 100, 16, 4, 1), (0.999, 0.9, 0.9, 0.9, 1.0), width=130),
    Case((300, 200, 90), (60, 3, 89), (0.9, 0.9, 1.0)),
    Case((150, 90, 33), (149, 40, 32), (0.5, 0.9, 0.96), mass="ties"),
    Case((150, 90, 64), (149, 80, 56), (0.5, 0.9, 0.875), mass="constant"),
    Case((128, 129, 40), (60, 64, 39), (0.9, 0.99, 1e-6), mass="zeros"),
    Case((90, 200, 60), (80, 150, 30), (0.9, 0.5, 0.5), mass="special"),
    Case((70, 40), (60, 30), (0.9, 0.5), mass="unknown"),
    Case((200, 64), (150, 60), (0.9, 1e-10), mass="one"),
    Case((130, 64), (120, 50), (0.9, 0.6), mass="flat"),
    Case((), (), (), width=4),
    Case((0, 0), (5, 0), (0.9, 0.9), width=4),
    Case((1500, 300), (500, 100), (0.95, 0.9), width=1600),
    Case((4096,) * 8, (2048,) * 8, (0.9,) * 8, width=8192, gpu_only=True),
    Case((8192, 20000, 1, 9000), (4096, 10000, 1, 100), (0.95, 0.9, 0.9, 0.95), gpu_only=True),
    Case((65536, 65535), (32768, 65534), (0.9, 0.9999), gpu_only=True),
    Case((65536, 30000, 8192), (65535, 29000, 8000), (0.9, 0.99, 0.5), mass="ties", gpu_only=True),
    Case((20000, 8193, 4097), (19000, 8000, 4096), (0.9, 0.5, 0.9), mass="flat", gpu_only=True),
    Case((20000, 8193, 4097), (19000, 8000, 4096), (0.9, 0.5, 0.9), mass="constant", gpu_only=True),
]


def make(case: Case, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """Arguments of ``block_topp``."""
    generator = seeded(device, seed)
    batch = paged_batch(case.n_blocks, 1, device, generator, case.width)
    held = torch.arange(batch.page_table.shape[1], device=device) < batch.n_pages[:, None]
    mass = _masses(case.mass, torch.randn(held.shape, device=device, generator=generator), held)
    return {
        # Positions beyond a row's blocks must never be read: NaN there would select all blocks.
        "mass": mass.masked_fill(~held, float("nan")),
        "block_table": batch.page_table,
        "n_blocks": batch.n_pages,
        "capacity": torch.tensor(case.capacity, dtype=torch.int32, device=device),
        "top_p": torch.tensor(case.top_p, dtype=torch.float32, device=device),
    }


def random_rows(rows: int, width: int, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """Arguments of rows of all lengths, whose masses are spread widely or hardly; half of their sets overflow."""
    generator = seeded(device, seed)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, device=device, generator=generator)

    n_blocks = (1 + uniform(rows) * width).int().clamp(max=width)
    held = torch.arange(width, device=device) < n_blocks[:, None]
    normal = torch.randn(rows, width, device=device, generator=generator)
    weight = (3 * uniform(rows, 1) * normal).exp()
    weight = torch.where(uniform(rows, 1) < 0.3, (weight * 2).round(), weight) * held
    weight[:, 0] += 0.5
    return {
        "mass": (weight / weight.sum(dim=1, keepdim=True)).masked_fill(~held, float("nan")),
        "block_table": torch.argsort(uniform(rows, width), dim=1).int(),
        "n_blocks": n_blocks,
        "capacity": (uniform(rows) * (n_blocks + 1)).int(),
        "top_p": 0.9999 - 0.7 * uniform(rows) ** 2,
    }


def _masses(kind: str, normal: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """Masses ``[B, M]`` that sum to 1 over the held, from normal random numbers."""
    if kind == "unknown":
        return torch.zeros_like(normal)
    if kind == "one":
        return (normal == normal.masked_fill(~held, float("-inf")).amax(dim=1, keepdim=True)).float()
    weight = {
        # Nine tenths of the mass in less than a tenth of the blocks, as in the paper at 128k tokens.
        "concentrated": (2.8 * normal).exp(),
        "flat": 1 + 0.01 * normal,
        "ties": normal.round().exp2(),
        "constant": torch.ones_like(normal),
        "zeros": normal.exp() * (normal > 1),
        "special": normal.exp(),
    }[kind]
    mass = weight / weight.masked_fill(~held, 0).sum(dim=1, keepdim=True)
    if kind == "special":
        # Some that count as 0, and in the rows after the first one that makes all of the row unknown.
        zeros = torch.tensor([float("-inf"), -0.0, -1.0, 1e-40], device=mass.device)
        mass = torch.where(normal.abs() < 0.5, zeros[(normal * 1000).long().abs() % 4], mass)
        mass[1::2, 0] = float("nan")
        mass[2::2, 0] = float("inf")
    return mass
