"""Rows of float8 latents: what a token of a latent (MLA) cache takes where SGLang keeps it in float8 for DSA.

Source: the layout that FlashMLA calls its FP8 KV cache, written as SGLang does (``quantize_k_cache_separate``).
A row of bytes has ``R`` values in float8_e4m3fn, a float32 scale for each 128 of them, and the rotated key in bfloat16:
656 bytes for a latent of 512 and a key of 64.
"""

import torch

from ..common import checks
from . import reference
from .reference import row_bytes as row_bytes

# Sizes that the kernels take.
LATENT_DIMS = (128, 256, 512)
ROPE_DIMS = (16, 32, 64)


def write_latents(latent: torch.Tensor, rotated: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Quantise latents, and write them and rotated keys to the rows of their slots, and nothing else.

    The scale of a tile of 128 values is ``amax / 448``, and each value is multiplied by the rounded inverse. Bytes are
    those of SGLang's kernel, whose operators the Triton kernel has (on a GPU they may round the last bit otherwise than
    the reference), but for two kinds of tiles. Where the scale is 0 or no normal number, values are 0; SGLang's kernel
    stores +-448 there, which such a scale makes as good as 0. A tile that holds NaN or infinity is NaN as a whole,
    value by value and in its scale; SGLang's kernel clamps what is not finite to +-448.

    Args:
        latent: ``[N, R]``, float32 (CPU only), float16 or bfloat16; ``R`` is 128, 256 or 512, and contiguous.
        rotated: ``[N, r]`` in the dtype of ``latent``, keys after RoPE; ``r`` is 16, 32 or 64, and contiguous.
        slots: ``[N]`` int64, contiguous. One of -1 is skipped. Slots do not repeat, but for slot 0, to which a server
            writes what pads a batch.
        rows: ``[S, bytes]`` uint8, see ``check_rows``.

    Raises:
        ValueError: a wrong dimension, dtype, device, stride or address.

    Example:
        >>> import torch
        >>> from sglang_sparse_kernels.latent_rows import row_bytes, write_latents
        >>> rows = torch.zeros(2, row_bytes(128, 16), dtype=torch.uint8)
        >>> write_latents(torch.full((1, 128), 3.0), torch.ones(1, 16), torch.tensor([1]), rows)
        >>> rows.count_nonzero(dim=1).tolist(), rows[1, :2].tolist(), rows[1, -2:].tolist()
        ([0, 164], [126, 126], [128, 63])
    """
    checks.check_query("latent", latent, 2)
    checks.check_tensor("rotated", rotated, 2, (latent.dtype,))
    checks.check_tensor("slots", slots, 1, (torch.int64,))
    entries, latent_dim = latent.shape
    checks.check_shape("rotated", rotated, (entries, rotated.shape[1]))
    checks.check_shape("slots", slots, (entries,))
    checks.check_last(latent=latent, rotated=rotated)
    checks.check_contiguous("slots", slots)
    check_rows("rows", rows, latent_dim, rotated.shape[1])
    checks.check_device(latent.device, rotated=rotated, slots=slots, rows=rows)
    if checks.use_reference(latent):
        reference.write_latents(latent, rotated, slots, rows)
        return
    from . import triton

    triton.write_latents(latent, rotated, slots, rows)


def check_rows(name: str, rows: torch.Tensor, latent_dim: int, rope_dim: int) -> None:
    """Raise ValueError unless ``rows`` are ``[S, row_bytes]`` uint8, each contiguous and at a multiple of 4 bytes, of
    a latent and a rotated key of sizes in ``LATENT_DIMS`` and ``ROPE_DIMS``.
    """
    checks.check_tensor(name, rows, 2, (torch.uint8,))
    for part, dim, dims in (("latent", latent_dim, LATENT_DIMS), ("rotated key", rope_dim, ROPE_DIMS)):
        if dim not in dims:
            raise ValueError(
                f"{name}: the {part} of float8 rows must have a dimension of {', '.join(map(str, dims))}, got {dim}"
            )
    checks.check_shape(name, rows, (rows.shape[0], row_bytes(latent_dim, rope_dim)))
    checks.check_last(**{name: rows})
    if rows.data_ptr() % 4 or rows.stride(0) % 4:
        raise ValueError(
            f"{name} must have its rows at multiples of 4 bytes, got the address {rows.data_ptr()} and rows of "
            f"{rows.stride(0)} bytes"
        )
