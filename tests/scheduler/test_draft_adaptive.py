"""Tests of the number of tokens that a round drafts: as many as its time pays for, by the recent rate of right ones."""

import pytest
import torch

from sglang_sparse.attention.plan import plan_decode
from sglang_sparse.config.settings import build
from sglang_sparse.scheduler.speculation.adaptive import (
    ACCEPTANCE,
    GAIN,
    VERIFICATION,
    Acceptance,
    StepBytes,
    best_steps,
)

EVERY = {"min_seq_len": 0, "crossover_tokens": 0}


def gain(draft: float, acceptance: float, steps: int) -> float:
    """Tokens for the time of a dense step."""
    return sum(acceptance**power for power in range(steps + 1)) / (steps * draft + VERIFICATION)


@pytest.mark.parametrize("draft", [0.05, 0.25, 0.5, 0.9, 1.1])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7, 0.9, 0.98, 1.0])
def test_no_other_number_of_drafts_gains_more(draft: float, acceptance: float) -> None:
    found = best_steps(draft, acceptance, 16)
    best = max(gain(draft, acceptance, steps) for steps in range(1, 17))
    if found:
        assert gain(draft, acceptance, found) == pytest.approx(best) and best > GAIN
    else:
        assert best <= GAIN


def test_drafts_that_cost_as_much_as_dense_steps_or_are_wrong_are_not_made() -> None:
    assert best_steps(1.0, 0.99, 16) == best_steps(0.3, 0.1, 16) == 0
    assert best_steps(0.2, 0.99, 4) == 4, "the server's limit"


def test_acceptance_follows_the_drafts_that_were_judged() -> None:
    found = Acceptance()
    assert found.rate == pytest.approx(ACCEPTANCE)
    for _ in range(200):
        # Of the second row the first draft was wrong, so that the three behind it say nothing.
        found.add(4, [4, 0])
    assert found.rate == pytest.approx(0.8, abs=0.03)
    for _ in range(200):
        found.add(4, [0, 0])
    assert found.rate < 0.45
    for _ in range(400):
        found.add(0, [0, 0])
    assert found.rate == pytest.approx(ACCEPTANCE, abs=0.01), "drafts are tried again"


def test_what_follows_the_drafts_of_a_round_is_not_judged() -> None:
    one, other = Acceptance(), Acceptance()
    one.add(2, [6, 1])
    other.add(2, [2, 1])
    assert one.rate == other.rate


def test_a_draft_costs_the_share_of_the_kv_that_it_reads() -> None:
    settings = build("resa", {**EVERY, "active_ratio": 0.1, "min_pages": 1, "page_size": 16})
    plan = plan_decode(settings.decode, torch.tensor([16_000, 16_000]))
    costs = StepBytes(fixed=0, token=1000, summary=0.0)
    assert costs.draft(plan, settings.decode, 32_000, 4) == pytest.approx(0.1, abs=2e-3)
    # Weights are read by both, summaries by those drafts alone that choose pages.
    weighed = StepBytes(fixed=32_000_000, token=1000, summary=100.0)
    assert weighed.draft(plan, settings.decode, 32_000, 4) == pytest.approx((1 + 0.1) / 2, abs=2e-3)
    assert weighed.choice(2, 32_000) == pytest.approx(0.1 / 2)


def test_layers_that_stay_dense_read_all() -> None:
    settings = build("resa", {**EVERY, "active_ratio": 0.1, "min_pages": 1, "layers": "2-"})
    plan = plan_decode(settings.decode, torch.tensor([16_000]))
    assert StepBytes(0, 1000, 0.0).draft(plan, settings.decode, 16_000, 4) == pytest.approx(0.55, abs=2e-3)


def test_few_tokens_read_few_experts() -> None:
    """8 experts of 128 a token: weights that a dense step of one row does not read say nothing against drafts."""
    settings = build("resa", {**EVERY, "active_ratio": 0.1, "min_pages": 1})
    plan = plan_decode(settings.decode, torch.tensor([16_000]))
    costs = StepBytes(0, 1000, 0.0, experts=16_000_000, routed=8 / 128)
    assert costs.weights(1) == 1_000_000 and costs.weights(2) == 1_937_500
    assert costs.draft(plan, settings.decode, 16_000, 4) == pytest.approx((1 + 1.6) / (1 + 16), abs=2e-3)
    # A verification reads more of them than a step.
    assert costs.verification(1, 2, 16_000) == pytest.approx(VERIFICATION * 17.9375 / 17)
    assert StepBytes(10, 1000, 0.0).verification(4, 9, 100) == VERIFICATION
    assert best_steps(0.3, 0.7, 8, 3.0) == 0 < best_steps(0.3, 0.7, 8)
