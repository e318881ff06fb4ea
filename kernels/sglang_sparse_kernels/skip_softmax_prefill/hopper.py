"""Gluon kernel of Skip-Softmax prefill for Hopper.

A program has a tile of two query heads that share a KV head, each with four warps of its own, and one warp that brings
blocks of keys and values by TMA, page by page, some blocks ahead. So what is read from the L2 cache serves two tiles, a
head decides about its blocks without waiting for the other one, and tensor cores multiply for one of them while the
other one looks for its maxima and exponentiates. The values of a block that is skipped are brought all the same: nobody
knows in time.
"""

# Type checkers know neither the launch options of a kernel nor its compile-time values.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false, reportArgumentType=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from dataclasses import dataclass

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..dispatch import HALF_DTYPES
from ..launch import LOG2_E
from .plan import BLOCK_KEYS, TILE_QUERIES, QueryTile, SkipSoftmaxPlan

DIMS = (64, 128)
MIN_PAGE = 16
# Elements of a row that one TMA copy brings: what 128 bytes, the widest swizzle of shared memory, hold.
SLAB = 64
_SLAB = gl.constexpr(SLAB)
_TILE = gl.constexpr(TILE_QUERIES)
_HALF = gl.constexpr(TILE_QUERIES // 2)
_KEYS = gl.constexpr(BLOCK_KEYS)
_FIELDS = gl.constexpr(len(QueryTile._fields))
_NAN = gl.constexpr(tl.PropagateNan.ALL)
# Rows of a piece of values that are cleared at a time.
_PIECE = gl.constexpr(8)
_SMEM = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_LOGITS = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
_ROWS = gl.constexpr(gl.SliceLayout(1, _LOGITS.value))
# All four elements in every thread.
_EVERYWHERE = gl.constexpr(gl.DistributedLinearLayout([[1], [2]], [[0]] * 5, [[0]] * 2, [], [4]))


@dataclass(frozen=True)
class Config:
    """Launch parameters: blocks of keys and values in flight, and registers of the threads that compute and load.

    Not measured yet.
    """

    num_stages: int = 5
    consumer_registers: int = 240
    producer_registers: int = 24


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b, propagate_nan=_NAN)


@gluon.jit
def _triangle(n):
    """Keys of a block that ``n`` queries see together, the first of them none, each other one more than before."""
    n = gl.maximum(n, 0)
    part = gl.minimum(n, _KEYS + 1)
    return part * (part - 1) // 2 + (n - part) * _KEYS


@gluon.jit
def _any(near):
    """Whether any of ``[half, 4]`` is not 0, for all warps of the consumer."""
    # By warp, register, and the lanes of a warp, as the accumulators of wgmma lie.
    parts = gl.max(gl.reshape(near, [4, 2, 8, 4]), axis=1)
    by_warp = gl.max(gl.reshape(parts, [4, 32]), axis=1)
    return gl.max(gl.convert_layout(by_warp, _EVERYWHERE), axis=0) != 0


@gluon.jit
def _hide(logits, seen):
    """-inf where row ``m`` of ``[half, keys]`` does not see a key, being the one ``seen + m`` or later."""
    # Keys as they lie in threads: what tells the keys of a thread apart then needs no register.
    by_thread = gl.reshape(logits, [_HALF, 8, 4, 2])
    lanes: gl.constexpr = by_thread.type.layout
    eights = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, lanes))))[None, :, None, None]
    twos = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, lanes))))[None, None, :, None]
    ones = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, lanes))))[None, None, None, :]
    rows = gl.arange(0, _HALF, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, lanes))))[:, None, None, None]
    hidden = seen + rows - 2 * twos <= 8 * eights + ones
    return gl.convert_layout(gl.reshape(gl.where(hidden, float("-inf"), by_thread), [_HALF, _KEYS]), _LOGITS)


@gluon.jit
def _near(logits, state, gap, first, count):
    """What each thread holds of a query's largest logit, and 1 where that is near the query's largest one before.

    Whether a block is skipped can be said before threads talk of a query. ``first`` of ``count`` queries come before.
    """
    largest = gl.reduce(gl.reduce(gl.reshape(logits, [_HALF, 8, 4, 2]), 3, _larger), 1, _larger)
    by_thread: gl.constexpr = gl.SliceLayout(1, largest.type.layout)
    far = largest < gl.convert_layout(state[0] + gap, by_thread)[:, None]
    members = first + gl.arange(0, _HALF, by_thread) < count
    return largest, gl.where(far, 0, 1) * gl.where(members, 1, 0)[:, None]


