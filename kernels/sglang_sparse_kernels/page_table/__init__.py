"""Page tables: which physical page holds each logical page of every row of a decode batch.

No source: the KV pool says where each token of a request lies, and the other operations ask for pages.
"""

import torch

from ..common import checks
from . import reference


def load_page_table(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    n_pages: torch.Tensor,
    widest: int,
    page_size: int,
    page_table: torch.Tensor,
) -> None:
    """Fill the page table of a batch, in place and in one launch.

    The first ``n`` rows are requests, the others pad a graph and hold no pages. Entries of the table at and beyond the
    pages of a row keep their values.

    Args:
        req_to_token: ``[requests, max_context]`` int32, the slot of each token; ``max_context`` is contiguous. The
            slots of a page follow each other, and its first is a multiple of ``page_size``.
        req_pool_indices: ``[n]`` int64 or int32, contiguous: the request of each row.
        n_pages: ``[rows]`` int32, contiguous: pages that each row holds; 0 for the rows that pad.
        widest: the most pages of a row, known to the host.
        page_size: slots per page, a power of two from 1 to 64.
        page_table: ``[rows, M]`` int32, the output: the physical page of each logical page; ``M`` is contiguous.

    Raises:
        ValueError: a wrong dimension, dtype, device or page size, or rows wider than the tables.

    Example:
        >>> import torch
        >>> from sglang_sparse_kernels.page_table import load_page_table
        >>> req_to_token = torch.tensor([[0, 0, 0, 0], [4, 5, 2, 3]], dtype=torch.int32)
        >>> page_table, n_pages = torch.zeros(2, 3, dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32)
        >>> load_page_table(req_to_token, torch.tensor([1]), n_pages, widest=2, page_size=2, page_table=page_table)
        >>> page_table.tolist()
        [[2, 1, 0], [0, 0, 0]]
    """
    arguments = req_to_token, req_pool_indices, n_pages, widest, page_size, page_table
    _check_arguments(*arguments)
    if checks.use_reference(page_table):
        reference.load_page_table(*arguments)
    else:
        from . import triton

        triton.load_page_table(*arguments)


def _check_arguments(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    n_pages: torch.Tensor,
    widest: int,
    page_size: int,
    page_table: torch.Tensor,
) -> None:
    checks.check_tensor("req_to_token", req_to_token, 2, (torch.int32,))
    checks.check_tensor("req_pool_indices", req_pool_indices, 1, (torch.int64, torch.int32))
    checks.check_tensor("n_pages", n_pages, 1, (torch.int32,))
    checks.check_tensor("page_table", page_table, 2, (torch.int32,))
    checks.check_page_size(page_size)
    rows, width = page_table.shape
    checks.check_shape("n_pages", n_pages, (rows,))
    checks.check_last(req_to_token=req_to_token, page_table=page_table)
    inputs = {"req_to_token": req_to_token, "req_pool_indices": req_pool_indices, "n_pages": n_pages}
    checks.check_device(page_table.device, **inputs)
    checks.check_contiguous("n_pages", n_pages)
    checks.check_contiguous("req_pool_indices", req_pool_indices)
    if req_pool_indices.shape[0] > rows:
        raise ValueError(f"req_pool_indices must have at most {rows} entries, got {req_pool_indices.shape[0]}")
    most = min(width, -(-req_to_token.shape[1] // page_size))
    if not 0 <= widest <= most:
        raise ValueError(f"widest must be from 0 to {most} pages, got {widest}")
