"""Anchor attention against dense attention: thresholds that keep everything or nothing, ties, and broken keys."""

from typing import Any

import pytest
import torch
from anchor_runs import BLOCK, STEP, chunked, dense, relative_error, row_slots, run_reference, run_triton

from sglang_sparse_kernels.anchor_prefill import anchor_prefill, make_plan, reference
from sglang_sparse_kernels.anchor_prefill.cases import Case, make

FP32, FP16 = torch.float32, torch.float16
GROUP = BLOCK * STEP
INF = float("inf")
# Relative L2 error of float16 queries and weights.
TOLERANCE = 2e-3


def with_theta(arguments: dict[str, Any], theta: float) -> dict[str, Any]:
    return {**arguments, "theta": torch.full_like(arguments["theta"], theta)}


LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, GROUP - 1, GROUP, GROUP + 1, 2 * GROUP - 1, 2 * GROUP, 2 * GROUP + 1, 81]


@pytest.mark.parametrize("prefix", [0, 1, BLOCK, GROUP - 1, GROUP, GROUP + BLOCK, 77])
def test_infinite_theta_is_dense_attention_in_the_reference(prefix: int) -> None:
    case = Case((prefix,) * len(LENGTHS), tuple(LENGTHS), 16, 2, 2, 64, FP32, FP32)
    arguments = with_theta(make(case, "cpu"), INF)
    assert relative_error(run_reference(arguments), dense(arguments, case)) < 1e-5


@pytest.mark.parametrize("prefix", [0, 41])
def test_infinite_theta_is_dense_attention(prefix: int, device: str) -> None:
    case = Case((prefix,) * len(LENGTHS), tuple(LENGTHS), 16, 1, 1, 64, FP16, FP16)
    arguments = with_theta(make(case, device), INF)
    stats = torch.zeros(2, dtype=torch.int64, device=device)
    got = anchor_prefill(**arguments, stats=stats)
    assert relative_error(got, dense(arguments, case)) < TOLERANCE
    assert stats[0] == stats[1]


@pytest.mark.parametrize("chunk", [1, 7, BLOCK, 23, 50])
def test_chunks_of_any_size_are_dense_attention_at_infinite_theta(chunk: int) -> None:
    case = Case((19,), (110,), 16, 1, 4, 64, FP32, FP32)
    arguments = with_theta(make(case, "cpu"), INF)
    sizes = [min(chunk, 110 - first) for first in range(0, 110, chunk)]
    got = chunked(arguments, sizes, run_reference, prefix=19)
    assert relative_error(got, dense(arguments, case)) < 1e-5


@pytest.mark.parametrize("run", [run_reference, run_triton])
def test_theta_of_minus_infinity_leaves_the_anchor_and_the_block_before_the_group(run: Any, device: str) -> None:
    arguments = with_theta(make(Case((0,), (90,), 16, 1, 2, 64, FP16, FP16), device), -INF)
    got = run(arguments)
    slots = row_slots(arguments, 0, 90)
    for position in (15, 40, 64, 89):
        start = position // GROUP * GROUP
        first = min(BLOCK, start)
        kept = slots[[*range(first), *range(max(first, start - BLOCK), position + 1)]]
        keys, values = arguments["k_cache"][kept, 0].double(), arguments["v_cache"][kept, 0].double()
        expected = (arguments["q"][position].double() @ keys.T * arguments["sm_scale"]).softmax(dim=-1) @ values
        assert relative_error(got[position], expected) < TOLERANCE


@pytest.mark.parametrize("run", [run_reference, run_triton])
def test_the_first_group_is_dense_and_each_row_has_its_theta(run: Any, device: str) -> None:
    case = Case((5, 40, 40), (GROUP - 5, 30, 30), 16, 1, 2, 64, FP16, FP16)
    arguments = make(case, device)
    arguments["theta"] = torch.tensor([-INF, INF, -INF], device=device)
    got, expected = run(arguments), dense(arguments, case)
    dense_rows = sum(case.extends[:2])
    assert relative_error(got[:dense_rows], expected[:dense_rows]) < TOLERANCE
    assert relative_error(got[dense_rows:], expected[dense_rows:]) > 10 * TOLERANCE


