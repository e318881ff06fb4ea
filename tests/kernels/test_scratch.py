"""Tests of the scratch memory of decode operations: it takes ``scratch_bytes``, and may hold anything before."""

from typing import Any

import pytest
import torch

from sglang_sparse_kernels import (
    block_mass,
    block_topp,
    skip_softmax_decode,
    skip_softmax_mla_decode,
    sparse_decode,
    sparse_mla_decode,
)
from sglang_sparse_kernels.block_mass import cases as mass_cases
from sglang_sparse_kernels.block_mass import cuda as mass_cuda
from sglang_sparse_kernels.block_mass import triton as mass_kernels
from sglang_sparse_kernels.block_topp import cases as topp_cases
from sglang_sparse_kernels.common import launch
from sglang_sparse_kernels.skip_softmax_decode import cases as skip_cases
from sglang_sparse_kernels.skip_softmax_decode import cuda as skip_cuda
from sglang_sparse_kernels.skip_softmax_mla_decode import cases as skip_mla_cases
from sglang_sparse_kernels.sparse_decode import cases as decode_cases
from sglang_sparse_kernels.sparse_decode import cuda as decode_cuda
from sglang_sparse_kernels.sparse_mla_decode import cases as mla_cases
from sglang_sparse_kernels.sparse_mla_decode import fa3

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each tensor that was allocated since, in order."""
    sizes: list[int] = []
    empty = torch.empty

    def counting(*shape: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*shape, **options)
        sizes.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(torch, "empty", counting)
    return sizes


def mass_sizes(arguments: dict[str, Any]) -> tuple[Any, ...]:
    q, table = arguments["q"], arguments["block_table"]
    return *q.shape, table.shape[1], arguments["block_size"], q.dtype, q.device


def mass_scratch(arguments: dict[str, Any]) -> int:
    """Of the kernels that serve the call; what a server reserves is enough for either."""
    sizes = mass_sizes(arguments)
    batch, heads, dim, width, block_size, dtype, device = sizes
    most = block_mass.scratch_bytes(*sizes)
    if not mass_cuda.takes_sizes(heads, dim, block_size, dtype, device):
        return most
    taken = mass_kernels.scratch_bytes(*sizes)
    if mass_cuda.takes(arguments["q"], arguments["k_cache"], block_size):
        taken = mass_cuda.scratch_bytes(batch, heads, width, block_size, device)
    assert taken <= most
    return taken


def decode_sizes(arguments: dict[str, Any], usual: int | None = None) -> tuple[Any, ...]:
    q, values = arguments["q"], arguments["v_cache"]
    heads = (q.shape[1], values.shape[1], q.shape[2], values.shape[2])
    pages = usual or arguments["indices"].shape[2]
    return len(q), *heads, pages, arguments["page_size"], q.dtype, values.dtype, q.device


def mla_sizes(arguments: dict[str, Any], usual: int | None = None) -> tuple[Any, ...]:
    q, blocks = arguments["q_nope"], usual or arguments["indices"].shape[2]
    return *q.shape, blocks, arguments["block_size"], q.dtype, q.device


@pytest.mark.parametrize("case", [case for case in mass_cases.CASES if not case.gpu_only], ids=str)
def test_block_mass(case: Any, device: str, allocated: list[int]) -> None:
    if case.dtype == torch.float32 and device == "cuda":
        pytest.skip("float32 caches are for the CPU")
    arguments = mass_cases.make(case, device)
    out = torch.zeros(arguments["block_table"].shape, device=device)
    allocated.clear()
    block_mass.block_mass(**arguments, out=out)
    bound = block_mass.scratch_bytes(*mass_sizes(arguments))
    served = mass_cuda.takes(arguments["q"], arguments["k_cache"], arguments["block_size"])
    assert len(allocated) == (2 if served else 3)
    # Where it depends on the cache whose kernels serve a call, the bound holds for both.
    q = arguments["q"]
    either = mass_cuda.takes_sizes(*q.shape[1:], arguments["block_size"], q.dtype, q.device)
    assert sum(allocated) <= bound and (either or sum(allocated) == bound)


@pytest.mark.parametrize(("rows", "programs"), [(1, 1), (3, 1), (3, 64), (4, 1), (0, 64)])
def test_rows_of_the_block_mass_that_take_turns(
    rows: int, programs: int, device: str, allocated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables are allocated once and what the splits sum up by each launch, of which the last has fewer rows."""
    monkeypatch.setattr(mass_kernels, "num_processors", lambda _: 4)
    case = mass_cases.Case((700, 300, 64, 640), 16, 5, 64, FP16, FP16, width=50)
    config = mass_kernels.Config(tile_tokens=64, programs_per_processor=programs)
    arguments = mass_cases.make(case, device)
    # 13 tiles of four blocks; a block is two bytes a head and a tile four.
    limits = {"config": config, "limit": rows * 13 * 5 * (4 * 2 + 4)}
    out = torch.zeros(arguments["block_table"].shape, device=device)
    allocated.clear()
    mass_kernels.block_mass(**arguments, out=out, **limits)
    sums, maxima, *splits = allocated
    assert len(splits) == -(-4 // max(rows, 1)) and sums + maxima == max(rows * 780, 780)
    assert sums + maxima + max(splits) == mass_kernels.scratch_bytes(*mass_sizes(arguments), **limits)
    if (rows, programs) == (3, 1):
        assert splits[1] > splits[0]


def test_more_rows_than_fit_take_no_more_than_the_limit() -> None:
    """An upper bound that needs no batch: 256 MiB for the tables, a few MiB for the splits."""
    sizes = [block_mass.scratch_bytes(rows, 128, 64, 8192, 16, BF16, torch.device("cpu")) for rows in (64, 256, 4096)]
    assert sizes[0] < 200 * 2**20 and sizes[1] <= 257 * 2**20 and sizes[1] == sizes[2]


@pytest.mark.parametrize("usual", [None, 1, 7])
@pytest.mark.parametrize(
    "case", [case for case in (*decode_cases.CASES, *decode_cases.QUERIES) if not case.gpu_only], ids=str
)
def test_sparse_decode(case: Any, usual: int | None, device: str, allocated: list[int]) -> None:
    if case.dtype == torch.float32 and device == "cuda":
        pytest.skip("float32 caches are for the CPU")
    arguments = decode_cases.make(case, device)
    q, values = arguments["q"], arguments["v_cache"]
    out = torch.zeros(*q.shape[:2], values.shape[2], dtype=q.dtype, device=device)
    allocated.clear()
    sparse_decode.sparse_decode(**arguments, out=out, usual_pages=usual)
    tokens = (usual or arguments["indices"].shape[2]) * arguments["page_size"]
    served = decode_cuda.config_of(arguments["counts"].numel(), tokens, q.device) is not None
    served = served and case.queries == 1 and decode_cuda.takes(q, arguments["k_cache"], values, out)
    assert sum(allocated) == (0 if served else sparse_decode.scratch_bytes(*decode_sizes(arguments, usual)))


@pytest.mark.parametrize("usual", [None, 1, 7])
def test_skip_softmax_decode(usual: int | None, device: str, allocated: list[int]) -> None:
    arguments = skip_cases.make(skip_cases.CASES[0], device)
    q, caches = arguments["q"], (arguments["k_cache"], arguments["v_cache"])
    pages, out = usual or arguments["page_table"].shape[1], torch.zeros_like(q)
    allocated.clear()
    skip_softmax_decode.skip_softmax_decode(**arguments, out=out, usual_pages=usual)
    exact = most = skip_softmax_decode.scratch_bytes(4, 8, 2, 128, 128, pages, 16, q.dtype, q.device)
    if skip_cuda.faster(q.device) and skip_cuda.takes(q, *caches, out):
        exact = skip_cuda.scratch_bytes(4, (8, 2), 128, pages, 16, q.device)
    assert sum(allocated) == exact <= most


@pytest.mark.parametrize("usual", [None, 1, 7])
@pytest.mark.parametrize("case", [case for case in mla_cases.CASES if not case.gpu_only], ids=str)
def test_sparse_mla_decode(case: Any, usual: int | None, device: str, allocated: list[int]) -> None:
    if case.dtype == torch.float32 and device == "cuda":
        pytest.skip("float32 caches are for the CPU")
    arguments = mla_cases.make(case, device)
    out = torch.zeros_like(arguments["q_nope"], memory_format=torch.contiguous_format)
    allocated.clear()
    sparse_mla_decode.sparse_mla_decode(**arguments, out=out, usual_blocks=usual)
    assert sum(allocated) == sparse_mla_decode.scratch_bytes(*mla_sizes(arguments, usual))


def test_a_batch_that_fills_the_device_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row in pieces keeps each piece's result, per head its mean and the logarithm of its sum of weights."""
    monkeypatch.setattr(launch, "stand_in", launch.Properties((9, 0), 132, 232448))
    cpu = torch.device("cpu")
    mla = [sparse_mla_decode.scratch_bytes(rows, 128, 512, 4096, 16, BF16, cpu) for rows in (1, 16, 64, 256, 4096)]
    assert mla == [64 * 128 * (512 * 2 + 4), 16 * 4 * 128 * 1028, 0, 0, 0]
    gqa = [
        sparse_decode.scratch_bytes(rows, 32, 8, 128, 128, 820, 16, BF16, BF16, cpu) for rows in (1, 4, 16, 256, 4096)
    ]
    assert gqa == [32 * 15 * 516, 4 * 32 * 4 * 516, 16 * 32 * 3 * 516, 0, 0]


@pytest.mark.parametrize(
    ("operation", "cases"),
    [
        (sparse_decode.sparse_decode, decode_cases),
        (sparse_mla_decode.sparse_mla_decode, mla_cases),
        (skip_softmax_decode.skip_softmax_decode, skip_cases),
        (skip_softmax_mla_decode.skip_softmax_mla_decode, skip_mla_cases),
    ],
    ids=lambda one: one.__name__.rpartition(".")[2],
)
def test_what_nobody_wrote_is_dropped(operation: Any, cases: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`_combine_kernel` loads unwritten results of unused splits, which initcheck of compute-sanitizer reports."""
    case = next(case for case in cases.CASES if not case.gpu_only and 0 in case.lengths)
    # Multiprocessors enough for several splits of each row.
    monkeypatch.setattr(launch, "stand_in", launch.Properties((8, 0), 132, 166912))
    arguments, empty = cases.make(case, device), torch.empty
    out = operation(**arguments)

    def over(value: float) -> torch.Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(value))
            return operation(**arguments, out=torch.zeros_like(out))

    assert out.isfinite().all()
    assert all(torch.equal(over(value), out) for value in (0.0, float("nan"), float("inf")))


def test_block_topp_allocates_nothing(device: str, allocated: list[int]) -> None:
    case = next(case for case in topp_cases.CASES if not case.gpu_only)
    arguments = topp_cases.make(case, device)
    batch, width = arguments["mass"].shape
    shapes = (batch, 1, width), (batch, 1)
    out = tuple(torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes)
    allocated.clear()
    block_topp.block_topp(**{**arguments, "out": out})
    assert allocated == []


OPERATIONS = [
    (block_mass.block_mass, mass_scratch, mass_cases, lambda arguments: (arguments,)),
    (sparse_decode.sparse_decode, sparse_decode.scratch_bytes, decode_cases, decode_sizes),
    (sparse_mla_decode.sparse_mla_decode, sparse_mla_decode.scratch_bytes, mla_cases, mla_sizes),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("operation", "case"),
    [(operation, case) for operation in OPERATIONS for case in operation[2].CASES if case.gpu_only],
    ids=lambda one: one[0].__name__ if isinstance(one, tuple) else str(one),
)
def test_the_device_hands_out_as_much(
    operation: tuple[Any, ...], case: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the bytes asked for: what a block of the allocator has beyond them depends on what earlier tests left free.

    What FA3 takes is tested beside it.
    """
    monkeypatch.setattr(fa3, "installed", lambda _: False)
    run, scratch_bytes, cases, sizes = operation
    arguments = cases.make(case, device)
    # The first run compiles, and makes what the result takes.
    arguments["out"] = run(**arguments)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    run(**arguments)
    taken = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    assert taken == scratch_bytes(*sizes(arguments))
