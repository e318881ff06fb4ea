"""Page scores: reference against loops, Triton against the reference, and the bound itself."""

import importlib
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_sparse_kernels.common.testing import random_cache, seeded
from sglang_sparse_kernels.page_score import cuda, page_score, reference
from sglang_sparse_kernels.page_score.cases import BF16, CASES, Case, make
from sglang_sparse_kernels.page_summary import update_page_summary


def run_reference(arguments: dict[str, Any]) -> torch.Tensor:
    shape = arguments["q"].shape[0], arguments["summary"].shape[1], arguments["page_table"].shape[1]
    return reference.page_score(**arguments, out=torch.empty(shape, device=arguments["q"].device))


def assert_same_scores(got: torch.Tensor, expected: torch.Tensor, n_pages: torch.Tensor) -> None:
    """Equal where a row holds pages; the Triton kernel leaves the rest unwritten."""
    held = (torch.arange(got.shape[2], device=got.device) < n_pages[:, None])[:, None].expand_as(got)
    torch.testing.assert_close(got[held], expected[held], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("case", [case for case in CASES if not case.gpu_only], ids=str)
def test_reference_is_the_bound_summed_over_dimensions(case: Case) -> None:
    arguments = make(case, "cpu")
    scores = run_reference(arguments)
    for row, n_pages in enumerate(case.n_pages):
        assert (scores[row, :, n_pages:] == float("-inf")).all()
        for head in range(case.heads):
            query = arguments["q"][row, head * case.group : (head + 1) * case.group].double().mean(dim=0)
            for page in range(n_pages):
                bounds = arguments["summary"][arguments["page_table"][row, page].item(), head].double()
                expected = torch.maximum(query * bounds[0], query * bounds[1]).sum().item()
                if page >= n_pages - case.local_pages:
                    expected = float("inf")
                assert scores[row, head, page].item() == pytest.approx(expected, rel=1e-4, abs=1e-3)


@pytest.mark.parametrize("implementation", ["triton", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_equal_the_reference(case: Case, implementation: str, device: str) -> None:
    arguments = make(case, device)
    if implementation == "cuda" and not cuda.takes(arguments["q"], arguments["summary"]):
        pytest.skip("these are Triton's")
    kernel = importlib.import_module(f"sglang_sparse_kernels.page_score.{implementation}")
    expected = run_reference(arguments)
    for ready in (False, True):
        got = kernel.page_score(**arguments, out=torch.full_like(expected, torch.nan), summaries_ready=ready)
        assert_same_scores(got, expected, arguments["n_pages"])


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["triton", "cuda"])
@pytest.mark.parametrize("summary_dtype", [BF16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_replays_of_a_graph_give_the_same_bits(summary_dtype: torch.dtype, implementation: str, device: str) -> None:
    """A hundred times, into poisoned outputs."""
    kernel = importlib.import_module(f"sglang_sparse_kernels.page_score.{implementation}")
    arguments = make(Case((4096, 37, 0, 1000), 8, 4, 128, BF16, summary_dtype), device)
    out = torch.empty(4, 8, 4096, device=device)
    first = kernel.page_score(**arguments, out=out).clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.page_score(**arguments, out=out)
    held = (torch.arange(out.shape[2], device=device) < arguments["n_pages"][:, None])[:, None].expand_as(out)
    for _ in range(100):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out[held], first[held])


@pytest.mark.parametrize("summaries_ready", [False, True])
@pytest.mark.parametrize("programs", [1, 5, 64], ids="{} programs a processor".format)
def test_programs_take_pages_in_turn(programs: int, summaries_ready: bool, device: str) -> None:
    triton = importlib.import_module("sglang_sparse_kernels.page_score.triton")
    case = Case((70, 0, 33, 1, 64), 2, 4, 128, BF16, BF16, width=100)
    arguments = make(case, device)
    expected = run_reference(arguments)
    # Beyond a row's pages the table may hold anything, in the width that is loaded before n_pages is known, too.
    beyond = torch.arange(case.width, device=device) >= arguments["n_pages"][:, None]
    arguments["page_table"].masked_fill_(beyond, 2**31 - 1)
    config = triton.Config(programs_per_processor=programs)
    options = {"config": config, "summaries_ready": summaries_ready}
    got = triton.page_score(**arguments, out=torch.empty_like(expected), **options)
    assert_same_scores(got, expected, arguments["n_pages"])


def test_same_input_gives_the_same_bits(device: str) -> None:
    arguments = make(CASES[0], device)
    first, second = page_score(**arguments), page_score(**arguments)
    held = (torch.arange(first.shape[2], device=device) < arguments["n_pages"][:, None])[:, None].expand_as(first)
    assert torch.equal(first[held], second[held])


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("summary_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_nan_in_a_summary_selects_the_page(summary_dtype: torch.dtype, implementation: str, device: str) -> None:
    case = Case((6,), 2, 2, 64, torch.bfloat16, summary_dtype)
    arguments = make(case, device)
    page = arguments["page_table"][0, 3].item()
    bounds = arguments["summary"].float()
    bounds[page, 1, 0, 7] = float("nan")
    arguments["summary"] = bounds.to(summary_dtype)
    scores = page_score(**arguments) if implementation == "triton" else run_reference(arguments)
    assert (scores[0, 1] == torch.finfo(torch.float32).max).tolist() == [False, False, False, True, False, False]
    assert scores.isinf().tolist() == [[[False] * 5 + [True]] * 2]


@pytest.mark.parametrize("dim", range(4), ids="byte {} of a word".format)
def test_every_number_of_float8(dim: int, device: str) -> None:
    numbers = torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    arguments = make(Case((256,), 1, 1, 64, torch.bfloat16, torch.float8_e4m3fn, local_pages=0), device)
    arguments["q"] = torch.zeros_like(arguments["q"])
    arguments["q"][0, 0, dim] = 1
    summary = torch.zeros_like(arguments["summary"].view(torch.uint8))
    summary[arguments["page_table"][0].long(), 0, 0, dim] = numbers.view(torch.uint8)
    arguments["summary"] = summary.view(torch.float8_e4m3fn)
    expected = numbers.float().nan_to_num(nan=torch.finfo(torch.float32).max)
    assert torch.equal(page_score(**arguments)[0, 0], expected)
    assert torch.equal(run_reference(arguments)[0, 0], expected)


def test_strided_queries_and_tables(device: str) -> None:
    arguments = make(CASES[0], device)
    expected = run_reference(arguments)
    q, table = arguments["q"], arguments["page_table"]
    arguments["q"] = torch.cat([q, torch.randn_like(q)], dim=1)[:, : q.shape[1]]
    arguments["page_table"] = torch.cat([table, table], dim=1)[:, : table.shape[1]]
    assert_same_scores(page_score(**arguments), expected, arguments["n_pages"])


@given(
    seed=st.integers(0, 2**31),
    page_size=st.sampled_from([1, 4, 16, 64]),
    dim=st.sampled_from([64, 96]),
    summary_dtype=st.sampled_from([torch.bfloat16, torch.float8_e4m3fn]),
)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_score_bounds_every_key_of_the_page(
    device: str, seed: int, page_size: int, dim: int, summary_dtype: torch.dtype
) -> None:
    generator = seeded(device, seed)
    length = 2 * page_size + 1 + seed % page_size
    k_cache = random_cache((5 * page_size, 1, dim), torch.bfloat16, device, generator)
    summary = torch.zeros(5, 1, 2, dim, device=device).to(summary_dtype)
    pages = torch.tensor([3, 1, 2], device=device)
    last_slots = torch.tensor([4 * page_size - 1, 2 * page_size - 1, 2 * page_size + (length - 1) % page_size])
    update_page_summary(k_cache, summary, last_slots.to(device), page_size)
    q = torch.randn(1, 4, dim, device=device, generator=generator)
    n_pages = torch.tensor([3], dtype=torch.int32, device=device)
    scores = page_score(q, summary, pages.int()[None], n_pages, local_pages=0)[0, 0]
    for logical, last_slot in enumerate(last_slots.tolist()):
        keys = k_cache[last_slot // page_size * page_size : last_slot + 1, 0].float()
        logits = keys @ q[0].mean(dim=0)
        # The two sums round differently: at P=1 the bound is an equality.
        assert scores[logical] >= logits.max() - 1e-4
