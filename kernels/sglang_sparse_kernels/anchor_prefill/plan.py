"""Which query blocks and step groups a ragged extend pass holds: made once a pass, used by all of its layers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

_MIN_BLOCK, _MAX_BLOCK = 16, 128
# Bounds of one slice: a query token costs 4 * dv bytes a head, a candidate key 5.
SLICE_QUERIES = 16384
SLICE_CANDIDATES = 1 << 21
# The identification counts its hits over tiles of at least so many candidates.
MIN_TILE = 128


class QueryBlock(NamedTuple):
    """The queries of one block of absolute positions that are in this pass.

    ``block`` is the absolute position divided by the block size. ``first_query`` counts from the first query of the
    slice and ``part`` from its first part; ``first_position`` is absolute. The anchor region has all keys from
    ``window`` on: the first of the group, or 0 for dense queries.
    """

    row: int
    block: int
    first_position: int
    first_query: int
    num_queries: int
    part: int
    window: int


class GroupPart(NamedTuple):
    """The query blocks of one step group that are in this pass, and sparse or dense alike.

    ``group`` is the absolute position divided by block size times step. ``first_block`` counts from the first block of
    the slice. ``candidates`` keys follow the first block of keys; their list starts at ``offset`` times the number of
    query heads in the slice's lists.
    """

    row: int
    group: int
    first_block: int
    num_blocks: int
    num_queries: int
    candidates: int
    offset: int


@dataclass(frozen=True)
class Slice:
    """Whole group parts that are computed together, so that scratch memory has a bound.

    The tables are the int32 rows of ``blocks`` and ``parts`` on the device.
    """

    first_query: int
    num_queries: int
    blocks: tuple[QueryBlock, ...]
    parts: tuple[GroupPart, ...]
    block_table: torch.Tensor
    part_table: torch.Tensor

    @property
    def num_candidates(self) -> int:
        """Candidate keys of all parts."""
        return sum(part.candidates for part in self.parts)

    @property
    def max_candidates(self) -> int:
        """Candidate keys of the part that has the most."""
        return max(part.candidates for part in self.parts)


@dataclass(frozen=True)
class AnchorPlan:
    """What ``make_plan`` returns.

    ``max_length`` is the longest row with its prefix. ``anchor_pairs`` and ``causal_pairs`` count the query-key pairs
    of one query head in the anchor regions, and in dense causal attention.
    """

    block_size: int
    step: int
    num_rows: int
    num_queries: int
    max_length: int
    anchor_pairs: int
    causal_pairs: int
    slices: tuple[Slice, ...]
    device: torch.device

    def scratch_bytes(self, num_q_heads: int, head_dim: int, v_head_dim: int) -> int:
        """Upper bound of the scratch memory of one call in bytes; slices run one after the other and share it.

        A query token takes ``4 * dv + 8`` bytes a query head, a candidate key of a group part ``5 + 4 / 128`` and a
        query block ``4 * d + 4``. A part has at most as many candidates as its row has keys, so that a query token's
        share of the lists is ``4 * keys / (block_size * step)`` bytes a query head.
        """
        shapes = [_scratch_shapes(piece, num_q_heads, head_dim, v_head_dim, MIN_TILE) for piece in self.slices]
        sizes = [sum(math.prod(shape) * dtype.itemsize for shape, dtype in piece.values()) for piece in shapes]
        return max(sizes, default=0)


@dataclass(frozen=True)
class Scratch:
    """What the kernels of one slice hand on.

    ``maximum`` and ``total`` are ``[Hq, n]`` and ``output`` ``[n, Hq, dv]``, float32; maxima are products of query and
    key before any scale. ``pooled`` ``[blocks, Hq, d]`` has the dtype of the query, ``anchors`` ``[blocks, Hq]`` is
    float32. ``hits`` (int8) and ``slots`` (int32) hold ``[Hq, candidates]`` of one part after the other,
    ``tile_counts`` is ``[parts, Hq, tiles]`` and ``counts`` ``[parts, Hq]``, int32.
    """

    maximum: torch.Tensor
    total: torch.Tensor
    output: torch.Tensor
    pooled: torch.Tensor
    anchors: torch.Tensor
    hits: torch.Tensor
    slots: torch.Tensor
    tile_counts: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def allocate(cls, piece: Slice, q: torch.Tensor, v_head_dim: int, tile: int) -> "Scratch":
        """Scratch of ``piece`` for queries ``[n, Hq, d]``; the counts are zero, the rest is not initialised."""
        shapes = _scratch_shapes(piece, q.shape[1], q.shape[2], v_head_dim, tile, q.dtype)
        tensors = {name: torch.empty(shape, dtype=dtype, device=q.device) for name, (shape, dtype) in shapes.items()}
        tensors["counts"].zero_()
        return cls(**tensors)


def _scratch_shapes(
    piece: Slice, heads: int, dim: int, v_dim: int, tile: int, dtype: torch.dtype = torch.float32
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    queries, blocks, parts = piece.num_queries, len(piece.blocks), len(piece.parts)
    return {
        "maximum": ((heads, queries), torch.float32),
        "total": ((heads, queries), torch.float32),
        "output": ((queries, heads, v_dim), torch.float32),
        "pooled": ((blocks, heads, dim), dtype),
        "anchors": ((blocks, heads), torch.float32),
        "hits": ((heads * piece.num_candidates,), torch.int8),
        "slots": ((heads * piece.num_candidates,), torch.int32),
        "tile_counts": ((parts, heads, math.ceil(piece.max_candidates / tile)), torch.int32),
        "counts": ((parts, heads), torch.int32),
    }


def make_plan(
    prefix_lens: Sequence[int],
    extend_lens: Sequence[int],
    block_size: int,
    step: int,
    device: torch.device | str,
    sparse_ranges: Sequence[tuple[int, int]] | None = None,
) -> AnchorPlan:
    """Cut the queries of a pass into blocks and step groups, both aligned to absolute positions.

    Args:
        prefix_lens: tokens of each row before this pass.
        extend_lens: query tokens of each row, 0 or more; their positions follow the prefix.
        block_size: queries per block and keys of the initial block, a power of two from 16 to 128.
        step: query blocks per group.
        device: where the op runs; the tables reach it in one copy that does not block the host.
        sparse_ranges: for each row, the first sparse position and the one behind the last; queries outside attend
            densely. All queries are sparse if not given.

    Returns:
        A plan for any number of calls with these rows.

    Raises:
        ValueError: a wrong block size, step, length or number of ranges.
    """
    _check_sizes(prefix_lens, extend_lens, block_size, step)
    rows = list(zip(prefix_lens, extend_lens, strict=True))
    if sparse_ranges is None:
        sparse_ranges = [(0, prefix + extend) for prefix, extend in rows]
    if len(sparse_ranges) != len(rows):
        raise ValueError(f"as many sparse ranges as rows are needed, got {len(sparse_ranges)} and {len(rows)}")
    groups = _groups(rows, sparse_ranges, block_size, step)
    device = torch.device(device)
    return AnchorPlan(
        block_size=block_size,
        step=step,
        num_rows=len(rows),
        num_queries=sum(extend_lens),
        max_length=max((prefix + extend for prefix, extend in rows if extend), default=0),
        anchor_pairs=sum(_anchor_pairs(block, block_size) for group in groups for block in group),
        causal_pairs=sum(extend * prefix + extend * (extend + 1) // 2 for prefix, extend in rows),
        slices=_upload(_slices(groups, block_size, step), device),
        device=device,
    )


def _check_sizes(prefix_lens: Sequence[int], extend_lens: Sequence[int], block_size: int, step: int) -> None:
    if not _MIN_BLOCK <= block_size <= _MAX_BLOCK or block_size & (block_size - 1):
        raise ValueError(f"block_size must be a power of two from {_MIN_BLOCK} to {_MAX_BLOCK}, got {block_size}")
    if step < 1:
        raise ValueError(f"step must be at least 1, got {step}")
    if len(prefix_lens) != len(extend_lens):
        raise ValueError(f"as many prefix as extend lengths are needed, got {len(prefix_lens)} and {len(extend_lens)}")
    if min((*prefix_lens, *extend_lens), default=0) < 0:
        raise ValueError(f"lengths must be at least 0, got {list(prefix_lens)} and {list(extend_lens)}")


def _groups(
    rows: list[tuple[int, int]], sparse_ranges: Sequence[tuple[int, int]], block_size: int, step: int
) -> list[list[QueryBlock]]:
    """The blocks of each group part; queries and parts are counted over the whole pass."""
    groups: list[list[QueryBlock]] = []
    first_query = 0
    for row, ((prefix, extend), (low, high)) in enumerate(zip(rows, sparse_ranges, strict=True)):
        position, end, last = prefix, prefix + extend, (-1, False)
        while position < end:
            block, sparse = position // block_size, low <= position < high
            if (block // step, sparse) != last:
                last = block // step, sparse
                groups.append([])
            cuts = [cut for cut in (low, high, (block + 1) * block_size) if cut > position]
            count = min(end, *cuts) - position
            window = block // step * step * block_size if sparse else 0
            groups[-1].append(QueryBlock(row, block, position, first_query, count, len(groups) - 1, window))
            position += count
            first_query += count
    return groups


def _anchor_pairs(block: QueryBlock, block_size: int) -> int:
    local = sum(range(block.first_position + 1, block.first_position + block.num_queries + 1))
    return local + block.num_queries * (min(block_size, block.window) - block.window)


def _slices(
    groups: list[list[QueryBlock]], block_size: int, step: int
) -> list[tuple[int, list[QueryBlock], list[GroupPart]]]:
    """First query, blocks and parts of each slice; a part that exceeds the bounds alone is a slice of its own."""
    slices: list[tuple[int, list[QueryBlock], list[GroupPart]]] = []
    queries = offset = SLICE_QUERIES + SLICE_CANDIDATES
    for group in groups:
        count = sum(block.num_queries for block in group)
        index = group[0].block // step
        candidates = max(0, group[0].window - block_size)
        if queries + count > SLICE_QUERIES or offset + candidates > SLICE_CANDIDATES:
            slices.append((group[0].first_query, [], []))
            queries = offset = 0
        first_query, blocks, parts = slices[-1]
        parts.append(GroupPart(group[0].row, index, len(blocks), len(group), count, candidates, offset))
        for block in group:
            blocks.append(block._replace(first_query=block.first_query - first_query, part=len(parts) - 1))
        queries += count
        offset += candidates
    return slices


def _upload(slices: list[tuple[int, list[QueryBlock], list[GroupPart]]], device: torch.device) -> tuple[Slice, ...]:
    tables = [table for _, blocks, parts in slices for table in (blocks, parts)]
    flat = [value for table in tables for entry in table for value in entry]
    host = torch.tensor(flat, dtype=torch.int32, pin_memory=device.type == "cuda")
    on_device = host.to(device, non_blocking=True).split([sum(map(len, table)) for table in tables])
    pieces = []
    for number, (first_query, blocks, parts) in enumerate(slices):
        block_table = on_device[2 * number].view(-1, len(QueryBlock._fields))
        part_table = on_device[2 * number + 1].view(-1, len(GroupPart._fields))
        count = sum(part.num_queries for part in parts)
        pieces.append(Slice(first_query, count, tuple(blocks), tuple(parts), block_table, part_table))
    return tuple(pieces)
