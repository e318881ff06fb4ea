"""The definition of Skip-Softmax in plain torch."""

import math
from dataclasses import dataclass

import torch

from ..sparse_decode.reference import cap_logits, softmax
from .plan import QueryTile, SkipSoftmaxPlan

INF = float("inf")


@dataclass(frozen=True)
class Inputs:
    """Arguments of ``skip_softmax_prefill.skip_softmax_prefill``."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table: torch.Tensor
    plan: SkipSoftmaxPlan
    threshold_scale_factor: torch.Tensor
    page_size: int
    sm_scale: float
    k_scale: float
    v_scale: float
    sinks: torch.Tensor | None = None
    soft_cap: float | None = None


def skip_softmax_prefill(inputs: Inputs, out: torch.Tensor, stats: torch.Tensor | None = None) -> torch.Tensor:
    """See ``skip_softmax_prefill.skip_softmax_prefill``."""
    q, k_cache, v_cache, plan = inputs.q, inputs.k_cache, inputs.v_cache, inputs.plan
    page_size = inputs.page_size
    queries = q.float().transpose(0, 1).unflatten(0, (k_cache.shape[1], -1))
    skipped_pairs = skipped_blocks = 0
    for tile in plan.tiles:
        positions = torch.arange(tile.first_position + tile.num_queries, device=q.device)
        slots = inputs.page_table[tile.row, positions // page_size].long() * page_size + positions % page_size
        window = slice(tile.first_query, tile.first_query + tile.num_queries)
        visible = positions <= positions[tile.first_position :, None]
        keys = k_cache[slots].float().permute(1, 2, 0)[:, None]
        logits = cap_logits((queries[:, :, window] @ keys).mul_(inputs.sm_scale * inputs.k_scale), inputs.soft_cap)
        logits = logits.masked_fill_(~visible, -INF)
        threshold = log_threshold(tile, float(inputs.threshold_scale_factor[tile.row]))
        kept = kept_blocks(block_maxima(logits, plan.block_keys), threshold)
        read = kept.repeat_interleave(plan.block_keys, dim=-1)[..., : len(positions)]
        weights = softmax(logits.masked_fill_(~read[:, :, None], -INF), inputs.sinks, inner=2)
        # What is not read is not there: a broken value of a skipped block would make zero times NaN.
        values = v_cache[slots].float().transpose(0, 1)[:, None].masked_fill(~read[..., None], 0.0)
        out[window] = (weights @ values * inputs.v_scale).flatten(0, 1).transpose(0, 1)
        skipped_pairs += int((~read * visible.sum(0)).sum())
        skipped_blocks += int((~kept).sum())
    if stats is not None:
        stats.add_(plan.totals, alpha=q.shape[1])
        stats += torch.tensor([-skipped_pairs, 0, skipped_blocks, 0], device=stats.device)
    return out


def log_threshold(tile: QueryTile, threshold_scale_factor: float) -> float:
    """The natural logarithm of a tile's threshold, at most 0; -inf where nothing is skipped."""
    if not (tile.context and threshold_scale_factor > 0):
        return -INF
    return min(0.0, math.log(threshold_scale_factor) - math.log(tile.context))


def block_maxima(logits: torch.Tensor, block_keys: int) -> torch.Tensor:
    """Each query's largest logit in each block of keys.

    Args:
        logits: ``[Hkv, G, n, T]`` in natural units, -inf where a query does not see a key.
        block_keys: keys of a block.

    Returns:
        ``[Hkv, G, n, blocks]``.
    """
    padded = torch.nn.functional.pad(logits, (0, -logits.shape[-1] % block_keys), value=-INF)
    return padded.unflatten(-1, (-1, block_keys)).amax(-1)


def kept_blocks(maxima: torch.Tensor, log_lambda: float) -> torch.Tensor:
    """Return the blocks of keys that a tile attends to.

    With a threshold of at most 1, a skipped block never has a row's maximum: the running maximum is that of all blocks
    visited before, skipped or not, and blocks can be judged at once.

    Args:
        maxima: see ``block_maxima``.
        log_lambda: see ``log_threshold``.

    Returns:
        ``[Hkv, G, blocks]`` bool.
    """
    order = visit_order(maxima.shape[-1], maxima.device)
    maxima = maxima[..., order]
    running = maxima.cummax(-1).values
    before = torch.nn.functional.pad(running[..., :-1], (1, 0), value=-INF)
    # False for what is infinite or NaN: such a row keeps the blocks of its tile, and shows in the output.
    below = (maxima < before + log_lambda) & (before < INF)
    kept = torch.empty_like(below[:, :, 0])
    kept[..., order] = ~below.all(2)
    return kept


def visit_order(blocks: int, device: torch.device) -> torch.Tensor:
    """The order in which a tile visits its blocks of keys: the first, and then from the last one back."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), torch.arange(blocks - 1, 0, -1)]).to(device)
