"""Triton kernels of the page votes: logits of all heads of a group on tensor cores, then each page's votes.

The first reads every summary once and leaves the logits, and of each block of pages the maximum and the sum of every
head's softmax; the second puts these together. Logits are to the base 2.
"""

# Type checkers know neither the launch options of a kernel nor its compile-time values.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false

import torch
import triton
import triton.language as tl
from triton import knobs

from ..common.float8 import as_half
from ..common.launch import LOG2_E, await_inputs, dependent_launch
from ..page_centroids import HEADER, SCALE, count_of
from ..page_centroids.reference import ZERO_LEVEL
from ..page_score.reference import UNBOUNDED
from . import BLOCK, cuda, rows_at_once

# Pages of a program of the second kernel: each reads what all blocks of its row left.
_TILE = 512
_UNBOUNDED, _HEADER, _ZERO = tl.constexpr(UNBOUNDED), tl.constexpr(HEADER), tl.constexpr(ZERO_LEVEL)
_SCALE = tl.constexpr(SCALE)
# What tensor cores multiply, by the dtype of the summaries; those of centroids are bytes.
_OPERANDS = {
    torch.uint8: tl.float16,
    torch.float8_e4m3fn: tl.float16,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}


@triton.jit
def _vectors(pointers, mask, OPERAND: tl.constexpr, FLOAT8: tl.constexpr):
    """One vector of each page, ``[pages, dims]``; of float8 2^-8 of it."""
    loaded = tl.load(pointers, mask=mask, other=0)
    if FLOAT8:
        loaded = as_half(loaded)
    return loaded.to(OPERAND)


@triton.jit
def _queries(q_ptr, stride, dims, in_dim, GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr, OPERAND: tl.constexpr):
    """Some elements of the queries of a group, ``[BLOCK_GROUP, dims]``."""
    members = tl.arange(0, BLOCK_GROUP)
    mask = (members < GROUP)[:, None] & in_dim[None, :]
    return tl.load(q_ptr + members[:, None] * stride + dims[None, :], mask=mask, other=0).to(OPERAND)


@triton.jit
def _product(query, vectors):
    return tl.dot(query, tl.trans(vectors), input_precision="ieee")


