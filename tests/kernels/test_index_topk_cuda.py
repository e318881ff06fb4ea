"""The CUDA kernel of the token selection without a GPU: its source as C++, its threads taking turns."""

import ctypes
import dataclasses
import math
import random
from typing import Any

import pytest
import torch
from cuda_library import build
from hypothesis import assume, given
from hypothesis import strategies as st

from sglang_sparse_kernels.common import nvrtc
from sglang_sparse_kernels.common.testing import seeded
from sglang_sparse_kernels.index_topk import cuda, reference
from sglang_sparse_kernels.index_topk.cases import CASES, KINDS, Case, make
from sglang_sparse_kernels.index_topk.cuda import Shape

# Few candidates, so that rows are sampled and overflow that are short enough for a CPU.
SHAPES = [Shape(*shape) for shape in ((1, 64, 96), (2, 64, 96), (4, 32, 64), (8, 32, 48), (1, 256, 4992))]
ALL_SHAPES = pytest.mark.parametrize("shape", SHAPES[:4], ids=lambda shape: f"cluster{shape.cluster}")
KERNEL = """
#define CLUSTER {cluster}
#define THREADS {threads}
#define CANDIDATES {candidates}
#define RESIDENT 1
#define PAGE 64
#define index_topk kernel_{cluster}_{threads}
namespace shape_{cluster}_{threads} {{
static float4 load_four(const float* place) {{ return {{place[0], place[1], place[2], place[3]}}; }}
#include "{source}"
}}
extern "C" void run_{cluster}_{threads}(
    unsigned queries, const float* logits, const int* lengths, const int* first, const int* wanted, const int* table,
    const int* rows, const int* offsets, int* positions, int* counts, int* slots, unsigned long long* stats,
    long long stride, long long width, long long topk, long long table_stride, long long nothing) {{
    launch(CLUSTER * queries, 1, THREADS, CLUSTER, [=] {{
        shape_{cluster}_{threads}::index_topk(logits, lengths, first, wanted, table, rows, offsets, positions, counts,
                                              slots, stats, stride, width, topk, table_stride, nothing);
    }});
}}
#undef index_topk
#undef CLUSTER
#undef THREADS
#undef CANDIDATES
#undef RESIDENT
#undef PAGE
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernel of every shape."""
    kernels = (KERNEL.format(source=cuda.SOURCE, **dataclasses.asdict(shape)) for shape in SHAPES)
    return build(tmp_path_factory.mktemp("cuda"), kernels)


Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def poisoned(arguments: dict[str, Any]) -> Found:
    """Results and counters that nobody has written."""
    queries, topk = len(arguments["logits"]), arguments["topk"]
    made = [torch.full(size, -7, dtype=torch.int32) for size in ((queries, topk), (queries,), (queries, topk))]
    return made[0], made[1], made[2], torch.tensor([5, 6, 7])


def on_cpu(library: ctypes.CDLL, arguments: dict[str, Any], shape: Shape) -> Found:
    """What the kernel selects."""
    logits, table = arguments["logits"], arguments.get("page_table")
    found = poisoned(arguments)
    names = ("lengths", "first", "wanted", "page_table", "rows", "offsets")
    tensors = (logits, *(arguments.get(name) for name in names), *found)
    pointers = [ctypes.c_void_p(0 if tensor is None else tensor.data_ptr()) for tensor in tensors]
    strides = logits.stride(0), logits.shape[1], arguments["topk"], 0 if table is None else table.stride(0)
    numbers = [ctypes.c_longlong(value) for value in (*strides, arguments.get("nothing", -1))]
    library[f"run_{shape.cluster}_{shape.threads}"](len(logits), *pointers, *numbers)
    return found


def expected_of(arguments: dict[str, Any]) -> Found:
    """What the definition says."""
    found = poisoned(arguments)
    given = {name: value for name, value in arguments.items() if name not in ("page_table", "rows", "offsets")}
    names = arguments.get("page_table"), arguments.get("rows"), arguments.get("offsets")
    given = {"first": None, "wanted": None, **given}
    reference.index_topk(**given, names=names, out=found[:3], stats=found[3])
    return found


