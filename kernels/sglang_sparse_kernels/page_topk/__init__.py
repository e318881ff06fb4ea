"""Page selection: the highest pages of each row, exact, deterministic, without a sort.

Source: the block selection of ReSA (arXiv:2506.04108, section 3.1). Ties go to the lowest logical page, so that every
implementation selects the same pages.
"""

import torch

from ..common import checks
from . import reference


def page_topk(
    scores: torch.Tensor,
    page_table: torch.Tensor,
    n_pages: torch.Tensor,
    n_select: torch.Tensor,
    max_select: int,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    stats: torch.Tensor | None = None,
    tables_ready: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the ``n_select[b]`` highest-scored pages of each row and KV head.

    The count is clamped to ``n_pages[b]`` and ``max_select``. Where it reaches ``n_pages[b]`` the row is dense and
    its scores are not read. NaN counts as +inf; 0.0 and -0.0 are equal; ties go to the lowest logical page.

    The kernel in CUDA C++ selects where it can be compiled and a row fits its registers (``cuda.takes``): its histogram
    and the exchange between the blocks of a cluster are nothing that Triton can say. Triton's kernel serves elsewhere.
    Libraries' selections leave the order of the pages and ties open, or take few numbers of pages: they are peers of
    ``eval.lab.bench_kernels`` alone.

    Args:
        scores: ``[B, Hkv, M]`` float32, contiguous; only the first ``n_pages[b]`` entries of a row count.
        page_table: ``[B, M]`` int32, the physical page of each logical page; ``M`` is contiguous.
        n_pages: ``[B]`` int32, pages of each row, at most ``M``.
        n_select: ``[B]`` int32, pages wanted; 0 marks a padded row.
        max_select: width of the result, at least 1.
        out: optional ``(indices, counts)``, contiguous, shaped and typed as the result.
        stats: optional int64 counters, the first three of which are incremented by the number of (row, KV head) pairs
            with a selection, the pages they selected, and the pages they hold.
        tables_ready: ``page_table``, ``n_pages`` and ``n_select`` were written before the last launch of the stream
            that waited for its predecessors as launches do by default, or before the graph's. The kernel may then read
            them while a kernel that came after that launch still runs, as all of this package may (programmatic
            dependent launch).

    Returns:
        ``indices`` ``[B, Hkv, max_select]`` int32, physical pages in ascending logical order, of which the first
        ``counts`` ``[B, Hkv]`` int32 are meant. What lies beyond is -1 from the reference and *left unwritten* by the
        GPU kernels.

    Raises:
        ValueError: a wrong dimension, dtype, device or size.

    Example:
        >>> import torch
        >>> from sglang_sparse_kernels.page_topk import page_topk
        >>> scores = torch.tensor([[[0.5, 3.0, 0.5, 2.0]]])
        >>> page_table = torch.tensor([[7, 5, 9, 8]], dtype=torch.int32)
        >>> as_int32 = lambda value: torch.tensor([value], dtype=torch.int32)
        >>> indices, counts = page_topk(scores, page_table, as_int32(4), as_int32(3), max_select=4)
        >>> indices[0, 0, : counts[0, 0]].tolist()
        [7, 5, 8]
    """
    out = check_selection(scores, page_table, n_pages, n_select, max_select, out, stats)
    if checks.use_reference(scores):
        return reference.page_topk(scores, page_table, n_pages, n_select, max_select, out, stats)
    from . import cuda, triton

    if cuda.takes(scores):
        return cuda.page_topk(scores, page_table, n_pages, n_select, max_select, out, stats, tables_ready)
    return triton.page_topk(scores, page_table, n_pages, n_select, max_select, out, stats)


def check_selection(
    scores: torch.Tensor,
    page_table: torch.Tensor,
    n_pages: torch.Tensor,
    n_select: torch.Tensor,
    max_select: int,
    out: tuple[torch.Tensor, torch.Tensor] | None,
    stats: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``out``, made if it is None; raises ValueError unless these are arguments of ``page_topk``."""
    checks.check_tensor("scores", scores, 3, (torch.float32,))
    checks.check_tensor("page_table", page_table, 2, (torch.int32,))
    batch, _, width = scores.shape
    checks.check_shape("page_table", page_table, (batch, width))
    checks.check_contiguous("scores", scores)
    checks.check_last(page_table=page_table)
    tables = {"page_table": page_table, "n_pages": n_pages, "n_select": n_select}
    checks.check_device(scores.device, **tables, stats=stats)
    checks.check_exactly("n_pages", n_pages, (batch,), torch.int32)
    checks.check_exactly("n_select", n_select, (batch,), torch.int32)
    if max_select < 1:
        raise ValueError(f"max_select must be at least 1, got {max_select}")
    if stats is not None:
        checks.check_stats(stats)
    shape, (indices, counts) = (*scores.shape[:2], max_select), out or (None, None)
    return (
        checks.result("indices", indices, shape, torch.int32, scores.device),
        checks.result("counts", counts, shape[:2], torch.int32, scores.device),
    )