@gluon.jit
def _soften(logits, largest, state, scale, element: gl.constexpr):
    """A step of the online softmax but for the product with the values: the state before it, and the weights."""
    maximum, total, output = state
    outputs: gl.constexpr = output.type.layout
    new_maximum = _larger(maximum, gl.convert_layout(gl.reduce(largest, 1, _larger), _ROWS))
    # A row with an infinite key is NaN, as one with a broken key: such a row keeps all blocks from then on.
    new_maximum = gl.where(new_maximum < float("inf"), new_maximum, float("nan"))
    # Infinite keys may leave a query without any finite logit, and -inf - -inf would be NaN.
    finite = gl.where(new_maximum == float("-inf"), 0.0, new_maximum) * scale
    decay = gl.exp2(maximum * scale - finite)
    weights = gl.exp2(logits * scale - finite[:, None])
    total = total * decay + gl.sum(weights, axis=1)
    output = output * gl.convert_layout(decay, gl.SliceLayout(1, outputs))[:, None]
    return (new_maximum, total, output), gl.convert_layout(weights.to(element), gl.DotOperandLayout(0, outputs, 2))


@gluon.jit
def _visit(
    shared,
    stage,
    phase,
    seen,
    scale,
    gap,
    upper,
    lower,
    counts,
    count,
    lost,
    HEAD: gl.constexpr,
    MASKED: gl.constexpr,
):
    """One block of keys: skipped, and ``lost`` pairs counted, or one step of the online softmax.

    With ``MASKED``, query ``m`` sees only the first ``seen + m`` keys. Maxima stay products of query and key, and
    ``gap`` is the logarithm of the threshold in these units. Half of a tile is multiplied while the other half is
    exponentiated.
    """
    queries, keys, values, keys_ready, values_ready, free = shared
    mbarrier.wait(keys_ready.index(stage), phase)
    zero = gl.zeros([_HALF, _KEYS], gl.float32, _LOGITS)
    block = keys.index(stage).permute((1, 0))
    first = warpgroup_mma(queries.index(2 * HEAD), block, zero, use_acc=False, is_async=True)
    second = warpgroup_mma(queries.index(2 * HEAD + 1), block, zero, use_acc=False, is_async=True)
    above = warpgroup_mma_wait(1, deps=(first,))
    if MASKED:
        above = _hide(above, seen)
    largest_above, near_above = _near(above, upper, gap, 0, count)
    if MASKED:
        below = _hide(warpgroup_mma_wait(0, deps=(second,)), seen + _HALF)
    else:
        # The compiler would move the maxima behind the wait.
        below, largest_above = warpgroup_mma_wait(0, deps=(second, largest_above))
    largest_below, near_below = _near(below, lower, gap, _HALF, count)
    near = _any(near_above | near_below)
    if near:
        upper, weights_above = _soften(above, largest_above, upper, scale, keys.dtype)
        mbarrier.wait(values_ready.index(stage), phase)
        output_above = warpgroup_mma(weights_above, values.index(stage), upper[2], is_async=True)
        lower, weights_below = _soften(below, largest_below, lower, scale, keys.dtype)
        output_below = warpgroup_mma(weights_below, values.index(stage), lower[2], is_async=True)
        output_above, output_below, _, _ = warpgroup_mma_wait(
            0, deps=(output_above, output_below, weights_above, weights_below)
        )
        upper = (upper[0], upper[1], output_above)
        lower = (lower[0], lower[1], output_below)
    # After every warp has seen its products finished: the decision is a barrier, and wgmma reads as one.
    mbarrier.arrive(free.index(stage), count=1)
    skipped = gl.where(near, 0, 1)
    return upper, lower, (counts[0] + skipped, counts[1] + skipped * lost)


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _write(state, out_ptr, first, first_query, count, v_scale, head, HEADS: gl.constexpr):
    """Half of a tile's output."""
    V_DIM: gl.constexpr = state[2].shape[1]
    outputs: gl.constexpr = state[2].type.layout
    by_row: gl.constexpr = gl.SliceLayout(1, outputs)
    output = state[2] * gl.convert_layout(v_scale / state[1], by_row)[:, None]
    members = first + gl.arange(0, _HALF, by_row)
    dims = gl.arange(0, V_DIM, gl.SliceLayout(0, outputs))
    offsets = (first_query + members).to(gl.int64)[:, None] * (HEADS * V_DIM) + head * V_DIM + dims[None, :]
    gl.store(out_ptr + offsets, output.to(out_ptr.dtype.element_ty), mask=(members < count)[:, None])


