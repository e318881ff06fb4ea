"""Decode attention over the selected pages of each KV head, for GQA and MHA.

Source: group block sparse attention of ReSA (arXiv:2506.04108, section 3.1), split over the selected pages as in
Flash-Decoding.
"""

import torch

from ..common import checks
from ..common.launch import planned_rows
from . import reference


def sparse_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    indices: torch.Tensor,
    counts: torch.Tensor,
    last_slots: torch.Tensor,
    page_size: int,
    sm_scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    usual_pages: int | None = None,
    arrivals: torch.Tensor | None = None,
    queries: int = 1,
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Exact softmax attention of every query head over the tokens of its KV head's selected pages.

    In the page that holds ``last_slots[b]`` only the slots up to it count. With ``page_size=1`` the indices are token
    slots. A row with a count of 0 gives zeros. What the kernels allocate is in ``scratch_bytes``.

    An attention sink ``s`` adds ``exp(s)`` to the denominator of each softmax of its head, whatever is selected.

    A row's newest tokens may ask together: each attends to the row's selection up to itself, and a page's keys and
    values are read once for all of them.

    Triton's kernels serve on every GPU, launched as was fastest on one H200 for the shape of the call (``plan``). FA3
    and FlashInfer, given each KV head's pages as a row of its own, were not faster there over the same pages
    (``eval.lab.bench_kernels``), so no library serves. Of few tokens there is a kernel in CUDA C++ (``cuda``), which
    knows no sinks and no soft cap.

    Args:
        q: ``[B, Hq, d]``, float32 (CPU only), float16 or bfloat16; ``d`` is contiguous. With ``queries`` the heads are
            ``[Hkv, queries, group]``: of each KV head its group's for one token after the other, the oldest first.
        k_cache: ``[S, Hkv, d]``, the dtype of ``q`` or float8_e4m3fn; ``d`` is contiguous.
        v_cache: ``[S, Hkv, dv]``, the dtype of ``k_cache``; ``dv`` is contiguous.
        indices: ``[B, Hkv, K]`` int32, contiguous: physical pages, of which the first ``counts`` are read.
        counts: ``[B, Hkv]`` int32, contiguous.
        last_slots: ``[B]`` int64, contiguous: the slot of each row's newest token.
        page_size: slots per page, a power of two from 1 to 64.
        sm_scale: softmax scale, usually ``d ** -0.5``.
        k_scale: factor of the stored keys (float8 caches).
        v_scale: factor of the stored values (float8 caches).
        out: optional ``[B, Hq, dv]`` in the dtype of ``q``, contiguous.
        usual_pages: the count that most rows have at most, for which the work is split; ``K`` if not given. Any count
            is served, whatever this says.
        arrivals: optional ``[B, Hkv]`` int32, contiguous, all 0 and left so: by it the parts of a row that run beside
            one another find the last one, which combines them where that is faster than a second launch. Calls that
            share it must follow one another.
        queries: tokens of a row that ask; ``last_slots[b]`` is the newest one's. Above 1, ``indices`` are in ascending
            order of position, and each list ends with the row's newest ``ceil((queries - 1) / page_size) + 1`` pages,
            or with as many as the row has.
        sinks: optional ``[Hq]``, bfloat16 or float32, contiguous, in natural units, heads in the order of ``q``.
        soft_cap: optional, in natural units; the logits become ``soft_cap * tanh(logits / soft_cap)``.

    Returns:
        ``[B, Hq, dv]`` in the dtype of ``q``, heads in its order.

    Raises:
        ValueError: a wrong dimension, dtype, device, head count, page size or number of queries.

    Example:
        >>> import torch
        >>> from sglang_sparse_kernels.sparse_decode import sparse_decode
        >>> q, k_cache = torch.zeros(1, 2, 64), torch.zeros(8, 1, 64)
        >>> v_cache = torch.arange(8.0).view(8, 1, 1).expand(8, 1, 64).contiguous()
        >>> indices, counts = torch.tensor([[[1, -1]]], dtype=torch.int32), torch.tensor([[1]], dtype=torch.int32)
        >>> out = sparse_decode(q, k_cache, v_cache, indices, counts, torch.tensor([6]), page_size=4, sm_scale=0.125)
        >>> out[0, :, 0].tolist()
        [5.0, 5.0]
    """
    inputs = reference.Inputs(
        *(q, k_cache, v_cache, indices, counts, last_slots, page_size, sm_scale, k_scale, v_scale, queries),
        *(sinks, soft_cap),
    )
    _check_arguments(inputs, arrivals)
    out = checks.result("out", out, (*q.shape[:2], v_cache.shape[2]), q.dtype, q.device)
    if checks.use_reference(q):
        return reference.sparse_decode(inputs, out)
    from . import cuda, triton

    tokens = (usual_pages or indices.shape[2]) * page_size
    pairs = planned_rows(counts.shape[0]) * counts.shape[1]
    plain = queries == 1 and sinks is None and soft_cap is None
    config = cuda.config_of(pairs, tokens, q.device) if plain else None
    if config is not None and cuda.takes(q, k_cache, v_cache, out):
        return cuda.sparse_decode(inputs, out, config)
    return triton.sparse_decode(inputs, out, usual_pages=usual_pages, arrivals=arrivals)


def scratch_bytes(
    batch: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    pages: int,
    page_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Bytes that the kernels of one call allocate beside the output: what the splits of a row hand on.

    Not monotonic: small batches are split, large ones are not and need nothing. The reference allocates more.

    Args:
        batch: rows, at least one.
        num_q_heads: query heads, of all tokens of a row that ask.
        num_kv_heads: KV heads.
        head_dim: dimension of queries and keys.
        v_head_dim: dimension of values.
        pages: the call's ``usual_pages``.
        page_size: slots per page.
        dtype: of the queries.
        kv_dtype: of the caches.
        device: where the call runs.
    """
    from ..common.flash_decode import split_bytes
    from .plan import plan

    sizes = (batch, num_q_heads // num_kv_heads, num_kv_heads, head_dim, v_head_dim, pages, page_size)
    config, _, splits = plan(*sizes, kv_dtype, device)
    return split_bytes(batch * num_q_heads, splits, v_head_dim, dtype, config.narrow)


def _check_arguments(inputs: reference.Inputs, arrivals: torch.Tensor | None) -> None:
    q, k_cache, v_cache, indices = inputs.q, inputs.k_cache, inputs.v_cache, inputs.indices
    checks.check_query("q", q, 3)
    checks.check_tensor("k_cache", k_cache, 3, (q.dtype, torch.float8_e4m3fn))
    checks.check_tensor("v_cache", v_cache, 3, (k_cache.dtype,))
    checks.check_tensor("indices", indices, 3, (torch.int32,))
    checks.check_page_size(inputs.page_size)
    batch, num_q_heads, head_dim = q.shape
    num_slots, num_kv_heads, _ = v_cache.shape
    checks.check_heads(num_q_heads, num_kv_heads)
    if inputs.queries < 1 or num_q_heads // num_kv_heads % inputs.queries:
        raise ValueError(f"queries must divide the {num_q_heads // num_kv_heads} of a KV head, got {inputs.queries}")
    checks.check_shape("k_cache", k_cache, (num_slots, num_kv_heads, head_dim))
    checks.check_shape("indices", indices, (batch, num_kv_heads, indices.shape[2]))
    checks.check_last(q=q, k_cache=k_cache, v_cache=v_cache)
    by_row = {"counts": inputs.counts, "last_slots": inputs.last_slots, "arrivals": arrivals}
    checks.check_device(q.device, k_cache=k_cache, v_cache=v_cache, indices=indices, **by_row)
    checks.check_contiguous("indices", indices)
    checks.check_exactly("counts", inputs.counts, (batch, num_kv_heads), torch.int32)
    checks.check_exactly("last_slots", inputs.last_slots, (batch,), torch.int64)
    checks.check_sinks(q, inputs.sinks)
    checks.check_soft_cap(inputs.soft_cap)
    if arrivals is not None:
        checks.check_exactly("arrivals", arrivals, (batch, num_kv_heads), torch.int32)
