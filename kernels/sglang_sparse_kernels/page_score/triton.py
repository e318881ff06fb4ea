"""Triton kernel of the page score: bound by the bytes of the summaries, each read once."""

# Type checkers know neither the launch options of a kernel nor its compile-time values.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..launch import await_inputs, dependent_launch
from .reference import UNBOUNDED

_MANY_PROGRAMS = 8192
_UNBOUNDED = tl.constexpr(UNBOUNDED)


@dataclass(frozen=True)
class Config:
    """Launch parameters: pages per program and step, warps (0: by the size of the launch), most programs."""

    block_pages: int = 16
    num_warps: int = 0
    max_programs: int = 16384


@triton.jit
def _group_query(q_ptr, stride_head, dims, DIM: tl.constexpr, GROUP: tl.constexpr):
    """Mean query of a group in float32."""
    query = tl.load(q_ptr + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    for member in tl.static_range(1, GROUP):
        query += tl.load(q_ptr + member * stride_head + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    return query / GROUP


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
    BLOCK_PAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    await_inputs(DEPENDENT)
    # Heads run fastest: the programs that share pages, whose summaries are neighbours in memory, run together.
    head = tl.program_id(0)
    row = tl.program_id(2)
    n_pages = tl.load(n_pages_ptr + row)
    first = tl.program_id(1) * BLOCK_PAGES
    if first < n_pages:
        dims = tl.arange(0, BLOCK_DIM)
        query = _group_query(q_ptr + row * q_stride_row + head * GROUP * q_stride_head, q_stride_head, dims, DIM, GROUP)
        positive = tl.maximum(query, 0.0)[None, :]
        negative = tl.minimum(query, 0.0)[None, :]
        out_ptr += (row * HEADS + head).to(tl.int64) * width
        for start in range(first, n_pages, tl.num_programs(1) * BLOCK_PAGES):
            logical = start + tl.arange(0, BLOCK_PAGES)
            held = logical < n_pages
            # Page 0 is the pool's dummy page and always readable: the wide loads below need no mask.
            page = tl.load(page_table_ptr + row * table_stride + logical, mask=held, other=0).to(tl.int64)
            pointers = summary_ptr + ((page * HEADS + head) * (2 * DIM))[:, None] + dims[None, :]
            if DIM == BLOCK_DIM:
                k_max = tl.load(pointers)
                k_min = tl.load(pointers + DIM)
            else:
                k_max = tl.load(pointers, mask=(dims < DIM)[None, :], other=0.0)
                k_min = tl.load(pointers + DIM, mask=(dims < DIM)[None, :], other=0.0)
            # Sums, not maxima, of products: a NaN in the summary reaches the score, which then differs from itself.
            score = tl.sum(positive * k_max.to(tl.float32) + negative * k_min.to(tl.float32), axis=1)
            score = tl.where(score != score, _UNBOUNDED, score)  # noqa: PLR0124
            tl.store(out_ptr + logical, tl.where(logical >= n_pages - local_pages, float("inf"), score), mask=held)


def page_score(
    q: torch.Tensor,
    summary: torch.Tensor,
    page_table: torch.Tensor,
    n_pages: torch.Tensor,
    out: torch.Tensor,
    local_pages: int = 1,
    config: Config | None = None,
) -> torch.Tensor:
    """See ``page_score.page_score``; entries at or beyond ``n_pages`` are left unwritten."""
    config = config or Config()
    batch, num_q_heads, dim = q.shape
    heads, width = summary.shape[1], page_table.shape[1]
    if batch == 0 or width == 0:
        return out
    block_pages = min(config.block_pages, triton.next_power_of_2(width))
    per_row = min(triton.cdiv(width, block_pages), max(1, config.max_programs // (batch * heads)))
    # Few programs need the loads of many warps in flight; many programs have them, and pay for each reduction.
    num_warps = config.num_warps or (1 if batch * heads * per_row >= _MANY_PROGRAMS else 4)
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
        BLOCK_DIM=triton.next_power_of_2(dim),
        BLOCK_PAGES=block_pages,
        DEPENDENT=dependent,
        num_warps=num_warps,
        launch_pdl=dependent,
    )
    return out
