"""The scores of a KT selection: reference against loops, Triton against the reference, and what they promise."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_runs import replay_with

from sglang_sparse_kernels.kt_select import TABLES, cases, reference
from sglang_sparse_kernels.kt_select import triton as kernels
from sglang_sparse_kernels.kt_select.cases import BF16, CASES, E4M3, E5M2, FP16, FP32, Case, Row
from sglang_sparse_kernels.page_score.reference import page_score

NAN, INF, MOST = float("nan"), float("inf"), torch.finfo(torch.float32).max
# What no kernel writes.
UNWRITTEN = 7.0

SMALL = Case((Row(100), Row(0), Row(33), Row(1)), 2, 4, 64, 16, FP16, FP16, width=110)


def make(case: Case, device: str, seed: int = 0, local_pages: int = 1) -> dict[str, Any]:
    """Arguments of ``kt_score``: what is visible to the first KV head of a row, and to each other some blocks fewer."""
    given = cases.make(case, device, seed)
    shape = len(case.rows), case.heads, given["block_table"].shape[1]
    lists = (torch.empty(size, dtype=torch.int32, device=device) for size in (shape, shape[:2], shape[:2]))
    blocks, counts, _ = reference.visible_blocks(*(given.pop(name) for name in TABLES), tuple(lists))
    fewer = torch.arange(case.heads, dtype=torch.int32, device=device)
    counts = (counts - 3 * fewer).clamp(min=0)
    beyond = torch.arange(shape[2], device=device) >= counts[..., None]
    return {
        **given,
        "candidates": blocks.masked_fill(beyond, 2**31 - 1),
        "n_candidates": counts,
        "local_pages": local_pages,
    }


def unwritten(arguments: dict[str, Any]) -> torch.Tensor:
    return torch.full_like(arguments["candidates"], UNWRITTEN, dtype=FP32)


def run_reference(arguments: dict[str, Any]) -> torch.Tensor:
    return reference.kt_score(**arguments, out=unwritten(arguments))


def run_kernels(arguments: dict[str, Any], **options: Any) -> torch.Tensor:
    return kernels.kt_score(**arguments, out=unwritten(arguments), **options)


def held(arguments: dict[str, Any]) -> torch.Tensor:
    """The entries of the result that are a row's candidates."""
    logical = torch.arange(arguments["candidates"].shape[2], device=arguments["q"].device)
    return logical < arguments["n_candidates"][..., None]


def assert_scores(got: torch.Tensor, arguments: dict[str, Any]) -> None:
    """Close to the reference, and unwritten where no candidate is."""
    expected, mask = run_reference(arguments), held(arguments)
    torch.testing.assert_close(got[mask], expected[mask], rtol=1e-5, atol=1e-4)
    assert (got[~mask] == UNWRITTEN).all()


def naive(arguments: dict[str, Any], row: int, head: int, without: tuple[int, ...] = ()) -> list[float]:
    """Scores of one row and head in float64, without local pages and some others."""
    group = arguments["q"].shape[1] // arguments["summary"].shape[1]
    query = arguments["q"][row, head * group : (head + 1) * group].double().cpu()
    magnitude, total = query.abs().sum(dim=0).tolist(), query.sum(dim=0).tolist()
    chosen = sorted(range(len(total)), key=lambda j: (-magnitude[j], j))[: arguments["topr"]]
    candidates = arguments["candidates"][row, head, : arguments["n_candidates"][row, head]].tolist()
    pages = [page for i, page in enumerate(candidates) if i not in without]
    bounds = arguments["summary"][pages, head].double().cpu()
    bounds = torch.stack([bounds[:, 0 if total[j] > 0 else 1, j] for j in chosen], dim=1)
    shares = []
    for member in query:
        scale = arguments["sm_scale"] * (member.abs().sum() / member[chosen].abs().sum()).sqrt()
        shares.append((bounds @ member[chosen] * scale).log_softmax(dim=0))
    return (torch.stack(shares).logsumexp(dim=0) - math.log(group)).tolist()


@pytest.mark.parametrize("case", [case for case in CASES if not case.gpu_only], ids=str)
def test_reference_is_the_mean_of_the_heads_softmax(case: Case) -> None:
    arguments = make(case, "cpu")
    got = run_reference(arguments)
    for row in range(len(case.rows)):
        for head, count in enumerate(arguments["n_candidates"][row].tolist()):
            local = max(0, count - 1)
            assert (got[row, head, count:] == -INF).all() and (got[row, head, local:count] == INF).all()
            expected = naive(arguments, row, head)[:local]
            assert got[row, head, :local].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_equals_the_reference(case: Case, device: str) -> None:
    arguments = make(case, device)
    got = run_kernels(arguments)
    assert_scores(got, arguments)
    assert torch.equal(got, run_kernels(arguments))


