"""The definition of the index keys and of their cache in plain torch."""

import torch

PAGE_SIZE = 64
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
LEAST_AMAX = 1e-4


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Rows of ``x`` times the normalised Hadamard matrix in Sylvester's order, computed in float32."""
    dim = x.shape[-1]
    rows = x.float()
    for _ in range(dim.bit_length() - 1):
        # Each step adds and subtracts along the lowest bit of the position and makes it the highest; after all steps
        # the bits stand as at first.
        even, odd = rows.unflatten(-1, (-1, 2)).unbind(-1)
        rows = torch.cat([even + odd, even - odd], dim=-1)
    return (rows * dim**-0.5).to(x.dtype)


def quantize(
    x: torch.Tensor, rotate: bool, out: tuple[torch.Tensor, torch.Tensor], powers: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``index_keys.quantize``."""
    values, scales = out
    rows = (hadamard(x) if rotate else x).float()
    amax = rows.abs().amax(dim=-1).clamp(min=LEAST_AMAX)
    if powers:
        # 448 is 0.875 * 2 ** 9, and the mantissa is at least 0.5 and less than 1.
        mantissa, exponent = torch.frexp(amax)
        scale = torch.ldexp(torch.ones_like(amax), exponent - 9 + (mantissa > 0.875).int())
    else:
        # On CUDA torch multiplies by the inverse of a number, which rounds twice.
        scale = amax / torch.full_like(amax, FP8_MAX)
    infinite = ~amax.isfinite()
    scales.copy_(scale.masked_fill(infinite, float("nan")))
    scaled = rows * (1 / scale)[..., None]
    values.copy_(scaled.masked_fill(infinite[..., None], float("nan")).to(values.dtype))
    return out


def store(values: torch.Tensor, scales: torch.Tensor, slots: torch.Tensor, buffer: torch.Tensor) -> None:
    """See ``index_keys.store``."""
    keys, key_scales = parts(buffer)
    kept = slots >= 0
    page, token = slots[kept] // PAGE_SIZE, slots[kept] % PAGE_SIZE
    keys[page, token] = values[kept].view(torch.uint8)
    key_scales[page, token] = scales[kept]


def parts(buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of an index cache: the bytes of the keys ``[pages, 64, D]``, and their scales ``[pages, 64]`` float32."""
    dim = buffer.shape[1] // PAGE_SIZE - 4
    keys = buffer[:, : PAGE_SIZE * dim].unflatten(1, (PAGE_SIZE, dim))
    return keys, buffer[:, PAGE_SIZE * dim :].view(torch.float32)
