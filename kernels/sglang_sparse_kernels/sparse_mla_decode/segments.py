"""How the programs of a call divide the tiles of all rows among them, and what they find is combined.

The tiles of all rows lie side by side, in the order of the rows. Each program takes as many as any other one, from the
first one on, so a row has one segment or several, in consecutive programs. The numbers of tiles are known on the device
alone: every program counts them itself. What it has of a row that has several segments it stores in one of two places
of its own: the first for the row that it starts with, the second for a row that starts and does not end in it.
"""

# Type checkers know neither the launch options of a kernel nor its compile-time values.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false, reportArgumentType=false

import torch
import triton
import triton.language as tl

from ..launch import await_inputs

# Query heads and tokens of a tile.
TILE_HEADS, TILE_TOKENS = 64, 64
# Rows that a program counts the tiles of.
MOST_ROWS = 256
# Segments that are combined at a time, and dimensions of a program.
_SEGMENTS, _DIMS = 16, 128
_TOKENS = tl.constexpr(TILE_TOKENS)
_ROWS = tl.constexpr(MOST_ROWS)


def num_programs(num_heads: int, processors: int) -> int:
    """Programs that divide the tiles among them, for each tile of heads: together as many as run at once."""
    return max(1, processors // triton.cdiv(num_heads, TILE_HEADS))


def results(num_heads: int, programs: int, latent_dim: int, dtype: torch.dtype) -> tuple[tuple[int, torch.dtype], ...]:
    """Elements and dtypes of what the segments hand on: their results, and the logarithms of their sums of weights."""
    kept = 2 * programs * num_heads
    return (kept * latent_dim, dtype), (kept, torch.float32)


@triton.jit(do_not_specialize=["batch"])
def _combine_segments_kernel(
    partial_ptr,
    lse_ptr,
    counts_ptr,
    out_ptr,
    batch,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIMS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    LEAST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    await_inputs(DEPENDENT)
    head = tl.program_id(0) % HEADS
    row = tl.program_id(0) // HEADS
    dims = tl.program_id(1) * DIMS + tl.arange(0, DIMS)
    rows = tl.arange(0, _ROWS)
    tiles = tl.cdiv(tl.load(counts_ptr + rows, mask=rows < batch, other=0) * BLOCK, _TOKENS)
    share = tl.maximum(tl.cdiv(tl.sum(tiles, axis=0), PROGRAMS), LEAST)
    start = tl.sum(tl.where(rows < row, tiles, 0), axis=0)
    end = start + tl.sum(tl.where(rows == row, tiles, 0), axis=0)
    first = start // share
    segments = tl.where(end > start, (end - 1) // share - first + 1, 0)
    out_ptr += (row.to(tl.int64) * HEADS + head) * DIM + dims
    if segments == 0:
        tl.store(out_ptr, tl.zeros([DIMS], out_ptr.dtype.element_ty))
    elif segments > 1:
        maximum = tl.full([], float("-inf"), tl.float32)
        total = tl.full([], 0.0, tl.float32)
        output = tl.full([DIMS], 0.0, tl.float32)
        for chunk in range(0, segments, SEGMENTS):
            segment = chunk + tl.arange(0, SEGMENTS)
            valid = segment < segments
            second = (segment == 0) & (start > first * share)
            place = (2 * (first + segment) + tl.where(second, 1, 0)).to(tl.int64) * HEADS + head
            lse = tl.load(lse_ptr + place, mask=valid, other=float("-inf"))
            partial = tl.load(partial_ptr + place[:, None] * DIM + dims[None, :], mask=valid[:, None], other=0.0)
            new_maximum = tl.maximum(maximum, tl.max(lse, axis=0))
            # Of keys without any finite logit; -inf - -inf would be NaN.
            finite = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            decay = tl.exp2(maximum - finite)
            weights = tl.exp2(lse - finite)
            total = total * decay + tl.sum(weights, axis=0)
            output = output * decay + tl.sum(partial.to(tl.float32) * weights[:, None], axis=0)
            maximum = new_maximum
        tl.store(out_ptr, (output / tl.where(total == 0.0, 1.0, total)).to(out_ptr.dtype.element_ty))


def combine(
    partial: torch.Tensor,
    lse: torch.Tensor,
    counts: torch.Tensor,
    out: torch.Tensor,
    block_size: int,
    programs: int,
    least_tiles: int,
    dependent: bool,
) -> None:
    """Combine the segments of each row and query head in their order; zeros for rows without any token.

    A row that has one segment is left as it is.

    Args:
        partial: ``[2 * programs * H * R]``, the segments' results in the dtype of ``out``.
        lse: ``[2 * programs * H]`` float32, their logarithms of the sums of weights, to base 2.
        counts: ``[B, 1]`` int32, selected blocks of at most `MOST_ROWS` rows.
        out: ``[B, H, R]``, written; ``R`` is a multiple of 128.
        block_size: tokens per block, a divisor of `TILE_TOKENS`.
        programs: those that divide the tiles among them.
        least_tiles: tiles that each of these has at least, but for the last ones.
        dependent: launched before the segments have ended.
    """
    batch, num_heads, latent_dim = out.shape
    _combine_segments_kernel[(batch * num_heads, latent_dim // _DIMS)](
        *(partial, lse, counts, out, batch),
        HEADS=num_heads,
        DIM=latent_dim,
        DIMS=_DIMS,
        SEGMENTS=_SEGMENTS,
        BLOCK=block_size,
        PROGRAMS=programs,
        LEAST=least_tiles,
        DEPENDENT=dependent,
        num_warps=2,
        launch_pdl=dependent,
    )
