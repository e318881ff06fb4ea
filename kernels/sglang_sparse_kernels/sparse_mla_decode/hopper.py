"""Gluon kernel of sparse MLA decode attention for Hopper.

A program has 64 query heads of a row and goes through selected tokens, 64 at a time: a tile. Two consumers of four
warps each hold half of the dimensions of the output, which a warpgroup's registers do not hold whole. They take turns
with the tiles: one multiplies the query with a tile's keys, and hands the weights of the softmax to the other one
through shared memory, so that both multiply them with their half of the values. Then tensor cores multiply for one
consumer while the other one exponentiates. One warp brings blocks by TMA. A tile has two places in shared memory in
turn, and each half of its dimensions is brought, awaited and given back alone, which is what keeps copies under way.

As many programs as there are multiprocessors divide the tiles of all rows evenly (``segments``), by the counts on the
device. So a program may have the end of one row, further rows and the beginning of another one: its segments.
"""

# Type checkers know neither the launch options of a kernel nor its compile-time values.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false, reportArgumentType=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..dispatch import HALF_DTYPES
from ..launch import LOG2_E, dependent_launch, num_processors
from . import segments
from .hopper_attend import (
    HALF_LATENT,
    LATENT,
    LATENT_DIM,
    ROPE,
    ROPE_DIM,
    SMEM,
    TILE,
    TOKENS,
    consume,
    tile_blocks,
    total_of,
)
from .segments import MOST_ROWS, TILE_HEADS

