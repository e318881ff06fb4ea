"""The query tiles of a ragged extend pass: made once a pass, used by all of its layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

# Part of the definition: what is skipped depends on both. Not measured yet.
TILE_QUERIES = 128
BLOCK_KEYS = 64
_MIN_SIZE, _MAX_SIZE = 16, 128


class Span(NamedTuple):
    """Consecutive query tokens of one row: positions ``start`` to ``end - 1``. Those of dense spans skip nothing."""

    row: int
    start: int
    end: int
    sparse: bool = True


class QueryTile(NamedTuple):
    """The queries of one tile of absolute positions that are in this pass, and sparse or dense alike.

    ``first_query`` counts from the first query of the pass; ``first_position`` is absolute. ``context`` is the position
    behind the complete tile, whatever of it is in this pass; 0 for dense queries.
    """

    row: int
    first_position: int
    first_query: int
    num_queries: int
    context: int


@dataclass(frozen=True)
class SkipSoftmaxPlan:
    """The plan that ``make_plan`` returns.

    ``table`` has a row of int32 for each of ``tiles``. ``max_length`` is the longest row with its prefix. ``totals``
    ``[4]`` int64 has for one query head what the op's statistics would be if nothing was skipped. Both are on the
    device.
    """

    tile_queries: int
    block_keys: int
    num_rows: int
    num_queries: int
    max_length: int
    tiles: tuple[QueryTile, ...]
    table: torch.Tensor
    totals: torch.Tensor

    @property
    def device(self) -> torch.device:
        """The device of the op."""
        return self.table.device


def make_plan(
    spans: Sequence[Span],
    num_rows: int,
    device: torch.device | str,
    tile_queries: int = TILE_QUERIES,
    block_keys: int = BLOCK_KEYS,
) -> SkipSoftmaxPlan:
    """Cut the queries of a pass into tiles that are aligned to absolute positions.

    Args:
        spans: all query tokens, in the order in which they lie in ``q``; the keys of a row's earlier positions are in
            the cache.
        num_rows: rows of the page table.
        device: where the op runs; the tables reach it without blocking the host.
        tile_queries: queries that are skipped for together, a power of two from 16 to 128.
        block_keys: keys that are skipped together, likewise.

    Returns:
        A plan for any number of calls with these queries.

    Raises:
        ValueError: a wrong size, or a span that is empty, negative or of no row.
    """
    for name, size in (("tile_queries", tile_queries), ("block_keys", block_keys)):
        if not _MIN_SIZE <= size <= _MAX_SIZE or size & (size - 1):
            raise ValueError(f"{name} must be a power of two from {_MIN_SIZE} to {_MAX_SIZE}, got {size}")
    for span in spans:
        if not (0 <= span.row < num_rows and 0 <= span.start < span.end):
            raise ValueError(f"spans must have tokens, of the rows 0 to {num_rows - 1}, got {span}")
    tiles = _tiles(spans, tile_queries)
    ends = [tile.first_position + tile.num_queries for tile in tiles]
    pairs = sum((span.end - span.start) * (span.start + 1 + span.end) // 2 for span in spans)
    device = torch.device(device)
    pinned = device.type == "cuda"
    table = torch.tensor(tiles, dtype=torch.int32, pin_memory=pinned).view(-1, len(QueryTile._fields))
    visited = sum(-(-end // block_keys) for end, tile in zip(ends, tiles, strict=True) if tile.context)
    totals = torch.tensor([pairs, pairs, 0, visited], pin_memory=pinned)
    return SkipSoftmaxPlan(
        tile_queries=tile_queries,
        block_keys=block_keys,
        num_rows=num_rows,
        num_queries=sum(span.end - span.start for span in spans),
        max_length=max(ends, default=0),
        tiles=tuple(tiles),
        table=table.to(device, non_blocking=True),
        totals=totals.to(device, non_blocking=True),
    )


def _tiles(spans: Sequence[Span], tile_queries: int) -> list[QueryTile]:
    tiles: list[QueryTile] = []
    first_query = 0
    for row, position, end, sparse in spans:
        while position < end:
            context = (position // tile_queries + 1) * tile_queries
            count = min(end, context) - position
            tiles.append(QueryTile(row, position, first_query, count, context if sparse else 0))
            position += count
            first_query += count
    return tiles
