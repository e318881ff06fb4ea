"""Triton kernel of the page table: one program per row and block of pages."""

# Type checkers know neither the launch options of a kernel nor its compile-time values.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

_BLOCK_PAGES = 256


@triton.jit
def _page_table_kernel(
    req_to_token_ptr,
    req_pool_indices_ptr,
    n_pages_ptr,
    page_table_ptr,
    req_to_token_stride,
    table_stride,
    PAGE: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,
):
    row = tl.program_id(0)
    first = tl.program_id(1) * BLOCK_PAGES
    n_pages = tl.load(n_pages_ptr + row)
    # A row that pads has no request.
    if first < n_pages:
        request = tl.load(req_pool_indices_ptr + row).to(tl.int64)
        logical = first + tl.arange(0, BLOCK_PAGES)
        held = logical < n_pages
        slots = tl.load(req_to_token_ptr + request * req_to_token_stride + logical * PAGE, mask=held, other=0)
        tl.store(page_table_ptr + row.to(tl.int64) * table_stride + logical, slots // PAGE, mask=held)


def load_page_table(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    n_pages: torch.Tensor,
    widest: int,
    page_size: int,
    page_table: torch.Tensor,
) -> None:
    """See ``page_table.load_page_table``.

    Not a dependent launch: it runs between graphs, and other kernels may read what it writes without waiting for it.
    """
    rows = page_table.shape[0]
    if rows == 0:
        return
    _page_table_kernel[(rows, max(1, triton.cdiv(widest, _BLOCK_PAGES)))](
        req_to_token,
        req_pool_indices,
        n_pages,
        page_table,
        req_to_token.stride(0),
        page_table.stride(0),
        PAGE=page_size,
        BLOCK_PAGES=_BLOCK_PAGES,
    )
