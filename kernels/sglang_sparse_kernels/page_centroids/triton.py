"""Triton kernel of the page centroids: one program per touched page, layer and KV head, its keys in registers."""

# Type checkers know neither the launch options of a kernel nor its compile-time values.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..common.float8 import as_half, float8_bits
from ..common.launch import await_inputs
from ..page_summary.triton import launch
from . import HEADER, SCALE, count_of
from .reference import LARGEST_LEVEL, ZERO_LEVEL

_HEADER, _LEVELS, _ZERO = tl.constexpr(HEADER), tl.constexpr(LARGEST_LEVEL), tl.constexpr(ZERO_LEVEL)
_SCALE = tl.constexpr(SCALE)


@triton.jit
def _squared_distance(keys, point):
    apart = keys - point[None, :]
    return tl.sum(apart * apart, axis=1)


@triton.jit
def _centroid(keys, owner, counts, rank, seeds, mean, seed):
    """The mean of a seed's keys, and its place among the centroids."""
    size = tl.sum(tl.where(seeds == seed, counts, 0), axis=0)
    total = tl.sum(tl.where((owner == seed)[:, None], keys, 0.0), axis=0)
    place = tl.sum(tl.where(seeds == seed, rank, 0), axis=0)
    return tl.where(size > 0, total / tl.maximum(size, 1), mean), place


@triton.jit
def _store_difference(out_ptr, number, difference, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Store a centroid's difference from the first one in steps."""
    # Float16 without its lower byte, rounded up.
    half = tl.div_rn(tl.max(tl.abs(difference), axis=0), _LEVELS * 1.0).to(tl.float16).to(tl.int16, bitcast=True)
    upper = (half.to(tl.int32) + 0xFF) & 0xFF00
    tl.store(out_ptr + number, (upper >> 8).to(tl.uint8))
    step = upper.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    level = tl.div_rn(difference, tl.full([BLOCK_DIM], 1.0, tl.float32) * tl.maximum(step, 1e-30))
    level = tl.minimum(tl.maximum(tl.floor(level + 0.5), -_LEVELS), _LEVELS).to(tl.int32) + _ZERO
    low, high = tl.split(tl.reshape(level, [BLOCK_DIM // 2, 2]))
    pairs = tl.arange(0, BLOCK_DIM // 2)
    out = out_ptr + _HEADER + DIM + number * (DIM // 2) + pairs
    tl.store(out, (low | (high << 4)).to(tl.uint8), mask=pairs < DIM // 2)


@triton.jit
def _page_centroids_kernel(
    k_ptr,
    records_ptr,
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
    COUNT: tl.constexpr,
    BLOCK_COUNT: tl.constexpr,
    RECORD: tl.constexpr,
    COUNT_OVERFLOW: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    await_inputs(DEPENDENT)
    last_slot = tl.load(last_slots_ptr + tl.program_id(0))
    if last_slot >= 0:
        if LAYERS > 1:
            layer = tl.program_id(2)
            k_ptr += tl.multiple_of(tl.load(offsets_ptr + layer), 16)
            records_ptr += tl.multiple_of(tl.load(offsets_ptr + LAYERS + layer), 16)
        page = last_slot // PAGE
        places = tl.arange(0, PAGE)
        slots = page * PAGE + places
        # Elements whose levels share a byte stand side by side.
        numbers = tl.arange(0, BLOCK_DIM)
        dims = numbers % 2 * (DIM // 2) + numbers // 2
        in_dim = numbers < DIM
        written = slots <= last_slot
        seeds = tl.arange(0, BLOCK_COUNT)
        for head in range(tl.program_id(1), HEADS, tl.num_programs(1)):
            pointers = k_ptr + slots[:, None] * k_stride_slot + head * k_stride_head + dims[None, :]
            keys = tl.load(pointers, mask=written[:, None] & in_dim[None, :], other=0.0).to(tl.float32)
            mean = tl.sum(keys, axis=0) / tl.sum(written.to(tl.float32), axis=0)
            distance = tl.where(written, _squared_distance(keys, mean), -1.0)
            nearest = tl.full([PAGE], float("inf"), tl.float32)
            owner = tl.zeros([PAGE], tl.int32)
            for seed in tl.static_range(COUNT):
                farthest = tl.argmax(distance, axis=0)
                key = tl.sum(tl.where((places == farthest)[:, None], keys, 0.0), axis=0)
                to_seed = _squared_distance(keys, key)
                owner = tl.where(to_seed < nearest, seed, owner)
                nearest = tl.minimum(nearest, to_seed)
                distance = tl.where(written, nearest, -1.0)
            owner = tl.where(written, owner, BLOCK_COUNT)
            counts = tl.sum((owner[:, None] == seeds[None, :]).to(tl.int32), axis=0)
            # ``page_vote`` weights centroids by their order.
            more = counts[:, None] > counts[None, :]
            earlier = (counts[:, None] == counts[None, :]) & (seeds[:, None] < seeds[None, :])
            rank = tl.sum(((more | earlier) & (seeds < COUNT)[:, None]).to(tl.int32), axis=0)
            out_ptr = records_ptr + (page * HEADS + head) * RECORD
            # The first centroid is known before the others, which are kept as differences from it.
            first = tl.zeros([BLOCK_DIM], tl.float32)
            largest = tl.max(first, axis=0)
            for seed in tl.static_range(COUNT):
                centroid, place = _centroid(keys, owner, counts, rank, seeds, mean, seed)
                first = tl.where(place == 0, centroid, first)
                largest = tl.maximum(largest, tl.max(tl.abs(centroid), axis=0))
            # As the reference finds the exponent.
            exponent = tl.maximum(((largest.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8, 1)
            scale = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
            bits = float8_bits(first * scale)
            tl.store(out_ptr + _SCALE, exponent.to(tl.uint8))
            tl.store(out_ptr + _HEADER + dims, bits.to(tl.uint8), mask=in_dim)
            base = as_half(bits).to(tl.float32) * 256.0
            for seed in tl.static_range(COUNT):
                centroid, place = _centroid(keys, owner, counts, rank, seeds, mean, seed)
                if place > 0:
                    difference = tl.where(in_dim, centroid * scale - base, 0.0)
                    _store_difference(out_ptr, place - 1, difference, DIM, BLOCK_DIM)


def update_page_centroids(
    k_caches: Sequence[torch.Tensor],
    records: Sequence[torch.Tensor],
    last_slots: torch.Tensor,
    page_size: int,
    overflow: torch.Tensor | None = None,
) -> None:
    """See ``page_centroids.update_page_centroids``."""
    num_bytes = records[0].shape[2]
    count = count_of(num_bytes, k_caches[0].shape[2])
    constants = {"COUNT": count, "BLOCK_COUNT": triton.next_power_of_2(count), "RECORD": num_bytes}
    # With a counter, which the kernel has no use for, it would be compiled a second time.
    launch(_page_centroids_kernel, k_caches, records, last_slots, page_size, None, True, **constants)
