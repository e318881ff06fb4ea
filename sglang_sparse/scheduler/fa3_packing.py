"""Division of rows into rectifying passes, by FlashAttention-3's division of a batch among multiprocessors.

It cuts each row's keys into parts, as few as leave none longer than a multiprocessor's share of the whole batch and a
tenth, and then each multiprocessor takes one part after the other. So a batch takes as long as its rounds of parts:
six rows of eight KV heads and two tiles of queries are 96 tiles; cut in two they are 192 parts for 132 multiprocessors,
two rounds of half the keys, as long as not cut at all. Four of these rows are 128 parts, one round of half the keys,
and the other two, cut in four, a round of a quarter: together three quarters of the time.

Source: ``hopper/flash_prepare_scheduler.cu`` and ``tile_size.h`` of FlashAttention, as sglang-kernel has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang_sparse.methods.base import ModelShape

# Indices of the rows of each pass, from the queries and the keys of each row.
Divide = Callable[[Sequence[tuple[int, int]]], list[list[int]]]

# Queries and keys of a tile, for heads of this dimension.
TILE = 128
HEAD_DIM = 128
MARGIN = 1.1
# What one more pass takes, most of it to read the weights, as tiles of keys that each multiprocessor reads in each
# layer: 53 for Qwen3-8B on an H200. One number for all models, as all tensor-parallel ranks must decide alike.
PASS_TILES = 64


@dataclass(frozen=True)
class Divider:
    """Divides the rows of rectifying passes.

    Attributes:
        q_per_kv: query heads of a KV head.
        kv_heads: of this rank.
        processors: streaming multiprocessors of the GPU.
    """

    q_per_kv: int
    kv_heads: int
    processors: int

    def divide(self, rows: Sequence[tuple[int, int]]) -> list[list[int]]:
        """Divide a batch into passes.

        Args:
            rows: for each row its queries, and its keys with them.

        Returns:
            The indices of the rows of each pass, ascending; one pass with all of them where more would take longer.
        """
        everything = [list(range(len(rows)))]
        if len(rows) < 2 or self._tiles(rows) <= PASS_TILES:
            return everything
        # Rows of like length together: the longest part of a round is what it takes.
        order = sorted(everything[0], key=lambda row: -rows[row][1])
        best: list[tuple[int, list[list[int]]]] = [(0, [])]
        for end in range(1, len(order) + 1):
            ways = [
                (best[start][0] + self.tiles([rows[row] for row in order[start:end]]) + PASS_TILES, start)
                for start in range(end)
            ]
            taken, start = min(ways)
            best.append((taken, [*best[start][1], sorted(order[start:end])]))
        return best[-1][1]

    def tiles(self, rows: Sequence[tuple[int, int]]) -> int:
        """Tiles of keys that the busiest multiprocessor reads in each layer of a pass over ``rows``."""
        share = math.ceil(self._tiles(rows) * MARGIN)
        parts = []
        for queries, keys in rows:
            cuts = math.ceil(keys / TILE / share)
            parts.append((math.ceil(keys / TILE / cuts), cuts * self._rows_of_tiles(queries)))
        taken = seen = begun = 0
        # A round takes as long as its longest part.
        for length, count in sorted(parts, reverse=True):
            seen += count
            while begun < seen:
                taken += length
                begun += self.processors
        return taken

    def _tiles(self, rows: Sequence[tuple[int, int]]) -> float:
        """Return `tiles` for evenly divided work."""
        return sum(self._rows_of_tiles(queries) * math.ceil(keys / TILE) for queries, keys in rows) / self.processors

    def _rows_of_tiles(self, queries: int) -> int:
        return math.ceil(queries * self.q_per_kv / TILE) * self.kv_heads


def divider_of(prefill_backend: str, model: ModelShape, device: torch.device) -> Divide | None:
    """Return `Divider.divide` for a server whose passes it is about; None for others.

    Args:
        prefill_backend: SGLang's name for what attends in prefill.
        model: the attention layers of this rank.
        device: of the KV pool.
    """
    tiled = model.head_dim == HEAD_DIM and not model.rope_dim and model.kv_dtype.itemsize == 2
    if prefill_backend != "fa3" or device.type != "cuda" or not tiled:
        return None
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    counts = {gpu.multi_processor_count for gpu in gpus}
    if len(counts) > 1:
        # Ranks that divide a step otherwise would wait for each other.
        return None
    return Divider(model.num_q_heads // model.num_kv_heads, model.num_kv_heads, counts.pop()).divide
