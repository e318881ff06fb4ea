"""The CUDA kernel of the top-p selection without a GPU: its source as C++, its threads taking turns; and
with one in graphs."""

import ctypes
import importlib
from typing import Any

import pytest
import torch
from cuda_library import build

from sglang_sparse_kernels.block_topp import cuda, reference
from sglang_sparse_kernels.block_topp.cases import CASES, Case, make, random_rows
from sglang_sparse_kernels.common import nvrtc

# Threads and what each holds; all hold rows of 2,048 blocks.
SHAPES = [(64, 32), (256, 8)]
KERNEL = """
#define THREADS {threads}
#define ITEMS {items}
#define block_topp kernel_{threads}
namespace shape_{threads} {{
#include "{source}"
}}
extern "C" void run_{threads}(
    unsigned rows, const float* masses, const int* table, const int* n_blocks, const int* capacity, const float* top_p,
    int* indices, int* counts, unsigned long long* stats, long long mass_stride, long long table_stride,
    long long width, long long aligned) {{
    launch(rows, 1, THREADS, 1, [=] {{
        shape_{threads}::block_topp(masses, table, n_blocks, capacity, top_p, indices, counts, stats, mass_stride,
                                    table_stride, width, aligned);
    }});
}}
#undef block_topp
#undef THREADS
#undef ITEMS
"""
both = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernel of every shape."""
    kernels = (KERNEL.format(source=cuda.SOURCE, threads=threads, items=items) for threads, items in SHAPES)
    return build(tmp_path_factory.mktemp("cuda"), kernels)


def check(library: ctypes.CDLL, arguments: dict[str, Any], shape: tuple[int, int]) -> None:
    """Against the reference; what the kernel leaves unwritten stays -1."""
    mass, table = arguments["mass"], arguments["block_table"]
    batch, width = mass.shape
    results = []
    for _ in range(2):
        results.append((torch.full((batch, 1, width), -1, dtype=torch.int32), torch.full((batch, 1), -7).int()))
    counted = [torch.zeros(4, dtype=torch.int64) for _ in range(2)]
    reference.block_topp(**arguments, out=results[0], stats=counted[0])
    tensors = (mass, table, *(arguments[name] for name in ("n_blocks", "capacity", "top_p")), *results[1], counted[1])
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    aligned = mass.stride(0) % 4 == 0 and mass.data_ptr() % 16 == 0
    sizes = (mass.stride(0), table.stride(0), width, int(aligned))
    if batch:
        library[f"run_{shape[0]}"](batch, *pointers, *map(ctypes.c_longlong, sizes))
    for expected, got in zip(results[0], results[1], strict=True):
        assert torch.equal(got, expected)
    assert torch.equal(counted[1], counted[0])


@both
@pytest.mark.parametrize("case", [case for case in CASES if not case.gpu_only], ids=str)
def test_it_equals_the_reference(case: Case, shape: tuple[int, int], library: ctypes.CDLL) -> None:
    check(library, make(case, "cpu"), shape)


@both
@pytest.mark.parametrize("mass", ["concentrated", "flat", "ties", "constant", "zeros", "one"])
def test_long_rows(mass: str, shape: tuple[int, int], library: ctypes.CDLL) -> None:
    """Of all distributions: with bins that are divided up to three times."""
    for top_p in (1e-9, 0.3, 0.9, 0.99999):
        check(library, make(Case((2000, 1537), (1900, 1536), (top_p, top_p), mass), "cpu"), shape)


@both
@pytest.mark.parametrize("width", [7, 64, 130, 700])
def test_any_row(width: int, shape: tuple[int, int], library: ctypes.CDLL) -> None:
    for seed in range(3):
        check(library, random_rows(8, width, "cpu", seed), shape)


@both
def test_numbers_of_any_size(shape: tuple[int, int], library: ctypes.CDLL) -> None:
    """One next to the other, around powers of two, where leading bits change."""
    for power in range(-29, 0, 3):
        mass = 2.0**power + torch.arange(-40, 40)[torch.randperm(80)] * 2.0**-30
        mass = torch.cat([mass, torch.tensor([max(0.0, 1.0 - float(mass.sum()))])]).clamp(min=0)[None]
        options = {"dtype": torch.int32}
        for top_p in (1e-6, 0.01, 0.5, 0.999):
            rows = {
                "mass": mass.float(),
                "block_table": torch.arange(81, **options)[None],
                "n_blocks": torch.tensor([81], **options),
                "capacity": torch.tensor([80], **options),
                "top_p": torch.tensor([top_p]),
            }
            check(library, rows, shape)


def test_what_it_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not cuda.takes(torch.empty(1, 8))
    monkeypatch.setattr(nvrtc, "available", lambda _: True)
    assert cuda.takes(torch.empty(1, 32768)) and not cuda.takes(torch.empty(1, 32769))


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["triton", "cuda"])
def test_replays_of_a_graph_give_the_same_bits(implementation: str, device: str) -> None:
    """A hundred times, between kernels that are launched dependently, into poisoned outputs."""
    run = importlib.import_module(f"sglang_sparse_kernels.block_topp.{implementation}").block_topp
    arguments = make(Case((4096, 37, 0, 1000), (2000, 30, 4, 10), (0.9,) * 4, width=8192), device)
    options = {"dtype": torch.int32, "device": device}
    expected, out = ((torch.full((4, 1, 8192), -7, **options), torch.full((4, 1), -7, **options)) for _ in range(2))
    reference.block_topp(**arguments, out=expected)
    mass = arguments["mass"].clone()
    run(**arguments, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        arguments["mass"].copy_(mass)
        for _ in range(2):
            run(**arguments, out=out)
    for _ in range(100):
        for tensor, poison in ((arguments["mass"], 0), (out[0], -1), (out[1], -1)):
            tensor.fill_(poison)
        graph.replay()
        assert torch.equal(out[0], expected[0]) and torch.equal(out[1], expected[1])
