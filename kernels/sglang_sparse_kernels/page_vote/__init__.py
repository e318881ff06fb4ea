"""Page votes: the share of the attention that each page of a row would get, by what is kept of its keys.

Each query head of a KV head's group gives every page a logit and spreads one vote over the pages by their softmax; a
page's score is what it gets of all heads. A page that one head looks for is then not lost in the mean query of a group
whose other heads look elsewhere. Not from a paper; it replaces the group query of ReSA (arXiv:2506.04108, section 3.1),
see ``page_score``. The bound is Quest's (arXiv:2406.10774, section 3.3).
"""

import torch

from ..common import checks
from ..page_centroids import check_records
from ..page_score import check_bounds, check_rows
from ..page_topk import check_selection, page_topk
from . import reference

# Pages of a program of Triton's kernel, and of the smallest block of the one in CUDA C++, which has four warps.
BLOCK, _WARPS = 64, 4
# Bytes of scratch above which rows wait for one another.
MOST_SCRATCH = 1 << 28


def page_vote(
    q: torch.Tensor,
    summary: torch.Tensor,
    page_table: torch.Tensor,
    n_pages: torch.Tensor,
    sm_scale: float,
    out: torch.Tensor | None = None,
    local_pages: int = 1,
    summaries_ready: bool = False,
) -> torch.Tensor:
    """Score every page of every row by the votes of each KV head's group.

    A head's logit of a page is, of bounds, the most that ``q . k`` of any key can be; of centroids the logarithm of
    ``sum_c 2^-c exp(sm_scale * q . centroid_c)``: they stand in the order of how many keys they are the mean of, and
    each has about half as many as the one before. With the softmax of every head over the row's pages, the score is
    the logarithm of its mean over the heads, less a constant. The softmax is of all pages but the newest, whose summary
    may be out of date, so that this changes no other page's score. The newest ``local_pages`` pages score +inf; a page
    whose summary holds NaN scores the largest finite float32 and takes no votes from others.

    Args:
        q: ``[B, Hq, d]``, float32, float16 or bfloat16; ``d`` is contiguous. The kernels round it to the dtype of
            bounds, and to 16 bits for those of float8 and for centroids.
        summary: of bounds ``[num_pages, Hkv, 2, d]``, from ``update_page_summary``; of centroids ``[num_pages, Hkv,
            bytes]`` uint8, from ``update_page_centroids``. Contiguous.
        page_table: ``[B, M]`` int32, the physical page of each logical page; only the first ``n_pages[b]`` count. ``M``
            is contiguous.
        n_pages: ``[B]`` int32, contiguous: pages of each row, at most ``M``.
        sm_scale: softmax scale times the scale of stored keys; positive.
        out: optional ``[B, Hkv, M]`` float32, contiguous.
        local_pages: newest pages that always score +inf.
        summaries_ready: nothing that the kernels before this one on the stream still write is in the summary, the page
            table or the numbers of pages; see ``page_score``.

    Returns:
        ``[B, Hkv, M]`` float32. Entries at or beyond ``n_pages[b]`` are -inf from the reference and *left unwritten* by
        the GPU kernels. What these allocate besides is in ``scratch_bytes``.

    Raises:
        ValueError: a wrong dimension, dtype, device, head count or number of vectors.

    Example:
        >>> import torch
        >>> from sglang_sparse_kernels.page_vote import page_vote
        >>> q = torch.eye(2, 64)[None]
        >>> bounds = torch.zeros(4, 1, 2, 64)
        >>> bounds[1, 0, :, 0], bounds[2, 0, :, 1] = 9.0, 5.0
        >>> page_table = torch.tensor([[1, 2, 3]], dtype=torch.int32)
        >>> n_pages = torch.tensor([3], dtype=torch.int32)
        >>> page_vote(q, bounds, page_table, n_pages, 1.0).exp().round(decimals=2)
        tensor([[[1.0100, 0.9900,    inf]]])
    """
    _check_arguments(q, summary, page_table, n_pages, sm_scale, local_pages)
    shape = q.shape[0], summary.shape[1], page_table.shape[1]
    out = checks.result("out", out, shape, torch.float32, q.device)
    if checks.use_reference(q):
        return reference.page_vote(q, summary, page_table, n_pages, sm_scale, out, local_pages)
    from . import triton

    return triton.page_vote(q, summary, page_table, n_pages, sm_scale, out, local_pages, summaries_ready)


