"""Page selection: reference against a sorted list, Triton against the reference, exactly."""

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_sparse_kernels.page_topk import page_topk, reference
from sglang_sparse_kernels.page_topk.cases import CASES, Case, make

SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1.0, -1.0, 1e-40, -1e-40, 3e38, -3e38]


def run_reference(arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, _ = arguments["scores"].shape
    options = {"dtype": torch.int32, "device": arguments["scores"].device}
    out = (torch.empty(batch, heads, arguments["max_select"], **options), torch.empty(batch, heads, **options))
    return reference.page_topk(**arguments, out=out)


def highest(scores: list[float], n_select: int) -> list[int]:
    """Positions of the ``n_select`` highest scores in ascending order, ties to the lowest position."""
    keys = [math.inf if math.isnan(score) else score for score in scores]
    return sorted(sorted(range(len(keys)), key=lambda j: -keys[j])[:n_select])


def one_row(scores: list[float], n_select: int, device: str) -> list[int]:
    """Logical pages that ``page_topk`` selects of one row; its physical pages are 100, 101, ..."""
    table = 100 + torch.arange(len(scores), dtype=torch.int32, device=device)
    n_pages, wanted = (torch.tensor([value], dtype=torch.int32, device=device) for value in (len(scores), n_select))
    scores_row = torch.tensor(scores, dtype=torch.float32, device=device)[None, None]
    indices, counts = page_topk(scores_row, table[None], n_pages, wanted, max_select=max(1, len(scores)))
    count = counts.item()
    assert (indices[0, 0, count:] == -1).all()
    return (indices[0, 0, :count] - 100).tolist()


@pytest.mark.parametrize("case", [case for case in CASES if not case.gpu_only], ids=str)
def test_reference_is_the_head_of_a_stable_sort(case: Case) -> None:
    arguments = make(case, "cpu")
    indices, counts = run_reference(arguments)
    for row, (n_pages, n_select) in enumerate(zip(case.n_pages, case.n_select, strict=True)):
        wanted = min(n_pages, n_select, case.max_select)
        for head in range(case.heads):
            logical = highest(arguments["scores"][row, head, :n_pages].tolist(), wanted)
            pages = arguments["page_table"][row, logical].tolist()
            assert indices[row, head].tolist() == pages + [-1] * (case.max_select - wanted)
            assert counts[row, head].item() == wanted


@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_equals_the_reference(case: Case, device: str) -> None:
    arguments = make(case, device)
    expected_indices, expected_counts = run_reference(arguments)
    for _ in range(2):  # the same bits twice
        indices, counts = page_topk(**arguments)
        assert torch.equal(indices, expected_indices)
        assert torch.equal(counts, expected_counts)


@given(scores=st.lists(st.floats(width=32), min_size=1, max_size=150), n_select=st.integers(0, 160))
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_selects_the_head_of_a_stable_sort(device: str, scores: list[float], n_select: int) -> None:
    assert one_row(scores, n_select, device) == highest(scores, min(n_select, len(scores)))


@given(scores=st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=60), n_select=st.integers(0, 60))
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ties_go_to_the_lowest_page(device: str, scores: list[float], n_select: int) -> None:
    assert one_row(scores, n_select, device) == highest(scores, min(n_select, len(scores)))


def test_rows_longer_than_a_block(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks per row, as in a context of a million tokens, without its size."""
    triton = pytest.importorskip("sglang_sparse_kernels.page_topk.triton")
    for scores in ("normal", "ties", "constant", "special"):
        arguments = make(Case((700, 257, 130), (90, 200, 129), 200, scores=scores), device)
        expected = run_reference(arguments)
        out = tuple(torch.empty_like(tensor) for tensor in expected)
        triton.page_topk(**arguments, out=out, config=triton.Config(max_block=128))
        assert torch.equal(out[0], expected[0])
        assert torch.equal(out[1], expected[1])


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_dense_rows_do_not_read_their_scores(implementation: str, device: str) -> None:
    arguments = make(Case((40, 40), (40, 100), 50), device)
    arguments["scores"].fill_(float("nan"))
    indices, counts = page_topk(**arguments) if implementation == "triton" else run_reference(arguments)
    assert torch.equal(indices[:, :, :40], arguments["page_table"][:, None].expand(2, 2, 40))
    assert (counts == 40).all()


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_stats_count_active_rows_selected_and_held_pages(implementation: str, device: str) -> None:
    arguments = make(Case((100, 50, 8, 0), (10, 0, 16, 3), 20, heads=3), device)
    arguments["stats"] = torch.tensor([1, 2, 3], device=device)
    if implementation == "triton":
        page_topk(**arguments)
    else:
        run_reference(arguments)
    assert arguments["stats"].tolist() == [1 + 3 * 2, 2 + 3 * (10 + 8), 3 + 3 * (100 + 8)]
