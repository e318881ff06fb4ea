"""Triton kernels of anchor attention: anchor, identification of the active keys, and attention over those."""

# Type checkers know neither the launch options of a kernel nor its compile-time values.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from ..common.launch import LOG2_E, MIN_DOT
from ..common.paged_prefill import finish, load_rows, load_slots, softmax_step
from .launch import Config, Launch, default_config
from .means import GroupMeans, carried_means, hands_on
from .plan import CHUNK_TILES, AnchorPlan, GroupPart, QueryBlock, Scratch

# Mean queries that one product of the identification takes, over a KV head's query heads and a group's blocks.
_MAX_POOLED = 128
# The tables of a plan begin anywhere in one copy: their alignment must not make another kernel.
_BLOCK_FIELDS = tl.constexpr(len(QueryBlock._fields))
_PART_FIELDS = tl.constexpr(len(GroupPart._fields))


@triton.jit
def _attend(
    query,
    k_rows,
    v_rows,
    valid,
    limits,
    scale,
    maximum,
    total,
    output,
    DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One step of the online softmax; with ``MASKED``, query ``m`` takes only the first ``limits[m]`` keys."""
    dims = tl.arange(0, query.shape[1])
    keys = load_rows(k_rows[:, None] + dims[None, :], valid, dims, DIM)
    logits = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision="ieee")
    if MASKED:
        allowed = tl.arange(0, k_rows.shape[0])[None, :] < limits[:, None]
        logits = tl.where(allowed, logits, float("-inf"))
    return softmax_step(query, logits, v_rows, valid, scale, maximum, total, output, V_DIM)


@triton.jit
def _tile_start(tile, init_tiles, group_start, TILE: tl.constexpr):
    """Position of a tile of the anchor region: first those of the initial block, then those of the group."""
    return tl.where(tile < init_tiles, tile * TILE, group_start + (tile - init_tiles) * TILE)


@triton.jit(do_not_specialize=["num_queries", "table_stride"], do_not_specialize_on_alignment=["blocks_ptr"])
def _anchor_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    blocks_ptr,
    maximum_ptr,
    total_ptr,
    output_ptr,
    pooled_ptr,
    anchors_ptr,
    q_stride_row,
    q_stride_head,
    k_stride_slot,
    k_stride_head,
    v_stride_slot,
    v_stride_head,
    table_stride,
    num_queries,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_V_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One query block and head: attention over the anchor region, the mean query and the mean anchor."""
    # The last blocks of a group have the most keys: they start first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    blocks_ptr += block * _BLOCK_FIELDS
    row = tl.load(blocks_ptr).to(tl.int64)
    index = tl.load(blocks_ptr + 1)
    first_position = tl.load(blocks_ptr + 2)
    first_query = tl.load(blocks_ptr + 3).to(tl.int64)
    count = tl.load(blocks_ptr + 4)
    members = tl.arange(0, BLOCK)
    tokens = tl.arange(0, TILE)
    dims = tl.arange(0, BLOCK_DIM)
    v_dims = tl.arange(0, BLOCK_V_DIM)
    in_block = members < count
    end = first_position + count
    table_ptr += row * table_stride
    k_ptr += (head // GROUP).to(tl.int64) * k_stride_head
    v_ptr += (head // GROUP).to(tl.int64) * v_stride_head
    q_ptr += first_query * q_stride_row + head.to(tl.int64) * q_stride_head
    query = load_rows(q_ptr + members[:, None] * q_stride_row + dims[None, :], in_block, dims, DIM)
    entry = tl.load(blocks_ptr + 7).to(tl.int64) * HEADS + head
    mean_query = tl.sum(query.to(tl.float32), axis=0) / count
    tl.store(pooled_ptr + entry * DIM + dims, mean_query.to(pooled_ptr.dtype.element_ty), mask=dims < DIM)
    if UPCAST:
        query = query.to(tl.float32)
    maximum = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.full([BLOCK], 0.0, tl.float32)
    output = tl.full([BLOCK, v_dims.shape[0]], 0.0, tl.float32)
    group_start = tl.load(blocks_ptr + 6)
    block_start = index * BLOCK
    init_tiles = tl.where(group_start > 0, BLOCK // TILE, 0)
    full_tiles = init_tiles + (block_start - group_start) // TILE
    every = tokens >= 0
    slot = load_slots(table_ptr, _tile_start(0, init_tiles, group_start, TILE) + tokens, end, PAGE)
    for tile in range(full_tiles):
        # The slots of a tile are loaded one tile early, or keys and values would wait for them.
        ahead = load_slots(table_ptr, _tile_start(tile + 1, init_tiles, group_start, TILE) + tokens, end, PAGE)
        k_rows, v_rows = k_ptr + slot * k_stride_slot, v_ptr + slot * v_stride_slot
        maximum, total, output = _attend(
            query, k_rows, v_rows, every, every, scale, maximum, total, output, DIM, V_DIM, False
        )
        slot = ahead
    for start in range(block_start, end, TILE):
        slot = load_slots(table_ptr, start + tokens, end, PAGE)
        k_rows, v_rows = k_ptr + slot * k_stride_slot, v_ptr + slot * v_stride_slot
        valid, limits = start + tokens < end, first_position + members + 1 - start
        maximum, total, output = _attend(
            query, k_rows, v_rows, valid, limits, scale, maximum, total, output, DIM, V_DIM, True
        )
    states = head * num_queries + first_query + members
    tl.store(maximum_ptr + states, maximum, mask=in_block)
    tl.store(total_ptr + states, total, mask=in_block)
    offsets = (first_query + members)[:, None] * (HEADS * V_DIM) + head * V_DIM + v_dims[None, :]
    tl.store(output_ptr + offsets, output, mask=in_block[:, None] & (v_dims < V_DIM)[None, :])
    # The hardware's maximum drops NaN, the sum does not.
    anchor = tl.where(in_block, tl.where(total >= 0, maximum, float("nan")), 0.0)
    tl.store(anchors_ptr + entry, tl.sum(anchor, axis=0) / count)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["tiles_ptr", "parts_ptr", "theta_ptr"])
def _identify_kernel(
    k_ptr,
    table_ptr,
    tiles_ptr,
    parts_ptr,
    theta_ptr,
    pooled_ptr,
    anchors_ptr,
    hits_ptr,
    tile_counts_ptr,
    k_stride_slot,
    k_stride_head,
    table_stride,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One tile of keys and KV head, for the group parts that share it: which keys any block hits, for each query head.

    All of them hit the block before the group. Programs of one tile are neighbours, so that memory is read in the order
    of the slots.
    """
    KV_HEADS: tl.constexpr = HEADS // GROUP
    kv_head = tl.program_id(0) % KV_HEADS
    tiles_ptr += tl.program_id(0) // KV_HEADS * 3
    first_part = tl.load(tiles_ptr)
    end_part = first_part + tl.load(tiles_ptr + 1)
    tile = tl.load(tiles_ptr + 2)
    # The last part has all candidates of the others.
    last_ptr = parts_ptr + (end_part - 1) * _PART_FIELDS
    row = tl.load(last_ptr).to(tl.int64)
    most = tl.load(last_ptr + 5)
    theta = tl.load(theta_ptr + row)
    dims = tl.arange(0, BLOCK_DIM)
    members = tl.arange(0, BLOCK_GROUP)
    pairs = tl.arange(0, BLOCK_GROUP * BLOCK_STEP)
    tokens = tile * TILE + tl.arange(0, TILE)
    slot = load_slots(table_ptr + row * table_stride, BLOCK + tokens, BLOCK + most, PAGE)
    k_ptr += kv_head.to(tl.int64) * k_stride_head
    keys = load_rows(k_ptr + slot[:, None] * k_stride_slot + dims[None, :], tokens < most, dims, DIM)
    member = pairs // BLOCK_STEP
    q_head = kv_head * GROUP + members
    for part in range(first_part, end_part):
        part_ptr = parts_ptr + part * _PART_FIELDS
        candidates = tl.load(part_ptr + 5)
        first_mean = tl.load(part_ptr + 8)
        num_means = tl.load(part_ptr + 9)
        hit = tl.full([TILE, BLOCK_GROUP], 0, tl.int32)
        for first in range(0, num_means, BLOCK_STEP):
            mean = first + pairs % BLOCK_STEP
            used = (mean < num_means) & (member < GROUP)
            entry = (first_mean + mean).to(tl.int64) * HEADS + kv_head * GROUP + member
            pooled = load_rows(pooled_ptr + entry[:, None] * DIM + dims[None, :], used, dims, DIM)
            if UPCAST:
                pooled = pooled.to(tl.float32)
            anchors = tl.load(anchors_ptr + entry, mask=used, other=0.0)
            # Keys are the rows: a group of few query heads fills the tensor core all the same.
            logits = tl.dot(keys.to(pooled.dtype), tl.trans(pooled), input_precision="ieee")
            gaps = (anchors[None, :] - logits) * scale
            missed = (gaps > theta) & (gaps < float("inf"))
            found = tl.where(missed | (used[None, :] == 0), 0, 1)
            hit = tl.maximum(hit, tl.max(tl.reshape(found, [TILE, BLOCK_GROUP, BLOCK_STEP]), axis=2))
        valid = tokens < candidates
        hit = tl.where((tokens >= candidates - BLOCK)[:, None], 1, hit)
        hit = tl.where(valid[:, None], hit, 0)
        hits = hits_ptr + tl.load(part_ptr + 6).to(tl.int64) * HEADS + tokens[:, None]
        hits += q_head.to(tl.int64)[None, :] * candidates
        tl.store(hits, hit.to(tl.int8), mask=valid[:, None] & (members < GROUP)[None, :])
        tile_counts = tile_counts_ptr + tl.load(part_ptr + 7).to(tl.int64) * HEADS + tile
        tile_counts += q_head * tl.cdiv(candidates, TILE)
        tl.store(tile_counts, tl.sum(hit, axis=0), mask=members < GROUP)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["chunks_ptr", "parts_ptr"])
def _compact_kernel(
    hits_ptr,
    tile_counts_ptr,
    table_ptr,
    chunks_ptr,
    parts_ptr,
    slots_ptr,
    counts_ptr,
    table_stride,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK_TILES: tl.constexpr,
):
    """One chunk of a group part's candidates and query head: the slots of its hits, behind those of earlier chunks."""
    CHUNK: tl.constexpr = TILE * CHUNK_TILES
    head = tl.program_id(0) % HEADS
    chunks_ptr += tl.program_id(0) // HEADS * 2
    part = tl.load(chunks_ptr)
    chunk = tl.load(chunks_ptr + 1)
    parts_ptr += part * _PART_FIELDS
    row = tl.load(parts_ptr).to(tl.int64)
    candidates = tl.load(parts_ptr + 5)
    start = tl.load(parts_ptr + 6).to(tl.int64) * HEADS + head.to(tl.int64) * candidates
    tile_counts_ptr += tl.load(parts_ptr + 7).to(tl.int64) * HEADS + head * tl.cdiv(candidates, TILE)
    tokens = tl.arange(0, CHUNK)
    earlier = tl.full([CHUNK], 0, tl.int32)
    for first in range(0, chunk * CHUNK_TILES, CHUNK):
        earlier += tl.load(tile_counts_ptr + first + tokens, mask=first + tokens < chunk * CHUNK_TILES, other=0)
    before = tl.sum(earlier, axis=0)
    tokens += chunk * CHUNK
    hit = tl.load(hits_ptr + start + tokens, mask=tokens < candidates, other=0).to(tl.int32)
    slot = load_slots(table_ptr + row * table_stride, BLOCK + tokens, BLOCK + candidates, PAGE)
    position = before + tl.cumsum(hit, axis=0) - 1
    tl.store(slots_ptr + start + position, slot.to(tl.int32), mask=hit != 0)
    if (chunk + 1) * CHUNK >= candidates:
        tl.store(counts_ptr + part * HEADS + head, before + tl.sum(hit, axis=0))


@triton.jit
def _ranked_head(counts_ptr, rank, HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr):
    """The head with the ``rank``-th most active keys, from 0 on; of equals, the first comes first."""
    heads = tl.arange(0, BLOCK_HEADS)
    count = tl.load(counts_ptr + heads, mask=heads < HEADS, other=-1)
    more = count[None, :] > count[:, None]
    ahead = more | ((count[None, :] == count[:, None]) & (heads[None, :] < heads[:, None]))
    return tl.sum(tl.where(tl.sum(ahead.to(tl.int32), axis=1) == rank, heads, 0), axis=0)


@triton.jit(do_not_specialize=["num_queries"], do_not_specialize_on_alignment=["blocks_ptr", "parts_ptr"])
def _sparse_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    blocks_ptr,
    parts_ptr,
    maximum_ptr,
    total_ptr,
    output_ptr,
    slots_ptr,
    counts_ptr,
    out_ptr,
    sinks_ptr,
    q_stride_row,
    q_stride_head,
    k_stride_slot,
    k_stride_head,
    v_stride_slot,
    v_stride_head,
    num_queries,
    scale,
    v_scale,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_V_DIM: tl.constexpr,
    TILE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One query block and head: the anchor's softmax goes on over the group's active keys."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    blocks_ptr += block * _BLOCK_FIELDS
    first_query = tl.load(blocks_ptr + 3).to(tl.int64)
    queries = tl.load(blocks_ptr + 4)
    part = tl.load(blocks_ptr + 5)
    # Each group part's heads with the most active keys start first.
    head = _ranked_head(counts_ptr + part * HEADS, tl.program_id(1), HEADS, BLOCK_HEADS)
    candidates = tl.load(parts_ptr + part * _PART_FIELDS + 5)
    slots_ptr += tl.load(parts_ptr + part * _PART_FIELDS + 6).to(tl.int64) * HEADS + head.to(tl.int64) * candidates
    count = tl.load(counts_ptr + part * HEADS + head)
    members = tl.arange(0, BLOCK)
    tokens = tl.arange(0, TILE)
    dims = tl.arange(0, BLOCK_DIM)
    v_dims = tl.arange(0, BLOCK_V_DIM)
    in_block = members < queries
    k_ptr += (head // GROUP).to(tl.int64) * k_stride_head
    v_ptr += (head // GROUP).to(tl.int64) * v_stride_head
    q_ptr += first_query * q_stride_row + head.to(tl.int64) * q_stride_head
    query = load_rows(q_ptr + members[:, None] * q_stride_row + dims[None, :], in_block, dims, DIM)
    if UPCAST:
        query = query.to(tl.float32)
    states = head * num_queries + first_query + members
    maximum = tl.load(maximum_ptr + states, mask=in_block, other=0.0)
    total = tl.load(total_ptr + states, mask=in_block, other=1.0)
    offsets = (first_query + members)[:, None] * (HEADS * V_DIM) + head * V_DIM + v_dims[None, :]
    in_out = in_block[:, None] & (v_dims < V_DIM)[None, :]
    output = tl.load(output_ptr + offsets, mask=in_out, other=0.0)
    every = tokens >= 0
    full = count // TILE * TILE
    slot = tl.load(slots_ptr + tokens, mask=tokens < count, other=0)
    for first in range(0, full, TILE):
        # As in the anchor: one tile early.
        ahead = tl.load(slots_ptr + first + TILE + tokens, mask=first + TILE + tokens < count, other=0)
        k_rows, v_rows = k_ptr + slot.to(tl.int64) * k_stride_slot, v_ptr + slot.to(tl.int64) * v_stride_slot
        maximum, total, output = _attend(
            query, k_rows, v_rows, every, every, scale, maximum, total, output, DIM, V_DIM, False
        )
        slot = ahead
    if full < count:
        k_rows, v_rows = k_ptr + slot.to(tl.int64) * k_stride_slot, v_ptr + slot.to(tl.int64) * v_stride_slot
        valid, limits = tokens < count - full, tl.full([BLOCK], count - full, tl.int32)
        maximum, total, output = _attend(
            query, k_rows, v_rows, valid, limits, scale, maximum, total, output, DIM, V_DIM, True
        )
    output = finish(scale, v_scale, sinks_ptr, head, maximum, total, output)
    tl.store(out_ptr + offsets, output.to(out_ptr.dtype.element_ty), mask=in_out)


def anchor_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    plan: AnchorPlan,
    theta: torch.Tensor,
    page_size: int,
    sm_scale: float,
    k_scale: float,
    v_scale: float,
    out: torch.Tensor,
    stats: torch.Tensor | None = None,
    means: Mapping[int, GroupMeans] | None = None,
    config: Config | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``anchor_prefill.anchor_prefill``."""
    config = config or default_config(plan.block_size, max(q.shape[2], v_cache.shape[2]), q.device)
    pairs = 0
    for piece in plan.slices:
        window = slice(piece.first_query, piece.first_query + piece.num_queries)
        launch = Launch(q[window], k_cache, v_cache, page_table, plan, piece, page_size, sm_scale * k_scale, config)
        counts = _attend_slice(launch, theta, out[window], v_scale, means or {}, sinks)
        pairs += (counts.sum(dim=1) * piece.part_table[:, 4]).sum() if stats is not None else 0
    if stats is not None:
        stats[0] += pairs + plan.anchor_pairs * q.shape[1]
        stats[1] += plan.causal_pairs * q.shape[1]
    return out


def find_active_keys(launch: Launch, theta: torch.Tensor, means: Mapping[int, GroupMeans]) -> Scratch:
    """The anchor's state of every query, and the slots of each part's active keys in ascending order of position."""
    piece, config, heads = launch.piece, launch.config, launch.q.shape[1]
    scratch = Scratch.allocate(piece, launch.q, launch.v_cache.shape[2])
    table, table_stride = launch.page_table, launch.page_table.stride(0)
    _anchor_kernel[(len(piece.blocks), heads)](
        *(launch.q, launch.k_cache, launch.v_cache, table, piece.block_table),
        *(scratch.maximum, scratch.total, scratch.output, scratch.pooled, scratch.anchors),
        *launch.strides("q", "k_cache", "v_cache"),
        *(table_stride, piece.num_queries, launch.scale * LOG2_E),
        **launch.constants("GROUP", "DIM", "V_DIM", "BLOCK_DIM", "BLOCK_V_DIM", "PAGE", "TILE", "UPCAST"),
        **launch.attention_options,
    )
    _take_over(launch, scratch, means)
    _hand_on(launch, scratch, means)
    if not len(piece.tile_table):
        return scratch
    group = heads // launch.k_cache.shape[1]
    block_group = triton.next_power_of_2(group)
    pooled = min(triton.next_power_of_2(launch.plan.step), _MAX_POOLED // min(block_group, _MAX_POOLED))
    _identify_kernel[(len(piece.tile_table) * launch.k_cache.shape[1],)](
        *(launch.k_cache, table, piece.tile_table, piece.part_table, theta, scratch.pooled, scratch.anchors),
        *(scratch.hits, scratch.tile_counts),
        *launch.strides("k_cache"),
        *(table_stride, launch.scale),
        **launch.constants("GROUP", "DIM", "BLOCK_DIM", "PAGE", "UPCAST"),
        BLOCK_GROUP=block_group,
        BLOCK_STEP=max(pooled, MIN_DOT // min(block_group, MIN_DOT)),
        TILE=launch.plan.tile_keys,
        num_warps=config.identify_warps,
        num_stages=1,
    )
    _compact_kernel[(len(piece.chunk_table) * heads,)](
        *(scratch.hits, scratch.tile_counts, table, piece.chunk_table, piece.part_table),
        *(scratch.slots, scratch.counts, table_stride),
        **launch.constants("PAGE"),
        TILE=launch.plan.tile_keys,
        CHUNK_TILES=CHUNK_TILES,
    )
    return scratch


def _take_over(launch: Launch, scratch: Scratch, means: Mapping[int, GroupMeans]) -> None:
    """Put what is carried before a part's own means, and into that of a block that is cut. Few parts have any."""
    for number, part in enumerate(launch.piece.parts):
        count = carried_means(launch.piece, number)
        if not count:
            continue
        held, first = means[part.row], launch.piece.blocks[part.first_block]
        cut = part.first_mean + part.num_means - part.num_blocks
        share = first.earlier / (first.earlier + first.num_queries)
        for known, earlier in ((scratch.pooled, held.queries[-count:]), (scratch.anchors, held.anchors[-count:])):
            known[part.first_mean : cut] = earlier[: cut - part.first_mean]
            if first.earlier:
                known[cut] = known[cut].float().lerp(earlier[-1].float(), share)


def _hand_on(launch: Launch, scratch: Scratch, means: Mapping[int, GroupMeans]) -> None:
    """Keep the last means of rows that want them."""
    for number, part in enumerate(launch.piece.parts):
        if part.row in means and hands_on(launch.piece, number):
            count, end = min(part.num_means, launch.plan.step), part.first_mean + part.num_means
            means[part.row].queries[-count:] = scratch.pooled[end - count : end]
            means[part.row].anchors[-count:] = scratch.anchors[end - count : end]


def _attend_slice(
    launch: Launch,
    theta: torch.Tensor,
    out: torch.Tensor,
    v_scale: float,
    means: Mapping[int, GroupMeans],
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend in one slice, whose scratch ends here; returns the active keys' counts."""
    piece, scratch = launch.piece, find_active_keys(launch, theta, means)
    _sparse_kernel[(len(piece.blocks), launch.q.shape[1])](
        *(launch.q, launch.k_cache, launch.v_cache, piece.block_table, piece.part_table),
        *(scratch.maximum, scratch.total, scratch.output, scratch.slots, scratch.counts, out, sinks),
        *launch.strides("q", "k_cache", "v_cache"),
        *(piece.num_queries, launch.scale * LOG2_E, v_scale),
        **launch.constants("BLOCK_HEADS", "GROUP", "DIM", "V_DIM", "BLOCK_DIM", "BLOCK_V_DIM", "TILE", "UPCAST"),
        **launch.attention_options,
    )
    return scratch.counts
