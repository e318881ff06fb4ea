"""The CUDA kernel of the page selection without a GPU: its source as C++, its threads taking turns."""

import ctypes
import dataclasses
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_library import build
from hypothesis import assume, given
from hypothesis import strategies as st

from sglang_sparse_kernels.common import nvrtc
from sglang_sparse_kernels.common.testing import seeded
from sglang_sparse_kernels.page_topk import cuda, reference
from sglang_sparse_kernels.page_topk.cases import CASES, Case, make
from sglang_sparse_kernels.page_topk.cuda import Shape

# All hold rows of 2,048 pages, but the last one. Short rows leave most blocks of a large cluster with nothing.
SHAPES = [Shape(*shape) for shape in ((1, 64, 32), (2, 64, 16), (4, 64, 8), (8, 32, 8), (16, 32, 4), (1, 512, 4))]
VOTES = [Shape(*shape) for shape in ((1, 64, 32, 4), (4, 64, 8, 7), (1, 512, 4, 1), (8, 32, 8, 8))]
CLUSTERS = pytest.mark.parametrize("shape", SHAPES[:4], ids=lambda shape: f"cluster{shape.cluster}")
KERNEL = """
#define CLUSTER {cluster}
#define THREADS {threads}
#define ITEMS {items}
#define VOTERS {voters}
#define page_topk kernel_{cluster}_{threads}_{voters}
namespace shape_{cluster}_{threads}_{voters} {{
#include "{source}"
}}
extern "C" void run_{cluster}_{threads}_{voters}(
    unsigned heads, unsigned rows, const float* scores, const int* table, const int* n_pages, const int* n_select,
    int* indices, int* counts, unsigned long long* stats, const float* parts, long long stride, long long width,
    long long max_select, long long aligned, long long tables_ready, long long num_parts, long long local) {{
    launch(CLUSTER * heads, rows, THREADS, CLUSTER, [=] {{
        shape_{cluster}_{threads}_{voters}::page_topk(scores, table, n_pages, n_select, indices, counts, stats, parts,
                                                      stride, width, max_select, aligned, tables_ready, num_parts,
                                                      local);
    }});
}}
#undef page_topk
#undef VOTERS
#undef CLUSTER
#undef THREADS
#undef ITEMS
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernel of every shape."""
    kernels = (KERNEL.format(source=cuda.SOURCE, **dataclasses.asdict(shape)) for shape in SHAPES + VOTES)
    return build(tmp_path_factory.mktemp("cuda"), kernels)


