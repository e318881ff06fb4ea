"""KT score: how much a group of query heads may attend to each page of the KT cache, by its largest dimensions.

Source: the second stage of RocketKV (arXiv:2502.14051), hybrid sparse attention, as its authors' code and TensorRT-LLM
(``RocketVanillaAttention``, ``RocketTrtllmAttention``) combine the heads of a group.
"""

import torch

from ..common import checks
from . import reference

_SUMMARY_DTYPES = (*checks.KV_DTYPES, torch.float8_e5m2)
_MIN_DIM, _MAX_DIM = 16, 128


def kt_score(
    q: torch.Tensor,
    summary: torch.Tensor,
    candidates: torch.Tensor,
    n_candidates: torch.Tensor,
    topr: int,
    sm_scale: float,
    k_scale: float = 1.0,
    out: torch.Tensor | None = None,
    local_pages: int = 1,
) -> torch.Tensor:
    """Score the candidate pages of each row and KV head.

    A group of query heads chooses its dimensions together: the ``topr`` with the largest ``sum_g |q[g, j]|``, ties to
    the lower dimension. Of a chosen dimension the page counts with its maximum where ``sum_g q[g, j] > 0``, else with
    its minimum; call that ``bound[j]``. A head's logit of the page is then ``sum_j q[g, j] * bound[j]``, times
    ``sm_scale`` and ``sqrt(|q[g]|_1 / |chosen q[g]|_1)`` (SparQ's temperature; 1 where all dimensions are chosen). With
    one head to a group this is an upper bound of the page's logits on these dimensions. With more it is one for their
    sum, not for each head: the sign is the group's, as in the source. Each head's softmax runs over the candidates, and
    the score is the natural logarithm of the mean over the heads. Scores order as the source's means do, and do not
    vanish where a mean would be 0 in float32.

    The newest ``local_pages`` candidates score +inf, and still take part in the softmax. A page whose logit is infinite
    or NaN in any head, as after NaN in a bound that counts, is left out of the softmax and scores the largest finite
    float32: it is selected before every other page but never instead of a local one. A NaN in ``q`` makes that of all
    pages.

    Differences from the source: RocketTrtllmAttention has no temperature. RocketVanillaAttention and the authors' code
    run the softmax over tokens, each with its page's logit, so that a last page that is not full weighs less. Neither
    has local pages.

    A row's scores are a function of the row alone: the same bits in any batch and at any width on one kind of GPU.

    The kernels (two launches, as no page's score is known before all logits) allocate a scratch that ``scratch_bytes``
    gives: about as many bytes for each query head as the result has for each KV head. Rows that together need more than
    256 MiB take turns in it.

    Args:
        q: ``[B, Hq, d]``, float32, float16 or bfloat16; ``d`` is 16, 32, 64 or 128, and contiguous.
        summary: ``[num_pages, Hkv, 2, d]`` from ``update_page_summary`` (maximum at 0, minimum at 1), contiguous;
            float32, float16, bfloat16, float8_e4m3fn or float8_e5m2.
        candidates: ``[B, Hkv, M]`` int32, contiguous: pages of ``summary`` by row and KV head, oldest first. Only the
            first ``n_candidates[b, h]`` count.
        n_candidates: ``[B, Hkv]`` int32, contiguous, at most ``M``.
        topr: dimensions that count, 1 to ``d``.
        sm_scale: softmax scale, usually ``d ** -0.5``.
        k_scale: factor of the stored keys (float8 caches).
        out: optional ``[B, Hkv, M]`` float32, contiguous.
        local_pages: newest candidates that always score +inf.

    Returns:
        ``[B, Hkv, M]`` float32. Entries at or beyond ``n_candidates`` are -inf from the reference and *left unwritten*
        by the GPU kernels.

    Raises:
        ValueError: a wrong dimension, dtype, device, stride, head count, scale or number of dimensions.

    Example:
        >>> import torch
        >>> from sglang_sparse_kernels.kt_score import kt_score
        >>> q = torch.zeros(1, 1, 64)
        >>> q[0, 0, :3] = torch.tensor([8.0, -4.0, 1.0])
        >>> summary = torch.stack([torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([[-1.0], [0.0], [1.0]])], dim=2)
        >>> summary = summary[..., None].expand(3, 1, 2, 64).contiguous()
        >>> as_int32 = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> candidates, count = as_int32(2, 0, 1)[None, None], as_int32(3)[None]
        >>> scores = kt_score(q, summary, candidates, count, topr=2, sm_scale=0.125)
        >>> [round(score, 3) for score in scores[0, 0].tolist()]
        [-0.667, -1.707, inf]
    """
    if out is None:
        out = torch.empty(candidates.shape, dtype=torch.float32, device=q.device)
    _check_arguments(q, summary, candidates, n_candidates, topr, out, local_pages)
    checks.check_logit_scale(sm_scale, k_scale)
    arguments = (q, summary, candidates, n_candidates, topr, sm_scale, k_scale, out, local_pages)
    if checks.use_reference(q):
        return reference.kt_score(*arguments)
    from . import triton

    return triton.kt_score(*arguments)


def scratch_bytes(batch: int, num_q_heads: int, num_kv_heads: int, max_candidates: int) -> int:
    """Bytes that the kernels of one call allocate at once beside the result. The reference allocates more.

    Args:
        batch: rows, at least one.
        num_q_heads: query heads.
        num_kv_heads: KV heads.
        max_candidates: ``M``, at least one.
    """
    from . import triton

    return triton.scratch_bytes(batch, num_q_heads, num_kv_heads, max_candidates)


def check_bounds(q: torch.Tensor, summary: torch.Tensor, topr: int) -> None:
    """Raise ValueError unless these are queries and bounds on keys, and a number of their dimensions."""
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


def _check_arguments(
    q: torch.Tensor,
    summary: torch.Tensor,
    candidates: torch.Tensor,
    n_candidates: torch.Tensor,
    topr: int,
    out: torch.Tensor,
    local_pages: int,
) -> None:
    check_bounds(q, summary, topr)
    checks.check_tensor("candidates", candidates, 3, (torch.int32,))
    checks.check_tensor("n_candidates", n_candidates, 2, (torch.int32,))
    checks.check_tensor("out", out, 3, (torch.float32,))
    batch, num_kv_heads = q.shape[0], summary.shape[1]
    checks.check_shape("candidates", candidates, (batch, num_kv_heads, candidates.shape[2]))
    checks.check_shape("n_candidates", n_candidates, (batch, num_kv_heads))
    checks.check_shape("out", out, tuple(candidates.shape))
    tensors = {"candidates": candidates, "n_candidates": n_candidates, "out": out}
    for name, tensor in tensors.items():
        checks.check_contiguous(name, tensor)
    checks.check_device(q.device, **tensors)
    if local_pages < 0:
        raise ValueError(f"local_pages must be at least 0, got {local_pages}")
