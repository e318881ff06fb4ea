"""Triton kernel of the index logits: a few queries of one row share each tile of keys that a program loads.

Each query is multiplied with a tile of keys by itself, so that the sum over its heads has one order whatever the
queries beside it. The tokens are the rows of that product, and each warp has rows of its own: four threads then hold
all heads of a token, whose sum needs no shared memory. The compiler divides a product among warps by its shape and by
the products near it; one of 128 tokens and 32 heads is divided by its tokens alone, wherever it stands. Hopper's
instructions leave no choice, and are slow for so few heads.
"""

# Type checkers know neither the launch options of a kernel nor its compile-time values.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..common.float8 import as_half, converts_float8
from ..common.launch import MIN_DOT, await_inputs, capability, dependent_launch, num_processors
from ..index_keys import PAGE_SIZE

# Queries for each row of the page table from which on queries are taken to share rows.
_SHARED = 4
# FP8 bits at the place of float16's are 2^-8 of their number.
_HALF_UNIT = tl.constexpr(2.0**16)


@dataclass(frozen=True)
class Config:
    """Launch parameters: tokens per step (64 or a multiple), most heads of a product, queries that share keys where
    rows are shared, warps, pipeline stages, and programs aimed for per multiprocessor. Powers of two, but for the last
    two.
    """

    tile_tokens: int = 128
    block_heads: int = 32
    queries: int = 4
    num_warps: int = 4
    num_stages: int = 3
    programs_per_processor: int = 2


@triton.jit
def _operand(bits, FP8: tl.constexpr):
    """FP8 as tensor cores take it; float16 (2^-8 of the number) where they do not take it as it is."""
    if FP8:
        return bits
    else:
        return as_half(bits)


