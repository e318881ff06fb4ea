"""Divergences of hand-made distributions."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.scores.divergence import gap_change, kl, same_best

Top = list[list[object]]


def top(probabilities: dict[int, float], count: int | None = None) -> Top:
    """The `count` best tokens of a distribution, as the server gives them."""
    best = sorted(probabilities.items(), key=lambda item: -item[1])[:count]
    return [[math.log(p), token, None] for token, p in best]


@st.composite
def distributions(draw: st.DrawFn) -> dict[int, float]:
    weights = draw(st.lists(st.integers(1, 1000), min_size=6, max_size=6))
    return {token: weight / sum(weights) for token, weight in enumerate(weights)}


@given(distributions(), distributions(), st.integers(2, 6))
def test_kl_is_a_lower_bound(p: dict[int, float], q: dict[int, float], count: int) -> None:
    exact = sum(p[token] * math.log(p[token] / q[token]) for token in p)
    assert -1e-9 <= kl(top(p, count), top(q, count)) <= exact + 1e-6
    assert kl(top(p, 6), top(q, 6)) == pytest.approx(exact, abs=1e-6)
    assert kl(top(p, count), top(p, count)) == pytest.approx(0, abs=1e-9)


def test_tokens_outside_a_list_count_as_one() -> None:
    dense, sparse = top({1: 0.5, 2: 0.3, 3: 0.2}, 2), top({1: 0.5, 3: 0.3, 2: 0.2}, 2)
    assert kl(dense, sparse) == pytest.approx(0, abs=1e-9)
    assert kl(dense, top({4: 0.9, 5: 0.1})) == pytest.approx(0, abs=1e-6)


def test_best_token() -> None:
    assert same_best(top({1: 0.6, 2: 0.4}), top({1: 0.5, 3: 0.5}))
    assert not same_best(top({1: 0.6, 2: 0.4}), top({1: 0.4, 2: 0.6}))


def test_change_of_the_gap() -> None:
    one, other = top({1: 0.6, 2: 0.3, 3: 0.1}), top({1: 0.4, 2: 0.4, 3: 0.2})
    assert gap_change(one, other) == pytest.approx(math.log(2))
    assert gap_change(one, top({1: 0.9, 3: 0.1})) == 0.0
