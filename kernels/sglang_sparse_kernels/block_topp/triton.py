"""Triton kernel of the top-p selection: one program per row.

What decides is a threshold: the highest at which the blocks at or above it reach what is needed. It is found by
narrowing a range of float32 bit patterns, in which masses of all magnitudes lie about equally dense. Each round divides
the range by several thresholds at once and sums the masses at or above each. The search ends as soon as no block of the
range can be left out, or a single block is left in it, which for real masses takes far fewer rounds than the numbers
have bits; equal masses narrow the range to a single number. A running count then places the selected blocks in logical
order.
"""

# Type checkers know neither the launch options of a kernel nor its compile-time values.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..common.launch import await_inputs, dependent_launch
from ..page_topk.triton import block_positions
from . import reference

_ONE = tl.constexpr(reference.ONE)
_LIMIT = tl.constexpr(reference.LIMIT)


@dataclass(frozen=True)
class Config:
    """Launch parameters, powers of two: most masses held in registers, masses per thread, thresholds of a round."""

    max_block: int = 8192
    per_thread: int = 16
    thresholds: int = 4


@triton.jit
def _running_count(selected, BLOCK: tl.constexpr, WARPS: tl.constexpr):
    """Inclusive running count of a mask along ``block_positions``."""
    # As in page_topk, but with up to four rows of lanes in the bytes of one integer, as a row counts to 32 at most.
    ROWS: tl.constexpr = (BLOCK // (32 * WARPS) + 3) // 4
    PACKED: tl.constexpr = BLOCK // (32 * WARPS * ROWS)
    shifts = 8 * tl.arange(0, PACKED)[None, :, None, None]
    packed = tl.sum(tl.reshape(selected.to(tl.int32), [ROWS, PACKED, WARPS, 32]) << shifts, axis=1)
    row_counts = tl.broadcast_to(tl.sum(packed, axis=2, keep_dims=True), packed.shape)
    row_counts = tl.reshape((row_counts[:, None] >> shifts) & 0xFF, [ROWS * PACKED, WARPS, 32])
    in_row = tl.reshape((tl.cumsum(packed, axis=2)[:, None] >> shifts) & 0xFF, [ROWS * PACKED, WARPS, 32])
    warp_counts = tl.max(tl.sum(row_counts, axis=0), axis=1)
    warps_before = tl.cumsum(warp_counts, axis=0) - warp_counts
    running = in_row + tl.cumsum(row_counts, axis=0) - row_counts + warps_before[None, :, None]
    return tl.reshape(running, [BLOCK])


@triton.jit
def _load_fixed(mass_ptr, logical, n_blocks):
    """Masses as int32 in units of 2**-30; what is no mass reaches the limit by itself, and beyond the row lies 0.

    A matrix of one row: so the sums above several thresholds, and all that follows from them, stay in one layout.
    """
    logical = logical[None, :]
    mass = tl.load(mass_ptr + logical, mask=logical < n_blocks, other=0.0)
    share = mass < 2.0
    fixed = (tl.where(share & (mass > 0.0), mass, 0.0) * _ONE).to(tl.int32)
    return tl.where(share, fixed, _LIMIT)


@triton.jit
def _bits(number):
    """Of the float32 next to a positive int32."""
    return number.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def _ceil(bits):
    """The least int32 at or above a positive float32."""
    return tl.ceil(bits.to(tl.float32, bitcast=True)).to(tl.int32)


@triton.jit
def _total(fixed):
    return tl.sum(tl.sum(fixed.to(tl.int64), axis=1), axis=0)


@triton.jit
def _sums(fixed, thresholds):
    """Sum of the numbers at or above each threshold."""
    return tl.sum(tl.where(fixed >= thresholds[:, None], fixed, 0), axis=1)


@triton.jit
def _search(
    fixed,
    positions,
    mass_ptr,
    n_blocks,
    total,
    needed,
    BLOCK: tl.constexpr,
    THRESHOLDS: tl.constexpr,
    CHUNKED: tl.constexpr,
):
    """Range ``[low, high)`` of numbers and how many of the blocks within it are selected, the first ones.

    All blocks at or above ``high`` are selected, and none below ``low``.
    """
    ordinal = 1 + tl.arange(0, THRESHOLDS)
    # Were all that is not needed spread evenly, it would still lie below this. Converting an integer rounds to the
    # nearest float, so that the next one in either direction is beyond the integer.
    low_bits = _bits(tl.maximum((total - needed) // n_blocks, 1)) - 1
    high_bits = _bits(total) + 1
    low = _ceil(low_bits)
    high = _ceil(high_bits)
    # At or above the ends of the range; for the lower one too much, until a threshold takes its place.
    sum_low = total
    sum_high = 0
    while (high_bits - low_bits > 1) & (high - low > 1) & (sum_low - low >= needed) & (sum_low - sum_high - low >= low):
        step = (high_bits - low_bits + THRESHOLDS) // (THRESHOLDS + 1)
        bits = tl.minimum(low_bits + step * ordinal, high_bits)
        thresholds = _ceil(bits)
        sums = _sums(fixed, thresholds)
        if CHUNKED:
            for start in range(BLOCK, n_blocks, BLOCK):
                sums += _sums(_load_fixed(mass_ptr, start + positions, n_blocks), thresholds)
        enough = sums >= needed
        low_bits = tl.max(tl.where(enough, bits, low_bits), axis=0)
        sum_low = tl.min(tl.where(enough, sums, sum_low), axis=0)
        high_bits = tl.min(tl.where(enough, high_bits, bits), axis=0)
        sum_high = tl.max(tl.where(enough, sum_high, sums), axis=0)
        low = _ceil(low_bits)
        high = _ceil(high_bits)
    # Without the least of the range the rest would fall short, or the range holds one block alone.
    whole = (sum_low - low < needed) | (sum_low - sum_high - low < low)
    ties_wanted = tl.where(whole, n_blocks, (needed - sum_high + low - 1) // low)
    return tl.where(needed > 0, low, high), high, ties_wanted


@triton.jit
def _place(
    fixed, pages, logical, newest, indices_ptr, low, high, ties_wanted, BLOCK: tl.constexpr, WARPS: tl.constexpr
):
    """Store the selected blocks of one chunk; return their number and that of the ties in it that count."""
    fixed = tl.reshape(fixed, [BLOCK])
    selected = fixed >= low
    ties = 0
    if ties_wanted <= newest:
        tie = selected & (fixed < high)
        selected &= (fixed >= high) | (_running_count(tie, BLOCK, WARPS) <= ties_wanted)
        ties = tl.sum(tie.to(tl.int32), axis=0)
    selected |= logical == newest
    tl.store(indices_ptr + _running_count(selected, BLOCK, WARPS) - 1, pages, mask=selected)
    return tl.sum(selected.to(tl.int32), axis=0), ties


@triton.jit
def _select(
    mass_ptr,
    table_ptr,
    indices_ptr,
    n_blocks,
    top_p,
    BLOCK: tl.constexpr,
    WARPS: tl.constexpr,
    THRESHOLDS: tl.constexpr,
    CHUNKED: tl.constexpr,
):
    """Store the smallest set of a row of at most ``BLOCK`` blocks, or of any number if ``CHUNKED``.

    Return its size, or 0 where the row has none and nothing was stored.
    """
    positions = block_positions(BLOCK, WARPS)
    fixed = _load_fixed(mass_ptr, positions, n_blocks)
    pages = tl.load(table_ptr + positions, mask=positions < n_blocks, other=-1)
    total = _total(fixed)
    if CHUNKED:
        for start in range(BLOCK, n_blocks, BLOCK):
            total += _total(_load_fixed(mass_ptr, start + positions, n_blocks))
    count = 0
    if (total > 0) & (total < _LIMIT) & (top_p < 1.0):
        top_p_fixed = (tl.maximum(top_p, 0.0) * _ONE).to(tl.int64)
        needed = ((top_p_fixed * total + (_ONE - 1)) >> 30).to(tl.int32)
        low, high, ties_wanted = _search(
            fixed, positions, mass_ptr, n_blocks, total.to(tl.int32), needed, BLOCK, THRESHOLDS, CHUNKED
        )
        newest = n_blocks - 1
        count, ties = _place(fixed, pages, positions, newest, indices_ptr, low, high, ties_wanted, BLOCK, WARPS)
        if CHUNKED:
            for start in range(BLOCK, n_blocks, BLOCK):
                logical = start + positions
                fixed = _load_fixed(mass_ptr, logical, n_blocks)
                pages = tl.load(table_ptr + logical, mask=logical < n_blocks, other=-1)
                ties_wanted -= ties
                more, ties = _place(
                    fixed, pages, logical, newest, indices_ptr + count, low, high, ties_wanted, BLOCK, WARPS
                )
                count += more
    return count


@triton.jit
def _count_row(stats_ptr, count, n_blocks, overflowed):
    if n_blocks > 0:
        tl.atomic_add(stats_ptr, 1, sem="relaxed")
        tl.atomic_add(stats_ptr + 1, count.to(tl.int64), sem="relaxed")
        tl.atomic_add(stats_ptr + 2, n_blocks.to(tl.int64), sem="relaxed")
        if overflowed:
            tl.atomic_add(stats_ptr + 3, 1, sem="relaxed")


# Without the divisibility of the strides the compiler keeps one layout for loads, scan and stores (see page_topk).
@triton.jit(do_not_specialize=["mass_stride", "table_stride", "width"])
def _block_topp_kernel(
    mass_ptr,
    block_table_ptr,
    n_blocks_ptr,
    capacity_ptr,
    top_p_ptr,
    indices_ptr,
    counts_ptr,
    stats_ptr,
    mass_stride,
    table_stride,
    width,
    BLOCK: tl.constexpr,
    SMALL_BLOCK: tl.constexpr,
    WARPS: tl.constexpr,
    THRESHOLDS: tl.constexpr,
    STATS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    await_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    n_blocks = tl.load(n_blocks_ptr + row)
    capacity = tl.load(capacity_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    mass_ptr += row * mass_stride
    table_ptr = block_table_ptr + row * table_stride
    indices_ptr += row * width
    count = 0
    if capacity < n_blocks:
        # The table is as wide as the longest possible row; most rows are shorter.
        if n_blocks <= SMALL_BLOCK:
            count = _select(mass_ptr, table_ptr, indices_ptr, n_blocks, top_p, SMALL_BLOCK, WARPS, THRESHOLDS, False)
        elif n_blocks <= BLOCK:
            count = _select(mass_ptr, table_ptr, indices_ptr, n_blocks, top_p, BLOCK, WARPS, THRESHOLDS, False)
        else:
            count = _select(mass_ptr, table_ptr, indices_ptr, n_blocks, top_p, BLOCK, WARPS, THRESHOLDS, True)
    overflowed = count > capacity
    if (count == 0) | overflowed:
        count = n_blocks
        # Other threads may have stored what is replaced here.
        tl.debug_barrier()
        offsets = tl.arange(0, BLOCK)
        for start in range(0, n_blocks, BLOCK):
            held = start + offsets < n_blocks
            pages = tl.load(table_ptr + start + offsets, mask=held, other=-1)
            tl.store(indices_ptr + start + offsets, pages, mask=held)
    tl.store(counts_ptr + row, count)
    if STATS:
        _count_row(stats_ptr, count, n_blocks, overflowed)


def block_topp(
    mass: torch.Tensor,
    block_table: torch.Tensor,
    n_blocks: torch.Tensor,
    capacity: torch.Tensor,
    top_p: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor],
    stats: torch.Tensor | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``block_topp.block_topp``."""
    config = config or Config()
    indices, counts = out
    batch, width = mass.shape
    if batch == 0:
        return out
    block = min(config.max_block, max(128, triton.next_power_of_2(width)))
    num_warps = min(32, max(1, block // (32 * config.per_thread)))
    dependent = dependent_launch(mass.device)
    _block_topp_kernel[(batch,)](
        mass,
        block_table,
        n_blocks,
        capacity,
        top_p,
        indices,
        counts,
        stats if stats is not None else counts,
        mass.stride(0),
        block_table.stride(0),
        width,
        BLOCK=block,
        SMALL_BLOCK=max(32 * num_warps, block // 4),
        WARPS=num_warps,
        THRESHOLDS=config.thresholds,
        STATS=stats is not None,
        DEPENDENT=dependent,
        num_warps=num_warps,
        launch_pdl=dependent,
    )
    return out
