"""Triton kernels of the index keys: rows are rotated and quantised, or stored, a few to a program.

FP8 is made of integers: GPUs before compute capability 8.9 have no such type.
"""

# Type checkers know neither the launch options of a kernel nor its compile-time values.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..common.float8 import float8_bits
from ..common.launch import await_inputs, dependent_launch
from .reference import LEAST_AMAX, PAGE_SIZE

_INF_BITS = tl.constexpr(0x7F800000)
_NAN_BITS = tl.constexpr(0x7FC00000)
_LEAST_AMAX_BITS = tl.constexpr(torch.tensor(LEAST_AMAX).view(torch.int32).item())
# Mantissa of 448, and its exponent.
_MAX_MANTISSA = tl.constexpr(0x600000)
_MAX_EXPONENT = tl.constexpr(8)


@dataclass(frozen=True)
class Config:
    """Launch parameters of both kernels, not measured yet: elements of a program, and warps."""

    elements: int = 4096
    num_warps: int = 4


@triton.jit
def _hadamard(rows, ROWS: tl.constexpr, DIM: tl.constexpr, STEPS: tl.constexpr, FACTOR: tl.constexpr):
    """In the order of ``reference.hadamard``, without its last rounding."""
    for _ in tl.static_range(STEPS):
        even, odd = tl.split(tl.reshape(rows, [ROWS, DIM // 2, 2]))
        rows = tl.reshape(tl.permute(tl.join(even + odd, even - odd), [0, 2, 1]), [ROWS, DIM])
    return rows * FACTOR


@triton.jit
def _rounded(x, BFLOAT16: tl.constexpr, FLOAT16: tl.constexpr):
    """Float32 rounded to the nearest of a narrower dtype, ties to even."""
    if BFLOAT16:
        # The interpreter truncates where a GPU rounds.
        bits = x.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = tl.where((bits & 0x7FFFFFFF) < _INF_BITS, nearest, bits).to(tl.float32, bitcast=True)
    elif FLOAT16:
        x = x.to(tl.float16).to(tl.float32)
    return x


@triton.jit
def _quantize_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    entries,
    x_stride,
    ROTATE: tl.constexpr,
    POWERS: tl.constexpr,
    STEPS: tl.constexpr,
    FACTOR: tl.constexpr,
    BFLOAT16: tl.constexpr,
    FLOAT16: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    await_inputs(DEPENDENT)
    entry = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    held = entry < entries
    rows = tl.load(x_ptr + entry[:, None] * x_stride + dims[None, :], mask=held[:, None], other=0.0).to(tl.float32)
    if ROTATE:
        rows = _rounded(_hadamard(rows, ROWS, DIM, STEPS, FACTOR), BFLOAT16, FLOAT16)
    # As integers, magnitudes are in the same order, infinity and NaN above all others.
    amax = tl.max(rows.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    finite = amax < _INF_BITS
    amax = tl.where(finite, tl.maximum(amax, _LEAST_AMAX_BITS), _LEAST_AMAX_BITS)
    if POWERS:
        exponent = (amax >> 23) - _MAX_EXPONENT + ((amax & 0x7FFFFF) > _MAX_MANTISSA).to(tl.int32)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        inverse = ((2 * 127 - exponent) << 23).to(tl.float32, bitcast=True)
    else:
        # Rounded as IEEE 754 says; the operator is not.
        scale = tl.div_rn(amax.to(tl.float32, bitcast=True), tl.full([ROWS], 448.0, tl.float32))
        inverse = tl.div_rn(tl.full([ROWS], 1.0, tl.float32), scale)
    codes = tl.where(finite[:, None], float8_bits(rows * inverse[:, None]), 0x7F)
    tl.store(values_ptr + entry[:, None] * DIM + dims[None, :], codes.to(tl.uint8), mask=held[:, None])
    scale_bits = tl.where(finite, scale.to(tl.int32, bitcast=True), _NAN_BITS)
    tl.store(scales_ptr + entry, scale_bits.to(tl.float32, bitcast=True), mask=held)


@triton.jit
def _store_kernel(
    values_ptr,
    scales_ptr,
    slots_ptr,
    buffer_ptr,
    buffer_scales_ptr,
    entries,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    await_inputs(DEPENDENT)
    entry = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    slots = tl.load(slots_ptr + entry, mask=entry < entries, other=-1)
    kept = slots >= 0
    page, token = slots // PAGE, slots % PAGE
    values = tl.load(values_ptr + entry[:, None] * DIM + dims[None, :], mask=kept[:, None])
    scales = tl.load(scales_ptr + entry, mask=kept)
    target = page * (PAGE * (DIM + 4)) + token * DIM
    tl.store(buffer_ptr + target[:, None] + dims[None, :], values, mask=kept[:, None])
    tl.store(buffer_scales_ptr + page * (PAGE * (DIM // 4 + 1)) + PAGE * DIM // 4 + token, scales, mask=kept)


def quantize(
    x: torch.Tensor,
    rotate: bool,
    out: tuple[torch.Tensor, torch.Tensor],
    powers: bool = True,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``index_keys.quantize``."""
    config = config or Config()
    values, scales = out
    dim = x.shape[-1]
    rows = x.reshape(-1, dim)
    if len(rows) == 0:
        return out
    per_program = config.elements // dim
    dependent = dependent_launch(x.device)
    _quantize_kernel[(triton.cdiv(len(rows), per_program),)](
        *(rows, values.view(torch.uint8), scales, len(rows), rows.stride(0)),
        ROTATE=rotate,
        POWERS=powers,
        STEPS=dim.bit_length() - 1,
        FACTOR=dim**-0.5,
        BFLOAT16=x.dtype == torch.bfloat16,
        FLOAT16=x.dtype == torch.float16,
        DIM=dim,
        ROWS=per_program,
        DEPENDENT=dependent,
        num_warps=config.num_warps,
        # A product that is not rounded before something is added to it would give other bits.
        enable_fp_fusion=False,
        launch_pdl=dependent,
    )
    return out


def store(
    values: torch.Tensor, scales: torch.Tensor, slots: torch.Tensor, buffer: torch.Tensor, config: Config | None = None
) -> None:
    """See ``index_keys.store``."""
    config = config or Config()
    entries, dim = values.shape
    if entries == 0:
        return
    per_program = config.elements // dim
    dependent = dependent_launch(values.device)
    _store_kernel[(triton.cdiv(entries, per_program),)](
        *(values.view(torch.uint8), scales, slots, buffer, buffer.view(torch.float32), entries),
        DIM=dim,
        PAGE=PAGE_SIZE,
        ROWS=per_program,
        DEPENDENT=dependent,
        num_warps=config.num_warps,
        launch_pdl=dependent,
    )
