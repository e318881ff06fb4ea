"""Triton kernel of the page score: bound by the bytes of the summaries, each read once."""

# Type checkers know neither the launch options of a kernel nor its compile-time values.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..launch import await_inputs, dependent_launch, num_processors
from .reference import UNBOUNDED

_NUM_WARPS = 4
# What one load instruction of a warp brings, at 16 bytes a thread.
_WARP_BYTES = 32 * 16
_UNBOUNDED = tl.constexpr(UNBOUNDED)


@dataclass(frozen=True)
class Config:
    """Launch parameters: pages per program and step, and programs aimed for per multiprocessor, all resident at once.

    The pages beyond their first step the programs take in turn. The defaults were fastest on one H200, see
    ``eval.bench_kernels``; ``few_pages`` are those per program and step where one step is enough.
    """

    block_pages: int = 16
    programs_per_processor: int = 8
    few_pages: int = 32


@triton.jit
def _group_query(q_ptr, stride_head, dims, DIM: tl.constexpr, GROUP: tl.constexpr):
    """Mean query of a group in float32, in the shape of ``dims``."""
    query = tl.load(q_ptr + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    for member in tl.static_range(1, GROUP):
        query += tl.load(q_ptr + member * stride_head + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    return query / GROUP


@triton.jit
def _load_bounds(summary_ptr, page, dims, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Maximum and minimum of the keys of ``page`` [lanes, steps], each [lanes, steps, BLOCK_DIM]."""
    pointers = summary_ptr + (page.to(tl.int64) * (HEADS * 2 * DIM))[:, :, None] + dims[None, None, :]
    # Page 0 is the pool's dummy page and always readable: the wide loads need no mask.
    if DIM == BLOCK_DIM:
        k_max = tl.load(pointers)
        k_min = tl.load(pointers + DIM)
    else:
        k_max = tl.load(pointers, mask=(dims < DIM)[None, None, :], other=0.0)
        k_min = tl.load(pointers + DIM, mask=(dims < DIM)[None, None, :], other=0.0)
    return k_max, k_min


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
    BLOCK_DIM: tl.constexpr,
    LANES: tl.constexpr,
    STEPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    READY: tl.constexpr,
):
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
    # table, so that one load can bring several.
    logical = first + tl.arange(0, LANES)[:, None] * STEPS + tl.arange(0, STEPS)[None, :]
    page_table_ptr += row * table_stride
    # Only the summaries wait for another load: the table is read before it is known how many pages there are.
    n_pages = tl.load(n_pages_ptr + row)
    page = tl.load(page_table_ptr + logical, mask=logical < width, other=0)
    summary_ptr += head * (2 * DIM)
    dims = tl.arange(0, BLOCK_DIM)
    k_max, k_min = _load_bounds(summary_ptr, tl.where(logical < n_pages, page, 0), dims, HEADS, DIM, BLOCK_DIM)
    if READY:
        gdc_wait()
    if first < n_pages:
        q_ptr += row * q_stride_row + head * GROUP * q_stride_head
        out_ptr += (row * HEADS + head).to(tl.int64) * width
        # In the layout of the summaries: every lane loads the dimensions that it will need.
        query = _group_query(q_ptr, q_stride_head, dims[None, :] + tl.zeros([LANES, 1], tl.int32), DIM, GROUP)
        positive = tl.maximum(query, 0.0)[:, None, :]
        negative = tl.minimum(query, 0.0)[:, None, :]
        for start in range(first, n_pages, stride):
            now_max, now_min = k_max, k_min
            following = logical + stride
            # On their way before the present ones are reduced.
            if start + stride < n_pages:
                page = tl.load(page_table_ptr + following, mask=following < n_pages, other=0)
                k_max, k_min = _load_bounds(summary_ptr, page, dims, HEADS, DIM, BLOCK_DIM)
            # Sums, not maxima, of products: a NaN in the summary reaches the score, which then differs from itself.
            score = tl.sum(positive * now_max.to(tl.float32) + negative * now_min.to(tl.float32), axis=2)
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
    programs = config.programs_per_processor * num_processors(q.device)
    one_step = batch * heads * triton.cdiv(width, config.block_pages) <= programs
    block_pages = min(config.few_pages if one_step else config.block_pages, triton.next_power_of_2(width))
    block_dim = triton.next_power_of_2(dim)
    lanes = min(block_pages, max(1, _NUM_WARPS * _WARP_BYTES // (block_dim * summary.element_size())))
    per_row = min(triton.cdiv(width, block_pages), max(1, programs // (batch * heads)))
    dependent = dependent_launch(q.device)
    _page_score_kernel[(heads, per_row, batch)](
        q,
        summary,
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
        BLOCK_DIM=block_dim,
        LANES=lanes,
        STEPS=block_pages // lanes,
        DEPENDENT=dependent,
        READY=dependent and summaries_ready,
        num_warps=_NUM_WARPS,
        launch_pdl=dependent,
    )
    return out
