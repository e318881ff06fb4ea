"""Page selection: reference against a sorted list, Triton against the reference, exactly."""

import importlib
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_library import emulated
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from kernel_runs import assert_replays, scramble

from sglang_sparse_kernels.common import nvrtc
from sglang_sparse_kernels.common.launch import dependent_launch
from sglang_sparse_kernels.common.testing import seeded
from sglang_sparse_kernels.page_topk import cuda, page_topk
from sglang_sparse_kernels.page_topk.cases import CASES, Case, make
from sglang_sparse_kernels.page_topk.cuda import Shape

SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1.0, -1.0, 1e-40, -1e-40, 3e38, -3e38]
# All hold rows of 2,048 pages, but the last one. Short rows leave most blocks of a large cluster with nothing.
SHAPES = [Shape(*shape) for shape in ((1, 64, 32), (2, 64, 16), (4, 64, 8), (8, 32, 8), (16, 32, 4), (1, 512, 4))]
VOTES = [Shape(*shape) for shape in ((1, 64, 32, 4), (4, 64, 8, 7), (1, 512, 4, 1), (8, 32, 8, 8))]
CLUSTERS = pytest.mark.parametrize("shape", SHAPES[:4], ids=lambda shape: f"cluster{shape.cluster}")
on_cpu = emulated((cuda.SOURCE, "page_topk", shape.defines) for shape in SHAPES + VOTES)
emulation = pytest.mark.usefixtures("on_cpu")


Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def run(implementation: str, arguments: dict[str, Any], **options: Any) -> Found:
    """Pages, with -1 where none is written, their number and the counters."""
    module = importlib.import_module(f"sglang_sparse_kernels.page_topk.{implementation}")
    given = {**arguments, **options}
    table, heads = given["page_table"], given["scores"].shape[1] // (getattr(given.get("shape"), "voters", 0) or 1)
    shapes = (len(table), heads, given["max_select"]), (len(table), heads)
    out = tuple(torch.full(shape, -1, dtype=torch.int32, device=table.device) for shape in shapes)
    stats = given.setdefault("stats", torch.zeros(3, dtype=torch.int64, device=table.device))
    return *module.page_topk(**given, out=out), stats


