"""Triton kernels of rows of float8 latents: one that writes them, and how others read them.

FP8 is made of integers, and read from them, on GPUs that have no such type, see ``float8``.
"""

# Type checkers know neither the launch options of a kernel nor its compile-time values.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false, reportArgumentType=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..common.float8 import as_half, float8_bits
from ..common.launch import await_inputs, dependent_launch
from .reference import FP8_MAX, LEAST_SCALE, TILE, row_bytes

_INF_BITS = tl.constexpr(0x7F800000)
_NAN_BITS = tl.constexpr(0x7FC00000)
_LEAST_SCALE, _FP8_MAX = tl.constexpr(LEAST_SCALE), tl.constexpr(FP8_MAX)
_row_bytes = triton.constexpr_function(row_bytes)


@dataclass(frozen=True)
class Config:
    """Launch parameters, not measured yet: tokens of a program, and warps."""

    tokens: int = 4
    num_warps: int = 4


@triton.jit
def read_latents(rows_ptr, valid, LATENT: tl.constexpr, ROPE: tl.constexpr, TILE: tl.constexpr, NATIVE: tl.constexpr):
    """Latents ``[tokens, LATENT]`` in float32 and rotated keys ``[tokens, ROPE]`` in bfloat16.

    Args:
        rows_ptr: ``[tokens]`` pointers to the bytes of the rows.
        valid: ``[tokens]``, which rows are read; the others are zeros.
        LATENT: dimension of the latents.
        ROPE: dimension of the rotated keys.
        TILE: values that share a scale.
        NATIVE: as ``float8.converts_float8``.
    """
    tiles, dims, rope_dims = tl.arange(0, LATENT // TILE), tl.arange(0, TILE), tl.arange(0, ROPE)
    offsets = tiles[None, :, None] * TILE + dims[None, None, :]
    bits = tl.load(rows_ptr[:, None, None] + offsets, mask=valid[:, None, None], other=0)
    scales_ptr = (rows_ptr + LATENT).to(tl.pointer_type(tl.float32))
    scales = tl.load(scales_ptr[:, None] + tiles[None, :], mask=valid[:, None], other=0.0)
    if NATIVE:
        values = bits.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        values = as_half(bits).to(tl.float32)
        scales *= 256.0
    latent = tl.reshape(values * scales[:, :, None], [rows_ptr.shape[0], LATENT])
    rotated_ptr = (rows_ptr + _row_bytes(LATENT, 0)).to(tl.pointer_type(tl.bfloat16))
    rotated = tl.load(rotated_ptr[:, None] + rope_dims[None, :], mask=valid[:, None], other=0.0)
    return latent, rotated


@triton.jit
def _write_kernel(
    latent_ptr,
    rotated_ptr,
    slots_ptr,
    rows_ptr,
    entries,
    latent_stride,
    rotated_stride,
    row_stride,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    await_inputs(DEPENDENT)
    tiles, dims, rope_dims = tl.arange(0, LATENT // TILE), tl.arange(0, TILE), tl.arange(0, ROPE)
    entry = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    held = entry < entries
    slot = tl.load(slots_ptr + entry, mask=held, other=-1)
    kept = slot >= 0
    rows_ptr += slot * row_stride
    offsets = tiles[None, :, None] * TILE + dims[None, None, :]
    pointers = latent_ptr + entry[:, None, None] * latent_stride + offsets
    x = tl.load(pointers, mask=held[:, None, None], other=0.0).to(tl.float32)
    # As integers, magnitudes are in the same order, infinity and NaN above all others.
    amax = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2)
    finite = amax < _INF_BITS
    scale = tl.where(finite, amax, 0).to(tl.float32, bitcast=True) / _FP8_MAX
    inverse = tl.where(scale < _LEAST_SCALE, 0.0, 1.0 / tl.maximum(scale, _LEAST_SCALE))
    codes = tl.where(finite[:, :, None], float8_bits(x * inverse[:, :, None]), 0x7F)
    tl.store(rows_ptr[:, None, None] + offsets, codes.to(tl.uint8), mask=kept[:, None, None])
    scale_bits = tl.where(finite, scale.to(tl.int32, bitcast=True), _NAN_BITS)
    scales_ptr = (rows_ptr + LATENT).to(tl.pointer_type(tl.float32))
    tl.store(scales_ptr[:, None] + tiles[None, :], scale_bits.to(tl.float32, bitcast=True), mask=kept[:, None])
    keys = tl.load(rotated_ptr + entry[:, None] * rotated_stride + rope_dims[None, :], mask=held[:, None])
    keys_ptr = (rows_ptr + _row_bytes(LATENT, 0)).to(tl.pointer_type(tl.bfloat16))
    tl.store(keys_ptr[:, None] + rope_dims[None, :], keys, mask=kept[:, None])


def write_latents(
    latent: torch.Tensor,
    rotated: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    config: Config | None = None,
) -> None:
    """See ``latent_rows.write_latents``."""
    config = config or Config()
    entries, latent_dim = latent.shape
    if entries == 0:
        return
    # The interpreter truncates where a GPU rounds.
    rotated = rotated.bfloat16()
    dependent = dependent_launch(latent.device)
    _write_kernel[(triton.cdiv(entries, config.tokens),)](
        *(latent, rotated, slots, rows, entries),
        *(latent.stride(0), rotated.stride(0), rows.stride(0)),
        LATENT=latent_dim,
        ROPE=rotated.shape[1],
        TILE=TILE,
        TOKENS=config.tokens,
        DEPENDENT=dependent,
        num_warps=config.num_warps,
        # A product that is not rounded before something is added to it would give other bits.
        enable_fp_fusion=False,
        launch_pdl=dependent,
    )
