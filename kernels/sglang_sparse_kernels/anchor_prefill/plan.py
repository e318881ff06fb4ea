"""The query blocks and step groups of a ragged extend pass: made once a pass, used by all of its layers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import torch

_MIN_BLOCK, _MAX_BLOCK = 16, 128
# Bounds of one slice: a query head takes 4 * dv + 8 bytes for a query, 4 * d + 4 for a block's means and 5 for a
# candidate key.
SLICE_QUERIES = 16384
SLICE_MEANS = 2048
# An 8k chunk of one row at 128k: the keys before each of its four groups.
SLICE_CANDIDATES = 1 << 19
# Candidates of one program of the identification, and tiles of one program of the compaction.
TILE_KEYS = 128
CHUNK_TILES = 8
# With fewer blocks than this share of a group, the part of one that is cut keeps too little of what the whole group
# would keep; with more of those before the group, too much.
_ENOUGH = Fraction(3, 8)
# One program of the identification takes a tile of keys for so many parts of a row; more would leave few programs.
_SHARED_PARTS = 4


class QueryBlock(NamedTuple):
    """The queries of one block of absolute positions that are in this pass.

    ``block`` is the absolute position divided by the block size. ``first_query`` counts from the first query of the
    slice and ``part`` from its first part; ``first_position`` is absolute. The anchor region has all keys from
    ``window`` on: the first of the group, or 0 for dense queries. Its mean query and mean anchor are the ``mean``-th of
    the slice, and in them are ``earlier`` more queries of the block, whose means are carried from an earlier pass.
    """

    row: int
    block: int
    first_position: int
    first_query: int
    num_queries: int
    part: int
    window: int
    mean: int
    earlier: int


class GroupPart(NamedTuple):
    """The query blocks of one step group that are in this pass, and sparse or dense alike.

    ``group`` is the absolute position divided by block size times step. ``first_block`` counts from the first block of
    the slice. ``candidates`` keys follow the first block of keys; their list starts at ``offset`` times the number of
    query heads in the slice's lists, and its tiles at ``first_tile`` times that number. The ``num_means`` means from
    the slice's ``first_mean``-th on are those of the blocks that look for its keys: of earlier ones, and then its own.
    The earlier ones are the last means of the part before it, if that is the same row's and in the slice; else they are
    carried. They are of the group's blocks so far, and of the group before where ``make_plan`` says so.
    """

    row: int
    group: int
    first_block: int
    num_blocks: int
    num_queries: int
    candidates: int
    offset: int
    first_tile: int
    first_mean: int
    num_means: int


class SliceSize(NamedTuple):
    """Numbers of a slice's queries, means of blocks, group parts, candidate keys and tiles of candidates."""

    queries: int
    means: int
    parts: int
    candidates: int
    tiles: int


@dataclass(frozen=True)
class Slice:
    """Whole group parts that are computed together, so that scratch memory has a bound.

    Tables are int32 on the device: the rows of ``blocks`` and ``parts``; ``tile_table`` ``[n, 3]``, in each row the
    first of some consecutive parts, how many they are, and the number of a tile of keys that are candidates of all of
    them; ``chunk_table`` ``[n, 2]``, a part and the number of a chunk of its candidates.
    """

    first_query: int
    size: SliceSize
    blocks: tuple[QueryBlock, ...]
    parts: tuple[GroupPart, ...]
    block_table: torch.Tensor
    part_table: torch.Tensor
    tile_table: torch.Tensor
    chunk_table: torch.Tensor

    @property
    def num_queries(self) -> int:
        """Query tokens of all parts."""
        return self.size.queries


