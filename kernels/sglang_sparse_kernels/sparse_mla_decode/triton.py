"""Triton kernels of sparse MLA decode attention: split over the selected blocks, then combine as sparse decode does.

Another one counts the tokens of the selected blocks, for ``fa3``.
"""

# Type checkers know neither the launch options of a kernel nor its compile-time values.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton import knobs

from ..common.flash_decode import combine, hand_on, num_splits, split_tensors
from ..common.float8 import converts_float8
from ..common.launch import (
    LOG2_E,
    MIN_DOT,
    Properties,
    await_inputs,
    dependent_launch,
    most_latent_rows,
    num_processors,
    planned_rows,
    properties,
)
from ..latent_rows.reference import TILE
from ..latent_rows.triton import read_latents
from ..sparse_decode.triton import load_ids, token_slots
from .reference import Inputs

# Rows of the smallest product that Hopper's warpgroup instructions compute.
_WGMMA_ROWS = tl.constexpr(64)
# Rows whose tokens one program counts.
_COUNTED_ROWS = 128


@dataclass(frozen=True)
class Config:
    """Launch parameters: heads and tokens per step, warps, pipeline stages, and programs aimed for per multiprocessor.

    With ``narrow`` the results of the splits have the dtype of the output instead of float32. ``shared_memory`` is what
    this takes on Hopper with a latent of 512 in two bytes, in bytes; nothing takes more.
    """

    block_heads: int
    block_tokens: int
    num_warps: int
    num_stages: int
    programs_per_processor: int = 1
    narrow: bool = True
    shared_memory: int = 0


# By preference; not measured yet. With 128 heads the L2 cache is as busy as the tensor cores, and a tile of many heads
# reads from it less often; 64 heads are what Hopper's warpgroup instructions want, and their accumulator fills the
# registers of eight warps. In the shared memory that the query leaves, several small tiles of tokens hide the loads
# better than two large ones, which only blocks of 64 need.
CONFIGS = (
    Config(64, 32, num_warps=8, num_stages=4, shared_memory=225280),
    Config(64, 64, num_warps=8, num_stages=2, shared_memory=229376),
    Config(32, 32, num_warps=8, num_stages=4, shared_memory=149504),
    Config(32, 64, num_warps=8, num_stages=2, shared_memory=114688),
    Config(16, 32, num_warps=4, num_stages=3, programs_per_processor=2, shared_memory=93184),
    Config(16, 64, num_warps=8, num_stages=2, programs_per_processor=2, shared_memory=94208),
)


@triton.jit
def _softmax_step(logits, valid, maximum, total):
    """One tile of the online softmax: its weights, by what earlier ones shrink, and the new row maxima and sums."""
    logits = tl.where(valid[None, :], logits, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(logits, axis=1))
    # A tile without a valid token leaves the maximum at -inf, and -inf - -inf would be NaN.
    finite = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    decay = tl.exp2(maximum - finite)
    weights = tl.exp2(logits - finite[:, None])
    return weights, decay, new_maximum, total * decay + tl.sum(weights, axis=1)