@triton.jit
def _range_logits(
    q_ptr,
    weights_ptr,
    keys_ptr,
    scales_ptr,
    table_ptr,
    lengths_ptr,
    out_ptr,
    first,
    queries,
    longest,
    q_stride,
    q_stride_head,
    weights_stride,
    width,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    FP8: tl.constexpr,
):
    """Logits of ``QUERIES`` queries of one row from ``first`` on, in every tile that is this program's."""
    dims = tl.arange(0, DIM)
    tokens = tl.arange(0, TILE)
    parts: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    operands = ()
    head_weights = ()
    lengths = ()
    for i in tl.static_range(QUERIES):
        query = first + i
        for part in tl.static_range(parts):
            heads = part * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
            held = (heads < HEADS) & (query < queries)
            pointers = q_ptr + query * q_stride + heads[None, :] * q_stride_head + dims[:, None]
            operands += (_operand(tl.load(pointers, mask=held[None, :], other=0.0), FP8),)
            weights = tl.load(weights_ptr + query * weights_stride + heads, mask=held, other=0.0)
            head_weights += (weights,)
        lengths += (tl.load(lengths_ptr + query, mask=query < queries, other=0),)
    # Programs take tiles in turn: whatever the lengths on the device are, they differ by one tile at most.
    splits = tl.num_programs(1)
    split = tl.program_id(1)
    pages = tl.load(table_ptr + (split * TILE + tokens) // PAGE, mask=split * TILE + tokens < longest, other=0)
    for tile in range(split, tl.cdiv(longest, TILE), splits):
        token = tile * TILE + tokens
        page = pages.to(tl.int64)
        # One tile early, as keys that waited for their pages would leave the pipeline one tile deep.
        following = token + splits * TILE
        pages = tl.load(table_ptr + following // PAGE, mask=following < longest, other=0)
        # Page 0 and the unwritten part of a page can be read; what comes of them is not stored.
        key_pointers = keys_ptr + (page * (PAGE * (DIM + 4)) + token % PAGE * DIM)[:, None] + dims[None, :]
        keys = _operand(tl.load(key_pointers), FP8)
        scale = tl.load(scales_ptr + page * (PAGE * (DIM // 4 + 1)) + PAGE * DIM // 4 + token % PAGE)
        for i in tl.static_range(QUERIES):
            logits = tl.zeros([TILE], tl.float32)
            for part in tl.static_range(parts):
                products = tl.dot(keys, operands[i * parts + part])
                # A NaN that became a 0 would be a token that nobody ever selects.
                products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
                logits += tl.sum(products * head_weights[i * parts + part][None, :], axis=1)
            if not FP8:
                logits *= _HALF_UNIT
            tl.store(out_ptr + (first + i) * width + token, logits * scale, mask=token < lengths[i])


# Without specialisation one binary serves every width and every number of queries.
@triton.jit(do_not_specialize=["queries", "table_stride", "width"])
def _index_logits_kernel(
    q_ptr,
    weights_ptr,
    keys_ptr,
    scales_ptr,
    page_table_ptr,
    rows_ptr,
    lengths_ptr,
    out_ptr,
    queries,
    q_stride,
    q_stride_head,
    weights_stride,
    table_stride,
    width,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    FP8: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    await_inputs(DEPENDENT)
    # Queries vary fastest: the programs that share keys run together.
    first = tl.program_id(0).to(tl.int64) * QUERIES
    query = first + tl.arange(0, QUERIES)
    lengths = tl.load(lengths_ptr + query, mask=query < queries, other=0)
    seen = lengths > 0
    rows = tl.load(rows_ptr + query, mask=seen, other=0).to(tl.int64)
    row = tl.max(tl.where(seen, rows, 0), axis=0)
    if tl.max(tl.where(seen, rows != row, False).to(tl.int32), axis=0) == 0:
        _range_logits(
            *(q_ptr, weights_ptr, keys_ptr, scales_ptr, page_table_ptr + row * table_stride, lengths_ptr, out_ptr),
            *(first, queries, tl.max(lengths, axis=0)),
            *(q_stride, q_stride_head, weights_stride, width),
            *(QUERIES, HEADS, BLOCK_HEADS, DIM, PAGE, TILE, FP8),
        )
    else:
        for i in range(QUERIES):
            length = tl.load(lengths_ptr + first + i, mask=first + i < queries, other=0)
            row = tl.load(rows_ptr + first + i, mask=length > 0, other=0).to(tl.int64)
            _range_logits(
                *(q_ptr, weights_ptr, keys_ptr, scales_ptr, page_table_ptr + row * table_stride, lengths_ptr, out_ptr),
                *(first + i, queries, length),
                *(q_stride, q_stride_head, weights_stride, width),
                *(1, HEADS, BLOCK_HEADS, DIM, PAGE, TILE, FP8),
            )


def index_logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    buffer: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    config: Config | None = None,
    fp8: bool | None = None,
) -> torch.Tensor:
    """See ``index_logits.index_logits``; ``fp8`` is whether FP8 is multiplied as such."""
    queries, heads, dim = q.shape
    width = out.shape[1]
    if queries == 0 or width == 0:
        return out
    fp8 = converts_float8(q.device) if fp8 is None else fp8
    config = config or default_config(capability(q.device))
    shared = config.queries if queries >= _SHARED * page_table.shape[0] else 1
    query_tiles = triton.cdiv(queries, shared)
    tiles = triton.cdiv(width, config.tile_tokens)
    splits = min(tiles, max(1, config.programs_per_processor * num_processors(q.device) // query_tiles))
    dependent = dependent_launch(q.device)
    _index_logits_kernel[(query_tiles, splits)](
        q if fp8 else q.view(torch.uint8),
        weights,
        buffer.view(q.dtype) if fp8 else buffer,
        *(buffer.view(torch.float32), page_table, rows, lengths, out, queries),
        *(q.stride(0), q.stride(1), weights.stride(0), page_table.stride(0), width),
        QUERIES=shared,
        HEADS=heads,
        BLOCK_HEADS=min(config.block_heads, max(MIN_DOT, triton.next_power_of_2(heads))),
        DIM=dim,
        PAGE=PAGE_SIZE,
        TILE=config.tile_tokens,
        FP8=fp8,
        DEPENDENT=dependent,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        launch_pdl=dependent,
    )
    return out


def default_config(capability: tuple[int, int]) -> Config:
    """As many queries as need no local memory to speak of, by the compiler's word; not measured yet.

    Without float8 the queries are float16, and those of 64 heads fill the shared memory of compute capability 8.6.
    """
    if capability[0] == 9:
        return Config(block_heads=64)
    return Config(queries=2) if capability[0] == 10 or capability < (8, 9) else Config()
