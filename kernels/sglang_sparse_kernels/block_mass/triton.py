"""Triton kernels of the block mass: block sums of the split rows, then their masses.

The splits keep, for each head, what a block's tokens weigh relative to the maximum of their tile of tokens, and that
maximum. What is known only at the end, the row's maximum and its normaliser, is then one factor per tile and head.
"""

# Type checkers know neither the launch options of a kernel nor its compile-time values.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportReturnType=false

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton import knobs

from ..common.launch import LOG2_E, MIN_DOT, await_inputs, dependent_launch, num_processors, planned_rows
from ..common.scratch import LIMIT, rows_at_once

_MAX_HEADS = 128
# Dimensions up to which a tile of keys is loaded as a whole, and how many at a time beyond.
_WHOLE_DIM = 128
_DIM_STEP = 64
# In place of -inf: differences stay numbers, and the weight of a logit of -inf is still 0.
_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
# Shape and dtype.
_Table = tuple[tuple[int, ...], torch.dtype]
# What one step of the merge holds: splits, and block sums.
_MERGE_SPLITS = 32
_MERGE_SUMS = 8192


@dataclass(frozen=True)
class Config:
    """Launch parameters: tokens per step (at least a block), warps, pipeline stages, programs aimed for per
    multiprocessor, registers that a thread may take (None: any number), and the tiles of tokens that a program of the
    merge takes; a power of two, as the tokens are.
    """

    tile_tokens: int = 128
    num_warps: int = 8
    num_stages: int = 3
    programs_per_processor: int = 2
    max_registers: int | None = 128
    merge_tiles: int = 16