def select_by_votes(
    q: torch.Tensor,
    summary: torch.Tensor,
    page_table: torch.Tensor,
    n_pages: torch.Tensor,
    n_select: torch.Tensor,
    max_select: int,
    sm_scale: float,
    scores: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    stats: torch.Tensor | None = None,
    local_pages: int = 1,
    tables_ready: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the pages with the most votes: ``page_topk`` of what ``page_vote`` says.

    Where the kernels in CUDA C++ take both, the selection counts the votes, which saves a launch and a pass. Rounding
    then differs, and so may the choice between pages whose votes are as good as equal.

    Args:
        q: see ``page_vote``, and so for all but what follows.
        summary: likewise.
        page_table: likewise.
        n_pages: likewise.
        n_select: see ``page_topk``.
        max_select: likewise.
        sm_scale: see ``page_vote``.
        scores: ``[B, Hkv, M]`` float32, contiguous: room for the votes, which not every implementation uses.
        out: see ``page_topk``.
        stats: likewise.
        local_pages: see ``page_vote``.
        tables_ready: ``summaries_ready`` of ``page_vote`` and ``tables_ready`` of ``page_topk``.

    Returns:
        ``(indices, counts)``, see ``page_topk``.

    Raises:
        ValueError: a wrong dimension, dtype, device, head count, size or number of vectors.
    """
    _check_arguments(q, summary, page_table, n_pages, sm_scale, local_pages)
    checks.check_shape("scores", scores, (q.shape[0], summary.shape[1], page_table.shape[1]))
    out = check_selection(scores, page_table, n_pages, n_select, max_select, out, stats)
    if not checks.use_reference(q):
        from . import cuda

        if cuda.selects(q, summary, scores):
            rest = (n_select, max_select, sm_scale, out, stats, local_pages, tables_ready)
            return cuda.select_by_votes(q, summary, page_table, n_pages, *rest)
    page_vote(q, summary, page_table, n_pages, sm_scale, scores, local_pages, tables_ready)
    return page_topk(scores, page_table, n_pages, n_select, max_select, out, stats, tables_ready)


def scratch_bytes(batch: int, num_q_heads: int, max_pages: int) -> int:
    """Bytes that the kernels of one call allocate: a logit of every head for every page, of some rows at a time.

    Args:
        batch: rows.
        num_q_heads: query heads.
        max_pages: width of the table.
    """
    return min(batch, rows_at_once(num_q_heads, max_pages)) * _row_bytes(num_q_heads, max_pages)


def rows_at_once(num_q_heads: int, max_pages: int) -> int:
    """Rows of a launch, at least one; see ``scratch_bytes``."""
    return max(1, MOST_SCRATCH // max(1, _row_bytes(num_q_heads, max_pages)))


def _check_arguments(
    q: torch.Tensor,
    summary: torch.Tensor,
    page_table: torch.Tensor,
    n_pages: torch.Tensor,
    sm_scale: float,
    local_pages: int,
) -> None:
    checks.check_tensor("q", q, 3, checks.QUERY_DTYPES)
    if summary.dtype == torch.uint8:
        check_records("summary", summary, q.shape[2])
    else:
        check_bounds(q, summary)
    check_rows(q, summary, page_table, n_pages, local_pages)
    if sm_scale <= 0:
        raise ValueError(f"sm_scale must be above 0, got {sm_scale}")


def _row_bytes(num_q_heads: int, max_pages: int) -> int:
    return 4 * num_q_heads * (max_pages + 2 * _WARPS * -(-max_pages // BLOCK))
