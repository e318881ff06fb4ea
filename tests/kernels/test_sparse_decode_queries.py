"""Sparse decode attention for several tokens of a row at once: each as if it were a row that ends with it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from anchor_runs import relative_error

from sglang_sparse_kernels.sparse_decode import reference, sparse_decode
from sglang_sparse_kernels.sparse_decode import triton as kernels
from sglang_sparse_kernels.sparse_decode.cases import CASES, FP16, QUERIES, Case, make
from sglang_sparse_kernels.sparse_decode.plan import Config

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# Many splits of one small tile each.
SPLIT = Config(block_tokens=16, programs_per_processor=64)


def one_by_one(arguments: dict[str, Any]) -> torch.Tensor:
    """The reference of one query token a row in float32, over what the row held when that token was the newest."""
    queries, heads, page = arguments["queries"], arguments["k_cache"].shape[1], arguments["page_size"]
    query = arguments["q"].float().unflatten(1, (heads, queries, -1))
    out = torch.zeros(*query.shape[:4], arguments["v_cache"].shape[2], device=query.device)
    rest = {name: value for name, value in arguments.items() if name != "queries"}
    for row, last_slot in enumerate(arguments["last_slots"].tolist()):
        for token in range(queries if last_slot >= 0 else 0):
            offset = last_slot % page - (queries - 1 - token)
            behind = -(offset // page)
            one = slice(row, row + 1)
            counts = arguments["counts"][one] - behind
            newest = arguments["indices"][row, 0, counts[0, 0] - 1].long() * page + offset % page
            mine = {"indices": arguments["indices"][one].contiguous(), "counts": counts, "last_slots": newest[None]}
            inputs = reference.Inputs(**{**rest, **mine, "q": query[one, :, token].flatten(1, 2)})
            got = torch.empty(*inputs.q.shape[:2], out.shape[-1], device=out.device)
            out[row, :, token] = reference.sparse_decode(inputs, got).unflatten(1, (heads, -1))[0]
    return out.flatten(1, 3)


def assert_close(got: torch.Tensor, arguments: dict[str, Any], dtype: torch.dtype) -> None:
    assert relative_error(got, one_by_one(arguments)) < TOLERANCE[dtype]
    assert got[arguments["last_slots"] < 0].count_nonzero() == 0


@pytest.mark.parametrize("case", [case for case in QUERIES if not case.gpu_only], ids=str)
def test_reference_sees_what_each_token_saw_as_the_newest(case: Case) -> None:
    arguments = make(case, "cpu")
    inputs = reference.Inputs(**{**arguments, "q": arguments["q"].float()})
    got = reference.sparse_decode(inputs, torch.empty(*inputs.q.shape[:2], case.v_dim or case.dim))
    assert_close(got, arguments, torch.float32)


@pytest.mark.parametrize("case", QUERIES, ids=str)
def test_triton_sees_what_each_token_saw_as_the_newest(case: Case, device: str) -> None:
    if case.dtype == torch.float32 and device == "cuda":
        pytest.skip("float32 caches are for the CPU")
    arguments = make(case, device)
    got = sparse_decode(**arguments)
    assert_close(got, arguments, case.dtype)
    assert torch.equal(got, sparse_decode(**arguments))


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(
    "case", [case for case in QUERIES if not case.gpu_only and case.dtype != torch.float32], ids=str
)
def test_splits_hand_on_what_each_token_found(case: Case, narrow: bool, together: bool, device: str) -> None:
    """Of several splits, the ones that hold no token before the first query's leave that one nothing."""
    arguments = make(case, device)
    arrivals = torch.zeros_like(arguments["counts"]) if together else None
    shape = (*arguments["q"].shape[:2], arguments["v_cache"].shape[2])
    out = torch.full(shape, float("nan"), dtype=case.dtype, device=device)
    inputs = reference.Inputs(**arguments)
    got = kernels.sparse_decode(inputs, out, replace(SPLIT, narrow=narrow), arrivals=arrivals)
    assert_close(got, arguments, case.dtype)
    assert arrivals is None or arrivals.count_nonzero() == 0


@pytest.mark.parametrize("queries", [1, 2, 4, 5])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_all_lengths_around_a_page_end(queries: int, group: int, device: str) -> None:
    """From a row that is the queries alone to one of more than three pages; all pages selected, and some."""
    for ratio in (0.5, 1.0):
        case = Case(tuple(range(queries, 28, 3)), 8, 1, group, 64, FP16, FP16, ratio=ratio, queries=queries)
        arguments = {"queries": 1, **make(case, device)}
        assert_close(sparse_decode(**arguments), arguments, FP16)


def test_keys_behind_a_token_do_not_reach_it(device: str) -> None:
    arguments = make(Case((37,), 16, 1, 2, 64, FP16, FP16, ratio=1.0, queries=5), device)
    before = sparse_decode(**arguments).unflatten(1, (5, 2))
    for cache in (arguments["k_cache"], arguments["v_cache"]):
        cache[arguments["last_slots"]] *= 3
    after = sparse_decode(**arguments).unflatten(1, (5, 2))
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4], after[:, 4])


@pytest.mark.parametrize("case", [case for case in CASES if not case.gpu_only], ids=str)
def test_one_query_is_the_usual_call_to_the_bit(case: Case, device: str) -> None:
    if case.dtype == torch.float32 and device == "cuda":
        pytest.skip("float32 caches are for the CPU")
    arguments = make(case, device)
    assert torch.equal(sparse_decode(**arguments, queries=1), sparse_decode(**arguments))


def test_queries_divide_the_heads_of_a_kv_head() -> None:
    arguments = make(Case((32,), 16, 2, 4, 64, torch.float32, torch.float32), "cpu")
    for queries in (0, 3):
        with pytest.raises(ValueError, match=f"queries must divide the 4 of a KV head, got {queries}"):
            sparse_decode(**arguments, queries=queries)
