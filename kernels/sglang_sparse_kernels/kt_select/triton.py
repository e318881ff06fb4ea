"""Triton kernels of the KT selection: a list of what is visible, the logits of all heads, their softmax's mean.

They serve where the kernel in CUDA C++ does not; ``page_topk`` chooses by the scores.
"""

# Type checkers know neither the launch options of a kernel nor its compile-time values.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportReturnType=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from ..common.float8 import as_half
from ..common.launch import LOG2_E, MIN_DOT, await_inputs, dependent_launch, num_processors
from ..common.scratch import LIMIT, rows_at_once
from ..page_score.reference import UNBOUNDED
from ..page_topk.triton import count_row
from ..window_score.triton import merged_lse
from . import reference

# Candidates whose logits share a maximum and a sum: fixed, so that a row's scores do not depend on the batch.
_TILE = 32
_MERGE_TILES = 64
_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
_UNBOUNDED = tl.constexpr(UNBOUNDED)
# Float8 is loaded as bits: compilers for some GPUs do not know it, nor does the interpreter its NaN.
_WIDE, _E4M3, _E5M2 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_ENCODINGS = {torch.float8_e4m3fn: _E4M3.value, torch.float8_e5m2: _E5M2.value}
# Of float8_e4m3fn ``as_half`` makes 2^-8 of its number.
_E4M3_UNIT = 256.0
_OPERANDS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True)
class ScoreConfig:
    """Launch parameters: programs aimed for per multiprocessor, and candidates that one of the scores takes at once.

    Not measured yet. Not a program for each part of a wide row, most of which has no candidates: it would keep others
    waiting. Three of the logits fit a multiprocessor at once, but many pairs are shared out better among more.
    """

    programs_per_processor: int = 8
    score_block: int = 128


@dataclass(frozen=True)
class ListConfig:
    """Launch parameters: blocks that a program lists at once, and programs aimed for per multiprocessor.

    Not measured yet. At most as many programs as fit at once: most of a wide table has nothing to list, and a program
    for each part of it would keep others waiting.
    """

    block: int = 1024
    programs_per_processor: int = 16


