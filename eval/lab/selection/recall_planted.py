"""Keys that some queries look for: which of them AnchorAttention, chance and a window before the group find."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eval.lab.selection.recall_attention import Captured
from sglang_sparse.tools.calibration.recall import candidates

# Of the attention of a query that looks for a key: as much as all stripes hold by default.
SHARE = 0.3


@dataclass(frozen=True)
class Key:
    """A key for each KV head, ``positions`` ``[kv_heads]``, and the ``queries`` that look for it, of one block."""

    positions: Tensor
    queries: range


@dataclass(frozen=True)
class Found:
    """What one threshold finds, by query head, all ``[q_heads]``: shares of the planted keys.

    Attributes:
        queries: that look for each of them.
        theta: the threshold.
        keys: how many there are for each head.
        anchor: share that AnchorAttention finds.
        random: as many random keys of each group find, on average.
        window: as many keys right before those that are always kept find.
    """

    queries: int
    theta: float
    keys: int
    anchor: Tensor
    random: Tensor
    window: Tensor


def places(tokens: int, kv_heads: int, counts: Sequence[int], block_size: int, step: int, seed: str) -> list[Key]:
    """A key for each group that may leave any out and each of the numbers of queries that look for one.

    They lie in the older half of the keys that the group may leave out, each looked for from another block of it.
    """
    rng, keys, group = random.Random(seed), [], block_size * step
    for first in range(group, tokens - group + 1, group):
        older = (first - 2 * block_size) // 2
        if older < len(counts):
            continue
        drawn = [rng.sample(range(block_size, block_size + older), len(counts)) for _ in range(kv_heads)]
        for number, (count, positions) in enumerate(zip(counts, zip(*drawn, strict=True), strict=True)):
            start = first + number * step // len(counts) * block_size
            keys.append(Key(torch.tensor(positions), range(start, start + count)))
    return keys


def plant(captured: Captured, keys: Sequence[Key]) -> Captured:
    """Attention in which each of the keys has `SHARE` of that of its queries, in a dimension of its own."""
    tokens, heads, _ = captured.query.shape
    kv_heads, scale = captured.key.shape[1], captured.scaling
    of_queries, of_keys = (torch.zeros(tokens, n, len(keys)) for n in (heads, kv_heads))
    odds = torch.tensor(SHARE / (1 - SHARE)).log()
    for dim, one in enumerate(keys):
        rows = torch.tensor(one.queries)
        for head in range(heads):
            at, own = one.positions[head * kv_heads // heads], captured.key[:, head * kv_heads // heads].float()
            logits = captured.query[rows, head].float() @ own.T * scale
            logits.masked_fill_(torch.arange(tokens) > rows[:, None], -torch.inf)
            before = logits[:, at].clone()
            logits[:, at] = -torch.inf
            of_queries[rows, head, dim] = logits.logsumexp(1) + odds - before
        of_keys[one.positions, torch.arange(kv_heads), dim] = 1 / scale
    query, key = (
        torch.cat([part.float(), more], 2) for part, more in ((captured.query, of_queries), (captured.key, of_keys))
    )
    return replace(captured, query=query, key=key)


def find(
    captured: Captured, keys: Sequence[Key], thetas: Sequence[float], block_size: int, step: int
) -> Iterator[Found]:
    """Look for planted keys.

    Args:
        captured: of `plant`.
        keys: that were planted.
        thetas: thresholds.
        block_size: queries of a block.
        step: query blocks of a group.
    """
    tokens, heads = captured.query.shape[:2]
    group = block_size * step
    counts: dict[tuple[int, float], list[Tensor]] = {}
    for first in range(group, tokens, group):
        mine = [one for one in keys if first <= one.queries.start < first + group]
        gaps = candidates(captured, first, min(first + group, tokens), block_size).gaps if mine else torch.empty(0, 0)
        optional = gaps.shape[1] - block_size
        for one in mine:
            place = (one.positions - block_size).repeat_interleave(heads // len(one.positions))
            for theta in thetas:
                hit = gaps[:, :optional] <= theta
                kept = hit.sum(1)
                by = torch.stack([hit.gather(1, place[:, None])[:, 0], kept / optional, place >= optional - kept])
                counts.setdefault((len(one.queries), theta), []).append(by)
    for (queries, theta), found in counts.items():
        yield Found(queries, theta, len(found), *torch.stack(found).mean(0))
