"""Triton kernel of the page score: bound by the bytes of the summaries, each read once."""

# Type checkers know neither the launch options of a kernel nor its compile-time values.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..common.float8 import converts_float8, four_numbers
from ..common.launch import await_inputs, dependent_launch, num_processors, planned_rows
from .reference import UNBOUNDED

_NUM_WARPS = 4
# What one load instruction of a warp brings, at 16 bytes a thread.
_WARP_BYTES = 32 * 16
_UNBOUNDED = tl.constexpr(UNBOUNDED)


@dataclass(frozen=True)
class Config:
    """Launch parameters: bytes of summaries per program and step, and programs aimed for per multiprocessor, all
    resident at once.

    The pages beyond their first step the programs take in turn; where one step is enough for all pages, it is twice as
    large. The defaults were fastest on one H200 for bfloat16, see
    ``eval.lab.bench_kernels``.
    """

    block_bytes: int = 8192
    programs_per_processor: int = 6


@triton.jit
def _group_query(q_ptr, stride_head, dims, DIM: tl.constexpr, GROUP: tl.constexpr):
    """Mean query of a group in float32, in the shape of ``dims``."""
    query = tl.load(q_ptr + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    for member in tl.static_range(1, GROUP):
        query += tl.load(q_ptr + member * stride_head + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    return query / GROUP


@triton.jit
def _load_bounds(summary_ptr, page, entries, HEADS: tl.constexpr, ENTRIES: tl.constexpr):
    """Maximum and minimum of the keys of ``page`` [steps, lanes], each [steps, lanes, entries]."""
    pointers = summary_ptr + (page.to(tl.int64) * (HEADS * 2 * ENTRIES))[:, :, None] + entries[None, None, :]
    # Page 0 is the pool's dummy page and always readable: the wide loads need no mask.
    if entries.shape[0] == ENTRIES:
        k_max = tl.load(pointers)
        k_min = tl.load(pointers + ENTRIES)
    else:
        k_max = tl.load(pointers, mask=(entries < ENTRIES)[None, None, :], other=0.0)
        k_min = tl.load(pointers + ENTRIES, mask=(entries < ENTRIES)[None, None, :], other=0.0)
    return k_max, k_min


@triton.jit
def _bound(query, k_max, k_min):
    """Of each entry, the larger of the products with the maximum and the minimum."""
    return tl.maximum(query, 0.0)[None, :, :] * k_max + tl.minimum(query, 0.0)[None, :, :] * k_min


@triton.jit
def _page_score_kernel(
    q_ptr,
    summary_ptr,
    page_table_ptr,
    n_pages_ptr,
    out_ptr,
    q_stride_row,
    q_stride_head,
    table_stride,
    width,
    local_pages,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_ENTRIES: tl.constexpr,
    LANES: tl.constexpr,
    STEPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    READY: tl.constexpr,
    NATIVE: tl.constexpr,
):
    # The one kernel that reads before it waits, see ``page_score``.
    if READY:
        gdc_launch_dependents()
    else:
        await_inputs(DEPENDENT)
    # Heads run fastest: the programs that share pages, whose summaries are neighbours in memory, run together.
    head = tl.program_id(0)
    row = tl.program_id(2)
    first = tl.program_id(1) * (LANES * STEPS)
    stride = tl.num_programs(1) * (LANES * STEPS)
    # A lane is the threads that together read one row of a summary, 16 bytes each. Its pages follow each other in the
    # table, so that one load can bring several. Steps are the first axis, since Triton gives the last ones to a warp's
    # threads: they would hold more of the query, each for one step.
    logical = first + tl.arange(0, STEPS)[:, None] + tl.arange(0, LANES)[None, :] * STEPS
    page_table_ptr += row * table_stride
    # Only the summaries wait for another load: the table is read before it is known how many pages there are.
    n_pages = tl.load(n_pages_ptr + row)
    page = tl.load(page_table_ptr + logical, mask=logical < width, other=0)
    ENTRIES: tl.constexpr = DIM // PACKED
    summary_ptr += head * (2 * ENTRIES)
    entries = tl.arange(0, BLOCK_ENTRIES)
    k_max, k_min = _load_bounds(summary_ptr, tl.where(logical < n_pages, page, 0), entries, HEADS, ENTRIES)
    # A page is known one step before its summary is wanted, or each step would wait for two loads.
    page = tl.load(page_table_ptr + logical + stride, mask=logical + stride < n_pages, other=0)
    if READY:
        gdc_wait()
    if first < n_pages:
        q_ptr += row * q_stride_row + head * GROUP * q_stride_head
        out_ptr += (row * HEADS + head).to(tl.int64) * width
        # In the layout of the summaries: every lane loads the dimensions that it will need.
        dims = entries[None, :] * PACKED + tl.zeros([LANES, 1], tl.int32)
        query = _group_query(q_ptr, q_stride_head, dims, DIM, GROUP)
        if PACKED == 4:
            query_1 = _group_query(q_ptr, q_stride_head, dims + 1, DIM, GROUP)
            query_2 = _group_query(q_ptr, q_stride_head, dims + 2, DIM, GROUP)
            query_3 = _group_query(q_ptr, q_stride_head, dims + 3, DIM, GROUP)
        for start in range(first, n_pages, stride):
            now_max, now_min = k_max, k_min
            following = logical + stride
            # On their way before the present ones are reduced, and as they are in memory: to convert them is to wait.
            if start + stride < n_pages:
                k_max, k_min = _load_bounds(summary_ptr, page, entries, HEADS, ENTRIES)
                page = tl.load(page_table_ptr + following + stride, mask=following + stride < n_pages, other=0)
            # Sums, not maxima, of products: a NaN in the summary reaches the score, which then differs from itself.
            if PACKED == 4:
                max_0, max_1, max_2, max_3 = four_numbers(now_max, NATIVE)
                min_0, min_1, min_2, min_3 = four_numbers(now_min, NATIVE)
                bound = _bound(query, max_0, min_0) + _bound(query_1, max_1, min_1)
                bound += _bound(query_2, max_2, min_2) + _bound(query_3, max_3, min_3)
            else:
                bound = _bound(query, now_max.to(tl.float32), now_min.to(tl.float32))
            score = tl.sum(bound, axis=2)
            score = tl.where(score != score, _UNBOUNDED, score)  # noqa: PLR0124
            score = tl.where(logical >= n_pages - local_pages, float("inf"), score)
            tl.store(out_ptr + logical, score, mask=logical < n_pages)
            logical = following


def page_score(
    q: torch.Tensor,
    summary: torch.Tensor,
    page_table: torch.Tensor,
    n_pages: torch.Tensor,
    out: torch.Tensor,
    local_pages: int = 1,
    summaries_ready: bool = False,
    config: Config | None = None,
) -> torch.Tensor:
    """See ``page_score.page_score``; entries at or beyond ``n_pages`` are left unwritten."""
    config = config or Config()
    batch, num_q_heads, dim = q.shape
    heads, width = summary.shape[1], page_table.shape[1]
    if batch == 0 or width == 0:
        return out
    # Float8 is loaded in words of four: the compiler would take single bytes apart as soon as they arrive.
    packed = 4 if summary.dtype == torch.float8_e4m3fn and dim % 4 == 0 else 1
    programs, pairs = config.programs_per_processor * num_processors(q.device), planned_rows(batch) * heads
    entry_bytes = summary.element_size() * packed
    block_entries = triton.next_power_of_2(dim // packed)
    block_pages = max(1, config.block_bytes // (2 * block_entries * entry_bytes))
    if pairs * triton.cdiv(width, block_pages) <= programs:
        block_pages *= 2
    block_pages = min(block_pages, triton.next_power_of_2(width))
    lanes = min(block_pages, max(1, _NUM_WARPS * _WARP_BYTES // (block_entries * entry_bytes)))
    per_row = min(triton.cdiv(width, block_pages), max(1, programs // pairs))
    dependent = dependent_launch(q.device)
    _page_score_kernel[(heads, per_row, batch)](
        q,
        summary.view(torch.int32) if packed == 4 else summary,
        page_table,
        n_pages,
        out,
        q.stride(0),
        q.stride(1),
        page_table.stride(0),
        width,
        local_pages,
        HEADS=heads,
        GROUP=num_q_heads // heads,
        DIM=dim,
        PACKED=packed,
        BLOCK_ENTRIES=block_entries,
        LANES=lanes,
        STEPS=block_pages // lanes,
        DEPENDENT=dependent,
        READY=dependent and summaries_ready,
        NATIVE=converts_float8(q.device),
        num_warps=_NUM_WARPS,
        launch_pdl=dependent,
    )
    return out
