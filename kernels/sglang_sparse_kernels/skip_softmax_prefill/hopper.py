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
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..common.checks import HALF_DTYPES
from ..common.launch import LOG2_E
from .hopper_loads import SLAB, SMEM, next_stage, produce
from .hopper_softmax import (
    HALF,
    KEYS,
    LOGITS,
    ROWS,
    VOTES,
    add,
    hide,
    highest,
    levels_of,
    raise_maxima,
    vote,
    weigh,
)
from .plan import BLOCK_KEYS, TILE_QUERIES, QueryTile, SkipSoftmaxPlan
from .reference import Inputs

DIMS = (64, 128)
MIN_PAGE = 16
_FIELDS = gl.constexpr(len(QueryTile._fields))


@dataclass(frozen=True)
class Config:
    """Launch parameters: blocks of keys and values in flight, at least 2, and registers of the threads that compute and
    load.
    """

    num_stages: int = 5
    consumer_registers: int = 240
    producer_registers: int = 24


@gluon.jit
def _triangle(n):
    """Keys of a block that ``n`` queries see together, the first of them none, each other one more than before."""
    n = gl.maximum(n, 0)
    part = gl.minimum(n, KEYS + 1)
    return part * (part - 1) // 2 + (n - part) * KEYS


@gluon.jit
def _multiply(shared, place, HEAD: gl.constexpr, MASKED: gl.constexpr):
    """Start the products of both halves of a tile's queries with a block of keys, and give the block before back."""
    queries, keys, _values, keys_ready, _values_ready, free, _q_ready, _votes = shared
    stage, phase, visit = place
    STAGES: gl.constexpr = keys.shape[0]
    mbarrier.wait(keys_ready.index(stage), phase)
    zero = gl.zeros([HALF, KEYS], gl.float32, LOGITS)
    block = keys.index(stage).permute((1, 0))
    first = warpgroup_mma(queries.index(2 * HEAD), block, zero, use_acc=False, is_async=True)
    second = warpgroup_mma(queries.index(2 * HEAD + 1), block, zero, use_acc=False, is_async=True)
    # By then every warp has seen its products of the block before finished; nobody waits for that in between.
    gl.barrier()
    before = gl.where(stage == 0, STAGES, stage) - 1
    mbarrier.arrive(free.index(before), count=1, pred=visit > 0 if MASKED else True)
    # The compiler would put this barrier in front of the decision.
    gl.barrier()
    return first, second


@gluon.jit
def _attend(shared, place, scale, above, below, upper, lower):
    """Add the values of a block to the sums: the upper half by its weights, the lower one from its logits on."""
    values, values_ready = shared[2], shared[4]
    stage, phase = place[0], place[1]
    mbarrier.wait(values_ready.index(stage), phase)
    output_above, weights_above = add(above, upper, values.index(stage))
    below, lower = weigh(below, lower, scale)
    output_below, weights_below = add(below, lower, values.index(stage))
    output_above, output_below, _, _ = warpgroup_mma_wait(
        0, deps=(output_above, output_below, weights_above, weights_below)
    )
    return (upper[0], upper[1], output_above), (lower[0], lower[1], output_below)


@gluon.jit
def _visit(shared, place, seen, rule, upper, lower, HEAD: gl.constexpr, MASKED: gl.constexpr):
    """One block of keys: one step of the online softmax, or skipped, and then the last that is returned is 1.

    With ``MASKED``, query ``m`` sees only the first ``seen + m`` keys. Maxima stay products of query and key, and
    ``gap`` is the logarithm of the threshold in these units. Half of a tile is multiplied while the other half is
    exponentiated. Sums are rescaled only where a maximum rises, which the vote tells all warps.
    """
    scale, gap, count = rule
    first, second = _multiply(shared, place, HEAD, MASKED)
    above = warpgroup_mma_wait(1, deps=(first,))
    if MASKED:
        above = hide(above, seen)
    largest_above, levels_above = levels_of(above, upper, gap, 0, count)
    votes_above = shared[7][0].index(HEAD)
    votes_below = shared[7][1].index(HEAD)
    if not MASKED:
        # In memory before the wait, or the compiler would look for the maxima behind it. The few other blocks have no
        # registers for that.
        vote(levels_above, votes_above)
    below = warpgroup_mma_wait(0, deps=(second,))
    if MASKED:
        below = hide(below, seen + HALF)
    largest_below, levels_below = levels_of(below, lower, gap, HALF, count)
    if MASKED:
        levels_below = gl.maximum(levels_above, levels_below)
    vote(levels_below, votes_below)
    gl.barrier()
    level = highest(votes_below)
    if not MASKED:
        level = gl.maximum(level, highest(votes_above))
    if level > 0:
        if level > 1:
            upper = raise_maxima(upper, largest_above, scale)
            lower = raise_maxima(lower, largest_below, scale)
        above, upper = weigh(above, upper, scale)
        upper, lower = _attend(shared, place, scale, above, below, upper, lower)
    return upper, lower, gl.where(level > 0, 0, 1)


@gluon.jit
def _write(state, out_ptr, first, first_query, count, v_scale, head, HEADS: gl.constexpr):
    """Half of a tile's output."""
    V_DIM: gl.constexpr = state[2].shape[1]
    outputs: gl.constexpr = state[2].type.layout
    by_row: gl.constexpr = gl.SliceLayout(1, outputs)
    output = state[2] * gl.convert_layout(v_scale / state[1], by_row)[:, None]
    members = first + gl.arange(0, HALF, by_row)
    dims = gl.arange(0, V_DIM, gl.SliceLayout(0, outputs))
    offsets = (first_query + members).to(gl.int64)[:, None] * (HEADS * V_DIM) + head * V_DIM + dims[None, :]
    gl.store(out_ptr + offsets, output.to(out_ptr.dtype.element_ty), mask=(members < count)[:, None])


