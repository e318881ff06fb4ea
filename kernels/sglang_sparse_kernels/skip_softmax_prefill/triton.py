"""Triton kernel of Skip-Softmax prefill."""

# Type checkers know neither the launch options of a kernel nor its compile-time values.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false, reportArgumentType=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton import knobs

from ..common.flash_decode import cap_logits
from ..common.launch import LOG2_E
from ..common.paged_prefill import finish, load_rows, load_slots, softmax_step
from .plan import QueryTile
from .reference import Inputs

_TILE_FIELDS = tl.constexpr(len(QueryTile._fields))


@dataclass(frozen=True)
class Config:
    """Launch parameters: warps and pipeline stages. The sizes of tiles and blocks are the plan's."""

    num_warps: int = 8
    num_stages: int = 2


def default_config(tile_queries: int) -> Config:
    """Not measured yet: no register of 16-bit caches is spilled on Ampere and later up to a head dimension of 128."""
    return Config(num_warps=8 if tile_queries == 128 else 4)


@triton.jit
def _visit(
    query,
    k_rows,
    v_rows,
    valid,
    limits,
    count,
    scale,
    soft_cap,
    gap,
    maximum,
    total,
    output,
    skipped,
    lost,
    DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One block of keys: skipped and ``lost`` pairs counted, or one step of the online softmax.

    The tile has ``count`` queries. With ``MASKED``, query ``m`` sees only the first ``limits[m]`` keys. Maxima stay
    products of query and key, and ``gap`` is the logarithm of the threshold in these units, as ``soft_cap`` is.
    """
    BLOCK_KEYS: tl.constexpr = k_rows.shape[0]
    dims = tl.arange(0, query.shape[1])
    keys = load_rows(k_rows[:, None] + dims[None, :], valid, dims, DIM)
    logits = cap_logits(tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision="ieee"), soft_cap)
    if MASKED:
        logits = tl.where(tl.arange(0, BLOCK_KEYS)[None, :] < limits[:, None], logits, float("-inf"))
    # The hardware's maximum drops NaN, the sum and these comparisons do not.
    reach = tl.where(total >= 0, maximum + gap, float("nan"))
    near = tl.max(tl.where(logits < reach[:, None], 0, 1), axis=1)
    in_tile = tl.arange(0, query.shape[0]) < count
    if tl.max(tl.where(in_tile, near, 0), axis=0) == 0:
        skipped += 1
        if MASKED:
            seen = tl.minimum(tl.maximum(limits, 0), BLOCK_KEYS)
            lost += tl.sum(tl.where(in_tile, seen, 0), axis=0)
        else:
            lost += count * BLOCK_KEYS
    else:
        maximum, total, output = softmax_step(query, logits, v_rows, valid, scale, maximum, total, output, V_DIM)
    return maximum, total, output, skipped, lost


@triton.jit(do_not_specialize=["table_stride"])
def _skip_softmax_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    tiles_ptr,
    factor_ptr,
    out_ptr,
    stats_ptr,
    sinks_ptr,
    q_stride_row,
    q_stride_head,
    k_stride_slot,
    k_stride_head,
    v_stride_slot,
    v_stride_head,
    table_stride,
    scale,
    soft_cap,
    v_scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_V_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One query tile and head."""
    # The last tiles of a row have the most keys: they start first.
    tiles_ptr += (tl.num_programs(0) - 1 - tl.program_id(0)) * _TILE_FIELDS
    head = tl.program_id(1)
    row = tl.load(tiles_ptr).to(tl.int64)
    first_position = tl.load(tiles_ptr + 1)
    first_query = tl.load(tiles_ptr + 2).to(tl.int64)
    count = tl.load(tiles_ptr + 3)
    context = tl.load(tiles_ptr + 4)
    factor = tl.load(factor_ptr + row)
    members = tl.arange(0, TILE_QUERIES)
    tokens = tl.arange(0, BLOCK_KEYS)
    dims = tl.arange(0, BLOCK_DIM)
    v_dims = tl.arange(0, BLOCK_V_DIM)
    in_tile = members < count
    end = first_position + count
    threshold = tl.where((context > 0) & (factor > 0), factor, 1.0) / tl.maximum(context, 1).to(tl.float32)
    gap = tl.where((context > 0) & (factor > 0), tl.log2(tl.minimum(threshold, 1.0)) / scale, float("-inf"))
    table_ptr += row * table_stride
    k_ptr += (head // GROUP).to(tl.int64) * k_stride_head
    v_ptr += (head // GROUP).to(tl.int64) * v_stride_head
    q_ptr += first_query * q_stride_row + head.to(tl.int64) * q_stride_head
    q = load_rows(q_ptr + members[:, None] * q_stride_row + dims[None, :], in_tile, dims, DIM)
    if UPCAST:
        q = q.to(tl.float32)
    maximum = tl.full([TILE_QUERIES], float("-inf"), tl.float32)
    total = tl.full([TILE_QUERIES], 0.0, tl.float32)
    output = tl.full([TILE_QUERIES, BLOCK_V_DIM], 0.0, tl.float32)
    skipped = tl.full([], 0, tl.int32)
    lost = tl.full([], 0, tl.int32)
    blocks = tl.cdiv(end, BLOCK_KEYS)
    # Blocks that every query sees whole, and at least the first one, which is visited before any other.
    whole = tl.maximum((first_position + 1) // BLOCK_KEYS, 1)
    for i in range(blocks - whole + 1):
        start = tl.where(i == 0, 0, blocks - i) * BLOCK_KEYS
        slot = load_slots(table_ptr, start + tokens, end, PAGE)
        k_rows, v_rows = k_ptr + slot * k_stride_slot, v_ptr + slot * v_stride_slot
        valid, limits = start + tokens < end, first_position + members + 1 - start
        maximum, total, output, skipped, lost = _visit(
            *(q, k_rows, v_rows, valid, limits, count, scale, soft_cap, gap),
            *(maximum, total, output, skipped, lost, DIM, V_DIM, True),
        )
    every = tokens >= 0
    slot = load_slots(table_ptr, (whole - 1) * BLOCK_KEYS + tokens, end, PAGE)
    for i in range(1, whole):
        # The slots of a block are loaded one block early, or its keys would wait for them.
        ahead = load_slots(table_ptr, (whole - 1 - i) * BLOCK_KEYS + tokens, end, PAGE)
        k_rows, v_rows = k_ptr + slot * k_stride_slot, v_ptr + slot * v_stride_slot
        maximum, total, output, skipped, lost = _visit(
            *(q, k_rows, v_rows, every, None, count, scale, soft_cap, gap),
            *(maximum, total, output, skipped, lost, DIM, V_DIM, False),
        )
        slot = ahead
    output = finish(scale, v_scale, sinks_ptr, head, maximum, total, output)
    offsets = (first_query + members)[:, None] * (HEADS * V_DIM) + head * V_DIM + v_dims[None, :]
    in_out = in_tile[:, None] & (v_dims < V_DIM)[None, :]
    tl.store(out_ptr + offsets, output.to(out_ptr.dtype.element_ty), mask=in_out)
    if stats_ptr is not None:
        tl.atomic_add(stats_ptr, -lost.to(tl.int64))
        tl.atomic_add(stats_ptr + 2, skipped.to(tl.int64))


def skip_softmax_prefill(
    inputs: Inputs,
    out: torch.Tensor,
    stats: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """See ``skip_softmax_prefill.skip_softmax_prefill``."""
    q, k_cache, v_cache, plan = inputs.q, inputs.k_cache, inputs.v_cache, inputs.plan
    page_table = inputs.page_table
    heads, dim, v_dim = q.shape[1], q.shape[2], v_cache.shape[2]
    scale = inputs.sm_scale * inputs.k_scale
    config = config or default_config(plan.tile_queries)
    if stats is not None:
        stats.add_(plan.totals, alpha=heads)
    if not plan.tiles:
        return out
    _skip_softmax_kernel[(len(plan.tiles), heads)](
        *(q, k_cache, v_cache, page_table, plan.table, inputs.threshold_scale_factor, out, stats),
        inputs.sinks,
        *(stride for tensor in (q, k_cache, v_cache) for stride in tensor.stride()[:2]),
        *(page_table.stride(0), scale * LOG2_E, inputs.soft_cap and inputs.soft_cap / scale, inputs.v_scale),
        HEADS=heads,
        GROUP=heads // k_cache.shape[1],
        DIM=dim,
        V_DIM=v_dim,
        BLOCK_DIM=triton.next_power_of_2(dim),
        BLOCK_V_DIM=triton.next_power_of_2(v_dim),
        PAGE=inputs.page_size,
        TILE_QUERIES=plan.tile_queries,
        BLOCK_KEYS=plan.block_keys,
        # The interpreter multiplies the bit patterns of bfloat16.
        UPCAST=knobs.runtime.interpret,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out
