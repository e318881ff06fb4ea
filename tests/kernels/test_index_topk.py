"""Token selection: the reference against stable sorts one by one, and the kernels against the reference."""

import math
import random
from typing import Any

import pytest
import torch
from cuda_library import emulated
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from kernel_runs import assert_replays, scramble

from sglang_sparse_kernels.common import checks, nvrtc
from sglang_sparse_kernels.common.launch import dependent_launch, num_processors
from sglang_sparse_kernels.index_topk import cuda, index_topk, portable, reference
from sglang_sparse_kernels.index_topk.cases import CASES, KINDS, Case, make
from sglang_sparse_kernels.index_topk.cuda import Shape

SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1.0, -1.0, 1e-40, -1e-40, 3e38, -3e38]
SMALL = [case for case in CASES if not case.gpu_only]
# Few candidates, so that rows are sampled and overflow that are short enough for a CPU.
SHAPES = [Shape(*shape) for shape in ((1, 64, 96), (2, 64, 96), (4, 32, 64), (8, 32, 48), (1, 256, 4992))]
ALL_SHAPES = pytest.mark.parametrize("shape", SHAPES[:4], ids=lambda shape: f"cluster{shape.cluster}")
on_cpu = emulated((cuda.SOURCE, "index_topk", shape.defines) for shape in SHAPES)
emulation = pytest.mark.usefixtures("on_cpu")
Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def run(implementation: Any, arguments: dict[str, Any], **options: Any) -> Found:
    """Run one implementation into poisoned results; return these and its counters."""
    logits, topk = arguments["logits"].clone(), arguments["topk"]
    integers = {"dtype": torch.int32, "device": logits.device}
    positions, counts = torch.full((len(logits), topk), -7, **integers), torch.full((len(logits),), -7, **integers)
    found = positions, counts, torch.full_like(positions, -7), torch.tensor([5, 6, 7], device=logits.device)
    # As wide as it was: columns that are padded away stay where they are.
    strided = torch.empty_strided(logits.shape, arguments["logits"].stride(), device=logits.device).copy_(logits)
    names = arguments.get("page_table"), arguments.get("rows"), arguments.get("offsets")
    given = (strided, arguments["lengths"], topk, arguments.get("first"), arguments.get("wanted"), names, found[:3])
    implementation.index_topk(*given, found[3], arguments.get("nothing", -1), **options)
    return found


def same(ours: Found, theirs: Found) -> bool:
    return all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def check(arguments: dict[str, Any], shape: Shape) -> None:
    """Compare the CUDA kernel with the reference."""
    assert same(run(cuda, arguments, shape=shape), run(reference, arguments))


