"""KT selection: the blocks of a row that each KV head attends to in a step, by bounds on their keys.

Source: the second stage of RocketKV (arXiv:2502.14051). ``visible_blocks``, ``kt_score`` and ``page_topk`` in one.
"""

import torch

from ..common import checks
from ..kt_score import check_bounds
from ..visible_blocks import check_inputs
from . import portable


def kt_select(
    q: torch.Tensor,
    summary: torch.Tensor,
    kept: torch.Tensor,
    n_kept: torch.Tensor,
    first_visible: torch.Tensor,
    requests: torch.Tensor,
    block_table: torch.Tensor,
    n_blocks: torch.Tensor,
    n_select: torch.Tensor,
    topr: int,
    sm_scale: float,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    stats: torch.Tensor | None = None,
    scratch: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    tables_ready: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the ``n_select[b]`` highest-scored blocks among those that are visible to each row and KV head.

    What is visible is what ``visible_blocks`` lists, its scores are those of ``kt_score`` with one local page, and the
    highest are those of ``page_topk``. A row of no more visible blocks than it selects has all of them.

    The kernel in CUDA C++ is one launch, and serves bounds in float8_e5m2 and groups of up to eight heads on NVIDIA
    GPUs (``cuda.takes``). It rounds scores in another way than the kernels of the three operations, which serve
    elsewhere: of blocks that score the same but for rounding it may take another one.

    Args:
        q: ``[B, Hq, d]``, see ``kt_score``.
        summary: ``[num_blocks, Hkv, 2, d]``, see ``kt_score``.
        kept: ``[S, Hkv, K]`` int32, by request slot and KV head the logical blocks that were kept, see
            ``visible_blocks``.
        n_kept: ``[S]`` int32, kept blocks of each KV head.
        first_visible: ``[S]`` int32, the logical block from which on everything is visible.
        requests: ``[B]`` int64, the request slot of each row.
        block_table: ``[B, M]`` int32, the physical block of each logical block.
        n_blocks: ``[B]`` int32, blocks of each row; 0 marks a padded row.
        n_select: ``[B]`` int32, blocks that the row attends to.
        topr: dimensions that count, 1 to ``d``.
        sm_scale: scale of the products of query and stored key.
        out: optional ``(indices, counts)``, contiguous, shaped and typed as the result.
        stats: optional int64 counters, the first three of which are incremented as by ``visible_blocks``.
        scratch: optional, what the three operations hand on, contiguous: ``[B, Hkv, M]`` and twice ``[B, Hkv]`` int32,
            the results of ``visible_blocks``, and ``[B, Hkv, M]`` float32, that of ``kt_score``. The kernel in CUDA C++
            neither reads nor writes them.
        tables_ready: the seven tables were written before the last launch of the stream that waited for its
            predecessors as launches do by default, or before the graph's, see ``page_topk``.

    Returns:
        ``indices`` ``[B, Hkv, M]`` int32, physical blocks in ascending logical order, of which the first ``counts``
        ``[B, Hkv]`` int32 are meant. What lies beyond is -1 from the reference and *left unwritten* by the GPU kernels.

    Raises:
        ValueError: a wrong dimension, dtype, device, shape, stride, head count, scale or number of dimensions.

    Example:
        >>> import torch
        >>> from sglang_sparse_kernels.kt_select import kt_select
        >>> q = torch.zeros(1, 1, 64)
        >>> q[0, 0, 0] = 8.0
        >>> summary = torch.arange(5.0)[:, None, None, None].expand(5, 1, 2, 64).contiguous()
        >>> as_int32 = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> slots = as_int32(0, 1)[None, None], as_int32(2), as_int32(3), torch.tensor([0])
        >>> rows = as_int32(3, 4, 2, 1)[None], as_int32(4), as_int32(2)
        >>> indices, counts = kt_select(q, summary, *slots, *rows, topr=1, sm_scale=0.125)
        >>> indices[0, 0, : counts[0, 0]].tolist()
        [4, 1]
    """
    tables = (kept, n_kept, first_visible, requests, block_table, n_blocks, n_select)
    check_bounds(q, summary, topr)
    checks.check_device(q.device, block_table=block_table, stats=stats)
    check_inputs(*tables)
    checks.check_logit_scale(sm_scale, 1.0)
    (batch, heads), width = (q.shape[0], summary.shape[1]), block_table.shape[1]
    checks.check_shape("block_table", block_table, (batch, width))
    checks.check_shape("kept", kept, (kept.shape[0], heads, kept.shape[2]))
    if stats is not None:
        checks.check_stats(stats)
    indices, counts = out or (None, None)
    out = (
        checks.result("indices", indices, (batch, heads, width), torch.int32, q.device),
        checks.result("counts", counts, (batch, heads), torch.int32, q.device),
    )
    if not checks.use_reference(q):
        from . import cuda

        if cuda.takes(q, summary, width):
            return cuda.kt_select(q, summary, tables, topr, sm_scale, out, stats, tables_ready)
    return portable.kt_select(q, summary, tables, topr, sm_scale, out, stats, scratch)


def scratch_bytes(batch: int, num_q_heads: int, num_kv_heads: int, width: int, given: bool = True) -> int:
    """Bytes that one call allocates beside the result, at most, whatever serves it, and at a smaller width too.

    The references allocate more.

    Args:
        batch: rows, at least one.
        num_q_heads: query heads.
        num_kv_heads: KV heads.
        width: ``M``, at least one.
        given: whether the call gets ``scratch``, which is not counted.
    """
    from . import cuda

    sizes = (batch, num_q_heads, num_kv_heads, width)
    return max(portable.scratch_bytes(*sizes, given), cuda.scratch_bytes(*sizes))


def uses_scratch(
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    width: int,
    dtype: torch.dtype,
    summary_dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether calls of these sizes, or of a smaller width, use the ``scratch`` that they get.

    Args:
        num_q_heads: query heads.
        num_kv_heads: KV heads.
        head_dim: ``d``.
        width: ``M``.
        dtype: of the query.
        summary_dtype: of the bounds, which begin at a multiple of 16 bytes.
        device: where the call runs.
    """
    from . import cuda

    heads = num_q_heads, num_kv_heads
    forced = checks.use_reference(torch.empty(0, device=device))
    return forced or not cuda.takes_sizes(heads, head_dim, width, dtype, summary_dtype, device)
