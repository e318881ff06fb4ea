"""KT selection: the blocks of a row that each KV head attends to in a step, by bounds on their keys.

Source: RocketKV (arXiv:2502.14051), permanent KV cache eviction and then hybrid sparse attention, as its authors' code
and TensorRT-LLM (``RocketVanillaAttention``, ``RocketTrtllmAttention``) combine the heads of a group. Unlike there,
nothing is evicted: what was not kept stays in the cache, where other requests share it, and is left out of the lists
alone. RocketTrtllmAttention has no temperature. RocketVanillaAttention and the authors' code run the softmax over
tokens, each with its page's logit, so that a last page that is not full weighs less. Neither has local pages.
"""

import torch

from ..common import checks
from ..common.scratch import LIMIT, most_bytes
from . import reference

# The tables that say what is visible, in the order of the arguments.
TABLES = ("kept", "n_kept", "first_visible", "requests", "block_table", "n_blocks", "n_select")
_SUMMARY_DTYPES = (*checks.KV_DTYPES, torch.float8_e5m2)
_MIN_DIM, _MAX_DIM = 16, 128


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

    What is visible is what ``reference.visible_blocks`` lists, its scores are those of ``reference.kt_score`` with one
    local page, and the highest are those of ``page_topk``. A row of no more visible blocks than it selects has all of
    them.

    The kernel in CUDA C++ is one launch, and serves bounds in float8_e5m2 and groups of up to eight heads on NVIDIA
    GPUs (``cuda.takes``). It rounds scores in another way than Triton's kernels, which serve elsewhere: of blocks that
    score the same but for rounding it may take another one. Those of Triton are a launch for the lists and two for the
    scores, as none is known before all logits, and the choice. Rows whose logits together need more than 256 MiB take
    turns in them.

    Args:
        q: ``[B, Hq, d]``, float32, float16 or bfloat16; ``d`` is 16, 32, 64 or 128, and contiguous.
        summary: ``[num_blocks, Hkv, 2, d]`` from ``update_page_summary`` (maximum at 0, minimum at 1), contiguous;
            float32, float16, bfloat16, float8_e4m3fn or float8_e5m2.
        kept: ``[S, Hkv, K]`` int32, contiguous: by request slot and KV head, the logical blocks that were kept,
            ascending and below the slot's ``first_visible``. Only the first ``n_kept`` count.
        n_kept: ``[S]`` int32, contiguous: kept blocks of each KV head.
        first_visible: ``[S]`` int32, contiguous: the logical block from which on everything is visible. 0, with nothing
            kept, shows all blocks. A row has more blocks than this.
        requests: ``[B]`` int64, contiguous: the request slot of each row.
        block_table: ``[B, M]`` int32, the physical block of each logical block; ``M`` is contiguous.
        n_blocks: ``[B]`` int32, contiguous: blocks of each row, at most ``M``; 0 marks a padded row.
        n_select: ``[B]`` int32, contiguous: blocks that the row attends to; a negative number counts as 0.
        topr: dimensions that count, 1 to ``d``.
        sm_scale: scale of the products of query and stored key.
        out: optional ``(indices, counts)``, contiguous, shaped and typed as the result.
        stats: optional int64 counters, the first three of which are incremented as by ``page_topk``: by the number of
            (row, KV head) pairs that want a block, the blocks they want, and the blocks they hold, visible or not.
        scratch: optional, for the lists of blocks ``[B, Hkv, M]`` and twice ``[B, Hkv]`` int32, and for the scores
            ``[B, Hkv, M]`` float32, contiguous. The kernel in CUDA C++ neither reads nor writes them.
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
    _check_bounds(q, summary, topr)
    batch, heads = q.shape[0], summary.shape[1]
    checks.check_device(q.device, **dict(zip(TABLES, tables, strict=True)), stats=stats)
    _check_tables(tables, batch, heads)
    checks.check_logit_scale(sm_scale, 1.0)
    if stats is not None:
        checks.check_stats(stats)
    width = block_table.shape[1]
    indices, counts = out or (None, None)
    out = (
        checks.result("indices", indices, (batch, heads, width), torch.int32, q.device),
        checks.result("counts", counts, (batch, heads), torch.int32, q.device),
    )
    if checks.use_reference(q):
        return reference.kt_select(q, summary, tables, topr, sm_scale, out, stats, scratch)
    from . import cuda, triton

    if cuda.takes(q, summary, width):
        return cuda.kt_select(q, summary, tables, topr, sm_scale, out, stats, tables_ready)
    return triton.kt_select(q, summary, tables, topr, sm_scale, out, stats, scratch)


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
    from . import cuda, triton

    lists = 0 if given else batch * num_kv_heads * (2 * width + 2) * torch.int32.itemsize
    in_triton = lists + most_bytes(batch, triton.row_bytes(num_q_heads, width), LIMIT)
    return max(in_triton, cuda.scratch_bytes(batch, num_q_heads, num_kv_heads, width))


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


def _check_bounds(q: torch.Tensor, summary: torch.Tensor, topr: int) -> None:
    checks.check_tensor("q", q, 3, checks.QUERY_DTYPES)
    checks.check_tensor("summary", summary, 4, _SUMMARY_DTYPES)
    _, num_q_heads, head_dim = q.shape
    num_pages, num_kv_heads = summary.shape[:2]
    checks.check_heads(num_q_heads, num_kv_heads)
    if not _MIN_DIM <= head_dim <= _MAX_DIM or head_dim & (head_dim - 1):
        raise ValueError(
            f"the last dimension of q must be a power of two from {_MIN_DIM} to {_MAX_DIM}, got {head_dim}"
        )
    checks.check_shape("summary", summary, (num_pages, num_kv_heads, 2, head_dim))
    checks.check_last(q=q)
    checks.check_contiguous("summary", summary)
    checks.check_device(q.device, summary=summary)
    if not 1 <= topr <= head_dim:
        raise ValueError(f"topr must be 1 to {head_dim}, the last dimension of q, got {topr}")


def _check_tables(tables: tuple[torch.Tensor, ...], batch: int, heads: int) -> None:
    kept, n_kept, first_visible, requests, block_table, n_blocks, n_select = tables
    checks.check_tensor("kept", kept, 3, (torch.int32,))
    slots, _, most = kept.shape
    checks.check_exactly("kept", kept, (slots, heads, most), torch.int32)
    checks.check_tensor("block_table", block_table, 2, (torch.int32,))
    checks.check_shape("block_table", block_table, (batch, block_table.shape[1]))
    checks.check_last(block_table=block_table)
    checks.check_exactly("n_kept", n_kept, (slots,), torch.int32)
    checks.check_exactly("first_visible", first_visible, (slots,), torch.int32)
    checks.check_exactly("requests", requests, (batch,), torch.int64)
    checks.check_exactly("n_blocks", n_blocks, (batch,), torch.int32)
    checks.check_exactly("n_select", n_select, (batch,), torch.int32)
