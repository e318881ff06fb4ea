"""Index keys: FP8 queries and keys of the lightning indexer, and the paged cache of the keys.

Source: DeepSeek Sparse Attention (DSA, DeepSeek-V3.2-Exp), as SGLang computes it: ``rotate_activation``, then
``act_quant`` with scales in the format "ue8m0" (powers of two). Where SGLang quantises and stores keys in one kernel,
as on CUDA, a key's scale is ``amax / 448`` itself (``powers`` of False). The logits take both.
"""

import torch

from ..common import checks
from . import reference
from .reference import PAGE_SIZE

_DIMS = (64, 128, 256)


def quantize(
    x: torch.Tensor,
    rotate: bool = True,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    powers: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate each row by a Hadamard matrix and quantise it to FP8 with one scale.

    The matrix is ``D ** -0.5`` times Sylvester's, applied in float32 by ``log2(D)`` steps of sums and differences of
    neighbours, bit 0 of the position first; the result is rounded to the dtype of ``x``. The scale is the smallest
    power of two with ``max(amax, 1e-4) <= 448 * scale``, from the bits of the maximum; SGLang's kernel takes it from a
    rounded logarithm. Without ``powers`` it is ``max(amax, 1e-4) / 448``, and each value is multiplied by the rounded
    inverse, as in SGLang's fused kernel. Every implementation gives the same bits.

    A row that holds NaN or infinity, or becomes infinite by the rotation, is NaN as a whole, value by value and in its
    scale, so that its logits are NaN and a selection takes it. SGLang's kernel clamps what is not finite to +-448 and
    forgets a NaN in the maximum: a key of NaN gets the smallest scale there, and is hardly ever selected.

    Args:
        x: ``[..., D]``, float32 (CPU only), float16 or bfloat16, queries or keys after RoPE; ``D`` is 64, 128 or 256,
            and contiguous. It is copied if its other dimensions cannot be viewed as one.
        rotate: whether the model rotates queries and keys. It changes the products of both only by rounding; a cache
            holds keys of one kind.
        out: optional ``(values, scales)``, contiguous, shaped and typed as the result.
        powers: whether scales are powers of two.

    Returns:
        ``values`` ``[..., D]`` float8_e4m3fn, and ``scales`` ``[...]`` float32; ``values * scales`` is the row.

    Raises:
        ValueError: a wrong dimension, dtype, device or stride.

    Example:
        >>> import torch
        >>> from sglang_sparse_kernels.index_keys import quantize
        >>> values, scales = quantize(torch.full((1, 64), 3.0), rotate=False)
        >>> values[0, 0].item(), scales.item()
        (384.0, 0.0078125)
    """
    if x.dim() < 2:
        raise ValueError(f"x must have at least 2 dimensions, got shape {tuple(x.shape)}")
    checks.check_query("x", x, x.dim())
    if x.shape[-1] not in _DIMS:
        raise ValueError(f"the last dimension of x must be one of {', '.join(map(str, _DIMS))}, got {x.shape[-1]}")
    checks.check_last(x=x)
    if out is None:
        values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
        out = (values, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device))
    for name, tensor, dtype, shape in (
        ("values", out[0], torch.float8_e4m3fn, x.shape),
        ("scales", out[1], torch.float32, x.shape[:-1]),
    ):
        checks.check_exactly(name, tensor, tuple(shape), dtype)
    checks.check_device(x.device, values=out[0], scales=out[1])
    if checks.use_reference(x):
        return reference.quantize(x, rotate, out, powers)
    from . import triton

    return triton.quantize(x, rotate, out, powers)


def store(values: torch.Tensor, scales: torch.Tensor, slots: torch.Tensor, buffer: torch.Tensor) -> None:
    """Write keys to their slots of SGLang's index cache, and nothing else.

    A page of the cache holds 64 tokens: their ``64 * D`` bytes of values, token by token, then their 64 float32 scales.
    Slots do not repeat, but for those of page 0, to which a server writes what pads a batch.

    Args:
        values: ``[N, D]`` float8_e4m3fn, contiguous; ``D`` is 64, 128 or 256.
        scales: ``[N]`` float32, contiguous.
        slots: ``[N]`` int64, contiguous: token ``slot % 64`` of page ``slot // 64``. One of -1 is skipped.
        buffer: ``[pages, 64 * (D + 4)]`` uint8, contiguous, at an address that is a multiple of 16.

    Raises:
        ValueError: a wrong dimension, dtype, device, stride or address.

    Example:
        >>> import torch
        >>> from sglang_sparse_kernels.index_keys import quantize, store
        >>> buffer = torch.zeros(2, 64 * (64 + 4), dtype=torch.uint8)
        >>> store(*quantize(torch.full((1, 64), 3.0), rotate=False), torch.tensor([65]), buffer)
        >>> buffer.count_nonzero(dim=1).tolist(), buffer[1, 64:66].tolist()
        ([0, 65], [124, 124])
    """
    checks.check_tensor("values", values, 2, (torch.float8_e4m3fn,))
    checks.check_tensor("scales", scales, 1, (torch.float32,))
    checks.check_tensor("slots", slots, 1, (torch.int64,))
    entries, dim = values.shape
    if dim not in _DIMS:
        raise ValueError(f"the last dimension of values must be one of {', '.join(map(str, _DIMS))}, got {dim}")
    checks.check_shape("scales", scales, (entries,))
    checks.check_shape("slots", slots, (entries,))
    check_buffer(buffer, dim)
    checks.check_device(values.device, scales=scales, slots=slots, buffer=buffer)
    for name, tensor in (("values", values), ("scales", scales), ("slots", slots)):
        checks.check_contiguous(name, tensor)
    if checks.use_reference(values):
        reference.store(values, scales, slots, buffer)
        return
    from . import triton

    triton.store(values, scales, slots, buffer)


def check_buffer(buffer: torch.Tensor, dim: int) -> None:
    """Raise ValueError unless ``buffer`` is an index cache of keys of ``dim`` values."""
    checks.check_tensor("buffer", buffer, 2, (torch.uint8,))
    checks.check_shape("buffer", buffer, (buffer.shape[0], PAGE_SIZE * (dim + 4)))
    checks.check_contiguous("buffer", buffer)
    if buffer.data_ptr() % 16:
        raise ValueError(f"buffer must begin at a multiple of 16 bytes, got the address {buffer.data_ptr()}")
