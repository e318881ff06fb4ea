"""Triton kernel of Skip-Softmax decode over latents: split over the blocks of a row, then combined."""

# Type checkers know neither the launch options of a kernel nor its compile-time values.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton import knobs

from ..common.flash_decode import combine, hand_on, num_splits, split_tensors
from ..common.launch import (
    LOG2_E,
    Properties,
    await_inputs,
    dependent_launch,
    most_latent_rows,
    num_processors,
    planned_rows,
    properties,
)
from ..skip_softmax_decode.reference import BLOCK_KEYS, LOCAL_BLOCKS
from ..skip_softmax_decode.triton import load_pages, threshold_of
from .reference import HEAD_GROUP, Inputs

# Rows of the smallest product that Hopper's warpgroup instructions compute.
_WGMMA_ROWS = tl.constexpr(64)


@dataclass(frozen=True)
class Config:
    """Launch parameters: heads of a program, warps, pipeline stages, and programs aimed for per multiprocessor.

    With ``narrow`` the results of the splits have the dtype of the output instead of float32. ``shared_memory`` is what
    this takes on Hopper with a latent of 512 in two bytes, in bytes; nothing takes more.
    """

    block_heads: int
    num_warps: int = 8
    num_stages: int = 2
    programs_per_processor: int = 1
    narrow: bool = True
    shared_memory: int = 0


# By preference; not measured yet. See ``sparse_mla_decode.triton`` for why more heads are better; a tile has all keys
# of a block, which are judged together.
CONFIGS = (
    Config(64, shared_memory=229376),
    Config(32, shared_memory=114688),
    Config(16, shared_memory=94208),
)


@triton.jit
def _block_of(step, split, blocks, LOCAL_BLOCKS: tl.constexpr, SPLITS: tl.constexpr):
    """The block of each step: before step 0 the first one and the newest ones, from then on those of the split."""
    near = step + 1 + LOCAL_BLOCKS
    return tl.where(step < 0, tl.where(near == 0, 0, tl.maximum(blocks - near, 0)), split + step * SPLITS)