def check(library: ctypes.CDLL, arguments: dict[str, Any], shape: Shape) -> None:
    """Against the reference."""
    for ours, theirs in zip(on_cpu(library, arguments, shape), expected_of(arguments), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("case", [case for case in CASES if not case.gpu_only], ids=str)
def test_it_equals_the_reference(case: Case, library: ctypes.CDLL) -> None:
    check(library, make(case, "cpu"), SHAPES[0])


@ALL_SHAPES
@pytest.mark.parametrize("kind", KINDS)
def test_clusters_equal_the_reference(kind: str, shape: Shape, library: ctypes.CDLL) -> None:
    case = Case((shape.max_tokens if shape.cluster == 1 else 3000, 130, 7), 60, (3, 0, 2), kind=kind, gap=2)
    check(library, make(case, "cpu"), shape)


@ALL_SHAPES
@pytest.mark.parametrize("seed", range(4))
def test_any_row(seed: int, shape: Shape, library: ctypes.CDLL) -> None:
    """Of any length and place, also shorter than the cluster, with few or many logits equal, infinite or far out."""
    pick = random.Random(seed)
    topk = pick.choice((1, 3, 40, 90, 200))
    near = [max(0, topk + change) for change in (-1, 0, 1)]
    lengths = tuple(pick.choice((pick.randint(0, 9), *near, pick.randint(10, 400), 1500)) for _ in range(3))
    first = tuple(pick.randint(0, 9) for _ in lengths)
    arguments = make(Case(lengths, topk, first, gap=pick.randint(0, 3)), "cpu", seed)
    logits = arguments["logits"]
    logits.mul_(10.0 ** pick.randint(-3, 3)).add_(pick.choice((0.0, 50.0)))
    if pick.random() < 0.5:
        logits.copy_((logits * pick.choice((0.1, 1.0))).round())
    generator = seeded("cpu", seed)
    for value in (math.inf, -math.inf, math.nan, 1e30, -1e30, 0.0, -0.0):
        chances = torch.rand(logits.shape, generator=generator)
        if pick.random() < 0.5:
            logits.masked_fill_(chances < pick.choice((0.01, 0.3)), value)
    if pick.random() < 0.5:
        arguments["wanted"] = torch.tensor([pick.randint(-1, topk + 1) for _ in lengths], dtype=torch.int32)
    arguments["nothing"] = pick.choice((0, -1))
    check(library, arguments, shape)


@ALL_SHAPES
def test_a_sample_that_says_nothing(shape: Shape, library: ctypes.CDLL) -> None:
    """Hardly a logit is as high as those that are looked at, or as low; or it sees one of two values alone."""
    arguments = make(Case((1600,) * 4, 50), "cpu")
    logits = arguments["logits"]
    pieces = min(256, shape.candidates // 4, 400 // 4)
    seen = 4 * (torch.arange(pieces).float() * (400 / pieces)).int()[:, None] + torch.arange(8)
    for row, value in enumerate((100.0, -100.0)):
        logits[row, seen.flatten()] += value
    logits[2, ::2], logits[2, 1::2] = -math.inf, math.nan
    logits[3, ::3], logits[3, 1::3], logits[3, 2::3] = math.inf, -math.inf, 0.0
    check(library, arguments, shape)


def test_what_is_not_wanted_is_not_written(library: ctypes.CDLL) -> None:
    arguments = make(Case((300, 0, 40), 50), "cpu")
    expected = expected_of(arguments)
    del arguments["page_table"], arguments["rows"]
    positions, counts, slots, _ = on_cpu(library, {**arguments, "offsets": torch.tensor([3, 4, 5]).int()}, SHAPES[0])
    assert torch.equal(positions, expected[0]) and torch.equal(counts, expected[1])
    assert torch.equal(slots, torch.where(positions < 0, -1, positions + torch.tensor([[3], [4], [5]])))


@pytest.mark.parametrize("topk", [700, 2500])
def test_a_block_of_the_size_that_gpus_get(topk: int, library: ctypes.CDLL) -> None:
    """More than the histogram has room for are written in turns."""
    check(library, make(Case((6000,), topk, (1,)), "cpu"), SHAPES[-1])


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
