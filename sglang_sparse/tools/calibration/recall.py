"""Measure the share of a layer's attention that AnchorAttention keeps at each threshold.

A step group is evaluated for one KV head and some queries at a time, so that memory never holds a matrix of all queries
and keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_sparse.tools.calibration.capture import Captured
from sglang_sparse_kernels.sparse_decode.reference import softmax

# Thresholds that are judged, in natural-log units: each is a number that float32 and JSON hold exactly.
THETA_STEP, MAX_THETA = 0.125, 64.0
# Logits that are held at once.
LOGITS = 1 << 24


class Candidates(NamedTuple):
    """A step group and its candidate keys, both ``[q_heads, candidates]`` float32; ``c`` is the key ``block_size + c``.

    Attributes:
        gaps: how far the key's logit with the mean query of a block lies below the block's mean anchor, of the block
            where that is least, in natural-log units; negative infinity for the block before the group, always kept.
        mass: attention mass of the key, summed over the group's queries.
        sinks: ``[q_heads]``, that of the attention sinks; 0 without any.
    """

    gaps: Tensor
    mass: Tensor
    sinks: Tensor


def candidates(captured: Captured, first: int, end: int, block_size: int) -> Candidates:
    """Look at a step group, as ``sglang_sparse_kernels.anchor_prefill`` defines it: an attention sink is no anchor.

    Args:
        captured: a layer's attention, with the queries of all positions.
        first: position of the group's first query.
        end: behind its last one, or behind the prompt's.
        block_size: queries of a block, and keys of the initial block.
    """
    kv_heads = captured.key.shape[1]
    group = captured.query.shape[1] // kv_heads
    last = max(block_size, first)
    found = []
    for head in range(kv_heads):
        query = captured.query[first:end, head * group : (head + 1) * group].float().transpose(0, 1)
        query, key = query * captured.scaling, captured.key[:end, head].float()
        mass, on_sinks, anchors = key.new_zeros(group, last - block_size), key.new_zeros(group), []
        sinks = None if captured.sinks is None else captured.sinks[head * group : (head + 1) * group]
        for rows in torch.arange(end - first, device=key.device).split(max(1, LOGITS // (group * end))):
            logits = query[:, rows] @ key.T
            logits[..., first:].masked_fill_(torch.arange(end - first, device=key.device) > rows[:, None], -torch.inf)
            anchors.append(torch.maximum(logits[..., :block_size].amax(-1), logits[..., first:].amax(-1)))
            weights = softmax(logits[None], sinks, inner=2)[0]
            if sinks is not None:
                on_sinks += (1 - weights.sum(-1)).sum(1)
            mass += weights[..., block_size:last].sum(1)
        anchor, pooled = (
            torch.stack([part.mean(1) for part in rows.split(block_size, 1)], 1)
            for rows in (torch.cat(anchors, 1), query)
        )
        gaps = (anchor[..., None] - pooled @ key[block_size:last].T).amin(1)
        gaps[:, max(0, last - 2 * block_size) :] = -torch.inf
        found.append(Candidates(gaps, mass, on_sinks))
    return Candidates(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def thetas() -> Tensor:
    """The thresholds that are judged, ascending, ``[thresholds]`` float32."""
    return torch.arange(int(MAX_THETA / THETA_STEP) + 1) * THETA_STEP


@dataclass(frozen=True)
class Kept:
    """The shares that each threshold of `thetas` keeps, by query head, both ``[q_heads, thresholds]`` float64.

    Attributes:
        recall: share of the attention mass that falls on keys that are kept, mean over queries. That of an attention
            sink is always kept.
        sparsity: share of the causal query-key pairs that are left out.
        sinks: ``[q_heads]`` float64, share of the attention mass that attention sinks hold, or None.
    """

    recall: Tensor
    sparsity: Tensor
    sinks: Tensor | None = None


class Tally:
    """Counts of one layer, over prompts, of the queries that a server would run sparse.

    Args:
        q_heads: query heads of the layer.
    """

    def __init__(self, q_heads: int) -> None:
        # A bin for the keys that a threshold is the first to keep, and one for those that none keeps.
        self._bins = len(thetas()) + 1
        self._mass = torch.zeros(q_heads, self._bins, dtype=torch.float64)
        self._pairs = torch.zeros(q_heads, self._bins, dtype=torch.float64)
        self._sinks: Tensor | None = None
        self._queries = self._causal = 0

    def add(self, captured: Captured, dense_below: int, block_size: int, step: int) -> None:
        """Count a prompt that is prefilled in one piece.

        Args:
            captured: of the layer, with the queries of all positions.
            dense_below: position of the first query that counts, a multiple of ``block_size * step``.
            block_size: queries of a block.
            step: query blocks of a group.
        """
        tokens = captured.query.shape[0]
        for first in range(dense_below, tokens, block_size * step):
            end = min(first + block_size * step, tokens)
            # On the CPU, where sums do not depend on the order in which threads come.
            gaps, mass, sinks = (part.cpu() for part in candidates(captured, first, end, block_size))
            places = self._places(gaps)
            self._mass += self._counted(places, mass.double())
            self._pairs += self._counted(places) * (end - first)
            if captured.sinks is not None:
                self._sinks = (0 if self._sinks is None else self._sinks) + sinks.double()
            self._queries += end - first
            self._causal += (first + 1 + end) * (end - first) // 2

    def _places(self, gaps: Tensor) -> Tensor:
        # A key is kept from the threshold on that equals its gap; one without a finite gap is always kept.
        bins = torch.bucketize(torch.where(gaps.isfinite(), gaps, -torch.inf), thetas())
        return (bins + torch.arange(len(gaps))[:, None] * self._bins).flatten()

    def _counted(self, places: Tensor, weights: Tensor | None = None) -> Tensor:
        weights = None if weights is None else weights.flatten()
        return torch.bincount(places, weights, self._mass.numel()).view(self._mass.shape)

    def kept(self) -> Kept:
        """Return the counts so far."""
        missed, left_out = (part[:, 1:].flip(1).cumsum(1).flip(1) for part in (self._mass, self._pairs))
        queries = max(1, self._queries)
        sinks = None if self._sinks is None else self._sinks / queries
        return Kept(1 - missed / queries, left_out / max(1, self._causal), sinks)
