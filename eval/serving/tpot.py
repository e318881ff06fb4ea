"""Times per output token, from the chunks of streamed answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import numpy as np

from eval.live.client import Chunk, Stream
from eval.live.counters import EvaluationError


@dataclass(frozen=True)
class Peer:
    """Dense decode of the same batch on another server.

    Attributes:
        backend: its attention backend.
        file: name of the file that says so.
        rounds: times that it was measured.
        tpot: seconds per token, the median of the rounds.
        tpot_range: least and most of the rounds.
    """

    backend: str
    file: str
    rounds: int
    tpot: float
    tpot_range: tuple[float, float]


def shared_window(streams: Sequence[Stream]) -> tuple[float, float]:
    """When all requests decode: from the last first chunk to the first last chunk.

    Raises:
        EvaluationError: there is no such time.
    """
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


def bound_ratio(rectified: float, sparse: float, dense: float, dense_short: float, interval: int) -> float:
    """Time per token of the rectified arm over what it should cost.

    Args:
        rectified: seconds per token with rectification.
        sparse: without.
        dense: of dense decode at this context.
        dense_short: of dense decode at a short context.
        interval: tokens between rectifications.
    """
    return rectified / (sparse + (dense - dense_short) / interval)


def strongest(own: Sequence[float], backend: str, peers: Sequence[Peer]) -> tuple[str, Sequence[float]]:
    """The fastest dense decode by its median; among equals that of the server itself.

    Args:
        own: seconds per token of the dense arm, round by round.
        backend: of that server.
        peers: of other servers.

    Returns:
        Whose it is, and its seconds per token in each round. The rounds of a peer are others: its median stands for
        each of them.
    """
    best = min(peers, key=lambda peer: peer.tpot, default=None)
    if best is None or best.tpot >= median(own):
        return backend, own
    return f"{best.backend} (peer)", [best.tpot] * len(own)


def against(name: str, dense: Sequence[float], values: Sequence[float]) -> dict[str, Any]:
    """``dense``, whose dense decode it is; ``dense_ratio`` of the medians; ``dense_ratio_range`` over the rounds.

    Args:
        name: whose.
        dense: its seconds per token, round by round.
        values: the same of what is compared with it.
    """
    ratios = [one / value for one, value in zip(dense, values, strict=True)]
    ratio = median(dense) / median(values)
    return {"dense": name, "dense_ratio": ratio, "dense_ratio_range": (min(ratios), max(ratios))}


def summarise(
    rounds: Sequence[dict[str, Any]], interval: int, backend: str = "unknown", peers: Sequence[Peer] = ()
) -> list[dict[str, Any]]:
    """Figures of each arm over the rounds.

    Args:
        rounds: rows with arm, round, tpot_mean, ttft and density.
        interval: tokens between rectifications.
        backend: attention backend of the dense arm.
        peers: of other servers.

    Returns:
        For each arm the median time per token with its range, the ratio of the strongest dense decode to it (`against`,
        `strongest`), median time to the first token and density; for the rectified arm ``bound_ratio`` likewise, which
        goes by the arms of this server alone. Each peer is a row with arm "peer", its ``backend`` and its ``file``.
    """
    tpots: dict[str, list[float]] = {}
    for row in rounds:
        tpots.setdefault(row["arm"], []).append(row["tpot_mean"])
    reference = strongest(tpots["dense"], backend, peers)
    summary = []
    for arm, values in tpots.items():
        mine = [row for row in rounds if row["arm"] == arm]
        row: dict[str, Any] = {
            "arm": arm,
            "rounds": len(values),
            "tpot": median(values),
            "tpot_range": (min(values), max(values)),
            "ttft": median(t for row in mine for t in row["ttft"]),
            "density": mine[-1]["density"],
        }
        if arm != "dense_short":
            row |= against(*reference, values)
        if arm == "rectified" and "dense_short" in tpots:
            dense, short, sparse = tpots["dense"], tpots["dense_short"], tpots["sparse"]
            each = zip(values, sparse, dense, short, strict=True)
            bounds = [bound_ratio(r, s, d, d_short, interval) for r, s, d, d_short in each]
            row["bound_ratio"] = bound_ratio(row["tpot"], median(sparse), median(dense), median(short), interval)
            row["bound_ratio_range"] = (min(bounds), max(bounds))
        summary.append(row)
    beside = [
        {"arm": "peer", **asdict(peer)} | against(*reference, [peer.tpot] * len(tpots["dense"])) for peer in peers
    ]
    return [summary[0], *beside, *summary[1:]]