BLOCK_SIZES = (16, 32, 64)
# What one TMA copy reads starts at such an address.
ALIGNMENT = 16
# Elements of a row that one TMA copy brings: what 128 bytes, the widest swizzle of shared memory, hold.
_SLAB = gl.constexpr(64)
_SLABS = gl.constexpr(LATENT_DIM // 2 // 64)
# Rows of a slab that are cleared at a time.
_PIECE = gl.constexpr(8)
_ROWS = gl.constexpr(MOST_ROWS)
# The barrier that copies of a tile arrive at of which not all tokens count; those before it are of the places.
_CUT = gl.constexpr(4)
_FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# All rows in every warp.
_COUNTS = gl.constexpr(gl.BlockedLayout([8], [32], [4], [0]))


@dataclass(frozen=True)
class Config:
    """Launch parameters: registers of the threads that compute and load, and tiles that a program has at least.

    With ``values_first`` a consumer starts with its own tile only when it has multiplied the other one's weights, which
    gives back the places of those values earlier. Not measured yet.
    """

    consumer_registers: int = 240
    producer_registers: int = 24
    least_tiles: int = 2
    values_first: bool = False


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _copy(desc, slots, column, ready, slabs, place, NUMBER: gl.constexpr):
    """Start the copies of ``NUMBER`` slabs of a tile's blocks, of which the first becomes number ``place``."""
    BLOCKS: gl.constexpr = len(slots)
    for slab in gl.static_range(NUMBER):
        for i in gl.static_range(BLOCKS):
            to = slabs.index((place + slab) * BLOCKS + i)
            tma.async_copy_global_to_shared(desc, [slots[i], column + slab * _SLAB], ready, to)


@gluon.jit
def _clear(pieces, place, kept, BLOCK: gl.constexpr, NUMBER: gl.constexpr):
    """Zeros in ``NUMBER`` slabs in the place of tokens that do not count: never written slots may hold NaN."""
    PIECES: gl.constexpr = TOKENS // _PIECE
    lanes: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [1, 1], [1, 0])
    rows = gl.arange(0, _PIECE, gl.SliceLayout(1, lanes))
    for i in gl.static_range(len(kept)):
        for j in range(kept[i] // _PIECE, BLOCK // _PIECE):
            for slab in gl.static_range(NUMBER):
                piece = pieces.index((place + slab) * PIECES + i * (BLOCK // _PIECE) + j)
                counted = (j * _PIECE + rows < kept[i])[:, None]
                piece.store(gl.where(counted, piece.load(lanes), 0.0))


@gluon.jit
def _produce(desc, shared, barriers, work, inputs, max_blocks, BLOCK: gl.constexpr):
    """Bring tile after tile, by one warp."""
    _, _, keys, keys_rope, _, _, _ = shared
    _, ready, free, _, _ = barriers
    first_row, last_row, row_start, start, end = work
    _, _, indices_ptr, counts_ptr, last_slots_ptr = inputs
    BLOCKS: gl.constexpr = TOKENS // BLOCK
    PIECES: gl.constexpr = TOKENS // _PIECE
    element: gl.constexpr = keys.dtype
    slabs = keys._reinterpret(element, [4 * _SLABS * BLOCKS, BLOCK, _SLAB], SMEM)
    rope_slabs = keys_rope._reinterpret(element, [2 * BLOCKS, BLOCK, ROPE], SMEM)
    pieces = keys._reinterpret(element, [4 * _SLABS * PIECES, _PIECE, _SLAB], SMEM)
    rope_pieces = keys_rope._reinterpret(element, [2 * PIECES, _PIECE, ROPE], SMEM)
    uses = (gl.to_tensor(0), gl.to_tensor(0))
    cuts = gl.to_tensor(0)
    for row in range(first_row, last_row + 1):
        count = gl.load(counts_ptr + row)
        last_slot = gl.load(last_slots_ptr + row).to(gl.int32)
        tiles = (count * BLOCK + TOKENS - 1) // TOKENS
        first = gl.maximum(start - row_start, 0)
        number = gl.maximum(gl.minimum(end - row_start, tiles) - first, 0)
        blocks_ptr = indices_ptr + gl.to_tensor(row).to(gl.int64) * max_blocks
        for i in range(number):
            # Before anything is waited for.
            slots, kept = tile_blocks(blocks_ptr, first + i, count, last_slot, BLOCK)
            cut = total_of(kept) < TOKENS
            # The consumer whose tile it is begins with its half, and with the rotated dimensions.
            owner = i % 2
            phase = (gl.where(owner == 0, uses[0], uses[1]) + i // 2) & 1
            place = 2 * owner + owner
            mbarrier.wait(free.index(place), phase ^ 1)
            arrived = ready.index(gl.where(cut, _CUT, place))
            mbarrier.expect(arrived, TOKENS * (HALF_LATENT + ROPE) * 2)
            _copy(desc, slots, owner * HALF_LATENT, arrived, slabs, place * _SLABS, _SLABS)
            _copy(desc, slots, LATENT, arrived, rope_slabs, owner, 1)
            place = 2 * owner + 1 - owner
            mbarrier.wait(free.index(place), phase ^ 1)
            arrived = ready.index(gl.where(cut, _CUT, place))
            mbarrier.expect(arrived, TOKENS * HALF_LATENT * 2)
            _copy(desc, slots, (1 - owner) * HALF_LATENT, arrived, slabs, place * _SLABS, _SLABS)
            if cut:
                mbarrier.wait(ready.index(_CUT), cuts & 1)
                _clear(pieces, 2 * owner * _SLABS, kept, BLOCK, 2 * _SLABS)
                _clear(rope_pieces, owner, kept, BLOCK, 1)
                fence_async_shared()
                gl.thread_barrier()
                mbarrier.arrive(ready.index(2 * owner), count=1)
                mbarrier.arrive(ready.index(2 * owner + 1), count=1)
                cuts += 1
        uses = (uses[0] + (number + 1) // 2, uses[1] + number // 2)
        row_start += tiles


@gluon.jit
def _share(counts_ptr, rows, BLOCK: gl.constexpr, LEAST: gl.constexpr):
    """This program's part of the tiles of all rows, see ``segments``.

    Returns:
        Its first and last row, and the tiles before the first row, before its own first tile, and up to its last one.
    """
    row = gl.arange(0, _ROWS, _COUNTS)
    tiles = (gl.load(counts_ptr + row, mask=row < rows, other=0) * BLOCK + TOKENS - 1) // TOKENS
    ends = gl.associative_scan(tiles, 0, _add)
    total = gl.sum(tiles, axis=0)
    share = gl.maximum((total + gl.num_programs(1) - 1) // gl.num_programs(1), LEAST)
    start = gl.program_id(1) * share
    end = gl.minimum(start + share, total)
    first_row = gl.sum(gl.where(ends <= start, 1, 0), axis=0)
    last_row = gl.sum(gl.where(ends < end, 1, 0), axis=0)
    row_start = gl.max(gl.where(ends <= start, ends, 0), axis=0)
    return first_row, last_row, row_start, start, end


@gluon.jit(do_not_specialize=["rows", "max_blocks"])
def _segments_hopper_kernel(
    desc,
    q_nope_ptr,
    q_rope_ptr,
    indices_ptr,
    counts_ptr,
    last_slots_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    nope_stride_row,
    nope_stride_head,
    rope_stride_row,
    rope_stride_head,
    rows,
    max_blocks,
    logit_scale,
    kv_scale,
    HEADS: gl.constexpr,
    BLOCK: gl.constexpr,
    LEAST: gl.constexpr,
    VALUES_FIRST: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """The segments of one program, of 64 heads."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    work = _share(counts_ptr, rows, BLOCK, LEAST)
    element: gl.constexpr = desc.dtype
    query = gl.allocate_shared_memory(element, [2, TILE, HALF_LATENT], SMEM)
    query_rope = gl.allocate_shared_memory(element, [1, TILE, ROPE], SMEM)
    # By tile, the first or the second of two, and half of the dimensions.
    keys = gl.allocate_shared_memory(element, [4, TOKENS, HALF_LATENT], SMEM)
    keys_rope = gl.allocate_shared_memory(element, [2, TOKENS, ROPE], SMEM)
    weights = gl.allocate_shared_memory(element, [1, TILE, TOKENS], SMEM)
    maxima = gl.allocate_shared_memory(gl.float32, [TILE], _FLAT)
    totals = gl.allocate_shared_memory(gl.float32, [2, TILE], _FLAT)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [5, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    given = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready, count=2)
    mbarrier.init(done, count=2)
    mbarrier.init(ready.index(_CUT), count=2)
    for i in gl.static_range(4):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(given.index(i), count=1)
    fence_async_shared()
    shared = (query, query_rope, keys, keys_rope, weights, maxima, totals)
    barriers = (q_ready, ready, free, given, done)
    inputs = (q_nope_ptr, q_rope_ptr, indices_ptr, counts_ptr, last_slots_ptr)
    outputs = (out_ptr, partial_ptr, lse_ptr)
    strides = (nope_stride_row, nope_stride_head, rope_stride_row, rope_stride_head, max_blocks)
    scales = (logit_scale, kv_scale)
    # Constants stay constants in tuples that have no name.
    gl.warp_specialize(
        [
            (consume, (shared, barriers, work, inputs, outputs, strides, scales, HEADS, BLOCK, VALUES_FIRST, 0)),
            (consume, (shared, barriers, work, inputs, outputs, strides, scales, HEADS, BLOCK, VALUES_FIRST, 1)),
            (_produce, (desc, shared, barriers, work, inputs, max_blocks, BLOCK)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


def _aligned(tensor: torch.Tensor) -> bool:
    strides = (stride * tensor.itemsize for stride in tensor.stride()[:-1])
    return tensor.data_ptr() % ALIGNMENT == 0 and all(stride % ALIGNMENT == 0 for stride in strides)


def serves(batch: int, num_heads: int, latent_dim: int, block_size: int, dtype: torch.dtype) -> bool:
    """Whether calls of these sizes come here, if the kernel ``takes`` their tensors."""
    fits = 0 < batch <= MOST_ROWS and num_heads > 0
    return fits and latent_dim == LATENT_DIM and block_size in BLOCK_SIZES and dtype in HALF_DTYPES


def takes(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    kv_scale: float,
) -> bool:
    """Whether the kernel can read these, in calls that it ``serves``: a cache in the dtype of the queries, of rows that
    TMA reads, and a positive scale.
    """
    slots, step = kv_cache.shape[0], kv_cache.stride(0) * kv_cache.itemsize
    return (
        q_rope.shape[2] == ROPE_DIM
        and kv_cache.dtype == q_nope.dtype
        and sm_scale * kv_scale > 0
        and 0 < slots < 2**31
        and kv_cache.stride(0) >= kv_cache.shape[1]
        and step < 2**40
        and indices.numel() > 0
        and _aligned(kv_cache)
    )


def scratch_bytes(num_heads: int, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes that a call allocates: what the segments hand on."""
    programs = segments.num_programs(num_heads, num_processors(device))
    return sum(size * kind.itemsize for size, kind in segments.results(num_heads, programs, LATENT_DIM, dtype))


def sparse_mla_decode(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    counts: torch.Tensor,
    last_slots: torch.Tensor,
    block_size: int,
    sm_scale: float,
    kv_scale: float,
    out: torch.Tensor,
    config: Config | None = None,
) -> torch.Tensor:
    """See ``sparse_mla_decode.sparse_mla_decode``; for what ``serves`` and ``takes`` accept."""
    batch, num_heads, latent_dim = q_nope.shape
    config = config or Config()
    programs = segments.num_programs(num_heads, num_processors(q_nope.device))
    handed_on = segments.results(num_heads, programs, latent_dim, out.dtype)
    partial, lse = (torch.empty(size, dtype=dtype, device=out.device) for size, dtype in handed_on)
    dependent = dependent_launch(q_nope.device)
    rows = TensorDescriptor(
        kv_cache, list(kv_cache.shape), [kv_cache.stride(0), 1], [block_size, _SLAB.value], SMEM.value
    )
    _segments_hopper_kernel[(-(-num_heads // TILE_HEADS), programs)](
        *(rows, q_nope, q_rope, indices, counts, last_slots, out, partial, lse),
        *q_nope.stride()[:2],
        *q_rope.stride()[:2],
        *(batch, indices.shape[2], sm_scale * kv_scale * LOG2_E, kv_scale),
        HEADS=num_heads,
        BLOCK=block_size,
        LEAST=config.least_tiles,
        VALUES_FIRST=config.values_first,
        CONSUMER_REGISTERS=config.consumer_registers,
        PRODUCER_REGISTERS=config.producer_registers,
        DEPENDENT=dependent,
        num_warps=4,
        launch_pdl=dependent,
    )
    segments.combine(partial, lse, counts, out, block_size, programs, config.least_tiles, dependent)
    return out