@gluon.jit
def _consume(shared, tile, out_ptr, stats_ptr, factors, HEAD: gl.constexpr, HEADS: gl.constexpr):
    """The tile of one query head, by four warps."""
    first_position, first_query, count, first_head = tile
    scale, gap, v_scale = factors
    rule = (scale, gap, count)
    STAGES: gl.constexpr = shared[1].shape[0]
    V_DIM: gl.constexpr = shared[2].shape[2]
    outputs: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V_DIM, 16])
    maximum = gl.full([HALF], float("-inf"), gl.float32, ROWS)
    total = gl.zeros([HALF], gl.float32, ROWS)
    output = gl.zeros([HALF, V_DIM], gl.float32, outputs)
    upper = (maximum, total, output)
    lower = (maximum, total, output)
    skipped_blocks = gl.to_tensor(0)
    skipped_pairs = gl.to_tensor(0)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    blocks = (first_position + count + KEYS - 1) // KEYS
    # Blocks that every query sees whole, and at least the first one, which is visited before any other.
    whole = gl.maximum((first_position + 1) // KEYS, 1)
    mbarrier.wait(shared[6], 0)
    for i in range(blocks - whole + 1):
        seen = first_position + 1 - gl.where(i == 0, 0, blocks - i) * KEYS
        upper, lower, skipped = _visit(shared, (stage, phase, i), seen, rule, upper, lower, HEAD, True)
        skipped_blocks += skipped
        skipped_pairs += skipped * (_triangle(seen + count) - _triangle(seen))
        stage, phase = next_stage(stage, phase, STAGES)
    skipped_pairs -= skipped_blocks * count * KEYS
    for i in range(1, whole):
        upper, lower, skipped = _visit(shared, (stage, phase, i), 0, rule, upper, lower, HEAD, False)
        skipped_blocks += skipped
        stage, phase = next_stage(stage, phase, STAGES)
    skipped_pairs += skipped_blocks * count * KEYS
    _write(upper, out_ptr, 0, first_query, count, v_scale, first_head + HEAD, HEADS)
    _write(lower, out_ptr, HALF, first_query, count, v_scale, first_head + HEAD, HEADS)
    if stats_ptr is not None:
        gl.atomic_add(stats_ptr, -skipped_pairs.to(gl.int64))
        gl.atomic_add(stats_ptr + 2, skipped_blocks.to(gl.int64))


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
    queries = gl.allocate_shared_memory(element, [4, HALF, DIM], SMEM)
    keys = gl.allocate_shared_memory(element, [STAGES, KEYS, DIM], SMEM)
    values = gl.allocate_shared_memory(element, [STAGES, KEYS, V_DIM], SMEM)
    keys_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_ready = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    votes_above = gl.allocate_shared_memory(gl.int32, [2, 4], VOTES)
    votes_below = gl.allocate_shared_memory(gl.int32, [2, 4], VOTES)
    for i in gl.static_range(STAGES):
        mbarrier.init(keys_ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    for i in gl.static_range(STAGES + 1):
        mbarrier.init(values_ready.index(i), count=1)
    mbarrier.init(q_ready, count=1)
    fence_async_shared()
    shared = (queries, keys, values, keys_ready, values_ready, free, q_ready, (votes_above, votes_below))
    tile = (first_position, first_query, count, head)
    factors = (scale, gap, v_scale)
    kv_head = head // GROUP
    columns = (head * q_stride_head, q_stride_head, kv_head * k_stride_head, kv_head * v_stride_head)
    descs = (q_desc, k_desc, v_desc)
    table_ptr += row * table_stride
    end = first_position + count
    # Constants stay constants in tuples that have no name.
    gl.warp_specialize(
        [
            (_consume, (shared, tile, out_ptr, stats_ptr, factors, 0, HEADS)),
            (_consume, (shared, tile, out_ptr, stats_ptr, factors, 1, HEADS)),
            (produce, (descs, shared, table_ptr, end, first_query, columns, PAGE)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


def _width(tensor: torch.Tensor) -> int:
    return (tensor.shape[1] - 1) * tensor.stride(1) + tensor.shape[2]


def _box(tensor: torch.Tensor, rows: int) -> TensorDescriptor:
    """Of ``[n, heads, d]``, a row of which has all heads: ``rows`` rows of one slab at a time."""
    shape, strides = [tensor.shape[0], _width(tensor)], [tensor.stride(0), 1]
    return TensorDescriptor(tensor, shape, strides, [rows, SLAB.value], SMEM.value)


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
    inputs: Inputs,
    out: torch.Tensor,
    stats: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """See ``skip_softmax_prefill.skip_softmax_prefill``; what ``takes`` accepts."""
    q, k_cache, v_cache, plan = inputs.q, inputs.k_cache, inputs.v_cache, inputs.plan
    page_table, page_size = inputs.page_table, inputs.page_size
    heads, dim, v_dim = q.shape[1], q.shape[2], v_cache.shape[2]
    config = config or Config()
    if stats is not None:
        stats.add_(plan.totals, alpha=heads)
    if not plan.tiles:
        return out
    _skip_softmax_hopper_kernel[(len(plan.tiles), heads // 2)](
        *(_box(q, TILE_QUERIES // 2), _box(k_cache, page_size), _box(v_cache, page_size)),
        *(page_table, plan.table, inputs.threshold_scale_factor, out, stats),
        *(q.stride(1), k_cache.stride(1), v_cache.stride(1), page_table.stride(0)),
        *(inputs.sm_scale * inputs.k_scale * LOG2_E, inputs.v_scale),
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
