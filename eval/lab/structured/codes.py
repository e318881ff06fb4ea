"""Codes of blocks, which hardly correlate; see `eval.lab.structured.structure`."""

from __future__ import annotations

import math

import torch


def chirps(count: int, dims: int) -> torch.Tensor:
    """`count` codes ``[count, 2 p]`` float32 of length 1, p the largest prime up to a quarter of the dimensions.

    Raises:
        ValueError: fewer than 20 dimensions, or more codes than there are.
    """
    if dims < 20:
        raise ValueError(f"a head, or the RoPE part of one, must have at least 20 dimensions, got {dims}")
    p = next(n for n in range(dims // 4, 4, -1) if all(n % divisor for divisor in range(2, math.isqrt(n) + 1)))
    if count > p**3:
        raise ValueError(f"{dims} dimensions have codes for {p**3} blocks, needed are {count}: raise band_tokens")
    index, j = torch.arange(count)[:, None], torch.arange(p)
    turns = (index // p**2 * j**3 + index // p % p * j**2 + index % p * j) % p
    phase = turns * (2 * math.pi / p)
    return torch.cat([phase.cos(), phase.sin()], 1) / math.sqrt(p)


def own_and_previous(codes: torch.Tensor) -> torch.Tensor:
    """For each block what gives 1 with its own code and with the code before it."""
    wanted = codes.clone()
    overlap = (codes[1:] * codes[:-1]).sum(-1, keepdim=True)
    wanted[1:] = (codes[1:] + codes[:-1]) / (1 + overlap)
    return wanted