def on_cpu(
    library: ctypes.CDLL,
    arguments: dict[str, Any],
    shape: Shape,
    stats: torch.Tensor | None = None,
    parts: torch.Tensor | None = None,
    local_pages: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel selects; places that it leaves unwritten hold -1."""
    scores, table = arguments["scores"], arguments["page_table"]
    rows, heads, width = len(scores), scores.shape[1] // (shape.voters or 1), scores.shape[2]
    indices = torch.full((rows, heads, arguments["max_select"]), -1, dtype=torch.int32)
    counts = torch.full((rows, heads), -7, dtype=torch.int32)
    tensors = (scores, table, arguments["n_pages"], arguments["n_select"], indices, counts)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    pointers += [ctypes.c_void_p(tensor.data_ptr() if tensor is not None else 0) for tensor in (stats, parts)]
    sizes = (table.stride(0), width, arguments["max_select"], int(cuda.aligned(scores, table)), 0)
    sizes = (*sizes, 0 if parts is None else parts.shape[2], local_pages)
    numbers = [ctypes.c_longlong(value) for value in sizes]
    library[f"run_{shape.cluster}_{shape.threads}_{shape.voters}"](heads, rows, *pointers, *numbers)
    return indices, counts


def check(library: ctypes.CDLL, arguments: dict[str, Any], shape: Shape) -> None:
    """Against the reference."""
    batch, heads, _ = arguments["scores"].shape
    stats, expected_stats = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    indices = torch.empty(batch, heads, arguments["max_select"], dtype=torch.int32)
    expected = reference.page_topk(
        **arguments, out=(indices, torch.empty(batch, heads, dtype=torch.int32)), stats=expected_stats
    )
    indices, counts = on_cpu(library, arguments, shape, stats)
    assert torch.equal(counts, expected[1])
    assert torch.equal(indices, expected[0])
    assert torch.equal(stats, expected_stats)


MORE = [Case((1900, 640), (190, 639), 700, heads=1, scores=scores) for scores in ("normal", "ties", "special", "wide")]


@pytest.mark.parametrize("case", [case for case in CASES if not case.gpu_only] + MORE, ids=str)
def test_it_equals_the_reference(case: Case, library: ctypes.CDLL) -> None:
    check(library, make(case, "cpu"), SHAPES[0])


@CLUSTERS
@pytest.mark.parametrize("scores", ["normal", "ties", "special", "wide"])
def test_clusters_equal_the_reference(scores: str, shape: Shape, library: ctypes.CDLL) -> None:
    check(library, make(Case((1900, 7), (190, 3), 200, heads=1, scores=scores), "cpu"), shape)


@pytest.mark.parametrize("shape", SHAPES[:5], ids=lambda shape: f"cluster{shape.cluster}")
@pytest.mark.parametrize("seed", range(3))
def test_any_row(seed: int, shape: Shape, library: ctypes.CDLL) -> None:
    """Of any length, also shorter than the cluster, with few or many scores that are equal, infinite or far out."""
    pick = random.Random(seed)
    n_pages = [pick.choice((pick.randint(0, 9), pick.randint(10, 300), pick.randint(300, 2000))) for _ in range(2)]
    n_select = [pick.randint(0, pages + 1) for pages in n_pages]
    case = Case(
        tuple(n_pages), tuple(n_select), max(n_select) + 1, heads=1, width=max(n_pages) + pick.randint(0, 3) + 1
    )
    arguments = make(case, "cpu", seed)
    scores = arguments["scores"]
    scores.mul_(10.0 ** pick.randint(-3, 3)).add_(pick.choice((0.0, 50.0)))
    if pick.random() < 0.5:
        scores.copy_((scores * pick.choice((0.1, 1.0))).round())
    generator = seeded("cpu", seed)
    for value in (math.inf, -math.inf, math.nan, 1e30, -1e30, 0.0, -0.0):
        chances = torch.rand(scores.shape, generator=generator)
        if pick.random() < 0.5:
            scores.masked_fill_(chances < pick.choice((0.01, 0.3)), value)
    check(library, arguments, shape)


def test_a_block_of_the_size_that_gpus_get(library: ctypes.CDLL) -> None:
    check(library, make(Case((1100,), (110,), 110, heads=1), "cpu"), SHAPES[-1])


@pytest.mark.parametrize("local", [0, 2])
@pytest.mark.parametrize("shape", VOTES, ids=str)
def test_votes_are_counted(shape: Shape, local: int, library: ctypes.CDLL) -> None:
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
    out = torch.empty(4, 2, 200, dtype=torch.int32), torch.empty(4, 2, dtype=torch.int32)
    pages, counts = reference.page_topk(**expected, out=out)
    got = on_cpu(library, arguments | {"scores": logits}, shape, None, parts, local)
    assert torch.equal(got[1], counts)
    assert torch.equal(got[0], pages)


@CLUSTERS
@pytest.mark.parametrize("spread", [0.0, 1e-6, 1e-2])
def test_scores_that_are_close_together(spread: float, shape: Shape, library: ctypes.CDLL) -> None:
    """More of them in one bin than are ranked at once: the bin is divided again."""
    arguments = make(Case((1200,), (300,), 300, heads=1), "cpu")
    arguments["scores"] = 5.0 + spread * arguments["scores"]
    arguments["scores"][:, :, :4] = torch.tensor([-1e30, 1e30, 1e20, -1e20])
    check(library, arguments, shape)


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
