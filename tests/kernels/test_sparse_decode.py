"""Sparse decode attention: reference against loops, Triton against the reference, both against dense attention."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from anchor_runs import relative_error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_sparse_kernels.sparse_decode import reference, sparse_decode
from sglang_sparse_kernels.sparse_decode import triton as kernels
from sglang_sparse_kernels.sparse_decode.cases import CASES, Case, make
from sglang_sparse_kernels.sparse_decode.plan import Config, default_config

# Relative L2 error by the dtype of the query; bfloat16 also rounds the weights of the softmax.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


# Many splits of one small tile each.
SPLIT = Config(block_tokens=16, programs_per_processor=64)
VARIANTS = [SPLIT, replace(SPLIT, narrow=True)]
SPLIT_CASES = [
    Case((90, 0, 33, 1), 16, 1, 4, 64, torch.bfloat16, torch.bfloat16),
    Case((40, 20), 1, 1, 7, 64, torch.float16, torch.float16, v_dim=96),
    Case((70,), 8, 2, 1, 64, torch.bfloat16, torch.float8_e4m3fn, k_scale=0.5, v_scale=2.0),
]


def run_reference(arguments: dict[str, Any]) -> torch.Tensor:
    """The reference in float32, so that only the kernel under test rounds."""
    q = arguments["q"].float()
    out = torch.empty(*q.shape[:2], arguments["v_cache"].shape[2], device=q.device)
    return reference.sparse_decode(reference.Inputs(**{**arguments, "q": q}), out)


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
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pages_as_token_slots_give_the_same_result(device: str, seed: int, lengths: list[int]) -> None:
    """Page size 1 over the tokens of the selected pages."""
    arguments = make(Case(tuple(lengths), 8, 2, 2, 64, torch.float16, torch.float16), device, seed)
    slots, valid = reference.token_slots(
        arguments["indices"], arguments["counts"], arguments["last_slots"], arguments["page_size"]
    )
    counts = valid.sum(dim=-1).int()
    order = (~valid).int().argsort(dim=-1, stable=True)
    tokens = slots.gather(-1, order).int().contiguous()
    by_token = sparse_decode(**{**arguments, "indices": tokens, "counts": counts, "page_size": 1})
    assert relative_error(by_token, sparse_decode(**arguments).float()) < TOLERANCE[torch.float16]


def test_large_logits_do_not_overflow(device: str) -> None:
    arguments = make(CASES[0], device)
    arguments["q"] = arguments["q"] * 100
    got = sparse_decode(**arguments)
    assert got.isfinite().all()
    assert relative_error(got, run_reference(arguments)) < TOLERANCE[torch.bfloat16]


def poisoned(arguments: dict[str, Any], extra: int = 9) -> dict[str, Any]:
    """The same selection in wider rows that hold anything beyond the count, as memory that was never written does."""
    indices, counts = arguments["indices"], arguments["counts"]
    rows, heads, width = indices.shape
    wide = torch.full((rows, heads, width + extra), 2**31 - 1, dtype=torch.int32, device=indices.device)
    wide[:, :, 1::2] = 0
    chosen = torch.arange(width + extra, device=indices.device) < counts[..., None]
    wide[:, :, :width] = torch.where(chosen[..., :width], indices, wide[:, :, :width])
    return {**arguments, "indices": wide}


def run_config(
    arguments: dict[str, Any], config: Config, usual_pages: int | None = None, arrivals: torch.Tensor | None = None
) -> torch.Tensor:
    q = arguments["q"]
    out = torch.full((*q.shape[:2], arguments["v_cache"].shape[2]), float("nan"), dtype=q.dtype, device=q.device)
    return kernels.sparse_decode(reference.Inputs(**arguments), out, config, usual_pages, arrivals)


def no_arrivals(arguments: dict[str, Any]) -> torch.Tensor:
    return torch.zeros_like(arguments["counts"])


@pytest.fixture
def combined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The splits of each combination that was launched apart."""
    launched: list[int] = []
    combine = kernels.combine

    def counting(partial: Any, lse: Any, counts: Any, out: Any, splits: int, *more: Any) -> None:
        launched.append(splits)
        combine(partial, lse, counts, out, splits, *more)

    monkeypatch.setattr(kernels, "combine", counting)
    return launched


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("config", VARIANTS, ids=str)
@pytest.mark.parametrize("case", SPLIT_CASES, ids=str)
def test_every_variant_equals_the_reference(
    case: Case, config: Config, together: bool, device: str, combined: list[int]
) -> None:
    arguments = poisoned(make(case, device))
    arrivals = no_arrivals(arguments) if together else None
    got = run_config(arguments, config, arrivals=arrivals)
    assert bool(combined) != together
    if arrivals is not None:
        assert arrivals.count_nonzero() == 0, "ready for the next call"
        assert torch.equal(got, run_config(arguments, config, arrivals=arrivals))
    assert relative_error(got, run_reference(arguments)) < TOLERANCE[case.dtype]
    padded = [row for row, length in enumerate(case.lengths) if length == 0]
    assert got[padded].count_nonzero() == 0


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("config", VARIANTS, ids=str)
@pytest.mark.parametrize("usual_pages", [1, 3])
def test_counts_of_any_size_are_served(usual_pages: int, config: Config, together: bool, device: str) -> None:
    """Nothing, less than a tile, one tile, and more than the work was split for."""
    case = Case((150, 0, 5, 16, 33), 16, 1, 2, 64, torch.float16, torch.float16, ratio=1.0)
    arguments = poisoned(make(case, device))
    got = run_config(arguments, config, usual_pages, no_arrivals(arguments) if together else None)
    assert relative_error(got, run_reference(arguments)) < TOLERANCE[torch.float16]
    assert got[1].count_nonzero() == 0


def test_batches_without_any_page_give_zeros(device: str) -> None:
    arguments = poisoned(make(SPLIT_CASES[0], device))
    arguments["counts"] = torch.zeros_like(arguments["counts"])
    for config, arrivals in product(VARIANTS, (None, no_arrivals(arguments))):
        assert torch.equal(run_config(arguments, config, arrivals=arrivals), torch.zeros_like(arguments["q"]))


def test_more_results_than_a_program_holds_are_combined_apart(device: str, combined: list[int]) -> None:
    """Two warps hold 4,096 numbers: sixteen splits of four heads of 64, and no more."""
    for tokens, launched in ((256, []), (257, [17])):
        case = Case((tokens,), 16, 1, 4, 64, torch.float16, torch.float16, ratio=1.0)
        arguments = make(case, device)
        got = run_config(arguments, replace(SPLIT, num_warps=2), arrivals=no_arrivals(arguments))
        assert combined == launched
        assert relative_error(got, run_reference(arguments)) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("tokens", [100, 1000, 10000])
@pytest.mark.parametrize("case", [case for case in CASES if case.gpu_only], ids=str)
def test_every_default_on_the_gpu(case: Case, tokens: int, together: bool, device: str) -> None:
    arguments = poisoned(make(case, device))
    arrivals = no_arrivals(arguments) if together else None
    got = run_config(arguments, default_config(512, tokens, torch.bfloat16), arrivals=arrivals)
    assert relative_error(got, run_reference(arguments)) < TOLERANCE[case.dtype]
    if arrivals is not None:
        again = (
            run_config(arguments, default_config(512, tokens, torch.bfloat16), arrivals=arrivals) for _ in range(100)
        )
        assert all(torch.equal(got, one) for one in again) and arrivals.count_nonzero() == 0
