"""What AnchorAttention keeps of a layer's attention at any threshold, by the definition that the kernels implement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.lab.selection.recall_attention import Captured
from sglang_sparse.tools.calibration.recall import candidates


@dataclass(frozen=True)
class Kept:
    """What one threshold keeps, by query head.

    Attributes:
        anchor: whether scores are compared with the anchor's; without, with 0.
        theta: the threshold, in natural-log units.
        sparsity: ``[q_heads]``, share of the causal query-key pairs that are left out.
        recall: ``[q_heads]``, share of the attention mass that falls on the others, mean over queries.
        oracle: ``[q_heads]``, the most that as many keys of every group of queries could keep.
        random: ``[q_heads]``, what as many random ones keep on average, beside those that are always kept.
        window: ``[q_heads]``, what as many of the newest ones keep, right before those that are always kept: the first
            block and these are sinks and a sliding window.
        always: ``[q_heads]``, what those keep that are always kept.
    """

    anchor: bool
    theta: float
    sparsity: Tensor
    recall: Tensor
    oracle: Tensor
    random: Tensor
    window: Tensor
    always: Tensor


def measure(
    captured: Captured, thetas: Sequence[float], block_size: int, step: int, with_anchor: Sequence[bool] = (True, False)
) -> list[Kept]:
    """Judge thresholds on a prompt that is prefilled in one piece.

    Args:
        captured: a layer's attention, with the queries of all positions.
        thetas: thresholds.
        block_size: queries of a block.
        step: query blocks of a group.
        with_anchor: which of the two comparisons. The other one is the ablation of the paper's table 4, which puts a
            tensor of zeros in the anchor's place.
    """
    tokens, heads = captured.query.shape[:2]
    # Of what is left out: the mass, that of the other choices in the order of `Kept`, and that of all that may be.
    mass = {(anchor, theta): torch.zeros(5, heads) for anchor in with_anchor for theta in thetas}
    left_out = {place: torch.zeros(heads, dtype=torch.int64) for place in mass}
    for first in range(0, tokens, block_size * step):
        end = min(first + block_size * step, tokens)
        compared, weights = candidates(captured, first, end, block_size)
        least = torch.nn.functional.pad(weights.sort(1).values.cumsum(1), (1, 0))
        optional = compared > -torch.inf
        oldest = torch.nn.functional.pad((weights * optional).cumsum(1), (1, 0))
        most = oldest[:, -1]
        average = most / optional.sum(1).clamp_min(1)
        for anchor in with_anchor:
            gaps = compared if anchor else -_mean_logits(captured, first, end, block_size)
            for theta in thetas:
                missed = gaps > theta
                count = missed.sum(1)
                without, old = (part.gather(1, count[:, None])[:, 0] for part in (least, oldest))
                mass[anchor, theta] += torch.stack([(weights * missed).sum(1), without, average * count, old, most])
                left_out[anchor, theta] += count * (end - first)
    causal = tokens * (tokens + 1) // 2
    return [Kept(*place, left_out[place] / causal, *(1 - mass[place] / tokens)) for place in mass]


def anchors(captured: Captured, block_size: int, step: int) -> Tensor:
    """What the scores of each block of queries are compared with, ``[q_heads, blocks]``.

    That is the mean over the block of a query's highest logit with the initial block and with the keys of its group.
    """
    tokens, heads = captured.query.shape[:2]
    found: list[Tensor] = []
    for first in range(0, tokens, block_size * step):
        at = torch.arange(first, min(first + block_size * step, tokens))
        region = torch.cat([torch.arange(min(block_size, first)), at])
        query = captured.query[at].float() * captured.scaling
        key = captured.key[region].float().repeat_interleave(heads // captured.key.shape[1], dim=1)
        logits = torch.einsum("qhd,khd->hqk", query, key).masked_fill_(region > at[:, None], -torch.inf)
        found.extend(part.mean(1) for part in logits.amax(-1).split(block_size, 1))
    return torch.stack(found, 1)


def _mean_logits(captured: Captured, first: int, end: int, block_size: int) -> Tensor:
    """The highest logit of any block's mean query with each candidate key, ``[q_heads, candidates]``."""
    group = captured.query.shape[1] // captured.key.shape[1]
    means = [part.float().mean(0) for part in captured.query[first:end].split(block_size)]
    keys = captured.key[block_size : max(block_size, first)].float().repeat_interleave(group, dim=1)
    logits = torch.einsum("bhd,khd->bhk", torch.stack(means), keys).amax(0) * captured.scaling
    # As `candidates` has it: the block before the group is always kept.
    logits[:, max(0, logits.shape[1] - block_size) :] = torch.inf
    return logits