def best(logits: list[float], topk: int) -> list[int]:
    """Positions of the highest in ascending order, ties to the lowest position."""
    keys = [math.inf if math.isnan(logit) else logit for logit in logits]
    return sorted(sorted(range(len(keys)), key=lambda j: -keys[j])[: max(0, topk)])


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_the_reference_is_the_head_of_a_stable_sort(case: Case) -> None:
    arguments = make(case, "cpu")
    positions, counts, slots, stats = run(reference, arguments)
    taken = 0
    for query, length in enumerate(case.lengths):
        first = case.first[query] if case.first else 0
        topk = min(case.topk, case.wanted[query]) if case.wanted else case.topk
        expected = best(arguments["logits"][query, first : first + length].tolist(), topk)
        pages = arguments["page_table"][arguments["rows"][query]].tolist() if length else []
        named = [pages[position // 64] * 64 + position % 64 for position in expected]
        padding = [-1] * (case.topk - len(expected))
        assert positions[query].tolist() == expected + padding and slots[query].tolist() == named + padding
        assert counts[query] == len(expected)
        taken += len(expected)
    held = sum(length for length, count in zip(case.lengths, counts.tolist(), strict=True) if count)
    assert stats.tolist() == [5 + int((counts > 0).sum()), 6 + taken, 7 + held]


@emulation
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_the_emulated_cuda_kernel_equals_the_reference(case: Case) -> None:
    check(make(case, "cpu"), SHAPES[0])


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_the_fallback_equals_the_reference(case: Case, device: str) -> None:
    arguments = make(case, device)
    if case.first and case.kind in ("special", "lowest"):
        # It takes -inf for the lowest finite number.
        arguments["logits"].clamp_(min=torch.finfo(torch.float32).min)
    assert same(run(portable, arguments), run(reference, arguments))


@pytest.mark.parametrize("nothing", [0, -1])
def test_queries_have_rows_of_their_own_or_numbers(nothing: int, device: str) -> None:
    case = Case((100, 0, 30), 40, (3, 0, 1))
    arguments = {**make(case, device), "nothing": nothing}
    positions, counts, _, _ = run(reference, arguments)
    empty = torch.tensor([nothing] + [-1] * 39, device=device)
    for implementation in (reference, portable, *([cuda] if device == "cuda" else [])):
        own = {name: value for name, value in arguments.items() if name != "rows"}
        slots = run(implementation, own)[2]
        pages = arguments["page_table"].gather(1, positions.clamp(min=0).long() // 64)
        expected = torch.where(positions < 0, -1, pages * 64 + positions % 64)
        assert torch.equal(slots[[0, 2]], expected[[0, 2]]) and torch.equal(slots[1], empty.int())
        offsets = torch.tensor([1000, 2000, 3000], dtype=torch.int32, device=device)
        slots = run(implementation, {**own, "offsets": offsets})[2]
        expected = torch.where(positions < 0, -1, positions + offsets[:, None])
        assert torch.equal(slots[[0, 2]], expected[[0, 2]]) and torch.equal(slots[1], empty.int())
    assert counts.tolist() == [40, 0, 30]


def one_row(logits: list[float], topk: int, device: str, first: int = 0) -> list[int]:
    """Positions that the operation selects of one row."""
    row = torch.tensor([[math.nan] * first + logits], dtype=torch.float32, device=device)
    lengths, begin = (torch.tensor([value], dtype=torch.int32, device=device) for value in (len(logits), first))
    positions, counts, slots = index_topk(row, lengths, topk, begin if first else None)
    assert positions is not None and counts is not None and slots is None
    return positions[0, : counts.item()].tolist()


@given(logits=st.lists(st.floats(width=32), min_size=1, max_size=150), topk=st.integers(1, 160))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_it_selects_the_head_of_a_stable_sort(device: str, logits: list[float], topk: int) -> None:
    assert one_row(logits, topk, device) == best(logits, topk)


@given(logits=st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=60), topk=st.integers(1, 60))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ties_go_to_the_lowest_position(device: str, logits: list[float], topk: int) -> None:
    assert one_row(logits, topk, device) == best(logits, topk)
    if -math.inf not in logits:
        assert one_row(logits, topk, device, first=3) == best(logits, topk)


def test_what_is_refused(device: str) -> None:
    logits, lengths = torch.zeros(2, 9, device=device), torch.ones(2, dtype=torch.int32, device=device)
    for changed, message in (
        ({"topk": 0}, "topk must be at least 1, got 0"),
        ({"page_table": lengths[None]}, "page_table must have a row for each of 2 queries, got 1"),
        ({"out": (None, None, lengths[:, None])}, "slots must not be given without page_table or offsets"),
        ({"lengths": lengths[:1]}, "lengths must have the shape"),
    ):
        with pytest.raises(ValueError, match=message):
            index_topk(**{"logits": logits, "lengths": lengths, "topk": 1, **changed})


def test_what_is_not_wanted_is_not_made(device: str) -> None:
    arguments = make(Case((50, 3), 7), device)
    expected = index_topk(**arguments)
    assert expected[2] is not None
    positions, counts, slots = index_topk(**arguments, out=(None, None, torch.empty_like(expected[2])))
    assert positions is None and counts is None and slots is not None and torch.equal(slots, expected[2])
    empty = index_topk(arguments["logits"][:0], arguments["lengths"][:0], 7)[0]
    assert empty is not None and empty.shape == (0, 7)


def taken(arguments: dict[str, Any]) -> bool:
    return cuda.takes(arguments["logits"], arguments["topk"]) and not checks.use_reference(arguments["logits"])


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_cuda_kernel_equals_the_reference(case: Case, device: str) -> None:
    arguments = make(case, device)
    if not taken(arguments):
        pytest.skip("rows as long as these are the fallback's on this GPU")
    expected = run(reference, arguments)
    for _ in range(2):  # the same bits twice
        assert same(run(cuda, arguments), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["normal", "ties", "special", "rising", "outliers"])
@pytest.mark.parametrize(("cluster", "threads"), [(1, 256), (1, 512), (2, 512), (4, 512), (8, 512), (8, 1024)])
def test_rows_of_any_length_in_all_shapes(cluster: int, threads: int, kind: str, device: str) -> None:
    if cluster > 1 and not dependent_launch(torch.device(device)):
        pytest.skip("clusters of blocks need a GPU of compute capability 9.0 or later")
    lengths = (17, 2047, 2048, 2049, 4992, 4993, 5100, 9000, 40000, 131071)
    arguments = make(Case(lengths, 2048, tuple(range(10)), gap=1, kind=kind), device)
    assert same(run(cuda, arguments, shape=Shape(cluster, threads)), run(reference, arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["normal", "ties", "wide"])
@pytest.mark.parametrize("queries", [1, 20, 400])
def test_replays_of_a_graph_give_the_same_bits(queries: int, kind: str, device: str) -> None:
    """A hundred times, between kernels that are launched dependently, into poisoned results."""
    arguments = make(Case((30000, 2048, 0, 9000)[:queries] * -(-queries // 4), 2048, gap=2, kind=kind), device)
    expected = run(reference, arguments)[:3]
    source = arguments["logits"].clone()
    out = torch.empty_like(expected[0]), torch.empty_like(expected[1]), torch.empty_like(expected[2])

    def step() -> None:
        arguments["logits"].copy_(source)
        index_topk(**arguments, out=out)
        index_topk(**arguments, out=out)

    poisoned = [(arguments["logits"], 0), *((tensor, -7) for tensor in out)]
    assert_replays(step, poisoned, lambda: all(torch.equal(*pair) for pair in zip(out, expected, strict=True)))


@pytest.mark.gpu
def test_nvidia_gpus_take_the_cuda_kernel(device: str) -> None:
    most = Shape(8 if dependent_launch(torch.device(device)) else 1, 512).max_tokens
    assert cuda.takes(torch.empty(1, most, device=device), 4096) and num_processors(torch.device(device)) > 1
    assert not cuda.takes(torch.empty(1, most + 1, device=device), 4096)


@emulation
@ALL_SHAPES
@pytest.mark.parametrize("kind", KINDS)
def test_clusters_equal_the_reference(kind: str, shape: Shape) -> None:
    case = Case((shape.max_tokens if shape.cluster == 1 else 3000, 130, 7), 60, (3, 0, 2), kind=kind, gap=2)
    check(make(case, "cpu"), shape)


@emulation
@ALL_SHAPES
@pytest.mark.parametrize("seed", range(4))
def test_any_row(seed: int, shape: Shape) -> None:
    """Of any length and place, also shorter than the cluster, with few or many logits equal, infinite or far out."""
    pick = random.Random(seed)
    topk = pick.choice((1, 3, 40, 90, 200))
    near = [max(0, topk + change) for change in (-1, 0, 1)]
    lengths = tuple(pick.choice((pick.randint(0, 9), *near, pick.randint(10, 400), 1500)) for _ in range(3))
    first = tuple(pick.randint(0, 9) for _ in lengths)
    arguments = make(Case(lengths, topk, first, gap=pick.randint(0, 3)), "cpu", seed)
    scramble(arguments["logits"], pick, seed)
    if pick.random() < 0.5:
        arguments["wanted"] = torch.tensor([pick.randint(-1, topk + 1) for _ in lengths], dtype=torch.int32)
    arguments["nothing"] = pick.choice((0, -1))
    check(arguments, shape)


@emulation
@ALL_SHAPES
def test_a_sample_that_says_nothing(shape: Shape) -> None:
    """Hardly a logit is as high as those that are looked at, or as low; or it sees one of two values alone."""
    arguments = make(Case((1600,) * 4, 50), "cpu")
    logits = arguments["logits"]
    pieces = min(256, shape.candidates // 4, 400 // 4)
    seen = 4 * (torch.arange(pieces).float() * (400 / pieces)).int()[:, None] + torch.arange(8)
    for row, value in enumerate((100.0, -100.0)):
        logits[row, seen.flatten()] += value
    logits[2, ::2], logits[2, 1::2] = -math.inf, math.nan
    logits[3, ::3], logits[3, 1::3], logits[3, 2::3] = math.inf, -math.inf, 0.0
    check(arguments, shape)


@emulation
def test_what_is_not_wanted_is_not_written() -> None:
    arguments = make(Case((300, 0, 40), 50), "cpu")
    expected = run(reference, arguments)
    del arguments["page_table"], arguments["rows"]
    offsets = torch.tensor([3, 4, 5]).int()
    positions, counts, slots, _ = run(cuda, {**arguments, "offsets": offsets}, shape=SHAPES[0])
    assert torch.equal(positions, expected[0]) and torch.equal(counts, expected[1])
    assert torch.equal(slots, torch.where(positions < 0, -1, positions + torch.tensor([[3], [4], [5]])))


@emulation
@pytest.mark.parametrize("topk", [700, 2500])
def test_a_block_of_the_size_that_gpus_get(topk: int) -> None:
    """More than the histogram has room for are written in turns."""
    check(make(Case((6000,), topk, (1,)), "cpu"), SHAPES[-1])


@pytest.mark.parametrize(
    ("width", "queries", "topk", "clusters", "expected"),
    [
        (131136, 1, 2048, True, Shape(8, 512)),
        (131136, 32, 2048, True, Shape(4, 512)),  # as many blocks as have a multiprocessor
        (131136, 34, 2048, True, Shape(2, 512)),
        (32768, 1, 2048, True, Shape(4, 512)),  # as many as have enough to do
        (9000, 1, 2048, True, Shape(1, 512)),
        (9000, 1, 2048, False, Shape(1, 512)),  # a GPU without clusters
        (131136, 8192, 2048, True, Shape(1, 256)),
        (131136, 8192, 4096, False, Shape(1, 256)),
        (131136, 8192, 4096, True, Shape(2, 512)),  # candidates that one block could not keep
        (163840, 8192, 2048, True, Shape(2, 512)),  # as many as hold the row
        (1 << 20, 8192, 2048, True, Shape(8, 512)),
    ],
)
def test_shapes(width: int, queries: int, topk: int, clusters: bool, expected: Shape) -> None:
    assert cuda.shape_of(width, queries, topk, 132, clusters) == expected


@given(
    width=st.integers(1, 1277824),
    queries=st.integers(1, 9000),
    topk=st.integers(1, 4096),
    clusters=st.booleans(),
)
def test_rows_fit_their_shape(width: int, queries: int, topk: int, clusters: bool) -> None:
    assume(clusters or width <= 159728)
    shape = cuda.shape_of(width, queries, topk, 132, clusters)
    assert shape.max_tokens >= width and (shape.cluster == 1 or clusters)


def test_what_it_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "available", lambda _: True)
    for clusters, most in ((True, 1277824), (False, 159728)):
        monkeypatch.setattr(cuda, "dependent_launch", lambda _, clusters=clusters: clusters)
        assert cuda.takes(torch.empty(1, most, device="meta"), 4096)
        assert not cuda.takes(torch.empty(1, most + 1, device="meta"), 4096)
        assert not cuda.takes(torch.empty(1, most, device="meta"), 4097)
    monkeypatch.setattr(nvrtc, "available", lambda _: False)
    assert not cuda.takes(torch.empty(1, 8, device="meta"), 1)