def test_one_head_on_all_dimensions_is_the_page_score(device: str) -> None:
    """Up to its scale and one number for all pages."""
    arguments = make(Case((Row(80),), 1, 1, 64, 64, BF16, BF16), device, local_pages=0)
    got, bounds = run_kernels(arguments)[0, 0], unwritten(arguments)
    pages = arguments["candidates"][0], arguments["n_candidates"][0]
    page_score(arguments["q"], arguments["summary"], *pages, bounds, local_pages=0)
    difference = got - bounds[0, 0] / 8
    torch.testing.assert_close(difference, difference[:1].expand(80), rtol=0, atol=1e-4)
    assert got.exp().sum().item() == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("implementation", [run_reference, run_kernels])
def test_ties_go_to_the_lower_dimensions(implementation: Any, device: str) -> None:
    arguments = make(replace(SMALL, rows=(Row(40),), group=2, topr=6, width=0), device, local_pages=0)
    # Larger than the others at 50; equal at all others.
    arguments["q"].sign_()[0, :, 50] *= 3
    expected = implementation(arguments)
    assert expected[0, 0, :40].isfinite().all()
    arguments["summary"][..., 5:50], arguments["summary"][..., 51:] = NAN, INF
    assert torch.equal(implementation(arguments), expected)
    arguments["summary"][..., 4] = NAN
    assert (implementation(arguments)[held(arguments)] == MOST).all()


@pytest.mark.parametrize("implementation", [run_reference, run_kernels])
@pytest.mark.parametrize("dtype", [FP16, BF16, E4M3, E5M2], ids=str)
def test_a_broken_page_comes_before_all_but_local_ones(dtype: torch.dtype, implementation: Any, device: str) -> None:
    arguments = make(Case((Row(40),), 2, 2, 64, 16, BF16, dtype), device, local_pages=2)
    # The group's largest dimension, which counts with its maximum. The second head has three candidates fewer.
    arguments["q"][0, 2:, 7] = 40.0
    bounds = arguments["summary"].float()
    broken = arguments["candidates"][0, 1, [3, 36]].tolist()
    bounds[broken, 1, 0, 7] = NAN
    arguments["summary"] = bounds.to(dtype)
    got = implementation(arguments)[0]
    assert (got[1, :37] == MOST).tolist() == [i == 3 for i in range(37)]
    assert (got[1, :37] == INF).tolist() == [i >= 35 for i in range(37)]
    expected = naive(arguments, 0, 1, without=(3, 36))
    assert got[1, :3].tolist() + got[1, 4:35].tolist() == pytest.approx(expected[:34], rel=1e-4, abs=1e-4)
    assert got[0, :38].tolist() == pytest.approx(naive(arguments, 0, 0)[:38], rel=1e-4, abs=1e-4)
    bounds[broken, 1, 0, 7], bounds[broken, 1, 1, 7] = 1.0, NAN
    assert (implementation({**arguments, "summary": bounds.to(dtype)})[0, 1, :37] != MOST).all()


@pytest.mark.parametrize("implementation", [run_reference, run_kernels])
def test_queries_of_zero_and_of_nan(implementation: Any, device: str) -> None:
    arguments = make(replace(SMALL, rows=(Row(40), Row(40)), width=0), device)
    arguments["q"][0, :4] = 0.0
    arguments["q"][1, 0, 9] = NAN
    got = implementation(arguments)
    torch.testing.assert_close(got[0, 0, :39], torch.full_like(got[0, 0, :39], -math.log(40)))
    assert (got[1, 0, :39] == MOST).all() and got[1, 0, 39] == INF
    assert got[1, 1, :36].isfinite().all()


@pytest.mark.parametrize("implementation", [run_reference, run_kernels])
def test_logits_far_apart_keep_their_order(implementation: Any, device: str) -> None:
    """The order holds where most probabilities are 0 in float32."""
    arguments = make(Case((Row(30),), 1, 1, 64, 16, FP16, FP16), device, local_pages=0)
    arguments["sm_scale"] = 20.0
    got = implementation(arguments)[0, 0].cpu()
    assert (got.exp() == 0).sum() > 20
    assert torch.equal(got.argsort(), torch.tensor(naive(arguments, 0, 0)).argsort())


