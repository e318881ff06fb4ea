"""The definition of Skip-Softmax decode in plain torch."""

import math
from dataclasses import dataclass

import torch

from ..sparse_decode.reference import cap_logits, softmax

# Part of the definition: what is skipped depends on both. Not measured yet.
BLOCK_KEYS = 64
LOCAL_BLOCKS = 2
INF = float("inf")


@dataclass(frozen=True)
class Inputs:
    """Arguments of ``skip_softmax_decode.skip_softmax_decode``."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table: torch.Tensor
    n_pages: torch.Tensor
    last_slots: torch.Tensor
    threshold_scale_factor: torch.Tensor
    page_size: int
    sm_scale: float
    k_scale: float
    v_scale: float
    sinks: torch.Tensor | None = None
    soft_cap: float | None = None


def skip_softmax_decode(inputs: Inputs, out: torch.Tensor, stats: torch.Tensor | None = None) -> torch.Tensor:
    """See ``skip_softmax_decode.skip_softmax_decode``."""
    q, k_cache, v_cache, page_size = inputs.q, inputs.k_cache, inputs.v_cache, inputs.page_size
    out.zero_()
    queries = q.float().unflatten(1, (k_cache.shape[1], -1))
    visited = skipped = 0
    for row, pages in enumerate(inputs.n_pages.tolist()):
        if pages <= 0:
            continue
        length = (pages - 1) * page_size + int(inputs.last_slots[row]) % page_size + 1
        positions = torch.arange(length, device=q.device)
        slots = inputs.page_table[row, positions // page_size].long() * page_size + positions % page_size
        logits = queries[row] @ k_cache[slots].float().permute(1, 2, 0) * (inputs.sm_scale * inputs.k_scale)
        logits = cap_logits(logits, inputs.soft_cap)
        log_lambda = log_threshold(float(inputs.threshold_scale_factor[row]), length)
        kept = kept_blocks(block_maxima(logits), log_lambda)
        read = kept.repeat_interleave(BLOCK_KEYS, dim=-1)[..., :length]
        logits = logits.masked_fill(~read[:, None], -INF)
        weights = softmax(logits, inputs.sinks).masked_fill(logits.amax(-1, keepdim=True) == -INF, 0.0)
        # What is not read is not there: a broken value of a skipped block would make zero times NaN.
        values = v_cache[slots].float().transpose(0, 1).masked_fill(~read[..., None], 0.0)
        out[row] = (weights @ values * inputs.v_scale).flatten(0, 1)
        if log_lambda > -INF:
            visited += kept.numel()
            skipped += int((~kept).sum())
    if stats is not None:
        stats += torch.tensor([visited, skipped], device=stats.device)
    return out


def log_threshold(threshold_scale_factor: float, length: int) -> float:
    """The natural logarithm of a row's threshold, at most 0; -inf where nothing is skipped."""
    if not threshold_scale_factor > 0:
        return -INF
    return min(0.0, math.log(threshold_scale_factor) - math.log(length))


def block_maxima(logits: torch.Tensor) -> torch.Tensor:
    """Each query's largest logit in each block of keys; what is not a number counts as infinite.

    Args:
        logits: ``[Hkv, G, T]`` in natural units.

    Returns:
        ``[Hkv, G, blocks]``.
    """
    padded = torch.nn.functional.pad(logits, (0, -logits.shape[-1] % BLOCK_KEYS), value=-INF)
    return padded.where(~padded.isnan(), INF).unflatten(-1, (-1, BLOCK_KEYS)).amax(-1)


def kept_blocks(maxima: torch.Tensor, log_lambda: float) -> torch.Tensor:
    """Return the blocks of keys that rows attend to.

    Args:
        maxima: see ``block_maxima``.
        log_lambda: see ``log_threshold``.

    Returns:
        ``[Hkv, blocks]`` bool.
    """
    always = torch.zeros(maxima.shape[-1], dtype=torch.bool, device=maxima.device)
    always[0] = always[-LOCAL_BLOCKS:] = True
    largest = maxima[..., always].amax(-1, keepdim=True)
    limit = (largest + log_lambda).where(largest < INF, -INF)
    return always | (maxima >= limit).any(1)
