"""Sparse decode attention: reference against loops, Triton against the reference, both against dense attention."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_sparse_kernels.sparse_decode import reference, sparse_decode
from sglang_sparse_kernels.sparse_decode.cases import CASES, Case, make

# Relative L2 error by the dtype of the query; bfloat16 also rounds the weights of the softmax.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def run_reference(arguments: dict[str, Any]) -> torch.Tensor:
    """The reference in float32, so that only the kernel under test rounds."""
    q = arguments["q"].float()
    out = torch.empty(*q.shape[:2], arguments["v_cache"].shape[2], device=q.device)
    return reference.sparse_decode(**{**arguments, "q": q}, out=out)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got.float() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def naive(arguments: dict[str, Any], row: int, q_head: int) -> torch.Tensor:
    """One output row in float64, token by token."""
    page_size, last_slot = arguments["page_size"], arguments["last_slots"][row].item()
    heads = arguments["k_cache"].shape[1]
    head = q_head // (arguments["q"].shape[1] // heads)
    slots = []
    for page in arguments["indices"][row, head, : arguments["counts"][row, head]].tolist():
        end = last_slot + 1 if page == last_slot // page_size else (page + 1) * page_size
        slots += range(page * page_size, end)
    keys = arguments["k_cache"][slots, head].double() * arguments["k_scale"]
    values = arguments["v_cache"][slots, head].double() * arguments["v_scale"]
    weights = (keys @ arguments["q"][row, q_head].double() * arguments["sm_scale"]).softmax(dim=0)
    return weights @ values


@pytest.mark.parametrize("case", [case for case in CASES if not case.gpu_only], ids=str)
def test_reference_is_softmax_attention_over_the_selected_tokens(case: Case) -> None:
    arguments = make(case, "cpu")
    got = run_reference(arguments)
    for row, length in enumerate(case.lengths):
        for q_head in range(case.heads * case.group):
            expected = naive(arguments, row, q_head) if length else torch.zeros_like(got[row, q_head]).double()
            torch.testing.assert_close(got[row, q_head].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_equals_the_reference(case: Case, device: str) -> None:
    if case.dtype == torch.float32 and device == "cuda":
        pytest.skip("float32 caches are for the CPU")
    arguments = make(case, device)
    got = sparse_decode(**arguments)
    assert got.dtype == case.dtype
    assert relative_error(got, run_reference(arguments)) < TOLERANCE[case.dtype]
    padded = [row for row, length in enumerate(case.lengths) if length == 0]
    assert got[padded].count_nonzero() == 0
    assert torch.equal(got, sparse_decode(**arguments))


@pytest.mark.parametrize("group", [1, 2, 4, 7, 8])
@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 16, 32, 64])
def test_all_pages_is_dense_attention(group: int, page_size: int, device: str) -> None:
    length = 90
    arguments = make(Case((length,), page_size, 2, group, 64, torch.float16, torch.float16, ratio=1.0), device)
    slots = arguments["indices"][0, 0].long()[:, None] * page_size + torch.arange(page_size, device=device)
    keys, values = (arguments[name][slots.flatten()[:length]].float() for name in ("k_cache", "v_cache"))
    query = arguments["q"][0].float().view(2, group, 64)
    weights = torch.einsum("hgd,thd->hgt", query, keys).mul(arguments["sm_scale"]).softmax(dim=-1)
    dense = torch.einsum("hgt,thd->hgd", weights, values).reshape(1, 2 * group, 64)
    assert relative_error(sparse_decode(**arguments), dense) < TOLERANCE[torch.float16]
    assert relative_error(run_reference(arguments), dense) < 1e-5


@given(seed=st.integers(0, 1000), lengths=st.lists(st.integers(0, 200), min_size=1, max_size=3))
@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pages_as_token_slots_give_the_same_result(device: str, seed: int, lengths: list[int]) -> None:
    """Page size 1 over the tokens of the selected pages."""
    arguments = make(Case(tuple(lengths), 8, 2, 2, 64, torch.float16, torch.float16), device, seed)
    slots, valid = reference._token_slots(
        arguments["indices"], arguments["counts"], arguments["last_slots"], arguments["page_size"]
    )
    counts = valid.sum(dim=-1).int()
    order = (~valid).int().argsort(dim=-1, stable=True)
    tokens = slots.gather(-1, order).int().contiguous()
    by_token = sparse_decode(**{**arguments, "indices": tokens, "counts": counts, "page_size": 1})
    assert relative_error(by_token, sparse_decode(**arguments).float()) < TOLERANCE[torch.float16]


def test_strided_queries_and_caches(device: str) -> None:
    arguments = make(CASES[0], device)
    expected = run_reference(arguments)
    both = torch.cat([arguments["k_cache"], arguments["v_cache"]], dim=1)
    heads = arguments["k_cache"].shape[1]
    arguments.update(k_cache=both[:, :heads], v_cache=both[:, heads:])
    q = arguments["q"]
    arguments["q"] = torch.cat([q, torch.randn_like(q)], dim=1)[:, : q.shape[1]]
    assert relative_error(sparse_decode(**arguments), expected) < TOLERANCE[torch.bfloat16]


def test_large_logits_do_not_overflow(device: str) -> None:
    arguments = make(CASES[0], device)
    arguments["q"] = arguments["q"] * 100
    got = sparse_decode(**arguments)
    assert got.isfinite().all()
    assert relative_error(got, run_reference(arguments)) < TOLERANCE[torch.bfloat16]
