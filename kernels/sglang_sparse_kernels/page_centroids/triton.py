"""Triton kernel of the page centroids: one program per touched page, layer and KV head, its keys in registers."""

# Type checkers know neither the launch options of a kernel nor its compile-time values.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..float8 import float8_bits
from ..launch import await_inputs
from ..page_summary.triton import launch

_LARGEST = tl.constexpr(torch.finfo(torch.float8_e4m3fn).max)


@triton.jit
def _squared_distance(keys, point):
    apart = keys - point[None, :]
    return tl.sum(apart * apart, axis=1)


@triton.jit
def _page_centroids_kernel(
    k_ptr,
    centroids_ptr,
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
    FLOAT8: tl.constexpr,
    COUNT_OVERFLOW: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    await_inputs(DEPENDENT)
    last_slot = tl.load(last_slots_ptr + tl.program_id(0))
    if last_slot >= 0:
        if LAYERS > 1:
            layer = tl.program_id(2)
            k_ptr += tl.multiple_of(tl.load(offsets_ptr + layer), 16)
            centroids_ptr += tl.multiple_of(tl.load(offsets_ptr + LAYERS + layer), 16)
        page = last_slot // PAGE
        places = tl.arange(0, PAGE)
        slots = page * PAGE + places
        dims = tl.arange(0, BLOCK_DIM)
        in_dim = dims < DIM
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
            out_ptr = centroids_ptr + (page * HEADS + head) * (COUNT * DIM) + dims
            for seed in tl.static_range(COUNT):
                size = tl.sum(tl.where(seeds == seed, counts, 0), axis=0)
                total = tl.sum(tl.where((owner == seed)[:, None], keys, 0.0), axis=0)
                centroid = tl.where(size > 0, total / tl.maximum(size, 1), mean)
                out = out_ptr + tl.sum(tl.where(seeds == seed, rank, 0), axis=0) * DIM
                if FLOAT8:
                    outside = tl.abs(centroid) > _LARGEST
                    tl.store(out, tl.where(outside, 0x7F, float8_bits(centroid)).to(tl.uint8), mask=in_dim)
                    if COUNT_OVERFLOW:
                        found = tl.sum((outside & in_dim).to(tl.int32), axis=0)
                        if found > 0:
                            tl.atomic_add(overflow_ptr, found, sem="relaxed")
                else:
                    tl.store(out, centroid.to(tl.bfloat16), mask=in_dim)


def update_page_centroids(
    k_caches: Sequence[torch.Tensor],
    centroids: Sequence[torch.Tensor],
    last_slots: torch.Tensor,
    page_size: int,
    overflow: torch.Tensor | None = None,
) -> None:
    """See ``page_centroids.update_page_centroids``."""
    count, float8 = centroids[0].shape[2], centroids[0].dtype == torch.float8_e4m3fn
    constants = {"COUNT": count, "BLOCK_COUNT": triton.next_power_of_2(count), "FLOAT8": float8}
    launch(_page_centroids_kernel, k_caches, centroids, last_slots, page_size, overflow, float8, **constants)
