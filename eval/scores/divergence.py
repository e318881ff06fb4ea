"""How far apart two servers' distributions of the next token are, from the best log-probabilities that each returns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

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
    """Whether a server's greedy answers count as those of a dense one.

    Args:
        mean_kl: of the distributions of the next token, in nats.
        gaps: of each answer that differs, how far apart the dense server's two best log-probabilities were there.
        noise: how much of that excuses another token.
    """
    return mean_kl < MAX_MEAN_KL and all(gap <= noise for gap in gaps)
