"""FlashInfer's ``VariableBlockSparseAttentionWrapper`` as a peer of ``bench_prefill``: attention to whole blocks.

It attends to what it is told to, so the blocks are chosen by an oracle: the exact softmax mass of each block of keys
over each block of queries, summed over the query heads of a KV head, which is what FlashInfer's mask is by. Of all KV
heads and query blocks together those blocks are taken that hold most per pair, until the share of causal pairs asked
for is left out. No selection of blocks keeps more of the mass at equal sparsity. Neither that nor FlashInfer's plan,
which is another one in every layer, is timed: what is measured is the bound of every method of blocks on this kernel.

The plan (`flashinfer.sparse`, 0.6) writes out an index for each key of each block of queries, as int64 in several
copies. What it takes is worked out beforehand, and a prompt at which that is more than `PLAN_LIMIT` is left out.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import partial

import torch

from eval.lab.kernels.kernel_attention import WORKSPACE_BYTES
from eval.lab.kernels.prefill_inputs import Prompt, Shape

# Four int64 of each index at the peak of the plan.
INDEX_BYTES = 32
PLAN_LIMIT = 8 * 2**30
# Tiles of all heads and query blocks, of which FlashInfer's own 8 MiB hold too few.
PLAN_WORKSPACE_BYTES = 128 * 2**20


def plan_bytes(shape: Shape, sparsity: float) -> int:
    """Bytes of device memory that FlashInfer's plan takes for its indices, at its peak."""
    pairs = (1 - sparsity) * shape.length * (shape.length + 1) / 2 * shape.kv_heads
    return math.ceil(pairs / shape.block_size) * INDEX_BYTES


def best_blocks(mass: torch.Tensor, shape: Shape, sparsity: float) -> torch.Tensor:
    """The blocks that keep most of the mass when a share of the causal pairs is left out.

    The block of the diagonal is always kept, because the kernel masks by the end of a query's own keys, and the first
    one, by which the mass kept is measured (`Prompt`).

    Args:
        mass: of each block, see ``Prompt.block_mass``.
        shape: of the prompt.
        sparsity: the share; what is left out is at least that much, by less than a block.

    Returns:
        ``[kv_heads, blocks, blocks]`` bool.

    Raises:
        ValueError: the blocks that are always kept are more than that leaves.
    """
    sizes = block_sizes(shape).to(mass.device, torch.float64)
    pairs = (sizes[:, None] * sizes).tril()
    pairs.diagonal().copy_(sizes * (sizes + 1) / 2)
    kept = torch.eye(len(sizes), dtype=torch.bool, device=mass.device)
    kept[:, 0] = True
    room = (1 - sparsity) * pairs.sum() - pairs[kept].sum()
    if room < 0:
        raise ValueError(f"sparsity {sparsity:g}: the first block and the diagonal alone are more than it leaves")
    kept = kept.expand(mass.shape).clone()
    pairs = pairs.expand(mass.shape)
    # Of equal ones the earlier are taken.
    worth = torch.where(kept | (pairs == 0), -1.0, mass / pairs.clamp(min=1)).flatten()
    order = worth.argsort(descending=True, stable=True)
    fitting = (pairs.flatten()[order].cumsum(0) <= room * mass.shape[0]) & (worth[order] >= 0)
    kept.view(-1)[order[fitting]] = True
    return kept


def block_sizes(shape: Shape) -> torch.Tensor:
    """Tokens of each block, ``[blocks]`` int32; the last may have fewer."""
    starts = torch.arange(0, shape.length, shape.block_size, dtype=torch.int32)
    return (shape.length - starts).clamp(max=shape.block_size)


def flashinfer_blocks(prompt: Prompt, sparsity: float) -> Callable[[torch.Tensor | None], torch.Tensor]:
    """FlashInfer over the whole prompt at once, at the best blocks.

    Raises:
        ValueError: the plan would take more than `PLAN_LIMIT`, or see `best_blocks`.
    """
    shape, device = prompt.shape, prompt.q.device
    needed = plan_bytes(shape, sparsity)
    if needed > PLAN_LIMIT:
        raise ValueError(f"its plan takes {needed / 2**30:.1f} GiB of indices, allowed are {PLAN_LIMIT / 2**30:g} GiB")
    library = importlib.import_module("flashinfer")
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = library.VariableBlockSparseAttentionWrapper(workspace)
    wrapper.reset_workspace_buffer(workspace, torch.empty(PLAN_WORKSPACE_BYTES, dtype=torch.uint8, device=device))
    mask = best_blocks(prompt.block_mass, shape, sparsity)
    sizes = block_sizes(shape).to(device).expand(shape.kv_heads, -1).contiguous()
    heads = (shape.q_heads, shape.kv_heads, shape.dim)
    types = {"q_data_type": prompt.q.dtype, "kv_data_type": prompt.k.dtype}
    wrapper.plan(mask, sizes, sizes, *heads, causal=True, sm_scale=prompt.scale, **types)
    k, v = (part.transpose(0, 1).contiguous() for part in (prompt.k, prompt.v))
    call = partial(wrapper.run, prompt.q.transpose(0, 1), k, v)
    return lambda _: call().transpose(0, 1)
