"""Means, their 95 % intervals, and whether two servers differ: in scores, or in distributions of the next token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
MARGIN = 0.01

Floats = NDArray[np.float64]
Interval = tuple[float, float]
Verdict = Literal["same", "worse", "better", "unclear"]


def resamples(count: int, seed: int) -> Floats:
    """Bootstrap weights ``[RESAMPLES, count]``: a row times `count` values is the mean of one resample.

    The same weights for two settings make their comparison paired.
    """
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    return drawn / count


def interval(values: Floats) -> Interval:
    """The central 95 % of resampled values."""
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def median_ratio_interval(mine: Sequence[float] | Floats, theirs: Sequence[float] | Floats, seed: int) -> Interval:
    """Paired bootstrap 95 % interval of the ratio of the medians of ``[n]`` and ``[n]`` values, measured in pairs."""
    weights = resamples(len(mine), seed)
    return interval(_medians(mine, weights) / _medians(theirs, weights))


def _medians(values: Sequence[float] | Floats, weights: Floats) -> Floats:
    """Of each resample of values ``[n]``, by its weights of `resamples`."""
    count, order = len(values), np.argsort(values)
    ordered = np.array(values, dtype=np.float64)[order]
    upto = np.rint(weights[:, order] * count).cumsum(axis=1)
    # The two in the middle, which are one of an odd number.
    low, high = (ordered[(upto > place).argmax(axis=1)] for place in ((count - 1) // 2, count // 2))
    return (low + high) / 2


def standard_error(values: Floats) -> float:
    """Of the mean of values ``[n]``; 0 for a single one."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0


def mean_interval(scores: Sequence[float]) -> Interval:
    """95 % interval of the mean of scores between 0 and 1, by Wilson's formula.

    Exact for rights and wrongs; for scores in between it is wider than need be, never narrower. Unlike a bootstrap it
    does not say that five right answers of five prove perfection.
    """
    n, z = len(scores), 1.959964
    mean = sum(scores) / n
    middle = (mean + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def paired_interval(differences: Floats) -> Interval:
    """95 % interval of the mean of paired differences ``[n]``, each between -1 and 1.

    A normal interval around a mean drawn towards 0 by two imagined pairs, one better and one worse (Agresti and Min,
    2005): where all pairs agree it still has a width, of about 2 / n to either side for single answers.
    """
    n = len(differences)
    padded = np.concatenate([differences, [1.0, -1.0]])
    mean, error = padded.sum() / (n + 2), math.sqrt(float((padded**2).mean() - padded.mean() ** 2) / (n + 2))
    return float(mean - 1.959964 * error), float(mean + 1.959964 * error)


def verdict(differences: Interval, margin: float = MARGIN) -> Verdict:
    """Judge a paired difference (this server less the other one) by its 95 % interval.

    Returns:
        "worse" or "better" where the interval excludes 0 and reaches beyond the margin, "same" where the server is at
        most `margin` worse, and "unclear" where there are too few questions to say.
    """
    low, high = differences
    if high < 0 and low < -margin:
        return "worse"
    if low > 0 and high > margin:
        return "better"
    return "same" if low >= -margin else "unclear"


def compare(mine: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Paired comparison of scores ``[n]`` on the same questions, those of the server under judgement first.

    Returns:
        ``diff`` (mean of mine less theirs) and ``diff_interval``; ``lost`` and ``won``, questions that this server
        scored lower and higher; ``verdict``.
    """
    differences = np.array(mine, dtype=np.float64) - np.array(theirs, dtype=np.float64)
    found = paired_interval(differences)
    return {
        "diff": float(differences.mean()),
        "diff_interval": found,
        "lost": int((differences < 0).sum()),
        "won": int((differences > 0).sum()),
        "verdict": verdict(found),
    }


TOP = 50
MAX_MEAN_KL = 0.003

# ``[log-probability, token id, text]`` of the best tokens of one position, the best first.
TopTokens = Sequence[Sequence[Any]]


def kl(dense: TopTokens, sparse: TopTokens) -> float:
    """KL(dense, sparse) of one position in nats, all tokens outside both top lists taken as one.

    Taking tokens together never makes it larger, so that it is a lower bound of the true divergence.
    """
    p = {token: math.exp(logprob) for logprob, token, _ in dense}
    q = {token: math.exp(logprob) for logprob, token, _ in sparse}
    common = [token for token in p if token in q]
    total = sum(p[token] * math.log(p[token] / q[token]) for token in common)
    rest_p = max(1.0 - sum(p[token] for token in common), 1e-9)
    rest_q = max(1.0 - sum(q[token] for token in common), 1e-9)
    return max(0.0, total + rest_p * math.log(rest_p / rest_q))


def same_best(dense: TopTokens, sparse: TopTokens) -> bool:
    """Whether both give the highest probability to the same token."""
    return dense[0][1] == sparse[0][1]


def gap_change(one: TopTokens, other: TopTokens) -> float:
    """By how much the distance between ``one``'s two best tokens differs in ``other``, in nats."""
    logprobs = {token: logprob for logprob, token, _ in other}
    (best, best_token, _), (second, second_token, _) = one[:2]
    if best_token not in logprobs or second_token not in logprobs:
        return 0.0
    return abs(best - second - (logprobs[best_token] - logprobs[second_token]))


def is_same(mean_kl: float, gaps: Sequence[float], noise: float) -> bool:
    """Whether a server's greedy answers count as those of a dense one, by the mean divergence in nats.

    `gaps` are the distances between the dense server's two best log-probabilities where an answer differs; a distance
    of at most `noise` excuses the difference.
    """
    return mean_kl < MAX_MEAN_KL and all(gap <= noise for gap in gaps)