@dataclass(frozen=True)
class AnchorPlan:
    """The plan that ``make_plan`` returns.

    ``tile_keys`` candidates make a tile. ``max_length`` is the longest row with its prefix. ``anchor_pairs`` and
    ``causal_pairs`` count the query-key pairs of one query head in the anchor regions, and in dense causal attention.
    """

    block_size: int
    step: int
    tile_keys: int
    num_rows: int
    num_queries: int
    max_length: int
    anchor_pairs: int
    causal_pairs: int
    slices: tuple[Slice, ...]
    device: torch.device

    def scratch_bytes(self, num_q_heads: int, head_dim: int, v_head_dim: int) -> int:
        """Scratch memory of one call in bytes, at most; slices run one after the other and share it.

        A query token takes ``4 * dv + 8`` bytes a query head, the means of a block ``4 * d + 4`` (``2 * d + 4`` if the
        query has 16 bits), a group part 4, a candidate key of a part 5 and each tile of them 4. A part has at most as
        many candidates as its row has keys, so that a query token's share of the lists is about
        ``5 * keys / (block_size * step)`` bytes a query head.
        """
        return max((_scratch_bytes(piece.size, num_q_heads, head_dim, v_head_dim) for piece in self.slices), default=0)


def scratch_bound(
    max_queries: int, max_context: int, num_q_heads: int, head_dim: int, v_head_dim: int, block_size: int, step: int
) -> int:
    """Upper bound of ``AnchorPlan.scratch_bytes`` over all batches, for tiles of the default size.

    Args:
        max_queries: query tokens of a pass, over all its rows.
        max_context: tokens of a row, its prefix included.
        num_q_heads: query heads.
        head_dim: dimension of queries and keys.
        v_head_dim: dimension of values.
        block_size: as in ``make_plan``.
        step: as in ``make_plan``.

    Returns:
        Bytes, without what an allocator adds.
    """
    queries = min(max_queries, max(SLICE_QUERIES, block_size * step))
    # A group has ``step`` blocks, and the ends of a row's sparse range cut two of them; all may be carried to a query.
    means = min(queries * step, max(SLICE_MEANS, step + 2))
    parts = min(queries, means)
    candidates = min(parts * max_context, max(SLICE_CANDIDATES, max_context))
    size = SliceSize(queries, means, parts, candidates, candidates // TILE_KEYS + parts)
    return _scratch_bytes(size, num_q_heads, head_dim, v_head_dim)


@dataclass(frozen=True)
class Scratch:
    """The buffers between the kernels of one slice.

    ``maximum`` and ``total`` are ``[Hq, n]`` and ``output`` ``[n, Hq, dv]``, float32; maxima are products of query and
    key before any scale. ``pooled`` ``[means, Hq, d]`` has the dtype of the query, ``anchors`` ``[means, Hq]`` is
    float32. ``hits`` (int8) and ``slots`` (int32) hold ``[Hq, candidates]`` of one part after the other and
    ``tile_counts`` (int32) its ``[Hq, tiles]``; ``counts`` is ``[parts, Hq]`` int32.
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
    def allocate(cls, piece: Slice, q: torch.Tensor, v_head_dim: int) -> "Scratch":
        """Scratch of ``piece`` for queries ``[n, Hq, d]``; the counts are zero, the rest is not initialised."""
        shapes = _scratch_shapes(piece.size, q.shape[1], q.shape[2], v_head_dim, q.dtype)
        tensors = {name: torch.empty(shape, dtype=dtype, device=q.device) for name, (shape, dtype) in shapes.items()}
        tensors["counts"].zero_()
        return cls(**tensors)


def _scratch_shapes(
    size: SliceSize, heads: int, dim: int, v_dim: int, dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {
        "maximum": ((heads, size.queries), torch.float32),
        "total": ((heads, size.queries), torch.float32),
        "output": ((size.queries, heads, v_dim), torch.float32),
        "pooled": ((size.means, heads, dim), dtype),
        "anchors": ((size.means, heads), torch.float32),
        "hits": ((heads * size.candidates,), torch.int8),
        "slots": ((heads * size.candidates,), torch.int32),
        "tile_counts": ((heads * size.tiles,), torch.int32),
        "counts": ((size.parts, heads), torch.int32),
    }


def _scratch_bytes(size: SliceSize, heads: int, dim: int, v_dim: int) -> int:
    shapes = _scratch_shapes(size, heads, dim, v_dim, torch.float32)
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())


def make_plan(
    prefix_lens: Sequence[int],
    extend_lens: Sequence[int],
    block_size: int,
    step: int,
    device: torch.device | str,
    sparse_ranges: Sequence[tuple[int, int]] | None = None,
    tile_keys: int = TILE_KEYS,
    carried: Sequence[int] | None = None,
) -> AnchorPlan:
    """Cut the queries of a pass into blocks and step groups, both aligned to absolute positions.

    Args:
        prefix_lens: tokens of each row before this pass.
        extend_lens: query tokens of each row, 0 or more; their positions follow the prefix.
        block_size: queries per block and keys of the initial block, a power of two from 16 to 128.
        step: query blocks per group.
        device: where the op runs; the tables reach it in one copy that does not block the host.
        sparse_ranges: for each row, the first sparse position and the one behind the last; queries outside attend
            densely. All queries are sparse if not given, and none follow. Where some follow, a group that the pass ends
            within is cut: a part of it that knows fewer than three eighths of the blocks that its group will have looks
            for keys with the last blocks of the group before, too, so many that it has as many in all.
        tile_keys: keys that one program of the identification takes, a power of two of at least 16.
        carried: for each row, how many sparse queries right before its prefix's end were in passes that have handed on
            their means in the row's ``GroupMeans``, and whose plans had a sparse range of the row that goes on behind
            them; 0 if not given.

    Returns:
        A plan for any number of calls with these rows.

    Raises:
        ValueError: a wrong block size, step, length, number of ranges, tile or number of carried queries.
    """
    _check_sizes(prefix_lens, extend_lens, block_size, step, tile_keys)
    rows = list(zip(prefix_lens, extend_lens, strict=True))
    if sparse_ranges is None:
        sparse_ranges = [(0, prefix + extend) for prefix, extend in rows]
    if len(sparse_ranges) != len(rows):
        raise ValueError(f"as many sparse ranges as rows are needed, got {len(sparse_ranges)} and {len(rows)}")
    carried = [0] * len(rows) if carried is None else carried
    _check_carried(rows, sparse_ranges, carried)
    groups = _groups(rows, sparse_ranges, carried, block_size, step)
    device = torch.device(device)
    return AnchorPlan(
        block_size=block_size,
        step=step,
        tile_keys=tile_keys,
        num_rows=len(rows),
        num_queries=sum(extend_lens),
        max_length=max((prefix + extend for prefix, extend in rows if extend), default=0),
        anchor_pairs=sum(_anchor_pairs(block, block_size) for group in groups for block in group),
        causal_pairs=sum(extend * prefix + extend * (extend + 1) // 2 for prefix, extend in rows),
        slices=_upload(_slices(groups, block_size, step, tile_keys), tile_keys, device),
        device=device,
    )


def _check_sizes(
    prefix_lens: Sequence[int], extend_lens: Sequence[int], block_size: int, step: int, tile_keys: int
) -> None:
    if not _MIN_BLOCK <= block_size <= _MAX_BLOCK or block_size & (block_size - 1):
        raise ValueError(f"block_size must be a power of two from {_MIN_BLOCK} to {_MAX_BLOCK}, got {block_size}")
    if step < 1:
        raise ValueError(f"step must be at least 1, got {step}")
    if tile_keys < _MIN_BLOCK or tile_keys & (tile_keys - 1):
        raise ValueError(f"tile_keys must be a power of two of at least {_MIN_BLOCK}, got {tile_keys}")
    if len(prefix_lens) != len(extend_lens):
        raise ValueError(f"as many prefix as extend lengths are needed, got {len(prefix_lens)} and {len(extend_lens)}")
    if min((*prefix_lens, *extend_lens), default=0) < 0:
        raise ValueError(f"lengths must be at least 0, got {list(prefix_lens)} and {list(extend_lens)}")


def _check_carried(
    rows: list[tuple[int, int]], sparse_ranges: Sequence[tuple[int, int]], carried: Sequence[int]
) -> None:
    if len(carried) != len(rows):
        raise ValueError(f"as many numbers of carried queries as rows are needed, got {len(carried)} and {len(rows)}")
    for row, ((prefix, _), (low, high), count) in enumerate(zip(rows, sparse_ranges, carried, strict=True)):
        most = max(0, prefix - max(low, 0)) if prefix <= high else 0
        if not 0 <= count <= most:
            raise ValueError(f"row {row} may have 0 to {most} carried queries, got {count}")


def _groups(
    rows: list[tuple[int, int]],
    sparse_ranges: Sequence[tuple[int, int]],
    carried: Sequence[int],
    block_size: int,
    step: int,
) -> list[list[QueryBlock]]:
    """The blocks of each group part; queries and parts are counted over the whole pass, means from the part's first."""
    groups: list[list[QueryBlock]] = []
    first_query = 0
    for row, ((prefix, extend), (low, high)) in enumerate(zip(rows, sparse_ranges, strict=True)):
        position, end, last, first_group = prefix, prefix + extend, (-1, False), len(groups)
        # Whole blocks that are carried alone, and what of the first block of this pass is.
        begun = max(prefix - carried[row], prefix // (block_size * step) * block_size * step)
        before = prefix // block_size - begun // block_size
        earlier = min(carried[row], prefix % block_size)
        while position < end:
            block, sparse = position // block_size, low <= position < high
            if (block // step, sparse) != last:
                last = block // step, sparse
                groups.append([])
                before = before if position == prefix else 0
            cuts = [cut for cut in (low, high, (block + 1) * block_size) if cut > position]
            count = min(end, *cuts) - position
            window = block // step * step * block_size if sparse else 0
            mean = before + len(groups[-1])
            groups[-1].append(
                QueryBlock(row, block, position, first_query, count, len(groups) - 1, window, mean, earlier)
            )
            earlier = 0
            position += count
            first_query += count
        if extend and low < end < high:
            carried_before = begun // block_size - (prefix - carried[row]) // block_size
            _fill_up(groups[first_group:], carried_before, low, high, block_size, step)
    return groups


def _fill_up(groups: list[list[QueryBlock]], carried: int, low: int, high: int, block_size: int, step: int) -> None:
    """Put means of the group before in front of those of a row's last part, if it is cut and knows few.

    ``carried`` is how many there may be from earlier passes, ``low`` the row's first sparse position, and ``high`` the
    one behind its last.
    """
    blocks = groups[-1]
    end = blocks[-1].first_position + blocks[-1].num_queries
    whole = min(step, math.ceil((high - blocks[0].window) / block_size))
    missing = math.ceil(whole * _ENOUGH) - blocks[-1].mean - 1
    if missing <= 0 or not end % (block_size * step) or blocks[0].window <= block_size:
        return
    if len(groups) > 1:
        # A dense part before it is followed by the first sparse query.
        carried = groups[-2][-1].mean + 1 if low < blocks[0].first_position else 0
    blocks[:] = [block._replace(mean=block.mean + min(missing, carried)) for block in blocks]


def _anchor_pairs(block: QueryBlock, block_size: int) -> int:
    local = sum(range(block.first_position + 1, block.first_position + block.num_queries + 1))
    return local + block.num_queries * (min(block_size, block.window) - block.window)


class _Draft(NamedTuple):
    """A slice whose tables are not on the device yet."""

    first_query: int
    blocks: list[QueryBlock]
    parts: list[GroupPart]


def _slices(groups: list[list[QueryBlock]], block_size: int, step: int, tile_keys: int) -> list[_Draft]:
    """A part that exceeds the bounds alone is a slice of its own."""
    drafts: list[_Draft] = []
    queries = offset = first_tile = first_mean = SLICE_QUERIES + SLICE_CANDIDATES
    for group in groups:
        count = sum(block.num_queries for block in group)
        index = group[0].block // step
        candidates = max(0, group[0].window - block_size)
        means = group[-1].mean + 1
        if (
            queries + count > SLICE_QUERIES
            or offset + candidates > SLICE_CANDIDATES
            or first_mean + means > SLICE_MEANS
        ):
            drafts.append(_Draft(group[0].first_query, [], []))
            queries = offset = first_tile = first_mean = 0
        first_query, blocks, parts = drafts[-1]
        if parts and parts[-1].row == group[0].row:
            # Earlier means, if it has any, are those of the part before it.
            first_mean -= group[0].mean
        part = GroupPart(
            *(group[0].row, index, len(blocks), len(group), count, candidates, offset, first_tile, first_mean, means)
        )
        for block in group:
            first, mean = block.first_query - first_query, first_mean + block.mean
            blocks.append(block._replace(first_query=first, part=len(parts), mean=mean))
        parts.append(part)
        queries += count
        offset += candidates
        first_tile += math.ceil(candidates / tile_keys)
        first_mean += means
    return drafts


def _upload(drafts: list[_Draft], tile_keys: int, device: torch.device) -> tuple[Slice, ...]:
    """One tensor for each kind of table of all slices, and one copy for all kinds."""
    tiles = [_tile_entries(draft.parts, tile_keys) for draft in drafts]
    chunks = [_chunk_entries(draft.parts, tile_keys * CHUNK_TILES) for draft in drafts]
    kinds = [
        _table([draft.blocks for draft in drafts], len(QueryBlock._fields)),
        _table([draft.parts for draft in drafts], len(GroupPart._fields)),
        _spread(_table(tiles, 4)),
        _spread(_table(chunks, 3)),
    ]
    lengths = [
        [len(draft.blocks) for draft in drafts],
        [len(draft.parts) for draft in drafts],
        *([sum(entry[-1] - entry[-2] for entry in entries) for entries in kind] for kind in (tiles, chunks)),
    ]
    sizes = [kind.numel() for kind in kinds]
    host = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    torch.cat([kind.flatten() for kind in kinds], out=host)
    on_device = host.to(device, non_blocking=True).split(sizes)
    tables = [flat.view(kind.shape).split(length) for flat, kind, length in zip(on_device, kinds, lengths, strict=True)]
    return tuple(
        Slice(draft.first_query, _size(draft, tile_keys), tuple(draft.blocks), tuple(draft.parts), *of_slice)
        for draft, of_slice in zip(drafts, zip(*tables, strict=True), strict=True)
    )


def _size(draft: _Draft, tile_keys: int) -> SliceSize:
    parts = draft.parts
    last = parts[-1]
    return SliceSize(
        queries=sum(part.num_queries for part in parts),
        means=last.first_mean + last.num_means,
        parts=len(parts),
        candidates=last.offset + last.candidates,
        tiles=last.first_tile + math.ceil(last.candidates / tile_keys),
    )


def _tile_entries(parts: list[GroupPart], tile_keys: int) -> list[tuple[int, ...]]:
    """First of some parts, how many they are, and start and end of the tiles that belong to all of them.

    The parts of a row follow one another and each has the candidates of those before it, so that a tile belongs to all
    parts of a run from some part on.
    """
    runs: list[tuple[int, int]] = []
    for number, part in enumerate(parts):
        first, end = runs[-1] if runs else (0, -1)
        if part.candidates and end == number and end - first < _SHARED_PARTS and parts[first].row == part.row:
            runs[-1] = first, number + 1
        elif part.candidates:
            runs.append((number, number + 1))
    entries = []
    for first, end in runs:
        start = 0
        for number in range(first, end):
            stop = math.ceil(parts[number].candidates / tile_keys)
            entries.append((number, end - number, start, stop))
            start = stop
    return entries


def _chunk_entries(parts: list[GroupPart], keys: int) -> list[tuple[int, ...]]:
    return [(number, 0, math.ceil(part.candidates / keys)) for number, part in enumerate(parts)]


def _table(entries: Sequence[Sequence[tuple[int, ...]]], fields: int) -> torch.Tensor:
    flat = [value for of_slice in entries for entry in of_slice for value in entry]
    return torch.tensor(flat, dtype=torch.int32).view(-1, fields)


def _spread(table: torch.Tensor) -> torch.Tensor:
    """A row for each number from the second-last field to before the last; the number stands for both."""
    counts = table[:, -1] - table[:, -2]
    rows = table[:, :-1].repeat_interleave(counts, dim=0)
    earlier = (counts.cumsum(0) - counts).repeat_interleave(counts)
    rows[:, -1] += torch.arange(len(rows)) - earlier
    return rows
