"""The CUDA kernel of the page selection without a GPU: its source as C++, each of its threads a thread of the CPU."""

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_sparse_kernels import nvrtc
from sglang_sparse_kernels.page_topk import cuda, reference
from sglang_sparse_kernels.page_topk.cases import CASES, Case, make

THREADS = 64
RUN = """
#include "cuda_on_cpu.h"
#include "{source}"
extern "C" void run(unsigned heads, unsigned rows, const float* scores, const int* table, const int* n_pages,
                    const int* n_select, int* indices, int* counts, unsigned long long* stats, long long stride,
                    long long width, long long max_select, long long aligned) {{
    launch(heads, rows, THREADS, [=] {{
        page_topk(scores, table, n_pages, n_select, indices, counts, stats, stride, width, max_select, aligned);
    }});
}}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Builds the kernel for so many threads of a block and scores of a thread, once each."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    folder, built = tmp_path_factory.mktemp("cuda"), {}

    def build(threads: int, items: int) -> Any:
        if (threads, items) not in built:
            source, target = folder / f"{threads}-{items}.cpp", folder / f"{threads}-{items}.so"
            source.write_text(RUN.format(source=cuda.SOURCE))
            options = ["-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-w", f"-I{Path(__file__).parent}"]
            options += [f"-DTHREADS={threads}", f"-DITEMS={items}"]
            subprocess.run([compiler, *options, str(source), "-o", str(target)], check=True)
            built[threads, items] = ctypes.CDLL(str(target)).run
        return built[threads, items]

    return build


def on_cpu(library: Any, arguments: dict[str, Any], stats: torch.Tensor | None = None, threads: int = THREADS) -> Any:
    """What the kernel selects; places that it leaves unwritten hold -1."""
    scores, table = arguments["scores"], arguments["page_table"]
    rows, heads, width = scores.shape
    indices = torch.full((rows, heads, arguments["max_select"]), -1, dtype=torch.int32)
    counts = torch.full((rows, heads), -7, dtype=torch.int32)
    tensors = (scores, table, arguments["n_pages"], arguments["n_select"], indices, counts)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    pointers.append(ctypes.c_void_p(stats.data_ptr() if stats is not None else 0))
    sizes = (table.stride(0), width, arguments["max_select"], int(width % 4 == 0))
    numbers = [ctypes.c_longlong(value) for value in sizes]
    library(*cuda.shape_of(width, threads))(heads, rows, *pointers, *numbers)
    return indices, counts


def expected(arguments: dict[str, Any], stats: torch.Tensor) -> Any:
    batch, heads, _ = arguments["scores"].shape
    indices = torch.empty(batch, heads, arguments["max_select"], dtype=torch.int32)
    out = indices, torch.empty(batch, heads, dtype=torch.int32)
    return reference.page_topk(**arguments, out=out, stats=stats)


MORE = [Case((1900, 640), (190, 639), 700, heads=1, scores=scores) for scores in ("normal", "ties", "special", "wide")]


@pytest.mark.parametrize("case", [case for case in CASES if not case.gpu_only] + MORE, ids=str)
def test_it_equals_the_reference(case: Case, library: Any) -> None:
    arguments, stats, others = make(case, "cpu"), *(torch.zeros(3, dtype=torch.int64) for _ in range(2))
    indices, counts = on_cpu(library, arguments, stats)
    expected_indices, expected_counts = expected(arguments, others)
    assert torch.equal(counts, expected_counts)
    assert torch.equal(indices, expected_indices)
    assert torch.equal(stats, others)


def test_a_block_of_the_size_that_gpus_get(library: Any) -> None:
    arguments = make(Case((1100,), (110,), 110, heads=1), "cpu")
    indices, counts = on_cpu(library, arguments, threads=512)
    expected_indices, expected_counts = expected(arguments, torch.zeros(3, dtype=torch.int64))
    assert torch.equal(counts, expected_counts) and torch.equal(indices, expected_indices)


@pytest.mark.parametrize("spread", [0.0, 1e-6])
def test_scores_that_are_close_together(spread: float, library: Any) -> None:
    """More of them in one bin than are ranked at once: the bin is divided again."""
    arguments = make(Case((1200,), (300,), 300, heads=1), "cpu")
    arguments["scores"] = 5.0 + spread * arguments["scores"]
    arguments["scores"][:, :, 0] = -1e30
    indices, counts = on_cpu(library, arguments)
    expected_indices, expected_counts = expected(arguments, torch.zeros(3, dtype=torch.int64))
    assert torch.equal(counts, expected_counts) and torch.equal(indices, expected_indices)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_it_compiles_for_gpus(capability: tuple[int, int]) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    for width in (1, 16384, cuda.MAX_PAGES):
        threads, items = cuda.shape_of(width)
        assert nvrtc.compile_file(cuda.SOURCE, capability, {"THREADS": threads, "ITEMS": items}).startswith(b"\x7fELF")


def test_what_does_not_compile_says_why(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    source = tmp_path / "broken.cu"
    source.write_text("__global__ void broken() { nothing(); }")
    with pytest.raises(RuntimeError, match=r"(?s)broken\.cu does not compile.*nothing"):
        nvrtc.compile_file(source, (9, 0), {})


def test_cpu_tensors_are_not_taken() -> None:
    assert not cuda.takes(torch.empty(1, 1, 8))
