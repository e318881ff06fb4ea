"""Triton kernel of Skip-Softmax decode: split over the blocks of a row, then combined as sparse decode does."""

# Type checkers know neither the launch options of a kernel nor its compile-time values.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton import knobs

from ..common.flash_decode import cap_logits, combine, hand_on, num_splits, split_tensors
from ..common.launch import LOG2_E, MIN_DOT, await_inputs, dependent_launch, num_processors, planned_rows
from ..common.paged_prefill import load_rows
from .reference import BLOCK_KEYS, LOCAL_BLOCKS, Inputs

# Beyond these a program's queries and values fill the registers of more warps.
_WIDE_DIM = 128
_WIDE_GROUP = 16


@dataclass(frozen=True)
class Config:
    """Launch parameters: warps, pipeline stages, registers of a thread, and programs aimed for per multiprocessor.

    With ``narrow`` the results of the splits have the dtype of the output instead of float32.
    """

    num_warps: int = 4
    num_stages: int = 3
    max_registers: int = 168
    programs_per_processor: int = 3
    narrow: bool = True


def default_config(dim: int, v_dim: int, group: int) -> Config:
    """Not measured yet: the most programs that fit the registers of a multiprocessor of Hopper, without spills.

    The values of a block are loaded when its keys have been judged, and the program waits for them. Meanwhile the
    memory is kept busy by the keys of its next blocks, which are on their way, and by the other programs. With heads
    of more than 256 two blocks of keys would not fit the shared memory of all GPUs, nor two programs the registers.
    """
    if max(dim, v_dim) > 2 * _WIDE_DIM:
        return Config(num_warps=8, num_stages=1, programs_per_processor=1)
    if max(dim, v_dim) > _WIDE_DIM or group > _WIDE_GROUP:
        return Config(num_warps=8, num_stages=2, max_registers=128, programs_per_processor=2)
    return Config()


@triton.jit
def load_pages(table_ptr, block, length, tokens, PAGE: tl.constexpr):
    """The page of each token of one block; any valid one from the row's end on."""
    BLOCK_KEYS: tl.constexpr = tokens.shape[0]
    pointers = table_ptr + block * (BLOCK_KEYS // PAGE) + tokens // PAGE
    return tl.load(pointers, mask=block * BLOCK_KEYS + tokens < length, other=0)


@triton.jit
def threshold_of(factor, length, scale):
    """Whether a row leaves blocks out at all, and the logarithm of its threshold as a product of query and key."""
    sparse = factor > 0
    threshold = tl.minimum(tl.where(sparse, factor, 1.0) / tl.maximum(length, 1).to(tl.float32), 1.0)
    return sparse, tl.log2(threshold) / scale


@triton.jit
def _score(q, k_ptr, pages, valid, k_stride_slot, soft_cap, DIM: tl.constexpr, PAGE: tl.constexpr):
    """Products of the queries with the keys of one block, -inf for those that are not valid, and their row maxima."""
    tokens = tl.arange(0, pages.shape[0])
    dims = tl.arange(0, q.shape[1])
    k_rows = k_ptr + (pages.to(tl.int64) * PAGE + tokens % PAGE) * k_stride_slot
    keys = load_rows(k_rows[:, None] + dims[None, :], valid, dims, DIM)
    logits = tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision="ieee")
    logits = tl.where(valid[None, :], cap_logits(logits, soft_cap), float("-inf"))
    # Not a number counts as infinite: the hardware's maximum would drop it.
    return logits, tl.max(tl.where(logits < float("inf"), logits, float("inf")), axis=1)