@triton.jit
def _attend(
    query,
    rotated_query,
    kv_ptr,
    table_ptr,
    length,
    blocks,
    split,
    in_heads,
    sparse,
    gap,
    kv_stride,
    scale,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD_GROUP: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    LOCAL_BLOCKS: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Online softmax over one split's blocks: unnormalised output, row sums, row maxima, blocks skipped by groups.

    Splits take blocks in turn: whatever the length on the device is, they differ by one block at most. Maxima stay
    products of query and key, and ``gap`` is the logarithm of the threshold in these units.
    """
    HEADS: tl.constexpr = query.shape[0]
    GROUPS: tl.constexpr = HEADS // HEAD_GROUP
    tokens = tl.arange(0, BLOCK_KEYS)
    latent_dims = tl.arange(0, LATENT)
    rope_dims = LATENT + tl.arange(0, ROPE)
    in_groups = tl.max(tl.reshape(in_heads.to(tl.int32), [GROUPS, HEAD_GROUP]), axis=1)
    largest = tl.full([HEADS], float("-inf"), tl.float32)
    maximum = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.full([HEADS], 0.0, tl.float32)
    output = tl.full([HEADS, LATENT], 0.0, tl.float32)
    skipped = tl.full([], 0, tl.int32)
    # What all blocks are compared with is looked at by the same loop: its keys are on their way as those of others are,
    # and take no shared memory of their own.
    first = tl.where(sparse, -1 - LOCAL_BLOCKS, 0)
    pages = load_pages(table_ptr, _block_of(first, split, blocks, LOCAL_BLOCKS, SPLITS), length, tokens, PAGE)
    for step in range(first, tl.cdiv(blocks - split, SPLITS)):
        block = _block_of(step, split, blocks, LOCAL_BLOCKS, SPLITS)
        next_block = _block_of(step + 1, split, blocks, LOCAL_BLOCKS, SPLITS)
        # The pages of a block are loaded one block early, or its keys would wait for them.
        ahead = load_pages(table_ptr, next_block, length, tokens, PAGE)
        valid = block * BLOCK_KEYS + tokens < length
        tokens_ptr = kv_ptr + (pages.to(tl.int64) * PAGE + tokens % PAGE)[:, None] * kv_stride
        pages = ahead
        latent = tl.load(tokens_ptr + latent_dims[None, :], mask=valid[:, None], other=0.0).to(query.dtype)
        rotated = tl.load(tokens_ptr + rope_dims[None, :], mask=valid[:, None], other=0.0).to(query.dtype)
        # Two products that are added afterwards, see ``sparse_mla_decode.triton``.
        logits = tl.dot(query, tl.trans(latent), input_precision="ieee")
        logits += tl.dot(rotated_query, tl.trans(rotated), input_precision="ieee")
        logits = tl.where(valid[None, :], logits, float("-inf"))
        # Not a number counts as infinite: the hardware's maximum would drop it.
        reached = tl.max(tl.where(logits < float("inf"), logits, float("inf")), axis=1)
        largest = tl.where(step < 0, tl.maximum(largest, reached), largest)
        limit = tl.where(largest < float("inf"), largest + gap, float("-inf"))
        needed = tl.where(in_heads & (reached >= limit), 1, 0)
        needed = tl.max(tl.reshape(needed, [GROUPS, HEAD_GROUP]), axis=1)
        needed = tl.where((block == 0) | (block >= blocks - LOCAL_BLOCKS), in_groups, needed)
        if step >= 0:
            skipped += tl.sum(in_groups - needed, axis=0)
        if (step >= 0) & (tl.max(needed, axis=0) > 0):
            kept = tl.reshape(tl.broadcast_to(needed[:, None], [GROUPS, HEAD_GROUP]), [HEADS]) > 0
            new_maximum = tl.maximum(maximum, tl.where(kept, reached, float("-inf")))
            # Infinite keys may leave a query without any finite logit, and -inf - -inf would be NaN.
            finite = tl.where(new_maximum == float("-inf"), 0.0, new_maximum) * scale
            decay = tl.exp2(maximum * scale - finite)
            weights = tl.exp2(tl.where(kept[:, None], logits, float("-inf")) * scale - finite[:, None])
            total = total * decay + tl.sum(weights, axis=1)
            values = latent
            if (kv_ptr.dtype.element_ty.primitive_bitwidth == 8) & (not WIDE):
                # Here a float8 load for both would not be pipelined. The other policy keeps the two from becoming one.
                pointers = tokens_ptr + latent_dims[None, :]
                values = tl.load(pointers, mask=valid[:, None], other=0.0, eviction_policy="evict_first")
                values = values.to(query.dtype)
            output = output * decay[:, None]
            output = tl.dot(weights.to(query.dtype), values, output, input_precision="ieee")
            maximum = new_maximum
    return output, total, maximum, skipped


@triton.jit(do_not_specialize=["table_stride"])
def _split_kernel(
    q_nope_ptr,
    q_rope_ptr,
    kv_ptr,
    table_ptr,
    n_pages_ptr,
    last_slots_ptr,
    factor_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    stats_ptr,
    nope_stride_row,
    nope_stride_head,
    rope_stride_row,
    rope_stride_head,
    kv_stride,
    table_stride,
    scale,
    kv_scale,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    HEAD_GROUP: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    LOCAL_BLOCKS: tl.constexpr,
    SPLITS: tl.constexpr,
    UPCAST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    await_inputs(DEPENDENT)
    # The head tiles of a split run side by side, so that only the first one reads the cache from memory.
    first_head = tl.program_id(0) * BLOCK_HEADS
    heads = first_head + tl.arange(0, BLOCK_HEADS)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    latent_dims = tl.arange(0, LATENT)
    rope_dims = tl.arange(0, ROPE)
    in_heads = heads < HEADS
    n_pages = tl.load(n_pages_ptr + row)
    last_slot = tl.load(last_slots_ptr + row)
    factor = tl.load(factor_ptr + row)
    length = tl.where(n_pages > 0, (n_pages - 1) * PAGE + (last_slot % PAGE).to(tl.int32) + 1, 0)
    blocks = tl.cdiv(length, BLOCK_KEYS)
    if (split < blocks) | (SPLITS == 1):
        sparse, gap = threshold_of(factor, length, scale)
        nope_rows = q_nope_ptr + row * nope_stride_row + heads[:, None] * nope_stride_head
        rope_rows = q_rope_ptr + row * rope_stride_row + heads[:, None] * rope_stride_head
        query = tl.load(nope_rows + latent_dims[None, :], mask=in_heads[:, None], other=0.0)
        rotated_query = tl.load(rope_rows + rope_dims[None, :], mask=in_heads[:, None], other=0.0)
        if UPCAST:
            query = query.to(tl.float32)
            rotated_query = rotated_query.to(tl.float32)
        output, total, maximum, skipped = _attend(
            query,
            rotated_query,
            kv_ptr,
            table_ptr + row * table_stride,
            length,
            blocks,
            split,
            in_heads,
            sparse,
            gap,
            kv_stride,
            scale,
            LATENT,
            ROPE,
            PAGE,
            HEAD_GROUP,
            BLOCK_KEYS,
            LOCAL_BLOCKS,
            SPLITS,
            BLOCK_HEADS >= _WGMMA_ROWS,
        )
        output *= (kv_scale / tl.where(total == 0.0, 1.0, total))[:, None]
        hand_on(
            output,
            maximum * scale + tl.log2(total),
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
        if stats_ptr is not None:
            groups = tl.cdiv(tl.minimum(HEADS - first_head, BLOCK_HEADS), HEAD_GROUP)
            visited = tl.where(sparse, tl.cdiv(blocks - split, SPLITS) * groups, 0)
            tl.atomic_add(stats_ptr, visited.to(tl.int64), sem="relaxed")
            tl.atomic_add(stats_ptr + 1, skipped.to(tl.int64), sem="relaxed")


def default_config(num_heads: int, gpu: Properties) -> Config:
    """The first of `CONFIGS` for these heads that such a GPU's multiprocessor can run."""
    padded_heads = max(HEAD_GROUP, triton.next_power_of_2(num_heads))
    most = min(padded_heads, most_latent_rows(gpu))
    fitting = (one for one in CONFIGS if one.shared_memory <= gpu.shared_memory and one.block_heads <= most)
    return next(fitting, CONFIGS[-1])


def plan(
    batch: int, num_heads: int, pages: int, page_size: int, device: torch.device, config: Config | None = None
) -> tuple[Config, int, int]:
    """Return the launch config of a call; ``pages`` are those that most rows hold at most.

    Returns:
        Its parameters, the tiles of heads, and the splits of each row.
    """
    config = config or default_config(num_heads, properties(device))
    tiles = triton.cdiv(num_heads, config.block_heads)
    programs = config.programs_per_processor * num_processors(device)
    return config, tiles, num_splits(planned_rows(batch) * tiles, pages, BLOCK_KEYS // page_size, programs)


def skip_softmax_mla_decode(
    inputs: Inputs,
    out: torch.Tensor,
    stats: torch.Tensor | None = None,
    config: Config | None = None,
    usual_pages: int | None = None,
) -> torch.Tensor:
    """See ``skip_softmax_mla_decode.skip_softmax_mla_decode``."""
    q_nope, q_rope, kv_cache = inputs.q_nope, inputs.q_rope, inputs.kv_cache
    page_table, n_pages = inputs.page_table, inputs.n_pages
    batch, num_heads, latent_dim = q_nope.shape
    if out.numel() == 0:
        return out
    sizes = (batch, num_heads, usual_pages or page_table.shape[1], inputs.page_size)
    config, tiles, splits = plan(*sizes, q_nope.device, config)
    partial, lse = split_tensors(batch * num_heads, splits, latent_dim, out.dtype, config.narrow, out.device)
    dependent = dependent_launch(q_nope.device)
    _split_kernel[(tiles, splits, batch)](
        *(q_nope, q_rope, kv_cache, page_table, n_pages, inputs.last_slots, inputs.threshold_scale_factor),
        *(out, partial, lse, stats),
        *q_nope.stride()[:2],
        *q_rope.stride()[:2],
        *(kv_cache.stride(0), page_table.stride(0), inputs.sm_scale * inputs.kv_scale * LOG2_E, inputs.kv_scale),
        HEADS=num_heads,
        BLOCK_HEADS=config.block_heads,
        HEAD_GROUP=HEAD_GROUP,
        LATENT=latent_dim,
        ROPE=q_rope.shape[2],
        PAGE=inputs.page_size,
        BLOCK_KEYS=BLOCK_KEYS,
        LOCAL_BLOCKS=LOCAL_BLOCKS,
        SPLITS=splits,
        # The interpreter multiplies the bit patterns of bfloat16.
        UPCAST=knobs.runtime.interpret,
        DEPENDENT=dependent,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        launch_pdl=dependent,
    )
    if splits > 1:
        # One count for all heads of a row, whose results lie side by side in each split.
        combine(partial, lse, n_pages[:, None], out, splits, BLOCK_KEYS // inputs.page_size, dependent)
    return out
