"""Triton kernel of sparse decode attention: split over the selected pages, then combined."""

# Type checkers know neither the launch options of a kernel nor its compile-time values.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from triton import knobs

from ..common.flash_decode import cap_logits, combine, hand_on, split_tensors
from ..common.launch import LOG2_E, MIN_DOT, await_inputs, dependent_launch
from .plan import Config, combines, plan
from .reference import Inputs


@triton.jit
def load_ids(indices_ptr, first, end, tokens, PAGE: tl.constexpr):
    """The page of each of one tile's tokens; -1 for positions from ``end`` on."""
    position = first + tokens // PAGE
    return tl.load(indices_ptr + position, mask=position < end, other=-1)


@triton.jit
def token_slots(page, last_slot, tokens, PAGE: tl.constexpr):
    """Slots of one tile's tokens, and which of them hold a token of a selected page."""
    slot = page.to(tl.int64) * PAGE + tokens % PAGE
    return slot, (page >= 0) & ((page != last_slot // PAGE) | (slot <= last_slot))


@triton.jit
def _load_rows(pointers, valid, dims, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    if DIM == BLOCK_DIM:
        return tl.load(pointers, mask=valid[:, None], other=0.0)
    else:
        return tl.load(pointers, mask=valid[:, None] & (dims < DIM)[None, :], other=0.0)


@triton.jit
def _attend(
    query,
    k_ptr,
    v_ptr,
    indices_ptr,
    first_ids,
    first_page,
    count,
    last_slot,
    k_stride_slot,
    v_stride_slot,
    logit_scale,
    soft_cap,
    STEP_PAGES: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_V_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """Online softmax over one split's tiles: unnormalised output, row sums and row maxima (base 2).

    The page ids of a tile are loaded one tile early: loads of keys and values that waited for them would leave the
    pipeline one tile deep, whatever its stages.
    """
    tokens = tl.arange(0, BLOCK_TOKENS)
    dims = tl.arange(0, BLOCK_DIM)
    v_dims = tl.arange(0, BLOCK_V_DIM)
    maximum = tl.full([query.shape[0]], float("-inf"), tl.float32)
    total = tl.full([query.shape[0]], 0.0, tl.float32)
    output = tl.full([query.shape[0], BLOCK_V_DIM], 0.0, tl.float32)
    ids = first_ids
    # The newest position that each member sees, counted from the row's newest one.
    horizon = tl.arange(0, query.shape[0]) // (GROUP // QUERIES) - (QUERIES - 1)
    for first in range(first_page, count, STEP_PAGES):
        slot, valid = token_slots(ids, last_slot, tokens, PAGE)
        seen = valid[None, :]
        if QUERIES > 1:
            # Right in the newest pages, with which every selection ends, and lower than any horizon in all others.
            position = tokens - last_slot % PAGE - (count - 1 - first) * PAGE
            seen = seen & (position[None, :] <= horizon[:, None])
        ids = load_ids(indices_ptr, first + STEP_PAGES, count, tokens, PAGE)
        keys = _load_rows(k_ptr + slot[:, None] * k_stride_slot + dims[None, :], valid, dims, DIM, BLOCK_DIM)
        logits = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision="ieee") * logit_scale
        logits = tl.where(seen, cap_logits(logits, soft_cap), float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(logits, axis=1))
        # A tile without a valid token leaves the maximum at -inf, and -inf - -inf would be NaN.
        finite = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        decay = tl.exp2(maximum - finite)
        weights = tl.exp2(logits - finite[:, None])
        values = _load_rows(v_ptr + slot[:, None] * v_stride_slot + v_dims[None, :], valid, v_dims, V_DIM, BLOCK_V_DIM)
        total = total * decay + tl.sum(weights, axis=1)
        output = output * decay[:, None]
        output = tl.dot(weights.to(query.dtype), values.to(query.dtype), output, input_precision="ieee")
        maximum = new_maximum
    return output, total, maximum


@triton.jit
def _split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    indices_ptr,
    counts_ptr,
    last_slots_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    arrivals_ptr,
    sinks_ptr,
    q_stride_row,
    q_stride_head,
    k_stride_slot,
    k_stride_head,
    v_stride_slot,
    v_stride_head,
    max_pages,
    logit_scale,
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
    BLOCK_TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_MEMBERS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    FUSED: tl.constexpr,
    UPCAST: tl.constexpr,
    DEPENDENT: tl.constexpr,
    QUERIES: tl.constexpr,
):
    await_inputs(DEPENDENT)
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    pair = (row * HEADS + head).to(tl.int64)
    tokens, members, dims = tl.arange(0, BLOCK_TOKENS), tl.arange(0, BLOCK_GROUP), tl.arange(0, BLOCK_DIM)
    # Splits take tiles in turn: whatever the count on the device is, they differ by one tile at most.
    first_page = split * (BLOCK_TOKENS // PAGE)
    indices_ptr += pair * max_pages
    q_ptr += row.to(tl.int64) * q_stride_row + head * GROUP * q_stride_head
    if sinks_ptr is not None:
        sinks_ptr += head * GROUP
    # No load waits for another one: an id beyond the count is read as well, whatever it is, and dropped afterwards.
    count = tl.load(counts_ptr + pair)
    ids = load_ids(indices_ptr, first_page, max_pages, tokens, PAGE)
    last_slot = tl.load(last_slots_ptr + row)
    in_query = (members < GROUP)[:, None] & (dims < DIM)[None, :]
    query = tl.load(q_ptr + members[:, None] * q_stride_head + dims[None, :], mask=in_query, other=0.0)
    if UPCAST:
        query = query.to(tl.float32)
    # The first one writes the zeros of a row without pages.
    if (first_page < count) | (split == 0):
        output, total, maximum = _attend(
            query,
            k_ptr + head * k_stride_head,
            v_ptr + head * v_stride_head,
            indices_ptr,
            tl.where(first_page + tokens // PAGE < count, ids, -1),
            first_page,
            count,
            last_slot,
            *(k_stride_slot, v_stride_slot, logit_scale, soft_cap),
            SPLITS * BLOCK_TOKENS // PAGE,
            DIM,
            BLOCK_DIM,
            V_DIM,
            BLOCK_V_DIM,
            PAGE,
            BLOCK_TOKENS,
            GROUP,
            QUERIES,
        )
        output *= (v_scale / tl.where(total == 0.0, 1.0, total))[:, None]
        hand_on(
            output,
            maximum + tl.log2(total),
            members,
            members < GROUP,
            split,
            out_ptr + pair * GROUP * V_DIM,
            partial_ptr + pair * SPLITS * GROUP * V_DIM,
            lse_ptr + pair * SPLITS * GROUP,
            GROUP,
            V_DIM,
            SPLITS,
            tl.minimum(SPLITS, tl.cdiv(count, BLOCK_TOKENS // PAGE)),
            arrivals_ptr + pair,
            BLOCK_MEMBERS,
            BLOCK_SPLITS,
            FUSED,
            sinks_ptr,
        )


def sparse_decode(
    inputs: Inputs,
    out: torch.Tensor,
    config: Config | None = None,
    usual_pages: int | None = None,
    arrivals: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``sparse_decode.sparse_decode``."""
    q, k_cache, v_cache = inputs.q, inputs.k_cache, inputs.v_cache
    batch, num_q_heads, dim = q.shape
    heads, v_dim = v_cache.shape[1:]
    counts, max_pages = inputs.counts, inputs.indices.shape[2]
    if batch == 0:
        return out
    group = num_q_heads // heads
    # More than 16 of them in a warp would spill.
    members = triton.next_power_of_2(group)
    sizes = (batch, group, heads, dim, v_dim, usual_pages or max_pages, inputs.page_size)
    config, tile_pages, splits = plan(*sizes, k_cache.dtype, q.device, config)
    partial, lse = split_tensors(batch * num_q_heads, splits, v_dim, q.dtype, config.narrow, q.device)
    dependent = dependent_launch(q.device)
    fused = arrivals is not None and combines(splits, group, v_dim, config.num_warps)
    tensors = (q, k_cache, v_cache, inputs.indices, counts, inputs.last_slots, out, partial, lse)
    strides = [stride for tensor in (q, k_cache, v_cache) for stride in tensor.stride()[:2]]
    _split_kernel[(splits, heads, batch)](
        *(*tensors, arrivals if fused else counts, inputs.sinks, *strides, max_pages),
        inputs.sm_scale * inputs.k_scale * LOG2_E,
        None if inputs.soft_cap is None else inputs.soft_cap * LOG2_E,
        inputs.v_scale,
        **_shape_constants(heads, group, dim, v_dim),
        PAGE=inputs.page_size,
        BLOCK_TOKENS=tile_pages * inputs.page_size,
        SPLITS=splits,
        BLOCK_MEMBERS=members,
        BLOCK_SPLITS=triton.next_power_of_2(splits),
        FUSED=fused,
        # The interpreter multiplies the bit patterns of bfloat16.
        UPCAST=knobs.runtime.interpret,
        DEPENDENT=dependent,
        QUERIES=inputs.queries,
        num_warps=config.num_warps if inputs.queries == 1 else max(config.num_warps, members // MIN_DOT),
        num_stages=config.num_stages,
        launch_pdl=dependent,
    )
    if splits > 1 and not fused:
        combine(partial, lse, counts, out, splits, tile_pages, dependent, inputs.sinks)
    return out


def _shape_constants(heads: int, group: int, dim: int, v_dim: int) -> dict[str, int]:
    return {
        "HEADS": heads,
        "GROUP": group,
        "BLOCK_GROUP": max(MIN_DOT, triton.next_power_of_2(group)),
        "DIM": dim,
        "BLOCK_DIM": triton.next_power_of_2(dim),
        "V_DIM": v_dim,
        "BLOCK_V_DIM": triton.next_power_of_2(v_dim),
    }
