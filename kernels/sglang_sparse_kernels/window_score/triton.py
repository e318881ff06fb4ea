"""Triton kernels of the window score: the queries' normalisers, their weights summed over the queries, and the pool.

A token's weight needs the maximum and the sum of all logits of its query, so the logits are computed twice; keeping
them would take as much memory as the keys. Rows are split after a fixed number of tokens, whatever the batch is, so
that a sum has one order.
"""

# Type checkers know neither the launch options of a kernel nor its compile-time values.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportReturnType=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton import knobs

from ..common.launch import LOG2_E, MIN_DOT
from ..common.paged_prefill import load_rows, load_slots
from ..common.scratch import LIMIT, rows_at_once
from .reference import UNBOUNDED

_MAX_ROWS = 128
# Tokens of one split, and splits or tokens that a program of the later kernels holds.
_SPLIT = 1024
_MERGE_SPLITS = 32
_POOL = 1024
# In place of -inf: differences stay numbers, and the weight of a logit of -inf is still 0.
_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
_UNBOUNDED = tl.constexpr(UNBOUNDED)


@dataclass(frozen=True)
class Config:
    """Launch parameters: tokens per step, a power of two that divides 1024, warps and pipeline stages."""

    tile_tokens: int = 64
    num_warps: int = 8
    num_stages: int = 3


def default_config(dim: int) -> Config:
    """Not measured yet: nothing is spilled, and it fits the shared memory of GPUs that have 99 KiB."""
    return Config() if dim <= 128 else Config(tile_tokens=32, num_stages=2)


@dataclass(frozen=True)
class _Sizes:
    """The query rows of a KV head (a token and a head of its group each) in tiles of ``block``; splits of a row."""

    tiles: int
    block: int
    splits: int

    def row_bytes(self, num_kv_heads: int, max_length: int) -> int:
        """Bytes of one row's scratch: weights by tile, maxima and sums by split, and normalisers."""
        normalisers = num_kv_heads * self.tiles * self.block * (2 * self.splits + 1)
        return (num_kv_heads * self.tiles * max_length + normalisers) * torch.float32.itemsize


@triton.jit
def merged_lse(maxima_ptr, totals_ptr, used, stride, columns, held, BLOCK_SPLITS: tl.constexpr):
    """Logarithm (base 2) of the sum of exponentials of each column over the first ``used`` splits.

    ``maxima`` are finite, and a split without a logit has a total of 0; ``held`` are the columns that exist.
    """
    maximum = tl.full([columns.shape[0]], _LOWEST, tl.float32)
    total = tl.full([columns.shape[0]], 0.0, tl.float32)
    for first in range(0, used, BLOCK_SPLITS):
        splits = first + tl.arange(0, BLOCK_SPLITS)
        offsets = splits[:, None] * stride + columns[None, :]
        mask = (splits < used)[:, None] & held[None, :]
        maxima = tl.load(maxima_ptr + offsets, mask=mask, other=_LOWEST)
        totals = tl.load(totals_ptr + offsets, mask=mask, other=0.0)
        higher = tl.maximum(maximum, tl.max(maxima, axis=0))
        total = total * tl.exp2(maximum - higher) + tl.sum(totals * tl.exp2(maxima - higher[None, :]), axis=0)
        maximum = higher
    return maximum + tl.log2(total)


@triton.jit
def _lengths(lengths_ptr, n_window_ptr, row, WINDOW: tl.constexpr):
    """Tokens of a row, and of its window."""
    length = tl.load(lengths_ptr + row)
    return length, tl.minimum(tl.minimum(tl.load(n_window_ptr + row), WINDOW), length)


@triton.jit
def _positions(rows, length, window, WINDOW: tl.constexpr, GROUP: tl.constexpr):
    """The position of each query row; -1 for one that there is not."""
    token = rows // GROUP
    real = (token >= WINDOW - window) & (token < WINDOW)
    return tl.where(real, length - WINDOW + token, -1)