@triton.jit
def _centroid_logits(
    q_ptr,
    stride,
    records,
    held,
    factor,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    COUNT: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """The mass of the centroids of each page, ``[BLOCK_GROUP, pages]``, to the base 2; ``records`` are pointers."""
    dims, halves = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_DIM // 2)
    query = _queries(q_ptr, stride, dims, dims < DIM, GROUP, BLOCK_GROUP, OPERAND)
    place = records[:, None] + _HEADER
    first = tl.load(place + dims[None, :], mask=held[:, None] & (dims < DIM)[None, :], other=0)
    exponent = tl.load(records + _SCALE, mask=held, other=0).to(tl.int32) << 23
    factor = factor * exponent.to(tl.float32, bitcast=True)
    base = _product(query, as_half(first).to(OPERAND)) * (factor * 256.0)[None, :]
    in_half = halves < DIM // 2
    lower = _queries(q_ptr, stride, halves, in_half, GROUP, BLOCK_GROUP, OPERAND)
    upper = _queries(q_ptr + DIM // 2, stride, halves, in_half, GROUP, BLOCK_GROUP, OPERAND)
    top, total = base, tl.full(base.shape, 1.0, tl.float32)
    for number in tl.static_range(1, COUNT):
        at = place + DIM + (number - 1) * (DIM // 2) + halves[None, :]
        packed = tl.load(at, mask=held[:, None] & in_half[None, :], other=0).to(tl.int16)
        steps = tl.load(records + number - 1, mask=held, other=0).to(tl.int16) << 8
        difference = _product(lower, ((packed & 0xF) - _ZERO).to(OPERAND))
        difference += _product(upper, ((packed >> 4) - _ZERO).to(OPERAND))
        logits = base + difference * (steps.to(tl.float16, bitcast=True).to(tl.float32) * factor)[None, :] - number
        most = tl.maximum(top, logits)
        total = total * tl.exp2(top - most) + tl.exp2(logits - most)
        top = most
    return top + tl.log2(total)


@triton.jit
def _page_vote_logits_kernel(
    q_ptr,
    summary_ptr,
    page_table_ptr,
    n_pages_ptr,
    logits_ptr,
    sums_ptr,
    q_stride_row,
    q_stride_head,
    table_stride,
    width,
    blocks,
    factor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    COUNT: tl.constexpr,
    RECORD: tl.constexpr,
    FLOAT8: tl.constexpr,
    OPERAND: tl.constexpr,
    PAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    await_inputs(DEPENDENT)
    # Heads run fastest: the programs that share pages, whose summaries are neighbours in memory, run together.
    head = tl.program_id(0)
    block = tl.program_id(1)
    row = tl.program_id(2)
    n_pages = tl.load(n_pages_ptr + row)
    if block * PAGES < n_pages:
        logical = block * PAGES + tl.arange(0, PAGES)
        held = logical < n_pages
        page = tl.load(page_table_ptr + row * table_stride + logical, mask=held, other=0)
        members = tl.arange(0, BLOCK_GROUP)
        in_group = members < GROUP
        q_ptr += row * q_stride_row + head * GROUP * q_stride_head
        entry = page.to(tl.int64) * HEADS + head
        if COUNT > 0:
            records = summary_ptr + entry * RECORD
            logits = _centroid_logits(
                q_ptr, q_stride_head, records, held, factor, GROUP, BLOCK_GROUP, DIM, BLOCK_DIM, COUNT, OPERAND
            )
        else:
            dims = tl.arange(0, BLOCK_DIM)
            query = _queries(q_ptr, q_stride_head, dims, dims < DIM, GROUP, BLOCK_GROUP, OPERAND)
            vectors = summary_ptr + entry[:, None] * (2 * DIM) + dims[None, :]
            mask = held[:, None] & (dims < DIM)[None, :]
            above = _vectors(vectors, mask, OPERAND, FLOAT8)
            below = _vectors(vectors + DIM, mask, OPERAND, FLOAT8)
            raised, lowered = tl.maximum(query, 0.0).to(OPERAND), tl.minimum(query, 0.0).to(OPERAND)
            logits = (_product(raised, above) + _product(lowered, below)) * factor
        at = row * HEADS * GROUP + head * GROUP + members
        out = logits_ptr + at.to(tl.int64)[:, None] * width + logical[None, :]
        tl.store(out, logits, mask=in_group[:, None] & held[None, :])
        # Neither the newest page, whose summary may be of another's keys, nor one with NaN takes votes from others.
        voted = (logical < n_pages - 1)[None, :] & (logits == logits)  # noqa: PLR0124
        votes = tl.where(voted, logits, float("-inf"))
        most = tl.max(votes, axis=1)
        base = tl.where(most == float("-inf"), 0.0, most)
        sums = sums_ptr + (at.to(tl.int64) * blocks + block) * 2
        tl.store(sums, most, mask=in_group)
        tl.store(sums + 1, tl.sum(tl.exp2(votes - base[:, None]), axis=1), mask=in_group)


@triton.jit
def _page_vote_kernel(
    n_pages_ptr,
    logits_ptr,
    sums_ptr,
    out_ptr,
    width,
    blocks,
    local_pages,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    PAGES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    await_inputs(DEPENDENT)
    head = tl.program_id(0)
    row = tl.program_id(2)
    n_pages = tl.load(n_pages_ptr + row)
    first = tl.program_id(1) * TILE
    if first < n_pages:
        logical = first + tl.arange(0, TILE)
        held = logical < n_pages
        parts = tl.arange(0, BLOCKS)
        members = tl.arange(0, BLOCK_GROUP)
        in_group = (members < GROUP)[:, None]
        at = ((row * HEADS + head) * GROUP + members).to(tl.int64)[:, None]
        known = in_group & ((parts < blocks) & (parts * PAGES < n_pages))[None, :]
        pointers = sums_ptr + (at * blocks + parts[None, :]) * 2
        maxima = tl.load(pointers, mask=known, other=float("-inf"))
        sums = tl.load(pointers + 1, mask=known, other=0.0)
        votes = tl.load(logits_ptr + at * width + logical[None, :], mask=in_group & held[None, :], other=0.0)
        most = tl.max(maxima, axis=1)
        base = tl.where(most == float("-inf"), 0.0, most)
        total_votes = tl.sum(sums * tl.exp2(maxima - base[:, None]), axis=1)
        whole = tl.where(total_votes > 0, base + tl.log2(total_votes), 0.0)
        votes = tl.where(in_group, votes - whole[:, None], float("-inf"))
        unknown = tl.max((votes != votes).to(tl.int32), axis=0) > 0  # noqa: PLR0124
        top = tl.max(votes, axis=0)
        top = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.exp2(votes - top[None, :]), axis=0)
        # To the base e, as the reference.
        score = (top + tl.log2(total)) * 0.6931471805599453
        score = tl.where(unknown, _UNBOUNDED, score)
        score = tl.where(logical >= n_pages - local_pages, float("inf"), score)
        tl.store(out_ptr + (row * HEADS + head).to(tl.int64) * width + logical, score, mask=held)


def page_vote(
    q: torch.Tensor,
    summary: torch.Tensor,
    page_table: torch.Tensor,
    n_pages: torch.Tensor,
    sm_scale: float,
    out: torch.Tensor,
    local_pages: int = 1,
    summaries_ready: bool = False,
) -> torch.Tensor:
    """See ``page_vote.page_vote``; entries at or beyond ``n_pages`` are left unwritten. The logits are by the kernel in
    CUDA C++ where that takes them."""
    batch, num_q_heads, width = *q.shape[:2], page_table.shape[1]
    if batch == 0 or width == 0:
        return out
    rows, by_cuda = min(batch, rows_at_once(num_q_heads, width)), cuda.takes(q, summary)
    if by_cuda:
        logits, parts = cuda.scratch(q, summary, width, rows)
    else:
        logits = torch.empty(rows, num_q_heads, width, dtype=torch.float32, device=q.device)
        parts = torch.empty(rows, num_q_heads, triton.cdiv(width, BLOCK), 2, dtype=torch.float32, device=q.device)
    for first in range(0, batch, rows):
        part = slice(first, first + rows)
        given = q[part], summary, page_table[part], n_pages[part], sm_scale, logits, parts
        if by_cuda:
            cuda.leave_logits(*given, summaries_ready)
        else:
            _leave_logits(*given)
        # Those of warps are all written, those of pages as far as there are pages.
        _votes(n_pages[part], logits, parts, out[part], local_pages, 0 if by_cuda else BLOCK)
    return out


def _leave_logits(
    q: torch.Tensor,
    summary: torch.Tensor,
    page_table: torch.Tensor,
    n_pages: torch.Tensor,
    sm_scale: float,
    logits: torch.Tensor,
    parts: torch.Tensor,
) -> None:
    batch, num_q_heads, dim = q.shape
    heads, width, blocks = summary.shape[1], page_table.shape[1], parts.shape[2]
    group = num_q_heads // heads
    count = count_of(summary.shape[2], dim) if summary.dtype == torch.uint8 else 0
    float8 = summary.dtype == torch.float8_e4m3fn
    dependent = dependent_launch(q.device)
    _page_vote_logits_kernel[(heads, blocks, batch)](
        q,
        summary.view(torch.uint8) if float8 else summary,
        page_table,
        n_pages,
        logits,
        parts,
        q.stride(0),
        q.stride(1),
        page_table.stride(0),
        width,
        blocks,
        sm_scale * LOG2_E * (256.0 if float8 else 1.0),
        HEADS=heads,
        GROUP=group,
        BLOCK_GROUP=max(16, triton.next_power_of_2(group)),
        DIM=dim,
        BLOCK_DIM=max(32 if count else 16, triton.next_power_of_2(dim)),
        COUNT=count,
        RECORD=summary.shape[2] if count else 0,
        FLOAT8=float8,
        # The interpreter multiplies the bit patterns of bfloat16.
        OPERAND=tl.float32 if knobs.runtime.interpret else _OPERANDS[summary.dtype],
        PAGES=BLOCK,
        DEPENDENT=dependent,
        num_warps=4 if dim <= 128 else 8,
        launch_pdl=dependent,
    )


def _votes(
    n_pages: torch.Tensor, logits: torch.Tensor, parts: torch.Tensor, out: torch.Tensor, local_pages: int, pages: int
) -> None:
    batch, heads, width = out.shape
    group, blocks = logits.shape[1] // heads, triton.next_power_of_2(parts.shape[2])
    block_group = triton.next_power_of_2(group)
    dependent = dependent_launch(out.device)
    _page_vote_kernel[(heads, triton.cdiv(width, _TILE), batch)](
        n_pages,
        logits,
        parts,
        out,
        width,
        parts.shape[2],
        local_pages,
        HEADS=heads,
        GROUP=group,
        BLOCK_GROUP=block_group,
        PAGES=pages,
        TILE=_TILE,
        BLOCKS=blocks,
        DEPENDENT=dependent,
        # So that the sums of all blocks fit in registers.
        num_warps=min(max(4, blocks * block_group // 2048), 16),
        launch_pdl=dependent,
    )