@triton.jit
def _attend(
    query,
    rotated_query,
    kv_ptr,
    indices_ptr,
    first_ids,
    first_block,
    count,
    last_slot,
    kv_stride,
    logit_scale,
    STEP_BLOCKS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    NATIVE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Online softmax over one split's tiles: unnormalised output, row sums and row maxima (base 2).

    The block ids of a tile are loaded one tile early: loads of the cache that waited for them would leave the pipeline
    one tile deep, whatever its stages.
    """
    tokens = tl.arange(0, BLOCK_TOKENS)
    latent_dims = tl.arange(0, LATENT)
    rope_dims = LATENT + tl.arange(0, ROPE)
    maximum = tl.full([query.shape[0]], float("-inf"), tl.float32)
    total = tl.full([query.shape[0]], 0.0, tl.float32)
    output = tl.full([query.shape[0], LATENT], 0.0, tl.float32)
    ids = first_ids
    for first in range(first_block, count, STEP_BLOCKS):
        slot, valid = token_slots(ids, last_slot, tokens, BLOCK)
        ids = load_ids(indices_ptr, first + STEP_BLOCKS, count, tokens, BLOCK)
        tokens_ptr = kv_ptr + slot[:, None] * kv_stride
        # One load for key and value. An unwritten slot may hold NaN, which a weight of zero would not remove.
        if kv_ptr.dtype.element_ty == tl.uint8:
            latent, rotated = read_latents(kv_ptr + slot * kv_stride, valid, LATENT, ROPE, TILE, NATIVE)
            latent = latent.to(query.dtype)
            values = latent
        else:
            latent = tl.load(tokens_ptr + latent_dims[None, :], mask=valid[:, None], other=0.0).to(query.dtype)
            values = latent
            if (kv_ptr.dtype.element_ty.primitive_bitwidth == 8) & (not WIDE):
                # Here a float8 load for both would not be pipelined. The other policy keeps the two from becoming one.
                pointers = tokens_ptr + latent_dims[None, :]
                values = tl.load(pointers, mask=valid[:, None], other=0.0, eviction_policy="evict_first")
                values = values.to(query.dtype)
            rotated = tl.load(tokens_ptr + rope_dims[None, :], mask=valid[:, None], other=0.0)
        rotated = rotated.to(query.dtype)
        # Two products that are added afterwards: one that starts from the other counts as chained, see below.
        logits = tl.dot(query, tl.trans(latent), input_precision="ieee") * logit_scale
        logits += tl.dot(rotated_query, tl.trans(rotated), input_precision="ieee") * logit_scale
        if WIDE:
            # Triton gives the rows of a product that another one follows to as many warps as there are; 64 rows are
            # enough for four, and the second warpgroup would repeat the first one's work. It does not look into
            # branches. This one is always taken.
            weights = logits
            decay = tl.zeros_like(maximum)
            if first < count:
                weights, decay, maximum, total = _softmax_step(logits, valid, maximum, total)
        else:
            weights, decay, maximum, total = _softmax_step(logits, valid, maximum, total)
        output = output * decay[:, None]
        output = tl.dot(weights.to(query.dtype), values, output, input_precision="ieee")
    return output, total, maximum


@triton.jit
def _split_kernel(
    q_nope_ptr,
    q_rope_ptr,
    kv_ptr,
    indices_ptr,
    counts_ptr,
    last_slots_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    nope_stride_row,
    nope_stride_head,
    rope_stride_row,
    rope_stride_head,
    kv_stride,
    max_blocks,
    logit_scale,
    kv_scale,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    NATIVE: tl.constexpr,
    UPCAST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    await_inputs(DEPENDENT)
    # The head tiles of a split run side by side, so that only the first one reads the cache from memory.
    heads = tl.program_id(0) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    tokens = tl.arange(0, BLOCK_TOKENS)
    latent_dims = tl.arange(0, LATENT)
    rope_dims = tl.arange(0, ROPE)
    in_heads = heads < HEADS
    # Splits take tiles in turn: whatever the count on the device is, they differ by one tile at most.
    first_block = split * (BLOCK_TOKENS // BLOCK)
    indices_ptr += row * max_blocks
    # No load waits for another one: an id beyond the count is read as well, whatever it is, and dropped afterwards.
    count = tl.load(counts_ptr + row)
    ids = load_ids(indices_ptr, first_block, max_blocks, tokens, BLOCK)
    last_slot = tl.load(last_slots_ptr + row)
    q_nope_ptr += row * nope_stride_row + heads[:, None] * nope_stride_head
    q_rope_ptr += row * rope_stride_row + heads[:, None] * rope_stride_head
    query = tl.load(q_nope_ptr + latent_dims[None, :], mask=in_heads[:, None], other=0.0)
    rotated_query = tl.load(q_rope_ptr + rope_dims[None, :], mask=in_heads[:, None], other=0.0)
    if UPCAST:
        query = query.to(tl.float32)
        rotated_query = rotated_query.to(tl.float32)
    if (first_block < count) | (SPLITS == 1):
        output, total, maximum = _attend(
            query,
            rotated_query,
            kv_ptr,
            indices_ptr,
            tl.where(first_block + tokens // BLOCK < count, ids, -1),
            first_block,
            count,
            last_slot,
            kv_stride,
            logit_scale,
            SPLITS * BLOCK_TOKENS // BLOCK,
            LATENT,
            ROPE,
            BLOCK,
            BLOCK_TOKENS,
            TILE,
            NATIVE,
            BLOCK_HEADS >= _WGMMA_ROWS,
        )
        output *= (kv_scale / tl.where(total == 0.0, 1.0, total))[:, None]
        hand_on(
            output,
            maximum + tl.log2(total),
            heads,
            in_heads,
            split,
            out_ptr + row * HEADS * LATENT,
            partial_ptr + row * SPLITS * HEADS * LATENT,
            lse_ptr + row * SPLITS * HEADS,
            HEADS,
            LATENT,
            SPLITS,
        )


@triton.jit(do_not_specialize=["rows", "width"])
def _tokens_kernel(
    indices_ptr,
    counts_ptr,
    last_slots_ptr,
    tokens_ptr,
    rows,
    width,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    await_inputs(DEPENDENT)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    count = tl.load(counts_ptr + row, mask=row < rows, other=0)
    last_slot = tl.load(last_slots_ptr + row, mask=row < rows, other=0)
    pointers = indices_ptr + row.to(tl.int64) * width + count - 1
    newest = tl.load(pointers, mask=count > 0, other=-1).to(tl.int64)
    unwritten = BLOCK - 1 - last_slot % BLOCK
    unread = tl.where((count > 0) & (newest == last_slot // BLOCK), unwritten, 0)
    tl.store(tokens_ptr + row, (count * BLOCK - unread).to(tl.int32), mask=row < rows)


def selected_tokens(
    indices: torch.Tensor, counts: torch.Tensor, last_slots: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Tokens that each row attends to, where the block of its newest slot, if it is selected, is the last one.

    Args:
        indices: ``[B, 1, K]``, as all else see ``sparse_mla_decode.sparse_mla_decode``; ``B`` is not 0.
        counts: ``[B, 1]``.
        last_slots: ``[B]``.
        block_size: slots per block.

    Returns:
        ``[B]`` int32.
    """
    batch, _, width = indices.shape
    tokens = torch.empty(batch, dtype=torch.int32, device=indices.device)
    dependent = dependent_launch(indices.device)
    _tokens_kernel[(triton.cdiv(batch, _COUNTED_ROWS),)](
        *(indices, counts, last_slots, tokens, batch, width),
        BLOCK=block_size,
        ROWS=_COUNTED_ROWS,
        DEPENDENT=dependent,
        num_warps=_COUNTED_ROWS // 32,
        launch_pdl=dependent,
    )
    return tokens


def plan(
    batch: int, num_heads: int, blocks: int, block_size: int, device: torch.device, config: Config | None = None
) -> tuple[Config, int, int, int]:
    """Return the launch config of a call; ``blocks`` are those that most rows select at most.

    Returns:
        Its parameters, the heads and the blocks of a tile, and the splits of each row.
    """
    config = config or default_config(num_heads, block_size, properties(device))
    block_heads = min(config.block_heads, max(MIN_DOT, triton.next_power_of_2(num_heads)))
    tile_blocks = max(config.block_tokens, block_size) // block_size
    programs = config.programs_per_processor * num_processors(device)
    tiles = planned_rows(batch) * triton.cdiv(num_heads, block_heads)
    splits = num_splits(tiles, blocks, tile_blocks, programs)
    return config, block_heads, tile_blocks, splits


def sparse_mla_decode(
    inputs: Inputs,
    out: torch.Tensor,
    config: Config | None = None,
    usual_blocks: int | None = None,
) -> torch.Tensor:
    """See ``sparse_mla_decode.sparse_mla_decode``."""
    q_nope, q_rope, kv_cache = inputs.q_nope, inputs.q_rope, inputs.kv_cache
    batch, num_heads, latent_dim = q_nope.shape
    if out.numel() == 0:
        return out
    max_blocks = inputs.indices.shape[2]
    sizes = (batch, num_heads, usual_blocks or max_blocks, inputs.block_size)
    config, block_heads, tile_blocks, splits = plan(*sizes, q_nope.device, config)
    partial, lse = split_tensors(batch * num_heads, splits, latent_dim, out.dtype, config.narrow, out.device)
    dependent = dependent_launch(q_nope.device)
    _split_kernel[(triton.cdiv(num_heads, block_heads), splits, batch)](
        *(q_nope, q_rope, kv_cache, inputs.indices, inputs.counts, inputs.last_slots, out, partial, lse),
        *q_nope.stride()[:2],
        *q_rope.stride()[:2],
        kv_cache.stride(0),
        max_blocks,
        inputs.sm_scale * inputs.kv_scale * LOG2_E,
        inputs.kv_scale,
        HEADS=num_heads,
        BLOCK_HEADS=block_heads,
        LATENT=latent_dim,
        ROPE=q_rope.shape[2],
        BLOCK=inputs.block_size,
        BLOCK_TOKENS=tile_blocks * inputs.block_size,
        SPLITS=splits,
        TILE=TILE,
        NATIVE=converts_float8(q_nope.device),
        # The interpreter multiplies the bit patterns of bfloat16.
        UPCAST=knobs.runtime.interpret,
        DEPENDENT=dependent,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        launch_pdl=dependent,
    )
    if splits > 1:
        combine(partial, lse, inputs.counts, out, splits, tile_blocks, dependent)
    return out


def default_config(num_heads: int, block_size: int, gpu: Properties) -> Config:
    """The first of `CONFIGS` for these heads and blocks that such a GPU's multiprocessor can run."""
    padded_heads = max(MIN_DOT, triton.next_power_of_2(num_heads))
    most = min(padded_heads, most_latent_rows(gpu))
    for config in CONFIGS:
        fits = config.block_tokens >= block_size and config.shared_memory <= gpu.shared_memory
        if fits and config.block_heads <= most:
            return config
    return CONFIGS[-1]
