"""Triton kernel of the page summary: one program per touched page, layer and KV head."""

# Type checkers know neither the launch options of a kernel nor its compile-time values.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ..common.launch import await_inputs, dependent_launch

# Above this many entries (an extend batch, where most entries are -1) a program takes all heads of its entry.
_MANY_ENTRIES = 1024

_EXACT, _BFLOAT16, _E4M3, _E5M2 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_E4M3_MAX = tl.constexpr(torch.finfo(torch.float8_e4m3fn).max)
_E5M2_MAX = tl.constexpr(torch.finfo(torch.float8_e5m2).max)


@triton.jit
def _directed_bfloat16(x, away):
    """Round float32 to bfloat16: away from zero where ``away``, else towards zero."""
    bits = x.to(tl.int32, bitcast=True)
    grow = away & ((bits & 0xFFFF) != 0)
    # The bits are sign and magnitude: adding one to the kept half grows the magnitude of either sign.
    return ((bits >> 16) + grow.to(tl.int32)).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _directed_float8(x, away, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """Round float32 to the bits of float8: away from zero where ``away``, else towards zero; NaN outside +-LARGEST."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.abs(x)
    # Normal numbers keep MANTISSA of 23 mantissa bits; the exponent bias goes from 127 to BIAS.
    DROPPED: tl.constexpr = 23 - MANTISSA
    inexact = (bits & ((1 << DROPPED) - 1)) != 0
    normal = ((bits & 0x7FFFFFFF) >> DROPPED) - ((127 - BIAS) << MANTISSA) + (away & inexact).to(tl.int32)
    # Subnormal numbers, below 2^(1 - BIAS), are multiples of 2^(1 - BIAS - MANTISSA).
    steps = magnitude * 2.0 ** (BIAS - 1 + MANTISSA)
    whole = steps.to(tl.int32)
    subnormal = whole + (away & (whole.to(tl.float32) != steps)).to(tl.int32)
    code = tl.where(magnitude < 2.0 ** (1 - BIAS), subnormal, normal)
    # NaN in either format; the infinities of e5m2 are not used.
    code = tl.where(magnitude > LARGEST, 0x7F, code) | ((bits >> 24) & 0x80)
    return code.to(tl.uint8)


@triton.jit
def _store_bound(pointers, bound, away, mask, ROUNDING: tl.constexpr):
    if ROUNDING == _E5M2:
        tl.store(pointers, _directed_float8(bound, away, MANTISSA=2, BIAS=15, LARGEST=_E5M2_MAX), mask=mask)
    elif ROUNDING == _E4M3:
        tl.store(pointers, _directed_float8(bound, away, MANTISSA=3, BIAS=7, LARGEST=_E4M3_MAX), mask=mask)
    elif ROUNDING == _BFLOAT16:
        tl.store(pointers, _directed_bfloat16(bound, away), mask=mask)
    else:
        tl.store(pointers, bound.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def _page_summary_kernel(
    k_ptr,
    summary_ptr,
    offsets_ptr,
    last_slots_ptr,
    overflow_ptr,
    k_stride_slot,
    k_stride_head,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    ROUNDING: tl.constexpr,
    COUNT_OVERFLOW: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    await_inputs(DEPENDENT)
    last_slot = tl.load(last_slots_ptr + tl.program_id(0))
    if last_slot >= 0:
        if LAYERS > 1:
            layer = tl.program_id(2)
            k_ptr += tl.multiple_of(tl.load(offsets_ptr + layer), 16)
            summary_ptr += tl.multiple_of(tl.load(offsets_ptr + LAYERS + layer), 16)
        page = last_slot // PAGE
        slots = page * PAGE + tl.arange(0, PAGE)
        dims = tl.arange(0, BLOCK_DIM)
        in_dim = dims < DIM
        written = (slots <= last_slot)[:, None] & in_dim[None, :]
        for head in range(tl.program_id(1), HEADS, tl.num_programs(1)):
            pointers = k_ptr + slots[:, None] * k_stride_slot + head * k_stride_head + dims[None, :]
            keys = tl.load(pointers, mask=written, other=0.0).to(tl.float32)
            k_max = tl.max(tl.where(written, keys, float("-inf")), axis=0)
            k_min = tl.min(tl.where(written, keys, float("inf")), axis=0)
            out = summary_ptr + (page * HEADS + head) * (2 * DIM) + dims
            _store_bound(out, k_max, k_max > 0, in_dim, ROUNDING)
            _store_bound(out + DIM, k_min, k_min < 0, in_dim, ROUNDING)
            if COUNT_OVERFLOW:
                LARGEST: tl.constexpr = _E5M2_MAX if ROUNDING == _E5M2 else _E4M3_MAX
                outside = (tl.abs(k_max) > LARGEST).to(tl.int32) + (tl.abs(k_min) > LARGEST).to(tl.int32)
                count = tl.sum(tl.where(in_dim, outside, 0), axis=0)
                if count > 0:
                    tl.atomic_add(overflow_ptr, count, sem="relaxed")


def update_page_summaries(
    k_caches: Sequence[torch.Tensor],
    summaries: Sequence[torch.Tensor],
    last_slots: torch.Tensor,
    page_size: int,
    overflow: torch.Tensor | None = None,
) -> None:
    """See ``page_summary.update_page_summaries``."""
    rounding = _rounding(k_caches[0].dtype, summaries[0].dtype)
    of_bytes = rounding in (_E4M3.value, _E5M2.value)
    launch(_page_summary_kernel, k_caches, summaries, last_slots, page_size, overflow, of_bytes, ROUNDING=rounding)


def launch(
    kernel: Any,
    k_caches: Sequence[torch.Tensor],
    summaries: Sequence[torch.Tensor],
    last_slots: torch.Tensor,
    page_size: int,
    overflow: torch.Tensor | None,
    of_bytes: bool,
    **constants: Any,
) -> None:
    """Run a kernel for every touched page, layer and KV head.

    Args:
        kernel: takes the arguments of ``_page_summary_kernel``, and ``constants`` in place of ``ROUNDING``.
        k_caches: see ``page_summary.update_page_summaries``, and so for what is not said here.
        summaries: likewise.
        last_slots: likewise.
        page_size: likewise.
        overflow: likewise.
        of_bytes: whether it stores float8, as integers: compilers for some GPUs do not know e4m3.
        constants: compile-time values of its own.
    """
    entries = last_slots.shape[0]
    if entries == 0:
        return
    k_cache, summary = k_caches[0], summaries[0]
    layers = len(k_caches)
    _, heads, dim = k_cache.shape
    block_dim = triton.next_power_of_2(dim)
    dependent = dependent_launch(k_cache.device)
    kernel[(entries, heads if entries <= _MANY_ENTRIES else 1, layers)](
        k_cache,
        summary.view(torch.uint8) if of_bytes else summary,
        _offsets(k_caches, summaries) if layers > 1 else last_slots,
        last_slots,
        overflow if overflow is not None else last_slots,
        k_cache.stride(0),
        k_cache.stride(1),
        LAYERS=layers,
        HEADS=heads,
        DIM=dim,
        BLOCK_DIM=block_dim,
        PAGE=page_size,
        COUNT_OVERFLOW=overflow is not None and of_bytes,
        DEPENDENT=dependent,
        num_warps=4 if page_size * block_dim <= 8192 else 8,
        launch_pdl=dependent,
        **constants,
    )


def _offsets(k_caches: Sequence[torch.Tensor], summaries: Sequence[torch.Tensor]) -> torch.Tensor:
    """``[2, layers]`` int64: how many elements after the first layer's tensor each layer's begins."""
    addresses = tuple(x.data_ptr() // x.element_size() for tensors in (k_caches, summaries) for x in tensors)
    return _offsets_of(addresses, k_caches[0].device)


# Kept for good: the passes that warm up a CUDA graph make the table that its replays read.
@functools.cache
def _offsets_of(addresses: tuple[int, ...], device: torch.device) -> torch.Tensor:
    layers = len(addresses) // 2
    firsts = [addresses[0]] * layers + [addresses[layers]] * layers
    offsets = [address - first for address, first in zip(addresses, firsts, strict=True)]
    # The kernel loads rows of 16 elements at once.
    if any(offset % 16 for offset in offsets):
        raise ValueError("k_caches and summaries must begin at multiples of 16 elements from one another")
    return torch.tensor(offsets, dtype=torch.int64, device=device)


def _rounding(kv_dtype: torch.dtype, summary_dtype: torch.dtype) -> int:
    """Return the rounding of a summary; a wider or equal dtype takes every key as it is."""
    if summary_dtype == torch.float8_e5m2:
        return _E5M2.value
    if kv_dtype in (summary_dtype, torch.float8_e4m3fn):
        return _EXACT.value
    return _BFLOAT16.value if summary_dtype == torch.bfloat16 else _E4M3.value
