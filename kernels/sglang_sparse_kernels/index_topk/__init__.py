"""Token selection from index logits: the highest of each query, exact, deterministic, and what they are called.

Source: DeepSeek Sparse Attention (DSA, DeepSeek-V3.2-Exp), the selection behind the lightning indexer. Ties go to the
lowest position, so that every implementation selects the same tokens.
"""

import torch

from ..common import checks
from . import reference
from .reference import Names, Results


def index_topk(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    topk: int,
    first: torch.Tensor | None = None,
    wanted: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    out: Results | None = None,
    stats: torch.Tensor | None = None,
    nothing: int = -1,
) -> Results:
    """Select the ``topk`` highest logits of each query, or all where there are no more.

    NaN counts as +inf; 0.0 and -0.0 are equal; -inf is a logit like others (the fallback without CUDA takes it for the
    lowest finite number where ``first`` is given); ties go to the lowest position. Where all are selected no logit is
    read.

    Args:
        logits: ``[T, L]`` float32; ``L`` is contiguous, and rows may be any number of elements apart. With ``first``
            the fallback overwrites what is outside of each query's tokens.
        lengths: ``[T]`` int32, tokens of each query, at most ``L`` less its first column; 0 for one that pads a pass.
        topk: most tokens of a query, the width of the results, at least 1.
        first: optional ``[T]`` int32, the column of each query's first token, whose position is 0; 0 by default.
        wanted: optional ``[T]`` int32, tokens that a query takes if that is fewer than ``topk``.
        page_table: ``[R, P]`` int32, the physical page of each 64 tokens of a row; ``P`` is contiguous.
        rows: optional ``[T]`` int32, the row of the page table for each query; by default its own, the first for the
            first query. Not read where a query has no tokens.
        offsets: ``[T]`` int32; slots are then positions from this number on, and the page table is not read.
        out: optional ``(positions, counts, slots)``, contiguous, shaped and typed as the result; what is None is not
            wanted.
        stats: optional int64 counters, the first three of which are incremented by the number of queries with a
            selection, the tokens they selected, and the tokens they have.
        nothing: the first slot of a query without tokens.

    Returns:
        ``positions`` ``[T, topk]`` int32, ascending, then -1; ``counts`` ``[T]`` int32, how many they are; and
        ``slots`` ``[T, topk]`` int32, what they are called in the KV cache, then -1; None without ``page_table`` and
        ``offsets``.

    Raises:
        ValueError: a wrong dimension, dtype, device, stride or size; or slots without a page table and offsets.

    Example:
        >>> import torch
        >>> from sglang_sparse_kernels.index_topk import index_topk
        >>> logits = torch.tensor([[9.0, 0.5, 3.0, 0.5, 2.0]])
        >>> as_int32 = lambda value: torch.tensor([value], dtype=torch.int32)
        >>> page_table = as_int32(7)[None]
        >>> positions, counts, slots = index_topk(logits, as_int32(4), 3, first=as_int32(1), page_table=page_table)
        >>> positions.tolist(), counts.tolist(), slots.tolist()
        ([[0, 1, 3]], [3], [[448, 449, 451]])
    """
    names = (page_table, rows, offsets)
    _check_arguments(logits, lengths, topk, first, wanted, names, stats)
    out = _results(logits, topk, names, out)
    if checks.use_reference(logits):
        reference.index_topk(logits, lengths, topk, first, wanted, names, out, stats, nothing)
        return out
    from . import cuda

    if cuda.takes(logits, topk):
        cuda.index_topk(logits, lengths, topk, first, wanted, names, out, stats, nothing)
    else:
        from . import portable

        portable.index_topk(logits, lengths, topk, first, wanted, names, out, stats, nothing)
    return out


def _check_arguments(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    topk: int,
    first: torch.Tensor | None,
    wanted: torch.Tensor | None,
    names: Names,
    stats: torch.Tensor | None,
) -> None:
    page_table, rows, offsets = names
    checks.check_tensor("logits", logits, 2, (torch.float32,))
    checks.check_last(logits=logits)
    queries = len(logits)
    by_query = {"lengths": lengths, "first": first, "wanted": wanted, "rows": rows, "offsets": offsets}
    checks.check_device(logits.device, **by_query, page_table=page_table, stats=stats)
    for name, tensor in by_query.items():
        if tensor is not None:
            checks.check_exactly(name, tensor, (queries,), torch.int32)
    if page_table is not None:
        checks.check_tensor("page_table", page_table, 2, (torch.int32,))
        checks.check_last(page_table=page_table)
        if rows is None and len(page_table) < queries:
            raise ValueError(f"page_table must have a row for each of {queries} queries, got {len(page_table)}")
    if topk < 1:
        raise ValueError(f"topk must be at least 1, got {topk}")
    if stats is not None:
        checks.check_stats(stats)


def _results(
    logits: torch.Tensor,
    topk: int,
    names: Names,
    out: Results | None,
) -> Results:
    """Return the checked ``out``, or new tensors for all outputs."""
    queries = len(logits)
    shapes = {"positions": (queries, topk), "counts": (queries,), "slots": (queries, topk)}
    named = names[0] is not None or names[2] is not None
    if out is not None and out[2] is not None and not named:
        raise ValueError("slots must not be given without page_table or offsets")
    found = []
    for i, (name, shape) in enumerate(shapes.items()):
        meant = out[i] is not None if out is not None else named or name != "slots"
        given = out[i] if out is not None else None
        found.append(checks.result(name, given, shape, torch.int32, logits.device) if meant else None)
    return found[0], found[1], found[2]