@triton.jit
def _query_pointers(
    q_ptr, row, head, rows, stride_row, stride_token, stride_head, WINDOW: tl.constexpr, GROUP: tl.constexpr
):
    token = tl.minimum(rows // GROUP, WINDOW - 1).to(tl.int64)
    return q_ptr + row * stride_row + token * stride_token + (head * GROUP + rows % GROUP) * stride_head


# Without specialisation one binary serves every width.
@triton.jit(do_not_specialize=["table_stride"])
def _split_kernel(
    q_ptr,
    n_window_ptr,
    k_ptr,
    table_ptr,
    lengths_ptr,
    maxima_ptr,
    totals_ptr,
    q_stride_row,
    q_stride_token,
    q_stride_head,
    k_stride_slot,
    k_stride_head,
    table_stride,
    scale,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Maximum and sum of exponentials (base 2) of one split for one tile of query rows."""
    head, split, row = tl.program_id(0) // TILES, tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)
    tokens, dims = tl.arange(0, TILE), tl.arange(0, BLOCK_DIM)
    length, window = _lengths(lengths_ptr, n_window_ptr, row, WINDOW)
    positions = _positions(rows, length, window, WINDOW, GROUP)
    if split * SPLIT < length:
        strides = q_stride_row, q_stride_token, q_stride_head
        pointers = _query_pointers(q_ptr, row, head, rows, *strides, WINDOW, GROUP)
        query = load_rows(pointers[:, None] + dims[None, :], positions >= 0, dims, DIM)
        query = query.to(tl.float32) if UPCAST else query
        table_ptr += row * table_stride
        k_ptr += head.to(tl.int64) * k_stride_head
        maximum = tl.full([BLOCK], _LOWEST, tl.float32)
        total = tl.full([BLOCK], 0.0, tl.float32)
        for start in range(split * SPLIT, tl.minimum((split + 1) * SPLIT, length), TILE):
            slot = load_slots(table_ptr, start + tokens, length, PAGE)
            key_pointers = k_ptr + slot[:, None] * k_stride_slot + dims[None, :]
            keys = load_rows(key_pointers, start + tokens < length, dims, DIM)
            logits = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision="ieee") * scale
            seen = (start + tokens)[None, :] <= positions[:, None]
            logits = tl.where(seen & (tl.abs(logits) < float("inf")), logits, float("-inf"))
            higher = tl.maximum(maximum, tl.max(logits, axis=1))
            total = total * tl.exp2(maximum - higher) + tl.sum(tl.exp2(logits - higher[:, None]), axis=1)
            maximum = higher
        offsets = ((row * tl.num_programs(1) + split) * tl.num_programs(0) + tl.program_id(0)) * BLOCK
        tl.store(maxima_ptr + offsets + tl.arange(0, BLOCK), maximum)
        tl.store(totals_ptr + offsets + tl.arange(0, BLOCK), total)


@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(
    maxima_ptr,
    totals_ptr,
    lengths_ptr,
    lse_ptr,
    splits,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Normalisers of one tile of query rows."""
    row = tl.program_id(1).to(tl.int64)
    stride = tl.num_programs(0) * BLOCK
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = row * splits * stride
    used = tl.cdiv(tl.load(lengths_ptr + row), SPLIT)
    lse = merged_lse(maxima_ptr + first, totals_ptr + first, used, stride, columns, columns >= 0, BLOCK_SPLITS)
    tl.store(lse_ptr + row * stride + columns, lse)


@triton.jit(do_not_specialize=["table_stride", "width"])
def _weight_kernel(
    q_ptr,
    n_window_ptr,
    k_ptr,
    table_ptr,
    lengths_ptr,
    lse_ptr,
    weights_ptr,
    q_stride_row,
    q_stride_token,
    q_stride_head,
    k_stride_slot,
    k_stride_head,
    table_stride,
    width,
    scale,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Weights of one split's tokens before the window, summed over one tile of query rows; +inf for a broken key."""
    head, split, row = tl.program_id(0) // TILES, tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)
    tokens, dims = tl.arange(0, TILE), tl.arange(0, BLOCK_DIM)
    length, window = _lengths(lengths_ptr, n_window_ptr, row, WINDOW)
    positions = _positions(rows, length, window, WINDOW, GROUP)
    context = length - window
    if split * SPLIT < context:
        strides = q_stride_row, q_stride_token, q_stride_head
        pointers = _query_pointers(q_ptr, row, head, rows, *strides, WINDOW, GROUP)
        query = load_rows(pointers[:, None] + dims[None, :], positions >= 0, dims, DIM)
        query = query.to(tl.float32) if UPCAST else query
        program = row * tl.num_programs(0) + tl.program_id(0)
        lse = tl.load(lse_ptr + program * BLOCK + tl.arange(0, BLOCK))
        table_ptr += row * table_stride
        k_ptr += head.to(tl.int64) * k_stride_head
        weights_ptr += program * width
        for start in range(split * SPLIT, tl.minimum((split + 1) * SPLIT, context), TILE):
            slot = load_slots(table_ptr, start + tokens, context, PAGE)
            key_pointers = k_ptr + slot[:, None] * k_stride_slot + dims[None, :]
            keys = load_rows(key_pointers, start + tokens < context, dims, DIM)
            # The tokens are the rows of this product: a sum over the queries stays within a warp.
            logits = tl.dot(keys.to(query.dtype), tl.trans(query), input_precision="ieee") * scale
            weights = tl.where(tl.abs(logits) < float("inf"), tl.exp2(logits - lse[None, :]), float("inf"))
            # All queries come after these tokens.
            weights = tl.sum(tl.where((positions >= 0)[None, :], weights, 0.0), axis=1)
            tl.store(weights_ptr + start + tokens, weights, mask=start + tokens < context)


@triton.jit(do_not_specialize=["width"])
def _pool_kernel(
    weights_ptr,
    n_window_ptr,
    lengths_ptr,
    out_ptr,
    width,
    WINDOW: tl.constexpr,
    TILES: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest importance around each token before the window; +inf for the window's tokens."""
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(2).to(tl.int64)
    pair = row * tl.num_programs(1) + tl.program_id(1)
    length, window = _lengths(lengths_ptr, n_window_ptr, row, WINDOW)
    context = length - window
    if tl.program_id(0) * BLOCK < length:
        weights_ptr += pair * TILES * width
        largest = tl.full([BLOCK], float("-inf"), tl.float32)
        for offset in range(-HALF, HALF + 1):
            around = tokens + offset
            inside = (around >= 0) & (around < context)
            importance = tl.load(weights_ptr + around, mask=inside, other=float("-inf"))
            for tile in tl.static_range(1, TILES):
                importance += tl.load(weights_ptr + tile * width + around, mask=inside, other=float("-inf"))
            largest = tl.maximum(largest, importance)
        largest = tl.minimum(largest, _UNBOUNDED)
        largest = tl.where(tokens < context, largest, float("inf"))
        tl.store(out_ptr + pair * width + tokens, largest, mask=tokens < length)


def _sizes(window: int, group: int, max_length: int) -> _Sizes:
    rows = window * group
    block = min(_MAX_ROWS, max(MIN_DOT, triton.next_power_of_2(rows)))
    return _Sizes(triton.cdiv(rows, block), block, triton.cdiv(max_length, _SPLIT))


def scratch_bytes(
    batch: int, window: int, num_q_heads: int, num_kv_heads: int, max_length: int, limit: int = LIMIT
) -> int:
    """See ``window_score.scratch_bytes``; ``limit`` is that of the call."""
    row_bytes = _sizes(window, num_q_heads // num_kv_heads, max_length).row_bytes(num_kv_heads, max_length)
    return rows_at_once(batch, row_bytes, limit) * row_bytes


def window_score(
    q: torch.Tensor,
    n_window: torch.Tensor,
    k_cache: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    page_size: int,
    sm_scale: float,
    k_scale: float,
    kernel_size: int,
    out: torch.Tensor,
    config: Config | None = None,
    limit: int = LIMIT,
) -> torch.Tensor:
    """See ``window_score.window_score``; entries at or beyond ``lengths`` are left unwritten.

    ``limit`` bounds the scratch in bytes wherever that of a single row fits.
    """
    batch, num_kv_heads, width = out.shape
    if batch == 0 or width == 0:
        return out
    sizes = _sizes(q.shape[1], q.shape[2] // num_kv_heads, width)
    rows = rows_at_once(batch, sizes.row_bytes(num_kv_heads, width), limit)
    tiles = num_kv_heads * sizes.tiles
    new = {"dtype": torch.float32, "device": q.device}
    weights = torch.empty(rows, tiles, width, **new)
    splits = torch.empty(2, rows, sizes.splits, tiles, sizes.block, **new)
    scratch = (weights, *splits, torch.empty(rows, tiles, sizes.block, **new))
    scale = sm_scale * k_scale * LOG2_E
    for first in range(0, batch, rows):
        part = slice(first, first + rows)
        inputs = (q[part], n_window[part], k_cache, page_table[part], lengths[part])
        _launch(inputs, scratch, out[part], page_size, scale, kernel_size, sizes, config or default_config(q.shape[3]))
    return out


def _launch(
    inputs: tuple[torch.Tensor, ...],
    scratch: tuple[torch.Tensor, ...],
    out: torch.Tensor,
    page_size: int,
    scale: float,
    kernel_size: int,
    sizes: _Sizes,
    config: Config,
) -> None:
    q, n_window, k_cache, page_table, lengths = inputs
    weights, maxima, totals, lse = scratch
    batch, num_kv_heads, width = out.shape
    window, num_q_heads, dim = q.shape[1:]
    tiles = num_kv_heads * sizes.tiles
    strides = (*q.stride()[:3], *k_cache.stride()[:2], page_table.stride(0))
    constants = {
        "WINDOW": window,
        "GROUP": num_q_heads // num_kv_heads,
        "DIM": dim,
        "BLOCK_DIM": max(MIN_DOT, triton.next_power_of_2(dim)),
        "PAGE": page_size,
        "TILES": sizes.tiles,
        "BLOCK": sizes.block,
        "TILE": config.tile_tokens,
        "SPLIT": _SPLIT,
        # The interpreter multiplies the bit patterns of bfloat16.
        "UPCAST": knobs.runtime.interpret,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    grid = (tiles, sizes.splits, batch)
    _split_kernel[grid](*inputs, maxima, totals, *strides, scale, **constants)
    _merge_kernel[(tiles, batch)](
        *(maxima, totals, lengths, lse, sizes.splits), BLOCK=sizes.block, SPLIT=_SPLIT, BLOCK_SPLITS=_MERGE_SPLITS
    )
    _weight_kernel[grid](*inputs, lse, weights, *strides, width, scale, **constants)
    _pool_kernel[(triton.cdiv(width, _POOL), num_kv_heads, batch)](
        *(weights, n_window, lengths, out, width),
        WINDOW=window,
        TILES=sizes.tiles,
        HALF=kernel_size // 2,
        BLOCK=_POOL,
    )
