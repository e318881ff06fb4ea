"""Page scores: reference against loops, Triton against the reference, and the bound itself."""

import importlib
import math
from functools import partial
from typing import Any

import pytest
import torch
from cuda_library import emulated
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_runs import assert_replays

from sglang_sparse_kernels.common import nvrtc
from sglang_sparse_kernels.common.testing import random_cache, seeded
from sglang_sparse_kernels.page_score import cuda, page_score, reference
from sglang_sparse_kernels.page_score.cases import BF16, CASES, FP8, FP16, Case, make
from sglang_sparse_kernels.page_summary import update_page_summary

# Dimension, group, type of the queries and of the summaries.
KINDS = [(128, 4, BF16, BF16), (128, 4, BF16, FP8), (64, 7, FP16, FP16), (64, 1, FP16, FP8), (64, 2, BF16, BF16)]
on_cpu = emulated((cuda.SOURCE, "page_score", cuda.defines(*kind)) for kind in KINDS)
emulation = pytest.mark.usefixtures("on_cpu")
Kind = tuple[int, int, torch.dtype, torch.dtype]


def run_reference(arguments: dict[str, Any]) -> torch.Tensor:
    shape = arguments["q"].shape[0], arguments["summary"].shape[1], arguments["page_table"].shape[1]
    return reference.page_score(**arguments, out=torch.empty(shape, device=arguments["q"].device))


def run_emulated(arguments: dict[str, Any], blocks: int = 2, ready: bool = False) -> torch.Tensor:
    """Score with the CUDA kernel, so many blocks a row; places that it leaves unwritten are -inf."""
    shape = len(arguments["q"]), arguments["summary"].shape[1], arguments["page_table"].shape[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "blocks_of", lambda *_: blocks)
        return cuda.page_score(**arguments, out=torch.full(shape, -math.inf), summaries_ready=ready)


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
@pytest.mark.parametrize("summary_dtype", [BF16, FP16, FP8], ids=str)
def test_replays_of_a_graph_give_the_same_bits(summary_dtype: torch.dtype, implementation: str, device: str) -> None:
    """A hundred times, into poisoned outputs."""
    kernel = importlib.import_module(f"sglang_sparse_kernels.page_score.{implementation}")
    arguments = make(Case((4096, 37, 0, 1000), 8, 4, 128, BF16, summary_dtype), device)
    out = torch.empty(4, 8, 4096, device=device)
    first = kernel.page_score(**arguments, out=out).clone()
    held = (torch.arange(out.shape[2], device=device) < arguments["n_pages"][:, None])[:, None].expand_as(out)
    step = partial(kernel.page_score, **arguments, out=out)
    assert_replays(step, [(out, torch.nan)], lambda: torch.equal(out[held], first[held]))


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
@pytest.mark.parametrize("summary_dtype", [BF16, FP8], ids=str)
def test_nan_in_a_summary_selects_the_page(summary_dtype: torch.dtype, implementation: str, device: str) -> None:
    case = Case((6,), 2, 2, 64, BF16, summary_dtype)
    arguments = make(case, device)
    page = arguments["page_table"][0, 3].item()
    bounds = arguments["summary"].float()
    bounds[page, 1, 0, 7] = float("nan")
    arguments["summary"] = bounds.to(summary_dtype)
    scores = page_score(**arguments) if implementation == "triton" else run_reference(arguments)
    assert (scores[0, 1] == torch.finfo(torch.float32).max).tolist() == [False, False, False, True, False, False]
    assert scores.isinf().tolist() == [[[False] * 5 + [True]] * 2]


@emulation
@pytest.mark.parametrize("implementation", ["reference", "kernel", "emulated"])
@pytest.mark.parametrize("dim", [0, 1, 2, 3, 5, 62, 63])
def test_every_number_of_float8(dim: int, implementation: str, device: str) -> None:
    run = {"reference": run_reference, "kernel": lambda given: page_score(**given), "emulated": run_emulated}
    device = "cpu" if implementation == "emulated" else device
    numbers = torch.arange(256, dtype=torch.uint8, device=device).view(FP8)
    arguments = make(Case((256,), 1, 1, 64, FP16, FP8, local_pages=0), device)
    arguments["q"] = torch.zeros_like(arguments["q"])
    arguments["q"][0, 0, dim] = 1
    summary = torch.zeros_like(arguments["summary"].view(torch.uint8))
    summary[arguments["page_table"][0].long(), 0, 0, dim] = numbers.view(torch.uint8)
    arguments["summary"] = summary.view(FP8)
    expected = numbers.float().nan_to_num(nan=torch.finfo(torch.float32).max)
    assert torch.equal(run[implementation](arguments)[0, 0], expected)