# Without specialisation one binary serves every width.
@triton.jit(do_not_specialize=["table_stride", "max_kept", "width"])
def _visible_blocks_kernel(
    kept_ptr,
    n_kept_ptr,
    first_visible_ptr,
    requests_ptr,
    block_table_ptr,
    n_blocks_ptr,
    n_select_ptr,
    blocks_ptr,
    counts_ptr,
    wanted_ptr,
    stats_ptr,
    table_stride,
    max_kept,
    width,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    STATS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    await_inputs(DEPENDENT)
    head, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    first, stride = tl.program_id(1) * BLOCK, tl.num_programs(1) * BLOCK
    pair = row * HEADS + head
    n_blocks = tl.maximum(tl.minimum(tl.load(n_blocks_ptr + row), width), 0)
    n_select = tl.maximum(tl.load(n_select_ptr + row), 0)
    # Loaded beside the numbers that say whether it is a request at all, so as not to wait for them.
    request = tl.load(requests_ptr + row)
    sparse = n_select < n_blocks
    first_visible = tl.load(first_visible_ptr + request, mask=sparse, other=0)
    n_kept = tl.load(n_kept_ptr + request, mask=sparse, other=0)
    first_visible = tl.maximum(tl.minimum(first_visible, n_blocks), 0)
    n_kept = tl.maximum(tl.minimum(tl.minimum(n_kept, first_visible), max_kept), 0)
    left_out = first_visible - n_kept
    count = n_blocks - left_out
    if first == 0:
        wanted = tl.minimum(n_select, count)
        tl.store(counts_ptr + pair, count)
        tl.store(wanted_ptr + pair, wanted)
        if STATS:
            count_row(stats_ptr, head, wanted, n_blocks, HEADS)
    kept_ptr += (request * HEADS + head) * max_kept
    block_table_ptr += row * table_stride
    blocks_ptr += pair * width
    for start in range(first, count, stride):
        position = start + tl.arange(0, BLOCK)
        listed, is_kept = position < count, position < n_kept
        logical = tl.load(kept_ptr + position, mask=is_kept, other=0)
        logical = tl.maximum(tl.minimum(logical, n_blocks - 1), 0)
        logical = tl.where(is_kept, logical, position + left_out)
        physical = tl.load(block_table_ptr + logical, mask=listed, other=0)
        tl.store(blocks_ptr + position, physical, mask=listed)


@triton.jit
def _numbers(elements, ENCODING: tl.constexpr):
    """Convert the elements of a summary to numbers; float8 to float16, e4m3 to 2^-8 of its number."""
    if ENCODING == _E4M3:
        return as_half(elements)
    elif ENCODING == _E5M2:
        # The upper half of a float16.
        return (elements.to(tl.int16) << 8).to(tl.float16, bitcast=True)
    else:
        return elements


@triton.jit
def _load_ids(candidates_ptr, candidate, width, count):
    """Pages of one tile's candidates; page 0, the pool's dummy page, where there is none.

    What lies beyond the count is read as well, whatever it is, and dropped: the load does not wait for the count.
    """
    ids = tl.load(candidates_ptr + candidate, mask=candidate < width, other=0)
    return tl.where(candidate < count, ids, 0).to(tl.int64)


@triton.jit
def _load_bounds(summary_ptr, page, HEADS: tl.constexpr, DIM: tl.constexpr):
    """Maxima and minima of the keys of one tile's pages, as they are in memory."""
    pointers = summary_ptr + (page * (HEADS * 2 * DIM))[:, None] + tl.arange(0, DIM)[None, :]
    return tl.load(pointers), tl.load(pointers + DIM)


@triton.jit
def _chosen(magnitude, topr):
    """The ``topr`` largest of ``magnitude``, of equal ones the first."""
    dims = tl.arange(0, magnitude.shape[0])
    other, own = magnitude[None, :], magnitude[:, None]
    before = (other > own) | ((other == own) & (dims[None, :] < dims[:, None]))
    return tl.sum(before.to(tl.int32), axis=1) < topr


# Without specialisation one binary serves every width.
@triton.jit(do_not_specialize=["width", "topr"])
def _logit_kernel(
    q_ptr,
    summary_ptr,
    candidates_ptr,
    n_candidates_ptr,
    logits_ptr,
    maxima_ptr,
    totals_ptr,
    q_stride_row,
    q_stride_head,
    width,
    topr,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    CHOOSE: tl.constexpr,
    ENCODING: tl.constexpr,
    OPERAND: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Logits (base 2) of some tiles of candidates, +inf for a broken page, and each tile's maxima and sums."""
    await_inputs(DEPENDENT)
    head, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    pair = row * HEADS + head
    first, stride = tl.program_id(1) * TILE, tl.num_programs(1) * TILE
    members, dims, tokens = tl.arange(0, BLOCK_GROUP), tl.arange(0, DIM), tl.arange(0, TILE)
    in_group = members < GROUP
    count = tl.load(n_candidates_ptr + pair)
    candidates_ptr += pair * width
    page = _load_ids(candidates_ptr, first + tokens, width, count)
    if first < count:
        summary_ptr += head * (2 * DIM)
        # On its way while the query's dimensions are chosen. Later pages are known one tile before their bounds are
        # wanted, or each tile would wait for two loads.
        upper, lower = _load_bounds(summary_ptr, page, HEADS, DIM)
        page = _load_ids(candidates_ptr, first + stride + tokens, width, count)
        pointers = q_ptr + row * q_stride_row + (head * GROUP + members)[None, :] * q_stride_head + dims[:, None]
        query = tl.load(pointers, mask=in_group[None, :], other=0.0).to(tl.float32)
        positive = tl.sum(query, axis=1) > 0
        scales = tl.full([BLOCK_GROUP], 1.0, tl.float32) * scale
        if CHOOSE:
            chosen = _chosen(tl.sum(tl.abs(query), axis=1), topr)
            whole = tl.sum(tl.abs(query), axis=0)
            query = tl.where(chosen[:, None], query, 0.0)
            kept = tl.sum(tl.abs(query), axis=0)
            scales *= tl.where(kept > 0, tl.sqrt(whole / tl.where(kept > 0, kept, 1.0)), 1.0)
        query = query.to(OPERAND)
        logits_ptr += pair * width * GROUP
        sums = pair * tl.cdiv(width, TILE) * GROUP + members
        for start in range(first, count, stride):
            bound = _numbers(tl.where(positive[None, :], upper, lower), ENCODING).to(OPERAND)
            if start + stride < count:
                upper, lower = _load_bounds(summary_ptr, page, HEADS, DIM)
                page = _load_ids(candidates_ptr, start + 2 * stride + tokens, width, count)
            if CHOOSE:
                bound = tl.where(chosen[None, :], bound, 0.0)
            logits = tl.dot(bound, query, input_precision="ieee") * scales[None, :]
            broken = tl.max(tl.where(in_group[None, :] & ~(tl.abs(logits) < float("inf")), 1, 0), axis=1) > 0
            logits = tl.where(broken[:, None], float("inf"), logits)
            held = start + tokens < count
            offsets = (start + tokens)[:, None] * GROUP + members[None, :]
            tl.store(logits_ptr + offsets, logits, mask=held[:, None] & in_group[None, :])
            logits = tl.where((~broken & held)[:, None], logits, float("-inf"))
            maximum = tl.maximum(tl.max(logits, axis=0), _LOWEST)
            total = tl.sum(tl.exp2(logits - maximum[None, :]), axis=0)
            tl.store(maxima_ptr + sums + start // TILE * GROUP, maximum, mask=in_group)
            tl.store(totals_ptr + sums + start // TILE * GROUP, total, mask=in_group)


@triton.jit(do_not_specialize=["width", "local_pages"])
def _score_kernel(
    logits_ptr,
    maxima_ptr,
    totals_ptr,
    n_candidates_ptr,
    out_ptr,
    width,
    local_pages,
    log_group,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    LN_2: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Scores of some blocks of candidates."""
    await_inputs(DEPENDENT)
    pair = tl.program_id(1).to(tl.int64)
    begin, stride = tl.program_id(0) * BLOCK, tl.num_programs(0) * BLOCK
    members = tl.arange(0, BLOCK_GROUP)
    in_group = members < GROUP
    count = tl.load(n_candidates_ptr + pair)
    if begin < count:
        first = pair * tl.cdiv(width, TILE) * GROUP
        used = tl.cdiv(count, TILE)
        lse = merged_lse(maxima_ptr + first, totals_ptr + first, used, GROUP, members, in_group, BLOCK_TILES)
        for start in range(begin, count, stride):
            candidate = start + tl.arange(0, BLOCK)
            offsets = (pair * width + candidate)[:, None] * GROUP + members[None, :]
            mask = (candidate < count)[:, None] & in_group[None, :]
            logits = tl.load(logits_ptr + offsets, mask=mask, other=float("-inf"))
            broken = tl.max(logits, axis=1) == float("inf")
            # Neither a broken page nor a row of such pages alone is to make infinities that cancel.
            shares = tl.where(mask & ~broken[:, None], logits - lse[None, :], _LOWEST)
            largest = tl.max(shares, axis=1)
            score = (largest + tl.log2(tl.sum(tl.exp2(shares - largest[:, None]), axis=1)) - log_group) * LN_2
            score = tl.where(broken, _UNBOUNDED, score)
            score = tl.where(candidate >= count - local_pages, float("inf"), score)
            tl.store(out_ptr + pair * width + candidate, score, mask=candidate < count)


def row_bytes(num_q_heads: int, max_candidates: int) -> int:
    """Bytes of one row's logits, and of the maxima and sums of its tiles."""
    return num_q_heads * (max_candidates + 2 * triton.cdiv(max_candidates, _TILE)) * torch.float32.itemsize


def scratch_bytes(batch: int, num_q_heads: int, max_candidates: int, limit: int = LIMIT) -> int:
    """Bytes that ``kt_score`` allocates at once; ``limit`` is that of the call."""
    of_row = row_bytes(num_q_heads, max_candidates)
    return rows_at_once(batch, of_row, limit) * of_row


def kt_score(
    q: torch.Tensor,
    summary: torch.Tensor,
    candidates: torch.Tensor,
    n_candidates: torch.Tensor,
    topr: int,
    sm_scale: float,
    out: torch.Tensor,
    local_pages: int = 1,
    config: ScoreConfig | None = None,
    limit: int = LIMIT,
) -> torch.Tensor:
    """See ``reference.kt_score``; entries at or beyond ``n_candidates`` are left unwritten.

    ``limit`` bounds the scratch in bytes wherever that of a single row fits.
    """
    batch, num_q_heads, _ = q.shape
    width = candidates.shape[2]
    if batch == 0 or width == 0:
        return out
    rows = rows_at_once(batch, row_bytes(num_q_heads, width), limit)
    logits = torch.empty(rows, width, num_q_heads, dtype=torch.float32, device=q.device)
    tiles = torch.empty(2, rows, triton.cdiv(width, _TILE), num_q_heads, dtype=torch.float32, device=q.device)
    for first in range(0, batch, rows):
        part = slice(first, first + rows)
        inputs = (q[part], summary, candidates[part], n_candidates[part])
        _launch(inputs, (logits, *tiles), out[part], topr, sm_scale, local_pages, config or ScoreConfig())
    return out


def _launch(
    inputs: tuple[torch.Tensor, ...],
    scratch: tuple[torch.Tensor, ...],
    out: torch.Tensor,
    topr: int,
    scale: float,
    local_pages: int,
    config: ScoreConfig,
) -> None:
    q, summary, candidates, n_candidates = inputs
    batch, heads, width = out.shape
    group, dim = q.shape[1] // heads, q.shape[2]
    encoding = _ENCODINGS.get(summary.dtype, _WIDE.value)
    # Float8 fits all dtypes of queries; of other pairs each may hold what the other rounds or cannot reach.
    exact = encoding != _WIDE.value or summary.dtype == q.dtype
    # The interpreter multiplies the bit patterns of bfloat16.
    operand = _OPERANDS[q.dtype] if exact and not knobs.runtime.interpret else tl.float32
    dependent = dependent_launch(q.device)
    most = max(1, config.programs_per_processor * num_processors(q.device) // (batch * heads))
    common = {"GROUP": group, "TILE": _TILE, "DEPENDENT": dependent, "launch_pdl": dependent}
    _logit_kernel[(heads, min(triton.cdiv(width, _TILE), most), batch)](
        q,
        summary if encoding == _WIDE.value else summary.view(torch.uint8),
        *(candidates, n_candidates, *scratch, q.stride(0), q.stride(1), width, topr),
        scale * LOG2_E * (_E4M3_UNIT if encoding == _E4M3.value else 1.0),
        HEADS=heads,
        BLOCK_GROUP=max(MIN_DOT, triton.next_power_of_2(group)),
        DIM=dim,
        CHOOSE=topr < dim,
        ENCODING=encoding,
        OPERAND=operand,
        **common,
    )
    _score_kernel[(min(triton.cdiv(width, config.score_block), most), batch * heads)](
        *(*scratch, n_candidates, out, width, local_pages, math.log2(group)),
        BLOCK_GROUP=triton.next_power_of_2(group),
        BLOCK=config.score_block,
        BLOCK_TILES=_MERGE_TILES,
        LN_2=math.log(2),
        **common,
    )


def visible_blocks(
    kept: torch.Tensor,
    n_kept: torch.Tensor,
    first_visible: torch.Tensor,
    requests: torch.Tensor,
    block_table: torch.Tensor,
    n_blocks: torch.Tensor,
    n_select: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    stats: torch.Tensor | None = None,
    config: ListConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``reference.visible_blocks``; what lies beyond the counts is left unwritten."""
    config = config or ListConfig()
    batch, heads, width = out[0].shape
    if batch * heads == 0:
        return out
    programs = config.programs_per_processor * num_processors(block_table.device)
    # A table of no blocks has counts all the same.
    per_pair = max(1, min(triton.cdiv(width, config.block), programs // (batch * heads)))
    dependent = dependent_launch(block_table.device)
    _visible_blocks_kernel[(heads, per_pair, batch)](
        *(kept, n_kept, first_visible, requests, block_table, n_blocks, n_select),
        *out,
        stats if stats is not None else out[1],
        block_table.stride(0),
        kept.shape[2],
        width,
        HEADS=heads,
        BLOCK=config.block,
        STATS=stats is not None,
        DEPENDENT=dependent,
        launch_pdl=dependent,
    )
    return out


def kt_select(*arguments: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``reference.kt_select``, by these kernels."""
    return reference.kt_select(*arguments, **more, parts=(visible_blocks, kt_score))