@triton.jit
def _attend(
    q,
    k_ptr,
    v_ptr,
    table_ptr,
    length,
    blocks,
    split,
    sparse,
    gap,
    k_stride_slot,
    v_stride_slot,
    scale,
    soft_cap,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_V_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    LOCAL_BLOCKS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Online softmax over one split's blocks: unnormalised output, row sums, row maxima, blocks skipped.

    Splits take blocks in turn: whatever the length on the device is, they differ by one block at most. Maxima stay
    products of query and key, and ``gap`` is the logarithm of the threshold in these units, as ``soft_cap`` is.
    """
    tokens = tl.arange(0, BLOCK_KEYS)
    v_dims = tl.arange(0, BLOCK_V_DIM)
    in_group = tl.arange(0, q.shape[0]) < GROUP
    limit = tl.full([q.shape[0]], float("-inf"), tl.float32)
    maximum = tl.full([q.shape[0]], float("-inf"), tl.float32)
    total = tl.full([q.shape[0]], 0.0, tl.float32)
    output = tl.full([q.shape[0], BLOCK_V_DIM], 0.0, tl.float32)
    skipped = tl.full([], 0, tl.int32)
    pages = load_pages(table_ptr, split, length, tokens, PAGE)
    for step in range(tl.cdiv(blocks - split, SPLITS)):
        block = split + step * SPLITS
        # The pages of a block are loaded one block early, or its keys would wait for them.
        ahead = load_pages(table_ptr, block + SPLITS, length, tokens, PAGE)
        valid = block * BLOCK_KEYS + tokens < length
        logits, reached = _score(q, k_ptr, pages, valid, k_stride_slot, soft_cap, DIM, PAGE)
        pages = ahead
        if sparse & (step == 0):
            # Not before the loop: here the keys of the split's first blocks are on their way already. Those of the sink
            # and local blocks, which all splits look at, come from a cache, and the memory would have nothing to do.
            largest = tl.full([q.shape[0]], float("-inf"), tl.float32)
            for i in tl.range(1 + LOCAL_BLOCKS, num_stages=1):
                near = tl.where(i == 0, 0, tl.maximum(blocks - i, 0))
                near_pages = load_pages(table_ptr, near, length, tokens, PAGE)
                near_valid = tokens < length - near * BLOCK_KEYS
                near_score = _score(q, k_ptr, near_pages, near_valid, k_stride_slot, soft_cap, DIM, PAGE)
                largest = tl.maximum(largest, near_score[1])
            limit = tl.where(largest < float("inf"), largest + gap, float("-inf"))
        needed = tl.max(tl.where(in_group & (reached >= limit), 1, 0), axis=0)
        if (needed > 0) | (block == 0) | (block >= blocks - LOCAL_BLOCKS):
            # Loaded once more, from a cache: kept since the keys were loaded, the pages would take registers.
            v_pages = load_pages(table_ptr, block, length, tokens, PAGE)
            v_rows = v_ptr + (v_pages.to(tl.int64) * PAGE + tokens % PAGE) * v_stride_slot
            # The same as the validity of the keys, but not to the compiler, which would keep that one, too. The values
            # come before the weights, which are worked out while these are on their way.
            v_valid = tokens < length - block * BLOCK_KEYS
            values = load_rows(v_rows[:, None] + v_dims[None, :], v_valid, v_dims, V_DIM)
            new_maximum = tl.maximum(maximum, reached)
            # Infinite keys may leave a query without any finite logit, and -inf - -inf would be NaN.
            finite = tl.where(new_maximum == float("-inf"), 0.0, new_maximum) * scale
            decay = tl.exp2(maximum * scale - finite)
            weights = tl.exp2(logits * scale - finite[:, None])
            total = total * decay + tl.sum(weights, axis=1)
            output = output * decay[:, None]
            output = tl.dot(weights.to(q.dtype), values.to(q.dtype), output, input_precision="ieee")
            maximum = new_maximum
        else:
            skipped += 1
    return output, total, maximum, skipped


@triton.jit(do_not_specialize=["table_stride"])
def _split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    n_pages_ptr,
    last_slots_ptr,
    factor_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    stats_ptr,
    sinks_ptr,
    q_stride_row,
    q_stride_head,
    k_stride_slot,
    k_stride_head,
    v_stride_slot,
    v_stride_head,
    table_stride,
    scale,
    soft_cap,
    v_scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_V_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    LOCAL_BLOCKS: tl.constexpr,
    SPLITS: tl.constexpr,
    UPCAST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    await_inputs(DEPENDENT)
    split = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    members = tl.arange(0, BLOCK_GROUP)
    dims = tl.arange(0, BLOCK_DIM)
    in_group = members < GROUP
    n_pages = tl.load(n_pages_ptr + row)
    last_slot = tl.load(last_slots_ptr + row)
    factor = tl.load(factor_ptr + row)
    length = tl.where(n_pages > 0, (n_pages - 1) * PAGE + (last_slot % PAGE).to(tl.int32) + 1, 0)
    blocks = tl.cdiv(length, BLOCK_KEYS)
    if (split < blocks) | (SPLITS == 1):
        sparse, gap = threshold_of(factor, length, scale)
        q_ptr += row * q_stride_row + head * GROUP * q_stride_head
        q = load_rows(q_ptr + members[:, None] * q_stride_head + dims[None, :], in_group, dims, DIM)
        if UPCAST:
            q = q.to(tl.float32)
        output, total, maximum, skipped = _attend(
            q,
            k_ptr + head.to(tl.int64) * k_stride_head,
            v_ptr + head.to(tl.int64) * v_stride_head,
            table_ptr + row * table_stride,
            length,
            blocks,
            split,
            sparse,
            gap,
            k_stride_slot,
            v_stride_slot,
            scale,
            soft_cap,
            GROUP,
            DIM,
            V_DIM,
            BLOCK_V_DIM,
            PAGE,
            BLOCK_KEYS,
            LOCAL_BLOCKS,
            SPLITS,
        )
        output *= (v_scale / tl.where(total == 0.0, 1.0, total))[:, None]
        hand_on(
            output,
            maximum * scale + tl.log2(total),
            head * GROUP + members,
            in_group,
            split,
            out_ptr + row * (HEADS * GROUP * V_DIM),
            partial_ptr + row * (SPLITS * HEADS * GROUP * V_DIM),
            lse_ptr + row * (SPLITS * HEADS * GROUP),
            HEADS * GROUP,
            V_DIM,
            SPLITS,
            sinks_ptr=sinks_ptr,
        )
        if stats_ptr is not None:
            visited = tl.where(sparse, tl.cdiv(blocks - split, SPLITS), 0)
            tl.atomic_add(stats_ptr, visited.to(tl.int64), sem="relaxed")
            tl.atomic_add(stats_ptr + 1, skipped.to(tl.int64), sem="relaxed")


def plan(
    batch: int,
    q_heads: int,
    heads: int,
    dim: int,
    v_dim: int,
    pages: int,
    page_size: int,
    device: torch.device,
    config: Config | None = None,
) -> tuple[Config, int]:
    """Return the launch config of a call; ``heads`` are KV heads, and ``pages`` those that most rows hold at most.

    Returns:
        Its parameters, and the splits of each row and KV head.
    """
    config = config or default_config(dim, v_dim, q_heads // heads)
    programs = config.programs_per_processor * num_processors(device)
    return config, num_splits(planned_rows(batch) * heads, pages, BLOCK_KEYS // page_size, programs)


def skip_softmax_decode(
    inputs: Inputs,
    out: torch.Tensor,
    stats: torch.Tensor | None = None,
    config: Config | None = None,
    usual_pages: int | None = None,
) -> torch.Tensor:
    """See ``skip_softmax_decode.skip_softmax_decode``."""
    q, k_cache, v_cache = inputs.q, inputs.k_cache, inputs.v_cache
    page_table, n_pages = inputs.page_table, inputs.n_pages
    batch, num_q_heads, dim = q.shape
    heads, v_dim = v_cache.shape[1:]
    if batch == 0:
        return out
    sizes = (batch, num_q_heads, heads, dim, v_dim, usual_pages or page_table.shape[1], inputs.page_size)
    config, splits = plan(*sizes, q.device, config)
    partial, lse = split_tensors(batch * num_q_heads, splits, v_dim, q.dtype, config.narrow, q.device)
    dependent = dependent_launch(q.device)
    group, scale = num_q_heads // heads, inputs.sm_scale * inputs.k_scale
    _split_kernel[(splits, heads, batch)](
        *(q, k_cache, v_cache, page_table, n_pages, inputs.last_slots, inputs.threshold_scale_factor),
        *(out, partial, lse, stats, inputs.sinks),
        *(stride for tensor in (q, k_cache, v_cache) for stride in tensor.stride()[:2]),
        *(page_table.stride(0), scale * LOG2_E, inputs.soft_cap and inputs.soft_cap / scale, inputs.v_scale),
        HEADS=heads,
        GROUP=group,
        BLOCK_GROUP=max(MIN_DOT, triton.next_power_of_2(group)),
        DIM=dim,
        BLOCK_DIM=triton.next_power_of_2(dim),
        V_DIM=v_dim,
        BLOCK_V_DIM=triton.next_power_of_2(v_dim),
        PAGE=inputs.page_size,
        BLOCK_KEYS=BLOCK_KEYS,
        LOCAL_BLOCKS=LOCAL_BLOCKS,
        SPLITS=splits,
        # The interpreter multiplies the bit patterns of bfloat16.
        UPCAST=knobs.runtime.interpret,
        DEPENDENT=dependent,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
        launch_pdl=dependent,
    )
    if splits > 1:
        # One count for all heads of a row, whose results lie side by side in each split.
        tile_pages = BLOCK_KEYS // inputs.page_size
        combine(partial, lse, n_pages[:, None], out, splits, tile_pages, dependent, inputs.sinks)
    return out