@pytest.mark.parametrize("run", [run_reference, run_triton])
def test_queries_outside_the_sparse_range_are_dense_and_those_inside_do_not_notice(run: Any, device: str) -> None:
    prefix, extend, low, high = 20, 120, 2 * GROUP, 3 * GROUP + 21
    case = Case((prefix,), (extend,), 16, 1, 2, 64, FP16, FP16)
    arguments = with_theta(make(case, device), -INF)
    plan = make_plan([prefix], [extend], BLOCK, STEP, device, [(low, high)])
    stats = torch.zeros(2, dtype=torch.int64, device=device)
    got = run({**arguments, "plan": plan, "stats": stats})
    inside = torch.arange(prefix, prefix + extend)
    inside = ((inside >= low) & (inside < high)).to(got.device)
    expected = dense(arguments, case)
    assert relative_error(got[~inside], expected[~inside]) < TOLERANCE
    assert relative_error(got[inside], expected[inside]) > 10 * TOLERANCE
    # The last part ends with the range, as it would with the prompt.
    alone = run(
        {
            **arguments,
            "q": arguments["q"][: high - prefix],
            "plan": make_plan([prefix], [high - prefix], BLOCK, STEP, device),
        }
    )
    assert torch.equal(got[inside], alone[inside[: high - prefix]])
    gaps = reference.key_gaps(arguments["q"], arguments["k_cache"], arguments["page_table"], plan, 16, 0.1, 1.0, 0, 3)
    assert gaps.shape[-1] == 3 * GROUP - BLOCK
    left_out = sum(max(0, position // GROUP * GROUP - 2 * BLOCK) for position in range(low, high)) * 2
    assert (stats[1] - stats[0]).item() == left_out


@pytest.mark.parametrize(("theta", "active"), [(2.0, True), (1.9999998, False)])
@pytest.mark.parametrize("run", [run_reference, run_triton])
def test_equality_with_theta_is_a_hit(run: Any, theta: float, active: bool, device: str) -> None:
    length, key = 4 * BLOCK, 20
    arguments = make(Case((0,), (length,), 16, 1, 1, 64, FP16, FP16, step=1, theta=theta), device)
    slots = row_slots(arguments, 0, length)
    arguments["q"].zero_()[..., 0] = 1.0
    arguments["k_cache"][slots] = 0.0
    arguments["k_cache"][slots, :, 0] = -50.0
    arguments["k_cache"][slots[0], :, 0], arguments["k_cache"][slots[key], :, 0] = 3.0, 1.0
    arguments["v_cache"][slots] = 0.0
    arguments["v_cache"][slots[key]] = 1.0
    seen = run({**arguments, "sm_scale": 1.0})[3 * BLOCK :]
    assert seen.min() > 0.1 if active else seen.abs().max() == 0


@pytest.mark.parametrize("component", [slice(None), slice(3, 4)])
@pytest.mark.parametrize("value", [float("nan"), INF, -INF])
@pytest.mark.parametrize("position", [2, 20, 50])
@pytest.mark.parametrize("run", [run_reference, run_triton])
def test_broken_keys_show_as_in_dense_attention(
    run: Any, position: int, value: float, component: slice, device: str
) -> None:
    """The same rows are NaN, whatever theta is; the others are right, as one that keeps all keys shows."""
    case = Case((30,), (40,), 16, 1, 1, 64, FP16, FP16)
    arguments = make(case, device)
    arguments["k_cache"][row_slots(arguments, 0, 70)[position], 0, component] = value
    expected = dense(arguments, case)
    assert expected.isnan().any()
    assert torch.equal(run(arguments).isnan(), expected.isnan())
    all_keys = run(with_theta(arguments, INF)).double()
    torch.testing.assert_close(all_keys, expected, rtol=1e-2, atol=2e-3, equal_nan=True)
