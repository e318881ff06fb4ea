"""float8_e4m3fn in Triton kernels, on GPUs that know it and on those that do not."""

# Type checkers know neither the launch options of a kernel nor its compile-time values.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from .launch import capability


def converts_float8(device: torch.device) -> bool:
    """Whether ``device`` has instructions for float8 (Ada and later); the interpreter takes its NaN for a number."""
    return torch.version.cuda is not None and capability(device) >= (8, 9)


@triton.jit
def as_half(bits):
    """Numbers by the lowest eight bits of integers, as float16 of 2^-8 of their size."""
    magnitude = (bits & 0x7F).to(tl.int16)
    # Float8 has one NaN and no infinity.
    magnitude = tl.where(magnitude == 0x7F, 0x7E00, magnitude << 7).to(tl.int16)
    return (magnitude | ((bits & 0x80).to(tl.int16) << 8)).to(tl.float16, bitcast=True)


@triton.jit
def four_numbers(words, NATIVE: tl.constexpr):
    """The four numbers of each 32-bit word in float32, the lowest byte's first; ``NATIVE`` as ``converts_float8``."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high, a, b, c, d;
            .reg .b32 first, second;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 first, low;
            cvt.rn.f16x2.e4m3x2 second, high;
            mov.b32 {a, b}, first;
            mov.b32 {c, d}, second;
            cvt.f32.f16 $0, a;
            cvt.f32.f16 $1, b;
            cvt.f32.f16 $2, c;
            cvt.f32.f16 $3, d;
            }""",
            "=f,=f,=f,=f,r",
            [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        return _number(words), _number(words >> 8), _number(words >> 16), _number(words >> 24)


@triton.jit
def _number(bits):
    return as_half(bits).to(tl.float32) * 256.0


@triton.jit
def float8_bits(x):
    """The nearest float8_e4m3fn of finite float32 that round to no more than +-448, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Normal numbers keep 3 of 23 mantissa bits; the exponent bias goes from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Subnormal numbers, below 2^-6, are multiples of 2^-9, which is what 2^14 leaves of a number when added.
    subnormal = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) & 0xFFFFF
    return tl.where(magnitude < 0x3C800000, subnormal, normal) | ((bits >> 24) & 0x80)
