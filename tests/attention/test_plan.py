"""Tests of which rows run sparse: a table of cases, since the decision is a pure function of lengths."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_sparse.attention.plan import plan_decode, usual_selection
from sglang_sparse.config.request_options import parse_options
from sglang_sparse.config.settings import build
from sglang_sparse.methods.layers import parse_layers


def decide(lengths: list[int], **fields: object):
    return plan_decode(build("resa", fields).decode, torch.tensor(lengths))


def test_below_the_crossover_the_batch_is_dense() -> None:
    plan = decide([8000, 8000])
    assert not plan.sparse and plan.covered.all()


def test_short_rows_stay_dense_in_a_sparse_batch() -> None:
    plan = decide([20000, 1000, 4095, 4096])
    assert plan.sparse
    assert plan.groups[0].n_pages.tolist() == [1250, 63, 256, 256]
    assert plan.groups[0].n_select.tolist() == [125, 63, 256, 26]
    assert plan.covered.tolist() == [False, True, True, False]


def test_never_is_sparse_even_when_every_page_is_selected() -> None:
    plan = decide([17, 300], dense_fallback="never")
    assert plan.sparse
    assert plan.groups[0].n_select.tolist() == [2, 16]
    assert not plan.covered.any()


def test_rows_run_as_their_requests_asked() -> None:
    settings = build("resa", {})
    asked = [{}, {"active_ratio": 0.5}, {"sparse": False}, {"active_ratio": 0.5, "rectify_interval": 4}]
    rows = [parse_options(settings, params) for params in asked]
    plan = plan_decode(settings.decode, torch.tensor([16000] * 4), rows)
    assert plan.groups[0].n_select.tolist() == [100, 500, 1000, 500]
    assert plan.covered.tolist() == [False, False, True, False]


@pytest.mark.parametrize("lengths", [[20, 300], [8000, 8000], [20000, 1000, 4096]])
def test_with_deterministic_inference_a_row_runs_as_it_would_alone(lengths: list[int]) -> None:
    """Always by the sparse kernels, which round otherwise than the dense backend; and none writes exact KV."""
    settings = build("resa", {})
    settings.decode.deterministic, settings.decode.crossover_tokens = True, 0
    asked = parse_options(settings, {"sparse": False})
    for options in (), [asked, *[parse_options(settings, {})] * (len(lengths) - 1)]:
        plan = plan_decode(settings.decode, torch.tensor(lengths), options)
        rows = [
            plan_decode(settings.decode, torch.tensor([length]), options[i : i + 1]) for i, length in enumerate(lengths)
        ]
        assert plan.sparse and all(row.sparse for row in rows)
        assert plan.groups[0].n_select.tolist() == [int(row.groups[0].n_select) for row in rows]
        assert not plan.covered.any() and not any(row.covered.any() for row in rows)


LENGTH = 2**14
RULES = {"0": "dense", "1": {"active_ratio": 0.1}, "2": {"active_ratio": 0.5}, "3": {"method": "rocketkv"}}


@given(
    st.sampled_from(
        [
            {},
            {"active_ratio": 0.9},
            {"dense_fallback": "never"},
            {"crossover_tokens": 2 * LENGTH + 20},
            # With blocks of 16 and of 4.
            {"layers": RULES, "rectify_interval": 0},
        ]
    ),
    # Steps that differ in one thing alone are to be frequent.
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.sampled_from([0, 3, 15, 16, 48]), st.integers(0, 2)), min_size=1, max_size=2),
            st.booleans(),
            st.booleans(),
        ),
        min_size=2,
        max_size=30,
    ),
)
def test_a_plan_does_not_depend_on_the_one_before(
    fields: dict[str, object], steps: list[tuple[list[tuple[int, int]], bool, bool]]
) -> None:
    settings = build("resa", fields)
    own = {} if "layers" in fields else {"active_ratio": 0.5}
    options = [parse_options(settings, asked) for asked in ({}, {"sparse": False}, own)]
    for asked, compacted, deterministic in steps:
        settings.decode.deterministic = deterministic
        lengths, rows = torch.tensor([LENGTH + more for more, _ in asked]), [options[which] for _, which in asked]
        plan = plan_decode(settings.decode, lengths, rows, compacted)
        settings.decode.planned = None
        anew = plan_decode(settings.decode, lengths, rows, compacted)
        assert torch.equal(plan.covered, anew.covered) and torch.equal(plan.selective, anew.selective)
        for one, other in zip(plan.groups, anew.groups, strict=True):
            assert all(map(torch.equal, one, other))


def test_a_step_that_fills_no_page_has_the_plan_before() -> None:
    groups = build("resa", {}).decode
    one, same, other = (plan_decode(groups, torch.tensor([20001, length])) for length in (16001, 16016, 16017))
    assert one is same and other is not one


@pytest.mark.parametrize("given", [{}, {"min_seq_len": 0, "crossover_tokens": 0}, {"crossover_tokens": "auto"}])
def test_never_leaves_no_limits(given: dict[str, object]) -> None:
    config = build("resa", {"dense_fallback": "never", **given}).config
    assert (config.min_seq_len, config.crossover_tokens) == (0, 0)


def test_a_ratio_of_one_covers_everything() -> None:
    plan = decide([100000], active_ratio=1.0)
    assert not plan.sparse and plan.covered.all()


@given(st.integers(1, 10**6), st.integers(1, 100))
def test_count_is_the_exact_ceiling(n_pages: int, percent: int) -> None:
    method = build("resa", {"active_ratio": percent / 100, "min_pages": 1}).method
    exact = -(-n_pages * percent // 100)
    assert method.n_select(torch.tensor([n_pages], dtype=torch.int32)).tolist() == [exact]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [("all", (0, 1, 2, 3)), ("2-", (2, 3)), ("0-1, 3", (0, 1, 3)), ([3, 1], (1, 3)), ("2", (2,))],
)
def test_layers(spec: object, expected: tuple[int, ...]) -> None:
    assert parse_layers(spec, 4) == expected


@given(st.sampled_from([1, 4, 16, 64]), st.floats(0.01, 1.0), st.integers(1, 40))
def test_no_sparse_row_selects_more_than_the_usual_selection(page: int, ratio: float, least: int) -> None:
    fields = {"min_seq_len": 0, "crossover_tokens": 0, "page_size": page, "active_ratio": ratio, "min_pages": least}
    settings = build("resa", fields)
    plan = plan_decode(settings.decode, torch.arange(1, 4001))
    widest = int(plan.groups[0].n_select[~plan.covered].max()) if not plan.covered.all() else 0
    assert widest <= usual_selection(settings.method, -(-4000 // page))
