"""Page scores: an upper bound of the attention logit that any key of a page can reach.

Source: Quest (arXiv:2406.10774, section 3.3), with the group query of ReSA (arXiv:2506.04108, section 3.1).
"""

import torch

from ..common import checks
from . import reference


def page_score(
    q: torch.Tensor,
    summary: torch.Tensor,
    page_table: torch.Tensor,
    n_pages: torch.Tensor,
    out: torch.Tensor | None = None,
    local_pages: int = 1,
    summaries_ready: bool = False,
) -> torch.Tensor:
    """Score every page of every row against the mean query of each KV head's group.

    With ``q`` the mean over the group's query heads, the score of a page is
    ``sum_j max(q_j * k_max_j, q_j * k_min_j)``, in logits before the softmax scale. The newest ``local_pages`` pages
    of a row score +inf; a page whose summary holds NaN scores the largest finite float32, so that it is selected before
    every other page but never instead of a local one.

    Summaries of one byte an entry are scored by the kernel in CUDA C++ where it takes them (``cuda.takes``): Triton's
    takes longer to make float32 of each number than to read it. Triton's kernel scores all others, as it reads long
    rows of two bytes an entry faster, and serves where the other cannot. No library's kernel was tried.

    Args:
        q: ``[B, Hq, d]``, float32, float16 or bfloat16; ``d`` is contiguous.
        summary: ``[num_pages, Hkv, 2, d]`` from ``update_page_summary``, contiguous.
        page_table: ``[B, M]`` int32, the physical page of each logical page; only the first ``n_pages[b]`` count. ``M``
            is contiguous.
        n_pages: ``[B]`` int32, contiguous: pages of each row, at most ``M``.
        out: optional ``[B, Hkv, M]`` float32, contiguous.
        local_pages: newest pages that always score +inf.
        summaries_ready: ``summary``, ``page_table`` and ``n_pages``, unlike ``q``, were written before the last launch
            of the stream that waited for its predecessors as launches do by default, or before the graph's. The kernel
            may then read them while a kernel that came after that launch still runs (see ``page_topk``).

    Returns:
        ``[B, Hkv, M]`` float32. Entries at or beyond ``n_pages[b]`` are -inf from the reference and *left unwritten*
        by the GPU kernel: ``page_topk`` does not read them.

    Raises:
        ValueError: a wrong dimension, dtype, device or head count.

    Example:
        >>> import torch
        >>> from sglang_sparse_kernels.page_score import page_score
        >>> q = torch.ones(1, 2, 64)
        >>> summary = torch.stack([torch.full((3, 1, 64), 2.0), torch.full((3, 1, 64), -1.0)], dim=2)
        >>> page_table = torch.tensor([[1, 2]], dtype=torch.int32)
        >>> page_score(q, summary, page_table, torch.tensor([2], dtype=torch.int32)).tolist()
        [[[128.0, inf]]]
    """
    checks.check_tensor("q", q, 3, checks.QUERY_DTYPES)
    check_bounds(q, summary)
    check_rows(q, summary, page_table, n_pages, local_pages)
    shape = q.shape[0], summary.shape[1], page_table.shape[1]
    out = checks.result("out", out, shape, torch.float32, q.device)
    if checks.use_reference(q):
        return reference.page_score(q, summary, page_table, n_pages, out, local_pages)
    from . import cuda, triton

    kernel = cuda if cuda.faster(summary) and cuda.takes(q, summary) else triton
    return kernel.page_score(q, summary, page_table, n_pages, out, local_pages, summaries_ready)


def check_bounds(q: torch.Tensor, summary: torch.Tensor) -> None:
    """Raise ValueError unless a summary holds a maximum and a minimum for these queries."""
    checks.check_tensor("summary", summary, 4, checks.KV_DTYPES)
    checks.check_shape("summary", summary, (*summary.shape[:2], 2, q.shape[2]))
    checks.check_contiguous("summary", summary)


def check_rows(
    q: torch.Tensor, summary: torch.Tensor, page_table: torch.Tensor, n_pages: torch.Tensor, local_pages: int
) -> None:
    """Raise ValueError unless these are pages to score for ``[B, Hq, d]`` by a summary ``[num_pages, Hkv, ...]``."""
    checks.check_tensor("page_table", page_table, 2, (torch.int32,))
    batch = q.shape[0]
    checks.check_heads(q.shape[1], summary.shape[1])
    checks.check_shape("page_table", page_table, (batch, page_table.shape[1]))
    checks.check_last(q=q, page_table=page_table)
    checks.check_device(q.device, summary=summary, page_table=page_table, n_pages=n_pages)
    checks.check_exactly("n_pages", n_pages, (batch,), torch.int32)
    if local_pages < 0:
        raise ValueError(f"local_pages must be at least 0, got {local_pages}")
