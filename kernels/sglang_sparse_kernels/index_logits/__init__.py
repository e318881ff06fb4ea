"""Index logits: how much each query of the lightning indexer wants each token of its row.

Source: DeepSeek Sparse Attention (DSA, DeepSeek-V3.2-Exp): ``I[t, s] = sum_h w[t, h] * relu(q[t, h] . k[s])``, over FP8
queries and keys, of which the scale of a query is in ``w``. The selection that follows is ``index_topk``.
"""

import torch

from ..common import checks
from ..index_keys import PAGE_SIZE, check_buffer
from . import reference

_DIM = 128
_MAX_HEADS = 64


def index_logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    buffer: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits ``k_scale[s] * sum_h weights[t, h] * relu(q[t, h] . k[s])`` of each query's tokens ``s < lengths[t]``.

    For decode, where each query has a row of its own, and for prefill, where many share one: queries that follow each
    other in one row share its keys, which is where the time goes. Any order of rows is right.

    A query's logits do not depend on the batch, on the tile it is in, or on what else its row holds: the kernel
    multiplies one query with a tile of keys at a time, in decode as in prefill, and the order in which it adds the
    heads is that of one layout of the product. So they are meant to be the same bits on one GPU; that the compiler
    chooses one layout is tested, for compute capabilities 8.0, 8.9, 9.0 and 12.0. Between kinds of GPUs the bits
    differ: products are exact, but tensor cores differ in the order of their sums, and those for FP8 (8.9 and later)
    may keep fewer bits of them than float32. Before 8.9 FP8 becomes float16, which is exact, and sums are float32. The
    reference sums in float64.

    NaN in a query, a weight, a key or its scale makes the logits that it enters NaN.

    Args:
        q: ``[T, Hi, 128]`` float8_e4m3fn; ``Hi`` is 1 to 64. The last dimension is contiguous.
        weights: ``[T, Hi]`` float32, with the query's scale and all constant factors; the last dimension is contiguous.
        buffer: ``[pages, 64 * (128 + 4)]`` uint8, the index cache of ``index_keys.store``.
        page_table: ``[R, P]`` int32, the physical page of each 64 tokens of a row; ``P`` is contiguous. Entries beyond
            a row's longest query may hold anything.
        rows: ``[T]`` int32 or int64, contiguous: the row of the page table for each query; not read where the length
            is 0.
        lengths: ``[T]`` int32, contiguous: tokens that a query sees, at most ``L`` and ``64 * P``; 0 is a padded query.
        out: optional ``[T, L]`` float32, contiguous; ``L`` is ``64 * P`` by default.

    Returns:
        ``[T, L]`` float32. Entries at or beyond ``lengths[t]`` are *left unwritten*.

    Raises:
        ValueError: a wrong dimension, dtype, device, stride or number of heads.

    Example:
        >>> import torch
        >>> from sglang_sparse_kernels.index_keys import quantize, store
        >>> from sglang_sparse_kernels.index_logits import index_logits
        >>> buffer = torch.zeros(2, 64 * (128 + 4), dtype=torch.uint8)
        >>> keys = torch.stack([torch.ones(128), -torch.ones(128), torch.ones(128) / 2])
        >>> store(*quantize(keys), torch.tensor([64, 65, 66]), buffer)
        >>> q, scales = quantize(torch.ones(1, 1, 128))
        >>> as_int32 = lambda value: torch.tensor([value], dtype=torch.int32)
        >>> index_logits(q, scales, buffer, as_int32(1)[None], as_int32(0), as_int32(3))[0, :3].tolist()
        [121.0, 0.0, 60.5]
    """
    _check_arguments(q, weights, buffer, page_table, rows, lengths)
    most = page_table.shape[1] * PAGE_SIZE
    columns = out.shape[-1] if out is not None and out.dim() else most
    out = checks.result("out", out, (q.shape[0], columns), torch.float32, q.device)
    if columns > most:
        raise ValueError(f"out must have at most {most} columns, got {columns}")
    if checks.use_reference(q):
        return reference.index_logits(q, weights, buffer, page_table, rows, lengths, out)
    from . import triton

    return triton.index_logits(q, weights, buffer, page_table, rows, lengths, out)


def _check_arguments(
    q: torch.Tensor,
    weights: torch.Tensor,
    buffer: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    checks.check_tensor("q", q, 3, (torch.float8_e4m3fn,))
    checks.check_tensor("weights", weights, 2, (torch.float32,))
    checks.check_tensor("page_table", page_table, 2, (torch.int32,))
    checks.check_tensor("rows", rows, 1, (torch.int32, torch.int64))
    queries, heads, dim = q.shape
    if dim != _DIM:
        raise ValueError(f"the last dimension of q must be {_DIM}, got {dim}")
    if not 1 <= heads <= _MAX_HEADS:
        raise ValueError(f"q must have 1 to {_MAX_HEADS} heads, got {heads}")
    check_buffer(buffer, dim)
    checks.check_shape("weights", weights, (queries, heads))
    checks.check_shape("rows", rows, (queries,))
    checks.check_last(q=q, weights=weights, page_table=page_table)
    by_query = {"weights": weights, "rows": rows, "lengths": lengths}
    checks.check_device(q.device, buffer=buffer, page_table=page_table, **by_query)
    checks.check_contiguous("rows", rows)
    checks.check_exactly("lengths", lengths, (queries,), torch.int32)