@triton.jit
def _load(pointers, rows, columns, MASK_ROWS: tl.constexpr, MASK_COLUMNS: tl.constexpr):
    """A tile, of which only ``rows`` and ``columns`` are read where those have to be masked."""
    if MASK_ROWS and MASK_COLUMNS:
        return tl.load(pointers, mask=rows[:, None] & columns[None, :], other=0.0)
    elif MASK_ROWS:
        return tl.load(pointers, mask=rows[:, None], other=0.0)
    elif MASK_COLUMNS:
        return tl.load(pointers, mask=columns[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _load_query(
    q_pointers, heads, dims, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, UPCAST: tl.constexpr
):
    query = _load(q_pointers + dims[None, :], heads < HEADS, dims < DIM, True, DIM % BLOCK_DIM != 0)
    return query.to(tl.float32) if UPCAST else query


@triton.jit
def _logits(
    query,
    q_pointers,
    k_ptr,
    heads,
    slot,
    valid,
    k_stride,
    MASKED: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Products of one tile's keys with the queries [heads, tokens]; ``query`` is that of the first BLOCK_DIM."""
    dims = tl.arange(0, BLOCK_DIM)
    pointers = k_ptr + slot[:, None] * k_stride + dims[None, :]
    if DIM <= BLOCK_DIM:
        keys = _load(pointers, valid, dims < DIM, MASKED, DIM % BLOCK_DIM != 0)
        logits = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision="ieee")
    else:
        logits = tl.zeros([query.shape[0], slot.shape[0]], tl.float32)
        for start in range(0, DIM, BLOCK_DIM):
            part = _load_query(q_pointers, heads, start + dims, HEADS, DIM, BLOCK_DIM, UPCAST)
            keys = _load(pointers + start, valid, start + dims < DIM, MASKED, DIM % BLOCK_DIM != 0)
            logits = tl.dot(part, tl.trans(keys.to(query.dtype)), logits, input_precision="ieee")
    if MASKED:
        logits = tl.where(valid[None, :], logits, float("-inf"))
    return logits


@triton.jit
def _store_tile(
    logits,
    maximum,
    total,
    sums_ptr,
    tile_maxima_ptr,
    tile,
    heads,
    logit_scale,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Store a tile's block sums and maxima; return the running maximum and sum (base 2) with it."""
    tile_maximum = tl.maximum(tl.max(logits, axis=1) * logit_scale, _LOWEST)
    weights = tl.exp2(logits * logit_scale - tile_maximum[:, None])
    sums = tl.sum(tl.reshape(weights, [logits.shape[0], TILE // SIZE, SIZE]), axis=2)
    sums = sums.to(sums_ptr.dtype.element_ty)
    rows = tile * HEADS + heads
    blocks = tl.arange(0, TILE // SIZE)
    tl.store(sums_ptr + rows[:, None] * (TILE // SIZE) + blocks[None, :], sums, mask=(heads < HEADS)[:, None])
    tl.store(tile_maxima_ptr + rows, tile_maximum, mask=heads < HEADS)
    # Of what was stored: masses sum to 1 whatever the rounding did.
    tile_total = tl.sum(sums.to(tl.float32), axis=1)
    decay = tl.exp2(-tl.abs(tile_maximum - maximum))
    higher = tile_maximum > maximum
    total = tl.where(higher, total * decay + tile_total, total + tile_total * decay)
    return tl.where(higher, tile_maximum, maximum), total


# Without specialisation one binary serves every width of the table and every number of splits.
@triton.jit(do_not_specialize=["table_stride", "width", "tiles"])
def _split_kernel(
    q_ptr,
    k_ptr,
    block_table_ptr,
    n_blocks_ptr,
    last_slots_ptr,
    sums_ptr,
    tile_maxima_ptr,
    split_maxima_ptr,
    split_totals_ptr,
    q_stride_row,
    q_stride_head,
    k_stride,
    table_stride,
    width,
    tiles,
    logit_scale,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    UPCAST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    await_inputs(DEPENDENT)
    # Heads vary fastest: the programs that share keys run together.
    heads = tl.program_id(0) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    row = tl.program_id(2).to(tl.int64)
    tokens = tl.arange(0, TILE)
    block = tokens // SIZE
    block_table_ptr += row * table_stride
    n_blocks = tl.load(n_blocks_ptr + row)
    last_slot = tl.load(last_slots_ptr + row)
    # Splits take tiles in turn: whatever the lengths on the device are, they differ by one tile at most. The blocks of
    # a tile are looked up one tile early: keys that waited for them would leave the pipeline one tile deep. Entries of
    # the table beyond the row are read as well, and dropped in the last tile.
    first = split * (TILE // SIZE)
    ids = tl.load(block_table_ptr + first + block, mask=first + block < width, other=0)
    if first < n_blocks:
        q_pointers = q_ptr + row * q_stride_row + heads[:, None] * q_stride_head
        query = _load_query(q_pointers, heads, tl.arange(0, BLOCK_DIM), HEADS, DIM, BLOCK_DIM, UPCAST)
        sums_ptr += row * tiles * (HEADS * (TILE // SIZE))
        tile_maxima_ptr += row * tiles * HEADS
        maximum = tl.full([BLOCK_HEADS], _LOWEST, tl.float32)
        total = tl.full([BLOCK_HEADS], 0.0, tl.float32)
        last_tile = (n_blocks - 1) // (TILE // SIZE)
        # Only the row's last tile has tokens that do not count.
        for tile in range(split, last_tile, splits):
            slot = ids.to(tl.int64) * SIZE + tokens % SIZE
            following = (tile + splits) * (TILE // SIZE) + block
            ids = tl.load(block_table_ptr + following, mask=following < width, other=0)
            logits = _logits(
                query, q_pointers, k_ptr, heads, slot, slot >= 0, k_stride, False, HEADS, DIM, BLOCK_DIM, UPCAST
            )
            maximum, total = _store_tile(
                logits, maximum, total, sums_ptr, tile_maxima_ptr, tile, heads, logit_scale, HEADS, SIZE, TILE
            )
        if (last_tile - split) % splits == 0:
            slot = ids.to(tl.int64) * SIZE + tokens % SIZE
            logical = last_tile * (TILE // SIZE) + block
            newest = (logical == n_blocks - 1) & (slot // SIZE == last_slot // SIZE)
            valid = (logical < n_blocks) & (~newest | (slot <= last_slot))
            logits = _logits(
                query, q_pointers, k_ptr, heads, slot, valid, k_stride, True, HEADS, DIM, BLOCK_DIM, UPCAST
            )
            maximum, total = _store_tile(
                logits, maximum, total, sums_ptr, tile_maxima_ptr, last_tile, heads, logit_scale, HEADS, SIZE, TILE
            )
        offsets = (row * splits + split) * HEADS + heads
        tl.store(split_maxima_ptr + offsets, maximum, mask=heads < HEADS)
        tl.store(split_totals_ptr + offsets, total, mask=heads < HEADS)


@triton.jit
def _row_totals(split_maxima_ptr, split_totals_ptr, used, heads, HEADS: tl.constexpr, BLOCK_SPLITS: tl.constexpr):
    """Maximum and sum (base 2) of each head over the first ``used`` splits."""
    maximum = tl.full([heads.shape[0]], _LOWEST, tl.float32)
    total = tl.full([heads.shape[0]], 0.0, tl.float32)
    for first in range(0, used, BLOCK_SPLITS):
        splits = first + tl.arange(0, BLOCK_SPLITS)
        offsets = splits[:, None] * HEADS + heads[None, :]
        held = (splits < used)[:, None] & (heads < HEADS)[None, :]
        maxima = tl.load(split_maxima_ptr + offsets, mask=held, other=_LOWEST)
        totals = tl.load(split_totals_ptr + offsets, mask=held, other=0.0)
        new_maximum = tl.maximum(maximum, tl.max(maxima, axis=0))
        total = total * tl.exp2(maximum - new_maximum)
        total += tl.sum(totals * tl.exp2(maxima - new_maximum[None, :]), axis=0)
        maximum = new_maximum
    return maximum, total


@triton.jit(do_not_specialize=["splits", "width", "tiles"])
def _merge_kernel(
    sums_ptr,
    tile_maxima_ptr,
    split_maxima_ptr,
    split_totals_ptr,
    n_blocks_ptr,
    out_ptr,
    splits,
    width,
    tiles,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    MERGE_TILES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    await_inputs(DEPENDENT)
    first = tl.program_id(0) * MERGE_TILES
    row = tl.program_id(1).to(tl.int64)
    n_blocks = tl.load(n_blocks_ptr + row)
    used_tiles = tl.cdiv(n_blocks, TILE_BLOCKS)
    if first < used_tiles:
        sums_ptr += row * tiles * (HEADS * TILE_BLOCKS)
        tile_maxima_ptr += row * tiles * HEADS
        split_maxima_ptr += row * splits * HEADS
        split_totals_ptr += row * splits * HEADS
        heads = tl.arange(0, BLOCK_HEADS)
        blocks = tl.arange(0, TILE_BLOCKS)
        used_splits = tl.minimum(splits, used_tiles)
        maximum, total = _row_totals(split_maxima_ptr, split_totals_ptr, used_splits, heads, HEADS, BLOCK_SPLITS)
        share = 1.0 / tl.where(heads < HEADS, total * HEADS, 1.0)
        for start in range(first, tl.minimum(first + MERGE_TILES, used_tiles), STEP):
            tile = start + tl.arange(0, STEP)
            held = (tile < used_tiles)[:, None] & (heads < HEADS)[None, :]
            rows = tile[:, None] * HEADS + heads[None, :]
            maxima = tl.load(tile_maxima_ptr + rows, mask=held, other=_LOWEST)
            offsets = rows[:, :, None] * TILE_BLOCKS + blocks[None, None, :]
            sums = tl.load(sums_ptr + offsets, mask=held[:, :, None], other=0.0).to(tl.float32)
            weights = tl.exp2(maxima - maximum[None, :]) * share[None, :]
            mass = tl.sum(sums * weights[:, :, None], axis=1)
            logical = tile[:, None] * TILE_BLOCKS + blocks[None, :]
            tl.store(out_ptr + row * width + logical, mass, mask=logical < n_blocks)


def _row_tables(width: int, heads: int, block_size: int, dtype: torch.dtype, config: Config) -> tuple[_Table, _Table]:
    """Shapes and dtypes of what the splits of one row keep: its block sums, and the maxima of its tiles."""
    tile_blocks = config.tile_tokens // block_size
    tiles = triton.cdiv(width, tile_blocks)
    sums_dtype = torch.float32 if dtype == torch.float32 else torch.float16
    return ((tiles, heads, tile_blocks), sums_dtype), ((tiles, heads), torch.float32)


def _table_bytes(tables: tuple[_Table, _Table]) -> int:
    """Bytes of one row's tables."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in tables)


def _num_splits(batch: int, heads: int, tiles: int, config: Config, device: torch.device) -> int:
    """Splits of each row."""
    programs = config.programs_per_processor * num_processors(device)
    return min(tiles, max(1, programs // (planned_rows(batch) * triton.cdiv(heads, _block_heads(heads)))))


def scratch_bytes(
    batch: int,
    heads: int,
    dim: int,
    width: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    config: Config | None = None,
    limit: int = LIMIT,
) -> int:
    """See ``block_mass.scratch_bytes``; ``config`` and ``limit`` are those of the call."""
    config = config or default_config(heads, dim)
    tables = _row_tables(width, heads, block_size, dtype, config)
    tiles, rows = tables[0][0][0], rows_at_once(batch, _table_bytes(tables), limit)
    # The last rows may be fewer, and then have more splits in all.
    launches = {rows, batch % rows or rows}
    splits = max(launch * _num_splits(launch, heads, tiles, config, device) for launch in launches)
    return rows * _table_bytes(tables) + 2 * splits * heads * torch.float32.itemsize


def block_mass(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    n_blocks: torch.Tensor,
    last_slots: torch.Tensor,
    block_size: int,
    sm_scale: float,
    k_scale: float,
    out: torch.Tensor,
    config: Config | None = None,
    limit: int = LIMIT,
) -> torch.Tensor:
    """See ``block_mass.block_mass``; entries at or beyond ``n_blocks`` are left unwritten.

    ``limit`` bounds block sums and maxima in bytes wherever those of a single row fit.
    """
    batch, heads, dim = q.shape
    width = block_table.shape[1]
    if batch == 0 or width == 0:
        return out
    config = config or default_config(heads, dim)
    tables = _row_tables(width, heads, block_size, q.dtype, config)
    rows = rows_at_once(batch, _table_bytes(tables), limit)
    sums, tile_maxima = (torch.empty(rows, *shape, dtype=dtype, device=q.device) for shape, dtype in tables)
    for first in range(0, batch, rows):
        part = slice(first, first + rows)
        inputs = (q[part], k_cache, block_table[part], n_blocks[part], last_slots[part])
        _launch(inputs, sums, tile_maxima, out[part], block_size, sm_scale * k_scale * LOG2_E, config)
    return out


def _block_heads(heads: int) -> int:
    return min(_MAX_HEADS, max(MIN_DOT, triton.next_power_of_2(heads)))


def _launch(
    inputs: tuple[torch.Tensor, ...],
    sums: torch.Tensor,
    tile_maxima: torch.Tensor,
    out: torch.Tensor,
    block_size: int,
    logit_scale: float,
    config: Config,
) -> None:
    q, k_cache, block_table, n_blocks, _ = inputs
    batch, heads, dim = q.shape
    tiles, tile_blocks, width = sums.shape[1], sums.shape[3], block_table.shape[1]
    block_heads = _block_heads(heads)
    splits = _num_splits(batch, heads, tiles, config, q.device)
    split_maxima, split_totals = torch.empty(2, batch, splits, heads, dtype=torch.float32, device=q.device)
    block_dim = triton.next_power_of_2(dim)
    dependent = dependent_launch(q.device)
    _split_kernel[(triton.cdiv(heads, block_heads), splits, batch)](
        *inputs,
        *(sums, tile_maxima, split_maxima, split_totals),
        *(q.stride(0), q.stride(1), k_cache.stride(0), block_table.stride(0), width, tiles, logit_scale),
        HEADS=heads,
        BLOCK_HEADS=block_heads,
        DIM=dim,
        BLOCK_DIM=block_dim if block_dim <= _WHOLE_DIM else _DIM_STEP,
        SIZE=block_size,
        TILE=config.tile_tokens,
        # The interpreter multiplies the bit patterns of bfloat16.
        UPCAST=knobs.runtime.interpret,
        DEPENDENT=dependent,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
        launch_pdl=dependent,
    )
    all_heads = triton.next_power_of_2(heads)
    step = max(1, min(config.merge_tiles, _MERGE_SUMS // (all_heads * tile_blocks)))
    _merge_kernel[(triton.cdiv(tiles, config.merge_tiles), batch)](
        *(sums, tile_maxima, split_maxima, split_totals, n_blocks, out, splits, width, tiles),
        HEADS=heads,
        BLOCK_HEADS=all_heads,
        TILE_BLOCKS=tile_blocks,
        STEP=step,
        BLOCK_SPLITS=_MERGE_SPLITS,
        MERGE_TILES=config.merge_tiles,
        DEPENDENT=dependent,
        num_warps=4,
        launch_pdl=dependent,
    )


def default_config(heads: int, dim: int) -> Config:
    """As many programs as fit a multiprocessor without spilling, compiled for sm_90a; not measured yet.

    Few heads wait for memory, many for their exponentials; a long query leaves the registers for one program.
    """
    few = heads <= 32
    if dim > _WHOLE_DIM:
        return Config(num_warps=4 if few else 8, programs_per_processor=2 if few else 1, max_registers=None)
    return Config(tile_tokens=64, num_warps=4, num_stages=4, programs_per_processor=4) if few else Config()
