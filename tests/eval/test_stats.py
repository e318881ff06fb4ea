"""Intervals, verdicts and divergences, on numbers whose answer is known."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.scores.stats import (
    compare,
    gap_change,
    interval,
    kl,
    mean_interval,
    median_ratio_interval,
    paired_interval,
    resamples,
    same_best,
    standard_error,
    verdict,
)


def test_bootstrap() -> None:
    weights = resamples(50, seed=3)
    assert weights.shape == (10_000, 50) and np.allclose(weights.sum(1), 1)
    assert np.array_equal(weights, resamples(50, seed=3)) and not np.array_equal(weights, resamples(50, seed=4))
    values = np.random.default_rng(0).normal(2.0, 1.0, 50)
    low, high = interval(weights @ values)
    assert low < values.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * standard_error(values), rel=0.1)
    assert standard_error(np.array([1.0, 3.0])) == pytest.approx(1.0)
    assert standard_error(np.array([1.0])) == 0.0


def test_the_ratio_of_medians_is_resampled_in_pairs() -> None:
    rng = np.random.default_rng(0)
    for count in (3, 4):
        mine, theirs = rng.lognormal(0.0, 0.3, (2, count))
        weights = np.rint(resamples(count, seed=5) * count).astype(int)
        ratios = [np.median(np.repeat(mine, drawn)) / np.median(np.repeat(theirs, drawn)) for drawn in weights]
        assert median_ratio_interval(mine, theirs, seed=5) == pytest.approx(
            interval(np.array(ratios, dtype=np.float64))
        )
    theirs = rng.lognormal(0.0, 0.3, 60)
    mine = 1.1 * theirs * rng.normal(1.0, 0.005, 60)
    # What both of a pair have in common is not in the interval.
    low, high = median_ratio_interval(mine, theirs, seed=5)
    assert low < 1.1 < high < low + 0.03
    low, high = median_ratio_interval(rng.permutation(mine), theirs, seed=5)
    assert high > low + 0.1


def test_mean_interval_is_wilsons() -> None:
    # Wilson's interval of 5 of 5 and of 8 of 10.
    assert mean_interval([1.0] * 5) == pytest.approx((0.5655, 1.0), abs=1e-4)
    assert mean_interval([1.0] * 8 + [0.0] * 2) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert mean_interval([0.0]) == pytest.approx((0.0, 0.7935), abs=1e-4)


def test_paired_interval_covers_the_truth() -> None:
    rng = np.random.default_rng(0)
    # One of 25 pairs is lost, one of 50 won: the true mean is -.02.
    drawn = rng.choice([-1.0, 0.0, 1.0], p=[0.04, 0.94, 0.02], size=(2000, 300))
    bounds = np.array([paired_interval(row) for row in drawn])
    covered = ((bounds[:, 0] <= -0.02) & (bounds[:, 1] >= -0.02)).mean()
    assert 0.93 <= covered <= 0.99


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ((-0.005, 0.005), "same"),
        ((-0.009, -0.001), "same"),
        ((-0.03, -0.001), "worse"),
        ((-0.03, 0.02), "unclear"),
        ((0.001, 0.03), "better"),
        ((-0.001, 0.3), "same"),
    ],
)
def test_verdict(bounds: tuple[float, float], expected: str) -> None:
    assert verdict(bounds) == expected


def test_compare_is_paired() -> None:
    ones, none = [1.0] * 500, [0.0] * 500
    assert compare(ones, ones)["verdict"] == "same" and compare(none, ones)["verdict"] == "worse"
    found = compare([*[0.0] * 10, *[1.0] * 490], ones)
    assert found["diff"] == pytest.approx(-0.02) and (found["lost"], found["won"]) == (10, 0)
    assert found["verdict"] == "worse"
    # Twenty questions cannot decide about one point.
    assert compare([1.0] * 20, [1.0] * 20)["verdict"] == "unclear"


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
