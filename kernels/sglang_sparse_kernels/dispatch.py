"""Which implementation of an operation runs, and the argument checks the operations share."""

import os
from collections.abc import Collection

import torch

MAX_PAGE_SIZE = 64
QUERY_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
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


def check_shape(name: str, tensor: torch.Tensor, expected: tuple[int, ...]) -> None:
    """Raise ValueError unless ``tensor`` has exactly the shape ``expected``."""
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{name} must have the shape {expected}, got {tuple(tensor.shape)}")


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless ``tensor`` is contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got the strides {tensor.stride()} for {tuple(tensor.shape)}")


def check_page_size(page_size: int) -> None:
    """Raise ValueError unless ``page_size`` is a power of two from 1 to 64."""
    if not 1 <= page_size <= MAX_PAGE_SIZE or page_size & (page_size - 1):
        raise ValueError(f"page_size must be a power of two from 1 to {MAX_PAGE_SIZE}, got {page_size}")


def check_heads(num_q_heads: int, num_kv_heads: int) -> None:
    """Raise ValueError unless the query heads divide evenly among the KV heads."""
    if num_kv_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(f"query heads must be a multiple of KV heads, got {num_q_heads} and {num_kv_heads}")
