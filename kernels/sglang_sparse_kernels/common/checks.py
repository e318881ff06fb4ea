"""Choice of an operation's implementation, and the argument checks that operations share."""

import os
from collections.abc import Collection
from typing import Protocol

import torch

MAX_PAGE_SIZE = 64
HALF_DTYPES = (torch.float16, torch.bfloat16)
QUERY_DTYPES = (torch.float32, *HALF_DTYPES)
KV_DTYPES = (*QUERY_DTYPES, torch.float8_e4m3fn)


def use_reference(tensor: torch.Tensor) -> bool:
    """True when the plain torch reference handles ``tensor``.

    That is the case for CPU tensors, unless Triton's interpreter is on (``TRITON_INTERPRET=1``), and for every
    tensor when ``SGLANG_SPARSE_REFERENCE=1`` is set.
    """
    if os.environ.get("SGLANG_SPARSE_REFERENCE") == "1":
        return True
    return tensor.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"


def check_tensor(name: str, tensor: torch.Tensor, ndim: int, dtypes: Collection[torch.dtype]) -> None:
    """Raise ValueError unless ``tensor`` has ``ndim`` dimensions and one of ``dtypes``."""
    if tensor.dim() != ndim:
        raise ValueError(f"{name} must have {ndim} dimensions, got shape {tuple(tensor.shape)}")
    if tensor.dtype not in dtypes:
        allowed = ", ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name} must have one of the dtypes {allowed}, got {tensor.dtype}")


def check_query(name: str, tensor: torch.Tensor, ndim: int) -> None:
    """Raise ValueError unless ``tensor`` has ``ndim`` dimensions and a dtype that kernels take where it is."""
    kernels_alone = tensor.device.type != "cpu" and not use_reference(tensor)
    check_tensor(name, tensor, ndim, HALF_DTYPES if kernels_alone else QUERY_DTYPES)


def check_shape(name: str, tensor: torch.Tensor, expected: tuple[int, ...]) -> None:
    """Raise ValueError unless ``tensor`` has exactly the shape ``expected``."""
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{name} must have the shape {expected}, got {tuple(tensor.shape)}")


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless ``tensor`` is contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got the strides {tensor.stride()} for {tuple(tensor.shape)}")