@pytest.mark.parametrize("implementation", [run_reference, run_kernels])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_every_number_of_float8(dtype: torch.dtype, implementation: Any, device: str) -> None:
    """A page of each number beside one of zeros, which the number's logit is the difference to."""
    numbers = torch.arange(256, dtype=torch.uint8, device=device)
    summary = torch.zeros(258, 1, 2, 16, dtype=torch.uint8, device=device)
    summary[2:, 0, 0, 5] = numbers
    pages = torch.stack([torch.ones(256), torch.arange(2, 258)], dim=1).int()[:, None].to(device)
    q = torch.zeros(256, 1, 16, dtype=BF16, device=device)
    q[..., 5] = 1.0
    arguments = {"q": q, "summary": summary.view(dtype), "candidates": pages.contiguous(), "topr": 3}
    arguments |= {"n_candidates": torch.full((256, 1), 2, dtype=torch.int32, device=device), "local_pages": 0}
    got = implementation({**arguments, "sm_scale": 16.0})[:, 0]
    expected = (numbers.view(dtype).float() * 16).nan_to_num(MOST, MOST, MOST)
    torch.testing.assert_close(got[:, 1] - got[:, 0], expected, rtol=1e-3, atol=2e-7)


def test_a_row_has_the_same_bits_in_any_batch(device: str) -> None:
    arguments = make(SMALL, device, local_pages=2)
    together = run_kernels(arguments)
    for row, count in ((0, 100), (2, 33), (3, 1)):
        alone = {name: arguments[name][row : row + 1] for name in ("q", "candidates", "n_candidates")}
        alone["candidates"] = alone["candidates"][..., :count].contiguous()
        assert torch.equal(run_kernels({**arguments, **alone})[0, 0], together[row, 0, :count])


@pytest.mark.parametrize(("programs", "rows"), [(1, 1), (1, 3), (64, 2)])
def test_any_number_of_programs_in_scratch_that_holds_anything(
    programs: int, rows: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The order in which a GPU sums up goes by the size of the block.
    arguments, config = (
        make(SMALL, device, local_pages=2),
        kernels.ScoreConfig(programs_per_processor=programs, score_block=64),
    )
    expected = run_kernels(arguments, config=kernels.ScoreConfig(score_block=64))
    assert_scores(expected, arguments)
    empty, sizes, one_row = torch.empty, [], kernels.row_bytes(8, 110)

    def allocate(*shape: int, **options: Any) -> torch.Tensor:
        sizes.append(empty(*shape, **options).nbytes)
        return torch.full(shape, NAN, **options)

    monkeypatch.setattr(torch, "empty", allocate)
    assert torch.equal(run_kernels(arguments, config=config, limit=rows * one_row), expected)
    assert sum(sizes) == rows * one_row == kernels.scratch_bytes(4, 8, 110, limit=rows * one_row)


def test_strided_queries_and_none(device: str) -> None:
    arguments = make(SMALL, device, local_pages=2)
    q = arguments["q"].repeat(1, 2, 1)[:, :8]
    assert not q.is_contiguous() and torch.equal(run_kernels({**arguments, "q": q}), run_kernels(arguments))
    none = {name: arguments[name][:0] for name in ("q", "candidates", "n_candidates")}
    assert run_kernels({**arguments, **none}).shape == (0, 2, 110)


@given(
    case=st.builds(
        Case,
        rows=st.lists(st.integers(0, 100).map(Row), min_size=1, max_size=3).map(tuple),
        heads=st.integers(1, 3),
        group=st.sampled_from([1, 2, 4, 8]),
        dim=st.sampled_from([64, 128]),
        topr=st.integers(1, 64),
        dtype=st.sampled_from([FP32, FP16, BF16]),
        summary_dtype=st.sampled_from([FP32, FP16, BF16, E4M3, E5M2]),
    ),
    local_pages=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
@settings(max_examples=15, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_shape(device: str, case: Case, local_pages: int, seed: int) -> None:
    arguments = make(case, device, seed, local_pages)
    assert_scores(run_kernels(arguments), arguments)


@pytest.mark.gpu
def test_replays_as_a_cuda_graph_with_other_counts(device: str) -> None:
    arguments = make(Case((Row(600), Row(64), Row(0), Row(1)), 8, 4, 128, 32, width=1024), device)
    out = run_kernels(arguments)
    other = make(Case((Row(17), Row(0), Row(1000), Row(283)), 8, 4, 128, 32, width=1024), device)
    replay_with(kernels.kt_score, arguments, other, out, UNWRITTEN)
    assert_scores(out, other)
