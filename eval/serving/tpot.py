"""Times per output token, from the chunks of streamed answers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np

from eval.live.client import Chunk, Stream
from eval.live.counters import EvaluationError


def shared_window(streams: Sequence[Stream]) -> tuple[float, float]:
    """When all requests decode: from the last first chunk to the first last one; refused where it is empty."""
    begin = max(s.chunks[0].seconds for s in streams)
    end = min(s.chunks[-1].seconds for s in streams)
    if end <= begin:
        raise EvaluationError("a request ended before another had its first token: the server does not run the batch")
    return begin, end


def whole_periods(chunks: Sequence[Chunk], period: int) -> Sequence[Chunk]:
    """The chunks up to the last one that is a multiple of `period` tokens after the first; empty if there is none."""
    ends = [i for i, chunk in enumerate(chunks) if i and (chunk.tokens - chunks[0].tokens) % period == 0]
    return chunks[: ends[-1] + 1] if ends else []


def decode_figures(streams: Sequence[Stream], period: int = 1) -> dict[str, Any]:
    """Times of a batch, in seconds.

    Args:
        streams: the answers.
        period: count a multiple of so many tokens, so that no part of an interval between rectifications weighs more.

    Returns:
        Per request: ``ttft``, time to the first token; ``tpot``, mean time per token within the shared window;
        ``tokens`` counted for it. Of the batch: ``tpot_mean``; ``itl_p50`` and ``itl_p99`` of the gaps between tokens,
        a chunk's gap divided evenly among its tokens; ``itl_max``, the longest wait for a chunk; ``merged``, the share
        of chunks with more than one token.

    Raises:
        EvaluationError: the window is empty, or holds less than half of a request's tokens.
    """
    begin, end = shared_window(streams)
    tpots, counts, gaps, waits, sizes = [], [], [], [], []
    for s in streams:
        inside = whole_periods([chunk for chunk in s.chunks if begin <= chunk.seconds <= end], period)
        tokens = inside[-1].tokens - inside[0].tokens if inside else 0
        total = s.chunks[-1].tokens
        if not tokens or 2 * tokens < total - 1:
            raise EvaluationError(f"only {tokens} of {total} tokens came while all requests of the batch decoded")
        tpots.append((inside[-1].seconds - inside[0].seconds) / tokens)
        counts.append(tokens)
        for before, after in pairwise(inside):
            waits.append(after.seconds - before.seconds)
            sizes.append(after.tokens - before.tokens)
            gaps += [waits[-1] / sizes[-1]] * sizes[-1]
    p50, p99 = np.percentile(gaps, [50, 99]).tolist()
    return {
        "ttft": [s.chunks[0].seconds - s.sent for s in streams],
        "tpot": tpots,
        "tokens": counts,
        "tpot_mean": fmean(tpots),
        "itl_p50": p50,
        "itl_p99": p99,
        "itl_max": max(waits),
        "merged": fmean(size > 1 for size in sizes),
    }
