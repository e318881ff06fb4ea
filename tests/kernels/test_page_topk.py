"""Page selection: reference against a sorted list, Triton against the reference, exactly."""

import importlib
import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_sparse_kernels.common.launch import dependent_launch
from sglang_sparse_kernels.page_topk import cuda, page_topk, reference
from sglang_sparse_kernels.page_topk.cases import CASES, Case, make

SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1.0, -1.0, 1e-40, -1e-40, 3e38, -3e38]


def run_reference(arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, _ = arguments["scores"].shape
    options = {"dtype": torch.int32, "device": arguments["scores"].device}
    out = (torch.empty(batch, heads, arguments["max_select"], **options), torch.empty(batch, heads, **options))
    return reference.page_topk(**arguments, out=out)


def meant(indices: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """``indices`` with -1 beyond the counts, where a kernel leaves what was there."""
    return indices.masked_fill(torch.arange(indices.shape[2], device=indices.device) >= counts[:, :, None], -1)


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


def on_clusters(arguments: dict[str, Any], size: int) -> dict[str, Any]:
    """The argument of the CUDA kernel that has it select with so many blocks of a row; skips where none can."""
    scores = arguments["scores"]
    if size > 1 and not dependent_launch(scores.device):
        pytest.skip("clusters of blocks need a GPU of compute capability 9.0 or later")
    return {"shape": cuda.shape_of(scores.shape[2], scores.shape[0] * scores.shape[1], 0, cluster=size)}


def run_kernel(implementation: str, arguments: dict[str, Any], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one implementation; what it leaves unwritten is no page."""
    kernel = importlib.import_module(f"sglang_sparse_kernels.page_topk.{implementation}")
    batch, heads, _ = arguments["scores"].shape
    shapes = (batch, heads, arguments["max_select"]), (batch, heads)
    out = tuple(torch.full(shape, -7, dtype=torch.int32, device=arguments["scores"].device) for shape in shapes)
    return kernel.page_topk(**arguments, out=out, **options)


@pytest.mark.parametrize("implementation", ["triton", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_equal_the_reference(case: Case, implementation: str, device: str) -> None:
    arguments = make(case, device)
    if implementation == "cuda" and not cuda.takes(arguments["scores"]):
        pytest.skip("rows as long as these are Triton's on this GPU")
    expected_indices, expected_counts = run_reference(arguments)
    for _ in range(2):  # the same bits twice
        indices, counts = run_kernel(implementation, arguments)
        assert torch.equal(counts, expected_counts)
        assert torch.equal(meant(indices, counts), expected_indices)


@pytest.mark.gpu
@pytest.mark.parametrize("scores", ["normal", "ties", "constant", "special", "wide"])
@pytest.mark.parametrize("pages", [17, 500, 2048, 2049, 5000, 16384, 32768])
@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
def test_cuda_holds_rows_of_any_length(cluster: int, pages: int, scores: str, device: str) -> None:
    selected = (max(1, pages // 10), pages // 2, pages - 1)
    arguments = make(Case((pages, pages, pages // 3), selected, pages, heads=3, scores=scores), device)
    expected_indices, expected_counts = run_reference(arguments)
    indices, counts = run_kernel("cuda", arguments, **on_clusters(arguments, cluster))
    assert torch.equal(counts, expected_counts)
    assert torch.equal(meant(indices, counts), expected_indices)


@pytest.mark.gpu
def test_cuda_holds_the_longest_rows(device: str) -> None:
    pages = cuda.max_pages(dependent_launch(torch.device(device)))
    arguments = make(Case((pages, 5000), (pages // 10, 500), pages // 10, heads=2), device)
    expected_indices, expected_counts = run_reference(arguments)
    indices, counts = run_kernel("cuda", arguments)
    assert torch.equal(counts, expected_counts)
    assert torch.equal(meant(indices, counts), expected_indices)


@pytest.mark.gpu
@pytest.mark.parametrize("scores", ["normal", "ties", "wide"])
@pytest.mark.parametrize("tables_ready", [False, True])
@pytest.mark.parametrize(("implementation", "cluster"), [("triton", 0), *(("cuda", size) for size in (1, 2, 4, 8))])
def test_replays_of_a_graph_give_the_same_bits(
    implementation: str, cluster: int, tables_ready: bool, scores: str, device: str
) -> None:
    """A hundred times, between kernels that are launched dependently, into poisoned outputs."""
    arguments = make(Case((4096, 37, 0, 1000), (410, 16, 4, 1000), 1000, heads=4, scores=scores), device)
    options = {}
    if implementation == "cuda":
        options = {**on_clusters(arguments, cluster), "tables_ready": tables_ready}
    elif tables_ready:
        pytest.skip("the CUDA kernel alone makes use of it")
    expected_indices, expected_counts = run_reference(arguments)
    source = arguments["scores"].clone()
    out = torch.empty_like(expected_indices), torch.empty_like(expected_counts)
    kernel = importlib.import_module(f"sglang_sparse_kernels.page_topk.{implementation}")

    def step() -> None:
        arguments["scores"].copy_(source)
        kernel.page_topk(**arguments, out=out, **options)
        kernel.page_topk(**arguments, out=out, **options)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(100):
        arguments["scores"].zero_()
        for tensor in out:
            tensor.fill_(-7)
        graph.replay()
        assert torch.equal(out[1], expected_counts)
        assert torch.equal(meant(*out), expected_indices)


def test_strides_that_no_kernel_takes_are_refused(device: str) -> None:
    arguments = make(Case((40, 40), (4, 4), 8), device)
    table = arguments["page_table"].repeat_interleave(2, 1)[:, ::2]
    with pytest.raises(ValueError, match="page_table must be contiguous along its last dimension"):
        page_topk(**{**arguments, "page_table": table})
    with pytest.raises(ValueError, match="n_select must be contiguous"):
        page_topk(**{**arguments, "n_select": arguments["n_select"].repeat_interleave(2)[::2]})


@pytest.mark.gpu
def test_nvidia_gpus_take_the_cuda_kernel(device: str) -> None:
    most = cuda.max_pages(dependent_launch(torch.device(device)))
    assert cuda.takes(torch.empty(1, 1, most, device=device))
    assert not cuda.takes(torch.empty(1, 1, most + 1, device=device))


@given(scores=st.lists(st.floats(width=32), min_size=1, max_size=150), n_select=st.integers(0, 160))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_selects_the_head_of_a_stable_sort(device: str, scores: list[float], n_select: int) -> None:
    assert one_row(scores, n_select, device) == highest(scores, min(n_select, len(scores)))


@given(scores=st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=60), n_select=st.integers(0, 60))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
        assert torch.equal(out[1], expected[1])
        assert torch.equal(meant(*out), expected[0])


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