def assert_reference(implementation: str, arguments: dict[str, Any], **options: Any) -> None:
    """Assert that an implementation does as the reference."""
    pairs = zip(run(implementation, arguments, **options), run("reference", arguments), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


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
    indices, counts, _ = run("reference", arguments)
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


@pytest.mark.parametrize("implementation", ["triton", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_equal_the_reference(case: Case, implementation: str, device: str) -> None:
    arguments = make(case, device)
    if implementation == "cuda" and not cuda.takes(arguments["scores"]):
        pytest.skip("rows as long as these are Triton's on this GPU")
    for _ in range(2):  # the same bits twice
        assert_reference(implementation, arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("scores", ["normal", "ties", "constant", "special", "wide"])
@pytest.mark.parametrize("pages", [17, 500, 2048, 2049, 5000, 16384, 32768])
@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
def test_cuda_holds_rows_of_any_length(cluster: int, pages: int, scores: str, device: str) -> None:
    selected = (max(1, pages // 10), pages // 2, pages - 1)
    arguments = make(Case((pages, pages, pages // 3), selected, pages, heads=3, scores=scores), device)
    assert_reference("cuda", arguments, **on_clusters(arguments, cluster))


@pytest.mark.gpu
def test_cuda_holds_the_longest_rows(device: str) -> None:
    pages = cuda.max_pages(dependent_launch(torch.device(device)))
    arguments = make(Case((pages, 5000), (pages // 10, 500), pages // 10, heads=2), device)
    assert_reference("cuda", arguments)


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
    expected = run("reference", arguments)[:2]
    source = arguments["scores"].clone()
    out = torch.empty_like(expected[0]), torch.empty_like(expected[1])
    kernel = importlib.import_module(f"sglang_sparse_kernels.page_topk.{implementation}")

    def step() -> None:
        arguments["scores"].copy_(source)
        kernel.page_topk(**arguments, out=out, **options)
        kernel.page_topk(**arguments, out=out, **options)

    poisoned = (arguments["scores"], 0), (out[0], -1), (out[1], -7)
    assert_replays(step, poisoned, lambda: all(torch.equal(*pair) for pair in zip(out, expected, strict=True)))


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
        assert_reference("triton", arguments, config=triton.Config(max_block=128))


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_dense_rows_do_not_read_their_scores(implementation: str, device: str) -> None:
    arguments = make(Case((40, 40), (40, 100), 50), device)
    arguments["scores"].fill_(float("nan"))
    indices, counts, _ = run(implementation, arguments)
    assert torch.equal(indices[:, :, :40], arguments["page_table"][:, None].expand(2, 2, 40))
    assert (counts == 40).all()


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_stats_count_active_rows_selected_and_held_pages(implementation: str, device: str) -> None:
    arguments = make(Case((100, 50, 8, 0), (10, 0, 16, 3), 20, heads=3), device)
    arguments["stats"] = torch.tensor([1, 2, 3], device=device)
    run(implementation, arguments)
    assert arguments["stats"].tolist() == [1 + 3 * 2, 2 + 3 * (10 + 8), 3 + 3 * (100 + 8)]


MORE = [Case((1900, 640), (190, 639), 700, heads=1, scores=scores) for scores in ("normal", "ties", "special", "wide")]


@emulation
@pytest.mark.parametrize("case", [case for case in CASES if not case.gpu_only] + MORE, ids=str)
def test_the_emulated_cuda_kernel_equals_the_reference(case: Case) -> None:
    assert_reference("cuda", make(case, "cpu"), shape=SHAPES[0])


@emulation
@CLUSTERS
@pytest.mark.parametrize("scores", ["normal", "ties", "special", "wide"])
def test_clusters_equal_the_reference(scores: str, shape: Shape) -> None:
    assert_reference("cuda", make(Case((1900, 7), (190, 3), 200, heads=1, scores=scores), "cpu"), shape=shape)


@emulation
@pytest.mark.parametrize("shape", SHAPES[:5], ids=lambda shape: f"cluster{shape.cluster}")
@pytest.mark.parametrize("seed", range(3))
def test_any_row(seed: int, shape: Shape) -> None:
    """Of any length, also shorter than the cluster, with few or many scores that are equal, infinite or far out."""
    pick = random.Random(seed)
    n_pages = [pick.choice((pick.randint(0, 9), pick.randint(10, 300), pick.randint(300, 2000))) for _ in range(2)]
    n_select = [pick.randint(0, pages + 1) for pages in n_pages]
    case = Case(
        tuple(n_pages), tuple(n_select), max(n_select) + 1, heads=1, width=max(n_pages) + pick.randint(0, 3) + 1
    )
    arguments = make(case, "cpu", seed)
    scramble(arguments["scores"], pick, seed)
    assert_reference("cuda", arguments, shape=shape)


@emulation
def test_a_block_of_the_size_that_gpus_get() -> None:
    assert_reference("cuda", make(Case((1100,), (110,), 110, heads=1), "cpu"), shape=SHAPES[-1])


@emulation
@pytest.mark.parametrize("local", [0, 2])
@pytest.mark.parametrize("shape", VOTES, ids=str)
def test_votes_are_counted(shape: Shape, local: int) -> None:
    """Of logits and of the sums of some pages each, also where a page's are NaN and where a head's parts are empty."""
    arguments = make(Case((1900, 7, 1, 0), (190, 3, 1, 0), 200, heads=2, width=1901), "cpu")
    generator = seeded("cpu", shape.cluster)
    logits = 30.0 * torch.randn(4, 2 * shape.voters, 1901, generator=generator)
    logits[0, 0, 40] = math.nan
    voting = torch.arange(1901) < arguments["n_pages"][:, None, None] - 1
    given = logits.masked_fill(~voting | logits.isnan(), -math.inf)
    given = torch.nn.functional.pad(given, (0, 19), value=-math.inf).unflatten(2, (-1, 64))
    most = given.amax(3)
    sums = (given - most.nan_to_num(neginf=0.0)[..., None]).exp2().sum(3)
    parts = torch.stack((most, sums), 3).contiguous()
    whole = given.flatten(2).double().mul(math.log(2)).logsumexp(2).div(math.log(2)).nan_to_num(neginf=0.0)
    votes = (logits.double() - whole[..., None]).unflatten(1, (2, -1)).mul(math.log(2)).logsumexp(2)
    votes = votes.nan_to_num(nan=torch.finfo(torch.float32).max)
    newest = torch.arange(1901) >= arguments["n_pages"][:, None, None] - local
    expected = arguments | {"scores": votes.masked_fill(newest, math.inf).float().contiguous()}
    found = run("cuda", arguments | {"scores": logits}, shape=shape, parts=parts, local_pages=local, stats=None)
    pages, counts, _ = run("reference", expected)
    assert torch.equal(found[0], pages) and torch.equal(found[1], counts)


@emulation
@CLUSTERS
@pytest.mark.parametrize("spread", [0.0, 1e-6, 1e-2])
def test_scores_that_are_close_together(spread: float, shape: Shape) -> None:
    """More of them in one bin than are ranked at once: the bin is divided again."""
    arguments = make(Case((1200,), (300,), 300, heads=1), "cpu")
    arguments["scores"] = 5.0 + spread * arguments["scores"]
    arguments["scores"][:, :, :4] = torch.tensor([-1e30, 1e30, 1e20, -1e20])
    assert_reference("cuda", arguments, shape=shape)


@pytest.mark.parametrize(
    ("width", "rows", "processors", "expected"),
    [
        (100, 8, 132, Shape(1, 512, 4)),
        (2048, 8, 132, Shape(1, 512, 4)),
        (8192, 8, 132, Shape(4, 512, 4)),  # as many blocks as have enough to do
        (4096, 8, 132, Shape(1, 512, 8)),  # the barriers of a cluster cost more
        (4224, 64, 132, Shape(1, 1024, 8)),
        (16384, 8, 132, Shape(8, 512, 4)),
        (8192, 64, 132, Shape(2, 512, 8)),  # as many as run at once
        (8192, 67, 132, Shape(1, 1024, 8)),
        (16384, 8, 0, Shape(1, 1024, 16)),  # a GPU without clusters
        (65536, 512, 132, Shape(2, 1024, 32)),  # as many as hold the row
        (262144, 512, 132, Shape(8, 1024, 32)),
    ],
)
def test_shapes(width: int, rows: int, processors: int, expected: Shape) -> None:
    assert cuda.shape_of(width, rows, processors) == expected


@given(width=st.integers(1, 262144), rows=st.integers(1, 1000), processors=st.sampled_from((0, 78, 132)))
def test_rows_fit_their_shape(width: int, rows: int, processors: int) -> None:
    assume(width <= cuda.max_pages(clusters=processors > 0))
    shape = cuda.shape_of(width, rows, processors)
    assert shape.cluster * shape.threads * shape.items >= width
    assert shape.cluster == 1 or processors > 0


def test_given_shapes_must_hold_the_row() -> None:
    assert cuda.shape_of(16384, 8, 132, cluster=16, threads=256) == Shape(16, 256, 4)
    with pytest.raises(ValueError, match="16384 pages do not fit 1 blocks of 256 threads with 32 each"):
        cuda.shape_of(16384, 8, 132, cluster=1, threads=256)


def test_what_does_not_compile_says_why(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    source = tmp_path / "broken.cu"
    source.write_text("__global__ void broken() { nothing(); }")
    with pytest.raises(RuntimeError, match=r"(?s)broken\.cu does not compile.*nothing"):
        nvrtc.compile_file(source, (9, 0), {})


def test_cpu_tensors_are_not_taken() -> None:
    assert not cuda.takes(torch.empty(1, 1, 8))