def check_exactly(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ValueError unless ``tensor`` is contiguous and has this shape and dtype."""
    # Every layer of a step asks: what is as it should be costs one comparison each.
    if tensor.dtype == dtype and tensor.shape == shape and tensor.is_contiguous():
        return
    check_tensor(name, tensor, len(shape), (dtype,))
    check_shape(name, tensor, shape)
    check_contiguous(name, tensor)


def check_device(device: torch.device, **tensors: torch.Tensor | None) -> None:
    """Raise ValueError unless each tensor that is given is on ``device``.

    Else an address of the host could reach a kernel, and end the CUDA context.
    """
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name} must be on {device}, got {tensor.device}")


def check_stats(stats: torch.Tensor) -> None:
    """Raise ValueError unless ``stats`` are the counters of a selection, and perhaps others behind them."""
    check_tensor("stats", stats, 1, (torch.int64,))
    check_contiguous("stats", stats)
    if stats.shape[0] < 3:
        raise ValueError(f"stats must have at least 3 counters, got {stats.shape[0]}")


def check_last(**tensors: torch.Tensor) -> None:
    """Raise ValueError unless the last dimension of each tensor is contiguous."""
    for name, tensor in tensors.items():
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be contiguous along its last dimension, got the strides {tensor.stride()}")


def result(
    name: str, given: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return ``given``, or a new tensor for None.

    Raises:
        ValueError: ``given`` is not contiguous, or has not this shape, dtype and device.
    """
    if given is None:
        return torch.empty(shape, dtype=dtype, device=device)
    check_exactly(name, given, shape, dtype)
    check_device(device, **{name: given})
    return given


def check_sinks(q: torch.Tensor, sinks: torch.Tensor | None) -> None:
    """Raise ValueError unless ``sinks`` are one number for each head of ``q``, ``[..., Hq, d]``, or None."""
    if sinks is None:
        return
    check_tensor("sinks", sinks, 1, (torch.bfloat16, torch.float32))
    check_shape("sinks", sinks, (q.shape[-2],))
    check_contiguous("sinks", sinks)
    check_device(q.device, sinks=sinks)


def check_soft_cap(soft_cap: float | None) -> None:
    """Raise ValueError unless ``soft_cap`` is positive, or None."""
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap must be positive, got {soft_cap}")


def check_page_size(page_size: int) -> None:
    """Raise ValueError unless ``page_size`` is a power of two from 1 to 64."""
    if not 1 <= page_size <= MAX_PAGE_SIZE or page_size & (page_size - 1):
        raise ValueError(f"page_size must be a power of two from 1 to {MAX_PAGE_SIZE}, got {page_size}")


def check_heads(num_q_heads: int, num_kv_heads: int) -> None:
    """Raise ValueError unless the query heads divide evenly among the KV heads."""
    if num_kv_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(f"query heads must be a multiple of KV heads, got {num_q_heads} and {num_kv_heads}")


def check_paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    by_row: tuple[str, torch.Tensor],
    out: torch.Tensor | None,
    stats: tuple[torch.Tensor | None, int],
) -> torch.Tensor:
    """Raise ValueError unless these are the queries, the paged caches and the result of a ragged extend batch.

    Args:
        q: ``[N, Hq, d]``.
        k_cache: ``[S, Hkv, d]``.
        v_cache: ``[S, Hkv, dv]``.
        page_table: ``[B, M]``.
        by_row: name of the method's number for each row, and ``[B]`` float32.
        out: ``[N, Hq, dv]``, or None.
        stats: what counts, or None, and how many numbers those are.

    Returns:
        ``out``, made if it was None.
    """
    check_query("q", q, 3)
    check_tensor("k_cache", k_cache, 3, (q.dtype, torch.float8_e4m3fn))
    check_tensor("v_cache", v_cache, 3, (k_cache.dtype,))
    check_tensor("page_table", page_table, 2, (torch.int32,))
    num_queries, num_q_heads, head_dim = q.shape
    num_slots, num_kv_heads, v_head_dim = v_cache.shape
    check_heads(num_q_heads, num_kv_heads)
    check_shape("k_cache", k_cache, (num_slots, num_kv_heads, head_dim))
    check_last(q=q, k_cache=k_cache, v_cache=v_cache, page_table=page_table)
    inputs = {"k_cache": k_cache, "v_cache": v_cache, "page_table": page_table, by_row[0]: by_row[1]}
    check_device(q.device, **inputs, stats=stats[0])
    check_exactly(*by_row, (page_table.shape[0],), torch.float32)
    if stats[0] is not None:
        check_exactly("stats", stats[0], (stats[1],), torch.int64)
    return result("out", out, (num_queries, num_q_heads, v_head_dim), q.dtype, q.device)


class PrefillPlan(Protocol):
    """Shared fields of the plans of prefill operations: the sizes of their batch."""

    @property
    def num_queries(self) -> int:
        """Query tokens."""
        ...

    @property
    def num_rows(self) -> int:
        """Rows of the page table."""
        ...

    @property
    def max_length(self) -> int:
        """Tokens of the longest row."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of its tables."""
        ...


def check_plan(q: torch.Tensor, page_table: torch.Tensor, plan: PrefillPlan, page_size: int) -> None:
    """Raise ValueError unless ``plan`` is one of this batch."""
    if plan.num_queries != q.shape[0] or plan.num_rows != page_table.shape[0]:
        raise ValueError(
            f"the plan has {plan.num_queries} query tokens in {plan.num_rows} rows,"
            f" got {q.shape[0]} in q and {page_table.shape[0]} in page_table"
        )
    if plan.max_length > page_table.shape[1] * page_size:
        raise ValueError(
            f"page_table must hold {plan.max_length} tokens a row, got {page_table.shape[1]} pages of {page_size}"
        )
    if plan.device.type != q.device.type:
        raise ValueError(f"the plan must be on the device of q, got {plan.device} and {q.device}")


def check_logit_scale(sm_scale: float, k_scale: float) -> None:
    """Raise ValueError unless logits keep their order when they are scaled."""
    if not sm_scale * k_scale > 0:
        raise ValueError(f"sm_scale * k_scale must be positive, got {sm_scale} and {k_scale}")