@gluon.jit
def _consume(
    shared,
    q_ready,
    tile,
    out_ptr,
    stats_ptr,
    scale,
    gap,
    v_scale,
    first_head,
    HEAD: gl.constexpr,
    HEADS: gl.constexpr,
):
    """The tile of one query head, by four warps."""
    first_position, first_query, count = tile
    STAGES: gl.constexpr = shared[1].shape[0]
    V_DIM: gl.constexpr = shared[2].shape[2]
    outputs: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V_DIM, 16])
    maximum = gl.full([_HALF], float("-inf"), gl.float32, _ROWS)
    total = gl.zeros([_HALF], gl.float32, _ROWS)
    output = gl.zeros([_HALF, V_DIM], gl.float32, outputs)
    upper = (maximum, total, output)
    lower = (maximum, total, output)
    counts = (gl.to_tensor(0), gl.to_tensor(0))
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    blocks = (first_position + count + _KEYS - 1) // _KEYS
    # Blocks that every query sees whole, and at least the first one, which is visited before any other.
    whole = gl.maximum((first_position + 1) // _KEYS, 1)
    mbarrier.wait(q_ready, 0)
    for i in range(blocks - whole + 1):
        seen = first_position + 1 - gl.where(i == 0, 0, blocks - i) * _KEYS
        lost = _triangle(seen + count) - _triangle(seen)
        upper, lower, counts = _visit(
            shared, stage, phase, seen, scale, gap, upper, lower, counts, count, lost, HEAD, True
        )
        stage, phase = _next(stage, phase, STAGES)
    for _ in range(1, whole):
        upper, lower, counts = _visit(
            shared, stage, phase, 0, scale, gap, upper, lower, counts, count, count * _KEYS, HEAD, False
        )
        stage, phase = _next(stage, phase, STAGES)
    _write(upper, out_ptr, 0, first_query, count, v_scale, first_head + HEAD, HEADS)
    _write(lower, out_ptr, _HALF, first_query, count, v_scale, first_head + HEAD, HEADS)
    if stats_ptr is not None:
        gl.atomic_add(stats_ptr, -counts[1].to(gl.int64))
        gl.atomic_add(stats_ptr + 2, counts[0].to(gl.int64))


@gluon.jit
def _load_slots(table_ptr, block, last_page, PAGE: gl.constexpr):
    """The first slots of a block's pages; those past the row's last page are that one again."""
    PAGES: gl.constexpr = _KEYS // PAGE
    slots = (gl.load(table_ptr + gl.minimum(block * PAGES, last_page)) * PAGE,)
    for page in gl.static_range(1, PAGES):
        slots = slots + (gl.load(table_ptr + gl.minimum(block * PAGES + page, last_page)) * PAGE,)  # noqa: RUF005
    return slots


@gluon.jit
def _copy(desc, slots, column, ready, slabs, stage, PAGE: gl.constexpr, DIM: gl.constexpr):
    """Start the copies of a block's pages."""
    PAGES: gl.constexpr = _KEYS // PAGE
    for page in gl.static_range(PAGES):
        for slab in gl.static_range(DIM // _SLAB):
            to = slabs.index((stage * (DIM // _SLAB) + slab) * PAGES + page)
            tma.async_copy_global_to_shared(desc, [slots[page], column + slab * _SLAB], ready, to)


@gluon.jit
def _clear(values, stage, first, DIM: gl.constexpr):
    """Zeros in the place of a block's values from row ``first`` on: never written slots may hold NaN."""
    SLABS: gl.constexpr = DIM // _SLAB
    PIECES: gl.constexpr = _KEYS // _PIECE
    pieces = values._reinterpret(values.dtype, [values.shape[0] * SLABS * PIECES, _PIECE, _SLAB], _SMEM)
    lanes: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [1, 1], [1, 0])
    rows = gl.arange(0, _PIECE, gl.SliceLayout(1, lanes))
    for i in range(first // _PIECE, PIECES):
        for slab in gl.static_range(SLABS):
            piece = pieces.index((stage * SLABS + slab) * PIECES + i)
            kept = (i * _PIECE + rows < first)[:, None]
            piece.store(gl.where(kept, piece.load(lanes), 0.0))


@gluon.jit
def _produce(descs, shared, q_ready, table_ptr, end, first_query, columns, PAGE: gl.constexpr):
    """Bring the queries, and block after block of keys and values, by one warp."""
    q_desc, k_desc, v_desc = descs
    queries, keys, values, keys_ready, values_ready, free = shared
    q_column, q_step, k_column, v_column = columns
    STAGES: gl.constexpr = keys.shape[0]
    DIM: gl.constexpr = keys.shape[2]
    V_DIM: gl.constexpr = values.shape[2]
    element: gl.constexpr = keys.dtype
    q_slabs = queries._reinterpret(element, [4 * (DIM // _SLAB), _HALF, _SLAB], _SMEM)
    k_slabs = keys._reinterpret(element, [STAGES * (DIM // _SLAB) * (_KEYS // PAGE), PAGE, _SLAB], _SMEM)
    v_slabs = values._reinterpret(element, [STAGES * (V_DIM // _SLAB) * (_KEYS // PAGE), PAGE, _SLAB], _SMEM)
    mbarrier.expect(q_ready, 2 * _TILE * DIM * 2)
    for part in gl.static_range(4):
        for slab in gl.static_range(DIM // _SLAB):
            to = q_slabs.index(part * (DIM // _SLAB) + slab)
            place = [first_query + part % 2 * _HALF, q_column + part // 2 * q_step + slab * _SLAB]
            tma.async_copy_global_to_shared(q_desc, place, q_ready, to)
    blocks = (end + _KEYS - 1) // _KEYS
    last_page = (end - 1) // PAGE
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for i in range(blocks):
        # Before anything is waited for.
        block = gl.where(i == 0, 0, blocks - i)
        slots = _load_slots(table_ptr, block, last_page, PAGE)
        # Values of skipped blocks are waited for by nobody else, and have to be there before others take their place.
        mbarrier.wait(values_ready.index(stage), phase ^ 1, pred=i >= STAGES)
        mbarrier.wait(free.index(stage), phase ^ 1)
        k_ready = keys_ready.index(stage)
        mbarrier.expect(k_ready, _KEYS * DIM * 2)
        _copy(k_desc, slots, k_column, k_ready, k_slabs, stage, PAGE, DIM)
        rows = end - block * _KEYS
        v_ready = values_ready.index(gl.where(rows < _KEYS, STAGES, stage))
        mbarrier.expect(v_ready, _KEYS * V_DIM * 2)
        _copy(v_desc, slots, v_column, v_ready, v_slabs, stage, PAGE, V_DIM)
        if rows < _KEYS:
            # Only the row's last block is cut: the barrier behind the others is used once.
            mbarrier.wait(v_ready, 0)
            _clear(values, stage, rows, V_DIM)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(values_ready.index(stage), count=1)
        stage, phase = _next(stage, phase, STAGES)
    # Nor may they come when the next program has this memory.
    for i in range(blocks, blocks + STAGES):
        mbarrier.wait(values_ready.index(stage), phase ^ 1, pred=i >= STAGES)
        stage, phase = _next(stage, phase, STAGES)


@gluon.jit(do_not_specialize=["table_stride"])
def _skip_softmax_hopper_kernel(
    q_desc,
    k_desc,
    v_desc,
    table_ptr,
    tiles_ptr,
    factor_ptr,
    out_ptr,
    stats_ptr,
    q_stride_head,
    k_stride_head,
    v_stride_head,
    table_stride,
    scale,
    v_scale,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    V_DIM: gl.constexpr,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """One query tile of two heads that share their keys and values."""
    # The last tiles of a row have the most keys: they start first.
    tiles_ptr += (gl.num_programs(0) - 1 - gl.program_id(0)) * _FIELDS
    head = gl.program_id(1) * 2
    row = gl.load(tiles_ptr).to(gl.int64)
    first_position = gl.load(tiles_ptr + 1)
    first_query = gl.load(tiles_ptr + 2)
    count = gl.load(tiles_ptr + 3)
    context = gl.load(tiles_ptr + 4)
    factor = gl.load(factor_ptr + row)
    threshold = gl.where((context > 0) & (factor > 0), factor, 1.0) / gl.maximum(context, 1).to(gl.float32)
    gap = gl.where((context > 0) & (factor > 0), gl.log2(gl.minimum(threshold, 1.0)) / scale, float("-inf"))
    element: gl.constexpr = q_desc.dtype
    queries = gl.allocate_shared_memory(element, [4, _HALF, DIM], _SMEM)
    keys = gl.allocate_shared_memory(element, [STAGES, _KEYS, DIM], _SMEM)
    values = gl.allocate_shared_memory(element, [STAGES, _KEYS, V_DIM], _SMEM)
    keys_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_ready = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(keys_ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    for i in gl.static_range(STAGES + 1):
        mbarrier.init(values_ready.index(i), count=1)
    mbarrier.init(q_ready, count=1)
    fence_async_shared()
    shared = (queries, keys, values, keys_ready, values_ready, free)
    tile = (first_position, first_query, count)
    kv_head = head // GROUP
    columns = (head * q_stride_head, q_stride_head, kv_head * k_stride_head, kv_head * v_stride_head)
    descs = (q_desc, k_desc, v_desc)
    table_ptr += row * table_stride
    end = first_position + count
    # Constants stay constants in tuples that have no name.
    gl.warp_specialize(
        [
            (_consume, (shared, q_ready, tile, out_ptr, stats_ptr, scale, gap, v_scale, head, 0, HEADS)),
            (_consume, (shared, q_ready, tile, out_ptr, stats_ptr, scale, gap, v_scale, head, 1, HEADS)),
            (_produce, (descs, shared, q_ready, table_ptr, end, first_query, columns, PAGE)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


def _width(tensor: torch.Tensor) -> int:
    return (tensor.shape[1] - 1) * tensor.stride(1) + tensor.shape[2]


def _box(tensor: torch.Tensor, rows: int) -> TensorDescriptor:
    """Of ``[n, heads, d]``, a row of which has all heads: ``rows`` rows of one slab at a time."""
    shape, strides = [tensor.shape[0], _width(tensor)], [tensor.stride(0), 1]
    return TensorDescriptor(tensor, shape, strides, [rows, SLAB], _SMEM.value)


def _fits(tensor: torch.Tensor) -> bool:
    """Whether TMA reads ``[n, heads, d]``: rows that have all heads and are aligned to 16 bytes."""
    rows, heads, _ = tensor.shape
    step = tensor.stride(0) * tensor.itemsize
    apart = tensor.stride(0) >= _width(tensor) and (heads == 1 or tensor.stride(1) >= tensor.shape[2])
    return apart and 0 < rows < 2**31 and step < 2**40 and not tensor.data_ptr() % 16 and not step % 16


def takes(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: SkipSoftmaxPlan, page_size: int) -> bool:
    """Whether these are served, on a GPU that this kernel is for (``launch.hopper_kernel``): pairs of heads, the usual
    tiles and blocks, and what TMA and wgmma read.
    """
    if (plan.tile_queries, plan.block_keys) != (TILE_QUERIES, BLOCK_KEYS) or page_size < MIN_PAGE:
        return False
    if q.dtype not in HALF_DTYPES or k_cache.dtype != q.dtype or v_cache.dtype != q.dtype:
        return False
    if q.shape[2] not in DIMS or v_cache.shape[2] not in DIMS or q.shape[1] // k_cache.shape[1] % 2:
        return False
    return all(map(_fits, (q, k_cache, v_cache)))


def skip_softmax_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    plan: SkipSoftmaxPlan,
    threshold_scale_factor: torch.Tensor,
    page_size: int,
    sm_scale: float,
    k_scale: float,
    v_scale: float,
    out: torch.Tensor,
    stats: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """See ``skip_softmax_prefill.skip_softmax_prefill``; what ``takes`` accepts."""
    heads, dim, v_dim = q.shape[1], q.shape[2], v_cache.shape[2]
    config = config or Config()
    if stats is not None:
        stats.add_(plan.totals, alpha=heads)
    if not plan.tiles:
        return out
    _skip_softmax_hopper_kernel[(len(plan.tiles), heads // 2)](
        *(_box(q, TILE_QUERIES // 2), _box(k_cache, page_size), _box(v_cache, page_size)),
        *(page_table, plan.table, threshold_scale_factor, out, stats),
        *(q.stride(1), k_cache.stride(1), v_cache.stride(1), page_table.stride(0)),
        *(sm_scale * k_scale * LOG2_E, v_scale),
        HEADS=heads,
        GROUP=heads // k_cache.shape[1],
        DIM=dim,
        V_DIM=v_dim,
        PAGE=page_size,
        STAGES=config.num_stages,
        CONSUMER_REGISTERS=config.consumer_registers,
        PRODUCER_REGISTERS=config.producer_registers,
        num_warps=4,
    )
    return out