@given(
    seed=st.integers(0, 2**31),
    page_size=st.sampled_from([1, 4, 16, 64]),
    dim=st.sampled_from([64, 96]),
    summary_dtype=st.sampled_from([BF16, FP8]),
)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_score_bounds_every_key_of_the_page(
    device: str, seed: int, page_size: int, dim: int, summary_dtype: torch.dtype
) -> None:
    generator = seeded(device, seed)
    length = 2 * page_size + 1 + seed % page_size
    k_cache = random_cache((5 * page_size, 1, dim), BF16, device, generator)
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


def case_of(kind: Kind, n_pages: tuple[int, ...], **more: Any) -> Case:
    dim, group, query, summary = kind
    return Case(n_pages, 2, group, dim, query, summary, **more)


@emulation
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(str(part).split(".")[-1] for part in kind))
def test_the_emulated_cuda_kernel_equals_the_reference(kind: Kind) -> None:
    """Rows of no page, of one, of one more than a warp takes; strided queries; a table with anything beyond."""
    arguments = make(case_of(kind, (70, 0, 17, 1), width=75, local_pages=2), "cpu")
    expected = run_reference(arguments)
    beyond = torch.arange(75) >= arguments["n_pages"][:, None]
    arguments["page_table"].masked_fill_(beyond, 2**31 - 1)
    q = arguments["q"]
    arguments["q"] = torch.cat([q, torch.randn_like(q)], dim=1)[:, : q.shape[1]]
    for blocks, ready in ((1, False), (2, True)):
        got = run_emulated(arguments, blocks, ready)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)


@emulation
@pytest.mark.parametrize("kind", KINDS[:3], ids=lambda kind: str(kind[3]).split(".")[-1])
def test_a_query_of_any_size_keeps_its_precision(kind: Kind) -> None:
    """Numbers a million times as large as others, and all of them far from what float16 holds."""
    for size in (1.0, 2.0**-40, 2.0**40) if kind[2] == BF16 else (1.0, 2.0**-8, 2.0**8):
        arguments = make(case_of(kind, (20,), local_pages=0), "cpu")
        arguments["q"][..., 1:] *= 2.0**-20 if kind[2] == BF16 else 2.0**-10
        arguments["q"] *= size
        # Of the large number nothing is left: what the small ones add up to is seen.
        arguments["summary"][:, :, :, 0] = 0
        expected, got = run_reference(arguments), run_emulated(arguments, 1)
        assert ((got - expected).abs() <= 1e-5 * expected.abs().max()).all() and expected.abs().max() > 0


@emulation
@pytest.mark.parametrize("kind", KINDS[:3], ids=lambda kind: str(kind[3]).split(".")[-1])
def test_what_is_no_number_with_the_emulated_cuda_kernel(kind: Kind) -> None:
    """A NaN of a summary has its page selected, a NaN or an infinity of a query all pages of its head."""
    largest = torch.finfo(torch.float32).max
    arguments = make(case_of(kind, (9, 9, 9)), "cpu")
    page = arguments["page_table"][0, 3].item()
    bounds = arguments["summary"].float()
    bounds[page, 1, 0, 7] = math.nan
    arguments["summary"] = bounds.to(kind[3])
    for row, value in ((1, math.nan), (2, math.inf)):
        arguments["q"][row, 0, 5] = value
    got = run_emulated(arguments, 1)
    assert (got[0] == largest).sum(dim=1).tolist() == [0, 1] and got[0, 1, 3] == largest
    for row in (1, 2):
        assert (got[row] == largest).sum(dim=1).tolist() == [8, 0]
    assert (got[:, :, 8] == math.inf).all()


def test_blocks() -> None:
    # 528 blocks of four warps at once on an H200: each warp takes two times 16 of 8,192 pages for each of 8 heads.
    assert cuda.blocks_of(8192, 8, 528) == 66 and cuda.blocks_of(4096, 64, 528) == 8
    assert cuda.blocks_of(100, 8, 528) == 2 and cuda.blocks_of(100, 1000, 528) == 1


def test_what_it_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "available", lambda _: True)
    monkeypatch.setattr(cuda, "capability", lambda _: (8, 0))

    def takes(query: torch.dtype, summary: torch.dtype, dim: int, first: int = 0) -> bool:
        entries = torch.zeros(3 * 2 * dim + first, dtype=summary)[first:].view(3, 1, 2, dim)
        return cuda.takes(torch.zeros(1, 2, dim, dtype=query), entries)

    assert takes(BF16, BF16, 128) and takes(FP16, BF16, 64) and takes(BF16, FP16, 128)
    # No other dimensions, no float32, no summaries that four lanes cannot read together, no float8 before Ada.
    assert not takes(BF16, BF16, 96) and not takes(torch.float32, BF16, 128) and not takes(BF16, torch.float32, 128)
    assert not takes(BF16, BF16, 128, first=4) and not takes(BF16, FP8, 128)
    monkeypatch.setattr(cuda, "capability", lambda _: (8, 9))
    assert takes(BF16, FP8, 128)
    monkeypatch.setattr(nvrtc, "available", lambda _: False)
    assert not takes(BF16, BF16, 128)
