"""Window score: how much the last queries of a prompt attend to each of its tokens, for each KV head.

Source: the first stage of RocketKV (arXiv:2502.14051), which is SnapKV (arXiv:2404.14469) with one choice for each
group of query heads, as its authors' code and TensorRT-LLM's ``RocketVanillaAttention`` compute it. TensorRT-LLM's
fused path differs: its softmax runs over the tokens before the window alone.
"""

import torch

from ..common import checks
from . import reference

_MAX_DIM = 256


def window_score(
    q: torch.Tensor,
    n_window: torch.Tensor,
    k_cache: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    page_size: int,
    sm_scale: float,
    k_scale: float = 1.0,
    kernel_size: int = 63,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of a prompt's last ``n_window`` queries, summed over queries and group, then max-pooled.

    Each query's softmax runs over all tokens up to its own, those of the window included. A token's importance is the
    sum of its weights over the window's queries and the group's query heads. A token before the window scores the
    largest importance of the ``kernel_size`` tokens around it, of those that exist and lie before the window: at both
    ends fewer tokens compete, and the window's own never do. The window's tokens score +inf. With no query in the
    window every token scores 0.

    A logit that is infinite or NaN is left out of its query's softmax, and its token's importance is the largest finite
    float32: a broken key is kept, with what the pool puts around it, and hides no other token. A broken query makes
    that of all tokens that it sees.

    A row's scores are a function of the row alone: the same bits in any batch and at any width on one kind of GPU.

    The kernels allocate a scratch that ``scratch_bytes`` gives: about as much as the result, twice that where ``W``
    times the group exceeds 128. Rows that together need more than 256 MiB take turns in it.

    Args:
        q: ``[B, W, Hq, d]``, float32 (CPU only), float16 or bfloat16, the rotated queries of the last ``W`` prompt
            tokens: ``q[b, w]`` is that of position ``lengths[b] - W + w``. Only the last ``n_window[b]`` are read, as
            a prompt may be shorter. ``d`` is at most 256 and contiguous.
        n_window: ``[B]`` int32, queries of each row's window, clamped to ``W`` and ``lengths[b]``.
        k_cache: ``[S, Hkv, d]``, the dtype of ``q`` or float8_e4m3fn; ``d`` is contiguous.
        page_table: ``[B, M]`` int32, the physical page of each logical page; ``M`` is contiguous. Entries past a row's
            pages are not read.
        lengths: ``[B]`` int32, prompt tokens of each row with its window, at most ``L``; 0 marks a padded row.
        page_size: slots per page, a power of two from 1 to 64.
        sm_scale: softmax scale, usually ``d ** -0.5``.
        k_scale: factor of the stored keys (float8 caches).
        kernel_size: tokens of the pool, odd; 1 pools nothing.
        out: optional ``[B, Hkv, L]`` float32, contiguous; ``L`` is ``M * page_size`` by default, and at most that.

    Returns:
        ``[B, Hkv, L]`` float32. Entries at or beyond ``lengths[b]`` are -inf from the reference and *left unwritten* by
        the GPU kernels.

    Raises:
        ValueError: a wrong dimension, dtype, device, stride, head count, page size, scale or pool.

    Example:
        >>> import torch
        >>> from sglang_sparse_kernels.window_score import window_score
        >>> as_int32 = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> k_cache = torch.zeros(8, 1, 64)
        >>> k_cache[5] = 1.0
        >>> q = torch.ones(1, 2, 1, 64)
        >>> pages = as_int32(1, 0)[None]
        >>> score = window_score(q, as_int32(2), k_cache, pages, as_int32(6), 4, sm_scale=0.125, kernel_size=3)
        >>> [round(value, 3) for value in score[0, 0, :6].tolist()]
        [1.997, 1.997, 1.997, 0.001, inf, inf]
    """
    _check_arguments(q, n_window, k_cache, page_table, lengths, page_size)
    most = page_table.shape[1] * page_size
    tokens = out.shape[-1] if out is not None and out.dim() else most
    out = checks.result("out", out, (q.shape[0], k_cache.shape[1], tokens), torch.float32, q.device)
    if tokens > most:
        raise ValueError(f"out must have at most the {most} tokens of page_table, got {tokens}")
    checks.check_logit_scale(sm_scale, k_scale)
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(f"kernel_size must be odd and at least 1, got {kernel_size}")
    arguments = (q, n_window, k_cache, page_table, lengths, page_size, sm_scale, k_scale, kernel_size, out)
    if checks.use_reference(q):
        return reference.window_score(*arguments)
    from . import triton

    return triton.window_score(*arguments)


def scratch_bytes(batch: int, window: int, num_q_heads: int, num_kv_heads: int, max_length: int) -> int:
    """Bytes that the kernels of one call allocate at once beside the result. The reference allocates more.

    Args:
        batch: rows, at least one.
        window: ``W``, queries of a window.
        num_q_heads: query heads.
        num_kv_heads: KV heads.
        max_length: ``L``, tokens of the result, at least one.
    """
    from . import triton

    return triton.scratch_bytes(batch, window, num_q_heads, num_kv_heads, max_length)


def _check_arguments(
    q: torch.Tensor,
    n_window: torch.Tensor,
    k_cache: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    page_size: int,
) -> None:
    checks.check_query("q", q, 4)
    checks.check_tensor("k_cache", k_cache, 3, (q.dtype, torch.float8_e4m3fn))
    checks.check_tensor("page_table", page_table, 2, (torch.int32,))
    batch, window, num_q_heads, head_dim = q.shape
    num_slots, num_kv_heads, _ = k_cache.shape
    if window < 1:
        raise ValueError(f"q must have at least one query, got the shape {tuple(q.shape)}")
    if not 1 <= head_dim <= _MAX_DIM:
        raise ValueError(f"the last dimension of q must be 1 to {_MAX_DIM}, got {head_dim}")
    checks.check_heads(num_q_heads, num_kv_heads)
    checks.check_page_size(page_size)
    checks.check_shape("k_cache", k_cache, (num_slots, num_kv_heads, head_dim))
    checks.check_shape("page_table", page_table, (batch, page_table.shape[1]))
    checks.check_last(q=q, k_cache=k_cache, page_table=page_table)
    for name, tensor in (("n_window", n_window), ("lengths", lengths)):
        checks.check_exactly(name, tensor, (batch,), torch.int32)
    tensors = {"k_cache": k_cache, "page_table": page_table, "n_window": n_window, "lengths": lengths}
    checks.check_device(q.device, **tensors)
