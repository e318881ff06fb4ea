"""Triton kernel of the visible blocks: some programs for each row and KV head, which take turns in its list."""

# Type checkers know neither the launch options of a kernel nor its compile-time values.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..common.launch import await_inputs, dependent_launch, num_processors


@dataclass(frozen=True)
class Config:
    """Launch parameters: blocks that a program lists at once, and programs aimed for per multiprocessor.

    Not measured yet. At most as many programs as fit at once: most of a wide table has nothing to list, and a program
    for each part of it would keep others waiting.
    """

    block: int = 1024
    programs_per_processor: int = 16


@triton.jit
def _count_row(stats_ptr, head, wanted, n_blocks, HEADS: tl.constexpr):
    """Counters of all heads of a row, by the program of its first head."""
    if (head == 0) & (wanted > 0):
        tl.atomic_add(stats_ptr, HEADS, sem="relaxed")
        tl.atomic_add(stats_ptr + 1, wanted.to(tl.int64) * HEADS, sem="relaxed")
        tl.atomic_add(stats_ptr + 2, n_blocks.to(tl.int64) * HEADS, sem="relaxed")


# Without specialisation one binary serves every width.
@triton.jit(do_not_specialize=["table_stride", "max_kept", "width"])
def _visible_blocks_kernel(
    kept_ptr,
    n_kept_ptr,
    first_visible_ptr,
    requests_ptr,
    block_table_ptr,
    n_blocks_ptr,
    n_select_ptr,
    blocks_ptr,
    counts_ptr,
    wanted_ptr,
    stats_ptr,
    table_stride,
    max_kept,
    width,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    STATS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    await_inputs(DEPENDENT)
    head, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    first, stride = tl.program_id(1) * BLOCK, tl.num_programs(1) * BLOCK
    pair = row * HEADS + head
    n_blocks = tl.maximum(tl.minimum(tl.load(n_blocks_ptr + row), width), 0)
    n_select = tl.maximum(tl.load(n_select_ptr + row), 0)
    # Loaded beside the numbers that say whether it is a request at all, so as not to wait for them.
    request = tl.load(requests_ptr + row)
    sparse = n_select < n_blocks
    first_visible = tl.load(first_visible_ptr + request, mask=sparse, other=0)
    n_kept = tl.load(n_kept_ptr + request, mask=sparse, other=0)
    first_visible = tl.maximum(tl.minimum(first_visible, n_blocks), 0)
    n_kept = tl.maximum(tl.minimum(tl.minimum(n_kept, first_visible), max_kept), 0)
    left_out = first_visible - n_kept
    count = n_blocks - left_out
    if first == 0:
        wanted = tl.minimum(n_select, count)
        tl.store(counts_ptr + pair, count)
        tl.store(wanted_ptr + pair, wanted)
        if STATS:
            _count_row(stats_ptr, head, wanted, n_blocks, HEADS)
    kept_ptr += (request * HEADS + head) * max_kept
    block_table_ptr += row * table_stride
    blocks_ptr += pair * width
    for start in range(first, count, stride):
        position = start + tl.arange(0, BLOCK)
        listed, is_kept = position < count, position < n_kept
        logical = tl.load(kept_ptr + position, mask=is_kept, other=0)
        logical = tl.maximum(tl.minimum(logical, n_blocks - 1), 0)
        logical = tl.where(is_kept, logical, position + left_out)
        physical = tl.load(block_table_ptr + logical, mask=listed, other=0)
        tl.store(blocks_ptr + position, physical, mask=listed)


def visible_blocks(
    kept: torch.Tensor,
    n_kept: torch.Tensor,
    first_visible: torch.Tensor,
    requests: torch.Tensor,
    block_table: torch.Tensor,
    n_blocks: torch.Tensor,
    n_select: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    stats: torch.Tensor | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``visible_blocks.visible_blocks``; what lies beyond the counts is left unwritten."""
    config = config or Config()
    batch, heads, width = out[0].shape
    if batch * heads == 0:
        return out
    programs = config.programs_per_processor * num_processors(block_table.device)
    # A table of no blocks has counts all the same.
    per_pair = max(1, min(triton.cdiv(width, config.block), programs // (batch * heads)))
    dependent = dependent_launch(block_table.device)
    _visible_blocks_kernel[(heads, per_pair, batch)](
        *(kept, n_kept, first_visible, requests, block_table, n_blocks, n_select),
        *out,
        stats if stats is not None else out[1],
        block_table.stride(0),
        kept.shape[2],
        width,
        HEADS=heads,
        BLOCK=config.block,
        STATS=stats is not None,
        DEPENDENT=dependent,
        launch_pdl=dependent,
    )
    return out
