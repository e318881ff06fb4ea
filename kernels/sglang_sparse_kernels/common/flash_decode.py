"""Flash decoding: the programs of a split attend to a part of a row each, and what they hand on is combined.

The split of a row that ends last combines all of them where that is little work; a launch of its own, in which the
heads of a row are combined side by side, costs about 4 us.
"""

# Type checkers know neither the launch options of a kernel nor its compile-time values.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false, reportArgumentType=false

import torch
import triton
import triton.language as tl

from .launch import LOG2_E, await_inputs

# Partial results that one program of the combination holds, and that a warp of it has at least.
_COMBINE_TILE = 4096
_COMBINE_WARP = 1024
_LOG2_E = tl.constexpr(LOG2_E)


def num_splits(pairs: int, max_pages: int, tile_pages: int, programs: int) -> int:
    """Splits per row and KV head: at most ``programs`` in all, and the same number of tiles for each.

    Rounded down: a few programs too many would run alone after all others.
    """
    tiles = max(1, triton.cdiv(max_pages, tile_pages))
    tiles_per_split = triton.cdiv(tiles, max(1, programs // pairs))
    return triton.cdiv(tiles, tiles_per_split)


def split_tensors(
    rows: int, splits: int, v_dim: int, dtype: torch.dtype, narrow: bool, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate what the splits hand on; nothing where there is one alone, which writes the output.

    Args:
        rows: pairs of a row and a query head.
        splits: of each pair.
        v_dim: dimension of a result.
        dtype: of the output.
        narrow: whether the results have the dtype of the output instead of float32.
        device: where the call runs.

    Returns:
        The results, and the logarithms of their sums of weights in float32.
    """
    kept = rows * splits if splits > 1 else 0
    partial = torch.empty(kept * v_dim, dtype=dtype if narrow else torch.float32, device=device)
    return partial, torch.empty(kept, dtype=torch.float32, device=device)


def split_bytes(rows: int, splits: int, v_dim: int, dtype: torch.dtype, narrow: bool) -> int:
    """Bytes of ``split_tensors``."""
    kept = rows * splits if splits > 1 else 0
    return kept * (v_dim * (dtype if narrow else torch.float32).itemsize + torch.float32.itemsize)


@triton.jit
def load_sinks(sinks_ptr, heads, in_group):
    """The attention sinks of some heads, to base 2."""
    return tl.load(sinks_ptr + heads, mask=in_group, other=0.0).to(tl.float32) * _LOG2_E


@triton.jit
def cap_logits(logits, soft_cap):
    """``soft_cap * tanh(logits / soft_cap)``, both in any one unit; the logits themselves where there is no cap."""
    if soft_cap is not None:
        # tanh(x) = 2 * sigmoid(2 * x) - 1
        logits = soft_cap * (2.0 * tl.sigmoid(logits * (2.0 / soft_cap)) - 1.0)
    return logits


@triton.jit
def _combine(
    partial_ptr,
    lse_ptr,
    out_ptr,
    used,
    sinks_ptr,
    GROUP: tl.constexpr,
    BLOCK_MEMBERS: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_V_DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Combine the first ``used`` splits of a row's KV head, in their order."""
    members = tl.arange(0, BLOCK_MEMBERS)[:, None]
    splits = tl.arange(0, BLOCK_SPLITS)[None, :]
    v_dims = tl.arange(0, BLOCK_V_DIM)[None, None, :]
    valid = (splits < used) & (members < GROUP)
    rows = splits * GROUP + members
    # Other programs have just written these: not from a cache that they do not share.
    lse = tl.load(lse_ptr + rows, mask=valid, other=float("-inf"), cache_modifier=".cg")
    in_partial = valid[:, :, None] & (v_dims < V_DIM)
    pointers = partial_ptr + rows[:, :, None] * V_DIM + v_dims
    partial = tl.load(pointers, mask=in_partial, other=0.0, cache_modifier=".cg").to(tl.float32)
    maximum = tl.max(lse, axis=1)
    finite = tl.where(maximum == float("-inf"), 0.0, maximum)
    weights = tl.exp2(lse - finite[:, None])
    total = tl.sum(weights, axis=1)
    if sinks_ptr is not None:
        heads = tl.arange(0, BLOCK_MEMBERS)
        total += tl.exp2(load_sinks(sinks_ptr, heads, heads < GROUP) - finite)
    output = tl.sum(partial * weights[:, :, None], axis=1) / tl.where(total == 0.0, 1.0, total)[:, None]
    v_dims = tl.arange(0, BLOCK_V_DIM)[None, :]
    in_out = (members < GROUP) & (v_dims < V_DIM)
    tl.store(out_ptr + members * V_DIM + v_dims, output.to(out_ptr.dtype.element_ty), mask=in_out)


@triton.jit
def hand_on(
    output,
    lse,
    members,
    in_group,
    split,
    out_ptr,
    partial_ptr,
    lse_ptr,
    GROUP: tl.constexpr,
    V_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    used=0,
    arrivals_ptr=None,
    BLOCK_MEMBERS: tl.constexpr = 1,
    BLOCK_SPLITS: tl.constexpr = 1,
    FUSED: tl.constexpr = False,
    sinks_ptr=None,
):
    """Store what one split has found for some ``members`` of a row's ``GROUP`` heads, or the output if it is the only
    one; with ``FUSED``, of all members, the last of the ``used`` splits combines them.

    The sinks of these heads enter the output alone: once a row, whatever its splits are.
    """
    v_dims = tl.arange(0, output.shape[1])
    in_out = in_group[:, None] & (v_dims < V_DIM)[None, :]
    offsets = members[:, None] * V_DIM + v_dims[None, :]
    if SPLITS == 1 or (FUSED and used <= 1):
        if sinks_ptr is not None:
            output *= (1.0 / (1.0 + tl.exp2(load_sinks(sinks_ptr, members, in_group) - lse)))[:, None]
        tl.store(out_ptr + offsets, output.to(out_ptr.dtype.element_ty), mask=in_out)
    else:
        tl.store(lse_ptr + split * GROUP + members, lse, mask=in_group)
        pointers = partial_ptr + split * GROUP * V_DIM + offsets
        tl.store(pointers, output.to(partial_ptr.dtype.element_ty), mask=in_out)
        if FUSED:
            # One thread counts its program in, after all threads of it have written.
            tl.debug_barrier()
            if tl.atomic_add(arrivals_ptr, 1, sem="acq_rel") == used - 1:
                tl.store(arrivals_ptr, 0)
                _combine(
                    partial_ptr,
                    lse_ptr,
                    out_ptr,
                    used,
                    sinks_ptr,
                    GROUP,
                    BLOCK_MEMBERS,
                    V_DIM,
                    output.shape[1],
                    BLOCK_SPLITS,
                )


@triton.jit
def _combine_kernel(
    partial_ptr,
    lse_ptr,
    counts_ptr,
    out_ptr,
    sinks_ptr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_V_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    TILE_PAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    await_inputs(DEPENDENT)
    q_head = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, BLOCK_SPLITS)
    v_dims = tl.program_id(1) * BLOCK_V_DIM + tl.arange(0, BLOCK_V_DIM)
    in_partial = (splits < SPLITS)[:, None] & (v_dims < V_DIM)[None, :]
    # Splits without pages wrote nothing, so their entries may hold anything. They are loaded all the same: the loads
    # of the count, the sums and the partial results then run at once instead of one after the other.
    pair = q_head // GROUP
    count = tl.load(counts_ptr + pair)
    rows = (pair * SPLITS + splits) * GROUP + q_head % GROUP
    lse = tl.load(lse_ptr + rows, mask=splits < SPLITS, other=float("-inf"))
    partial = tl.load(partial_ptr + rows[:, None] * V_DIM + v_dims[None, :], mask=in_partial, other=0.0).to(tl.float32)
    used = (splits < SPLITS) & (splits * TILE_PAGES < count)
    lse = tl.where(used, lse, float("-inf"))
    partial = tl.where(used[:, None], partial, 0.0)
    maximum = tl.max(lse, axis=0)
    finite = tl.where(maximum == float("-inf"), 0.0, maximum)
    weights = tl.exp2(lse - finite)
    total = tl.sum(weights, axis=0)
    if sinks_ptr is not None:
        total += tl.exp2(load_sinks(sinks_ptr, q_head % HEADS, True) - finite)
    output = tl.sum(partial * weights[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + q_head * V_DIM + v_dims, output.to(out_ptr.dtype.element_ty), mask=v_dims < V_DIM)


def combine(
    partial: torch.Tensor,
    lse: torch.Tensor,
    counts: torch.Tensor,
    out: torch.Tensor,
    splits: int,
    tile_pages: int,
    dependent: bool,
    sinks: torch.Tensor | None = None,
) -> None:
    """Combine the splits of each row and query head in a fixed order.

    Args:
        partial: ``[B * Hq * splits * dv]``, the result of each split, in the dtype of ``out`` or float32.
        lse: ``[B * Hq * splits]`` float32, its logarithm of the sum of weights, to base 2.
        counts: ``[B, Hkv]`` int32, selected pages; splits without any have written nothing.
        out: ``[B, Hq, dv]``, written.
        splits: splits of each KV head.
        tile_pages: pages of a tile, which a split has whole numbers of.
        dependent: launched before the splits have ended.
        sinks: ``[Hq]``, in natural units, or None.
    """
    batch, num_q_heads, v_dim = out.shape
    block_splits = triton.next_power_of_2(splits)
    block_v_dim = min(triton.next_power_of_2(v_dim), max(16, _COMBINE_TILE // block_splits))
    _combine_kernel[(batch * num_q_heads, triton.cdiv(v_dim, block_v_dim))](
        partial,
        lse,
        counts,
        out,
        sinks,
        HEADS=num_q_heads,
        GROUP=num_q_heads // counts.shape[1],
        V_DIM=v_dim,
        BLOCK_V_DIM=block_v_dim,
        SPLITS=splits,
        BLOCK_SPLITS=block_splits,
        TILE_PAGES=tile_pages,
        DEPENDENT=dependent,
        num_warps=min(4, max(1, block_splits * block_v_dim // _COMBINE_WARP)),
        launch_pdl=dependent,
    )
