"""Triton kernel of the page selection: one program per row and KV head.

The n-th highest score is found by narrowing a range of its order-preserving integer key: each round counts the keys
at or above two thresholds and keeps the third of the range that holds the n-th. A round ends the search as soon as a
threshold has exactly n keys above it, which for real scores takes far fewer rounds than the key has bits; equal
scores narrow the range to a single key. A cumulative sum then places the selected pages in logical order.
"""

# Type checkers know neither the launch options of a kernel nor its compile-time values.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..common.launch import await_inputs, dependent_launch

_INF_KEY = tl.constexpr(0x7F800000)
_LOWEST_KEY = tl.constexpr(-0x80000000)


@dataclass(frozen=True)
class Config:
    """Launch parameters: most scores held in registers at once (at most 16384), and scores per thread."""

    max_block: int = 8192
    per_thread: int = 8


@triton.jit
def block_positions(BLOCK: tl.constexpr, WARPS: tl.constexpr):
    """The positions ``0 .. BLOCK``, ordered so that each warp holds a consecutive range of them.

    The compiler gives element ``(row * WARPS + warp) * 32 + lane`` to that warp and lane. Loads stay coalesced, and a
    running count along the positions (not along the elements) crosses warps only once.
    """
    element = tl.arange(0, BLOCK)
    warp = element // 32 % WARPS
    row = element // (32 * WARPS)
    return (warp * (BLOCK // (32 * WARPS)) + row) * 32 + element % 32


@triton.jit
def _running_count(packed, BLOCK: tl.constexpr, WARPS: tl.constexpr):
    """Inclusive running count along ``block_positions``."""
    packed = tl.reshape(packed, [BLOCK // (32 * WARPS), WARPS, 32])
    # Broadcast over the lanes, so that the running count over the rows stays within each thread's registers.
    row_counts = tl.broadcast_to(tl.sum(packed, axis=2, keep_dims=True), packed.shape)
    warp_counts = tl.sum(tl.sum(packed, axis=2), axis=0)
    warps_before = tl.cumsum(warp_counts, axis=0) - warp_counts
    running = tl.cumsum(packed, axis=2) + tl.cumsum(row_counts, axis=0) - row_counts + warps_before[None, :, None]
    return tl.reshape(running, [BLOCK])


@triton.jit
def _load_keys(scores_ptr, logical, n_pages):
    """Scores as int32 keys of the same order; positions beyond the row get the lowest key of all."""
    held = logical < n_pages
    scores = tl.load(scores_ptr + logical, mask=held, other=0.0)
    scores = tl.where(scores != scores, float("inf"), scores)  # noqa: PLR0124
    scores = tl.where(scores == 0.0, 0.0, scores)
    bits = scores.to(tl.int32, bitcast=True)
    return tl.where(held, bits ^ ((bits >> 31) & 0x7FFFFFFF), _LOWEST_KEY)


@triton.jit
def _range_of(low_a, high_a, infinite_a, low_b, high_b, infinite_b):
    return tl.minimum(low_a, low_b), tl.maximum(high_a, high_b), infinite_a + infinite_b


@triton.jit
def _key_range(keys, held):
    """Lowest key of the held, highest key below +inf, and the number of keys at +inf."""
    infinite = keys >= _INF_KEY
    finite = tl.where(infinite, _LOWEST_KEY, keys)
    return tl.reduce((tl.where(held, keys, _INF_KEY), finite, infinite.to(tl.int32)), 0, _range_of)


@triton.jit
def _count_two(keys, low_threshold, high_threshold):
    """Keys at or above each of two thresholds, counted in the two halves of one integer."""
    return tl.sum((keys >= low_threshold).to(tl.int32) + ((keys >= high_threshold).to(tl.int32) << 16), axis=0)


@triton.jit
def _search(keys, positions, scores_ptr, n_pages, wanted, BLOCK: tl.constexpr, CHUNKED: tl.constexpr):
    """Range ``[low, high)`` of keys and the number of keys at or above ``high``.

    Fewer than ``wanted`` keys are at or above ``high``. Either exactly ``wanted`` are at or above ``low``, or the range
    is the single key of the n-th highest score.
    """
    lowest, highest, infinite = _key_range(keys, positions < n_pages)
    if CHUNKED:
        for start in range(BLOCK, n_pages, BLOCK):
            more = _load_keys(scores_ptr, start + positions, n_pages)
            chunk = _key_range(more, start + positions < n_pages)
            lowest, highest, infinite = _range_of(lowest, highest, infinite, chunk[0], chunk[1], chunk[2])
    all_infinite = infinite >= wanted
    low = tl.where(all_infinite, _INF_KEY, lowest)
    high = tl.where(all_infinite, _INF_KEY, highest) + 1
    above_high = tl.where(all_infinite, 0, infinite)
    above_low = n_pages
    # The difference of two signed keys fits 32 bits without a sign only.
    size = (high - low).to(tl.uint32, bitcast=True)
    while (size > 1) & (above_low != wanted):
        third = ((size + 2) // 3).to(tl.int32, bitcast=True)
        low_threshold = low + third
        high_threshold = low_threshold + third
        packed = _count_two(keys, low_threshold, high_threshold)
        above_low_threshold = packed & 0xFFFF
        above_high_threshold = packed >> 16
        if CHUNKED:
            for start in range(BLOCK, n_pages, BLOCK):
                packed = _count_two(_load_keys(scores_ptr, start + positions, n_pages), low_threshold, high_threshold)
                above_low_threshold += packed & 0xFFFF
                above_high_threshold += packed >> 16
        in_upper = above_high_threshold >= wanted
        in_lower = above_low_threshold < wanted
        high = tl.where(in_lower, low_threshold, tl.where(in_upper, high, high_threshold))
        above_high = tl.where(in_lower, above_low_threshold, tl.where(in_upper, above_high, above_high_threshold))
        low = tl.where(in_upper, high_threshold, tl.where(in_lower, low, low_threshold))
        above_low = tl.where(in_upper, above_high_threshold, tl.where(in_lower, above_low, above_low_threshold))
        size = (high - low).to(tl.uint32, bitcast=True)
    return low, high, above_high


@triton.jit
def _place(
    keys,
    pages,
    indices_ptr,
    low,
    high,
    ties_wanted,
    sure_before,
    ties_before,
    BLOCK: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Store the selected pages of one chunk; return its packed counts of sure pages and ties."""
    sure = keys >= high
    tie = (keys >= low) & (keys < high)
    packed = sure.to(tl.int32) + (tie.to(tl.int32) << 16)
    running = _running_count(packed, BLOCK, WARPS)
    ties_so_far = ties_before + (running >> 16)
    position = sure_before + (running & 0xFFFF) + tl.minimum(ties_so_far, ties_wanted) - 1
    tl.store(indices_ptr + position, pages, mask=sure | (tie & (ties_so_far <= ties_wanted)))
    return packed


@triton.jit
def _select(
    scores_ptr,
    table_ptr,
    indices_ptr,
    n_pages,
    wanted,
    BLOCK: tl.constexpr,
    WARPS: tl.constexpr,
    CHUNKED: tl.constexpr,
):
    """Store the ``wanted`` highest pages of a row of at most ``BLOCK`` pages, or of any number if ``CHUNKED``."""
    positions = block_positions(BLOCK, WARPS)
    keys = _load_keys(scores_ptr, positions, n_pages)
    pages = tl.load(table_ptr + positions, mask=positions < n_pages, other=-1)
    low, high, above_high = _search(keys, positions, scores_ptr, n_pages, wanted, BLOCK, CHUNKED)
    ties_wanted = wanted - above_high
    packed = _place(keys, pages, indices_ptr, low, high, ties_wanted, 0, 0, BLOCK, WARPS)
    if CHUNKED:
        total = tl.sum(packed, axis=0)
        sure_before = total & 0xFFFF
        ties_before = total >> 16
        for start in range(BLOCK, n_pages, BLOCK):
            keys = _load_keys(scores_ptr, start + positions, n_pages)
            pages = tl.load(table_ptr + start + positions, mask=start + positions < n_pages, other=-1)
            packed = _place(keys, pages, indices_ptr, low, high, ties_wanted, sure_before, ties_before, BLOCK, WARPS)
            total = tl.sum(packed, axis=0)
            sure_before += total & 0xFFFF
            ties_before += total >> 16


@triton.jit
def count_row(stats_ptr, head, wanted, n_pages, HEADS: tl.constexpr):
    """Counters of all heads of a row, by the program of its first head."""
    if (head == 0) & (wanted > 0):
        tl.atomic_add(stats_ptr, HEADS, sem="relaxed")
        tl.atomic_add(stats_ptr + 1, wanted.to(tl.int64) * HEADS, sem="relaxed")
        tl.atomic_add(stats_ptr + 2, n_pages.to(tl.int64) * HEADS, sem="relaxed")


# Without the divisibility of the strides the compiler keeps one layout for loads, scan and stores: with it the loads
# get a wider one, and converting between the two costs more than it saves.
@triton.jit(do_not_specialize=["table_stride", "width", "max_select"])
def _page_topk_kernel(
    scores_ptr,
    page_table_ptr,
    n_pages_ptr,
    n_select_ptr,
    indices_ptr,
    counts_ptr,
    stats_ptr,
    table_stride,
    width,
    max_select,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    SMALL_BLOCK: tl.constexpr,
    WARPS: tl.constexpr,
    STATS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    await_inputs(DEPENDENT)
    head = tl.program_id(0)
    row = tl.program_id(1)
    pair = (row * HEADS + head).to(tl.int64)
    n_pages = tl.load(n_pages_ptr + row)
    wanted = tl.load(n_select_ptr + row)
    wanted = tl.maximum(tl.minimum(tl.minimum(wanted, n_pages), max_select), 0)
    offsets = tl.arange(0, BLOCK)
    table_ptr = page_table_ptr + row.to(tl.int64) * table_stride
    indices_ptr += pair * max_select
    tl.store(counts_ptr + pair, wanted)
    if wanted == n_pages:
        for start in range(0, n_pages, BLOCK):
            held = start + offsets < n_pages
            pages = tl.load(table_ptr + start + offsets, mask=held, other=-1)
            tl.store(indices_ptr + start + offsets, pages, mask=held)
    elif wanted > 0:
        scores_ptr += pair * width
        # The table is as wide as the longest possible row; most rows are shorter.
        if n_pages <= SMALL_BLOCK:
            _select(scores_ptr, table_ptr, indices_ptr, n_pages, wanted, SMALL_BLOCK, WARPS, False)
        elif n_pages <= BLOCK:
            _select(scores_ptr, table_ptr, indices_ptr, n_pages, wanted, BLOCK, WARPS, False)
        else:
            _select(scores_ptr, table_ptr, indices_ptr, n_pages, wanted, BLOCK, WARPS, True)
    if STATS:
        count_row(stats_ptr, head, wanted, n_pages, HEADS)


def page_topk(
    scores: torch.Tensor,
    page_table: torch.Tensor,
    n_pages: torch.Tensor,
    n_select: torch.Tensor,
    max_select: int,
    out: tuple[torch.Tensor, torch.Tensor],
    stats: torch.Tensor | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``page_topk.page_topk``."""
    config = config or Config()
    indices, counts = out
    batch, heads, width = scores.shape
    if batch == 0:
        return out
    block = min(config.max_block, max(128, triton.next_power_of_2(width)))
    num_warps = min(32, max(1, block // (32 * config.per_thread)))
    dependent = dependent_launch(scores.device)
    _page_topk_kernel[(heads, batch)](
        scores,
        page_table,
        n_pages,
        n_select,
        indices,
        counts,
        stats if stats is not None else counts,
        page_table.stride(0),
        width,
        max_select,
        HEADS=heads,
        BLOCK=block,
        SMALL_BLOCK=max(32 * num_warps, block // 4),
        WARPS=num_warps,
        STATS=stats is not None,
        DEPENDENT=dependent,
        num_warps=num_warps,
        launch_pdl=dependent,
    )
    return out
