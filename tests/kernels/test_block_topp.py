"""Top-p selection: reference against a sorted list of integers, Triton against the reference, exactly."""

import importlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_library import emulated
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_runs import assert_replays

from sglang_sparse_kernels.block_topp import cuda, reference
from sglang_sparse_kernels.block_topp.cases import CASES, Case, make, random_rows
from sglang_sparse_kernels.common import nvrtc

Result = tuple[torch.Tensor, torch.Tensor]
# Of the CUDA kernel on the CPU: threads and what each holds; all hold rows of 2,048 blocks.
SHAPES = [(64, 32), (256, 8)]
on_cpu = emulated((cuda.SOURCE, "block_topp", dict(zip(("THREADS", "ITEMS"), shape, strict=True))) for shape in SHAPES)


def outputs(arguments: dict[str, Any]) -> Result:
    """Poisoned, as no physical block is negative."""
    batch, width = arguments["mass"].shape
    options = {"dtype": torch.int32, "device": arguments["mass"].device}
    return torch.full((batch, 1, width), -7, **options), torch.full((batch, 1), -7, **options)


def run_reference(arguments: dict[str, Any]) -> Result:
    return reference.block_topp(**arguments, out=outputs(arguments))


def run_triton(arguments: dict[str, Any], *config: int) -> Result:
    triton = pytest.importorskip("sglang_sparse_kernels.block_topp.triton")
    return triton.block_topp(**arguments, out=outputs(arguments), config=triton.Config(*config))


def run_cuda(arguments: dict[str, Any]) -> Result:
    if not cuda.takes(arguments["mass"]):
        pytest.skip("these are Triton's")
    return cuda.block_topp(**arguments, out=outputs(arguments))


RUN = {"reference": run_reference, "triton": run_triton, "cuda": run_cuda}
KERNELS = ["triton", pytest.param("cuda", marks=pytest.mark.gpu)]
kernels = pytest.mark.parametrize("implementation", KERNELS)
every = pytest.mark.parametrize("implementation", ["reference", *KERNELS])


def assert_equal(result: Result, expected: Result) -> None:
    """The counts and what they mean; beyond, where the reference has -1, a kernel leaves what was there."""
    indices, counts = result
    beyond = torch.arange(indices.shape[2], device=indices.device) >= counts[:, :, None]
    assert torch.equal(counts, expected[1])
    assert torch.equal(indices.masked_fill(beyond, -1), expected[0])
    assert (indices[beyond] < 0).all()


def selected_of(mass: list[float], capacity: int, top_p: float) -> tuple[list[int], bool]:
    """Logical blocks of one row in ascending order, and whether it overflowed."""
    blocks = list(range(len(mass)))
    if capacity >= len(mass) or top_p >= 1 or not all(value < 2 for value in mass):
        return blocks, False
    fixed = [int(max(value, 0) * 2**30) for value in mass]
    if not 0 < sum(fixed) < reference.LIMIT:
        return blocks, False
    needed = -(-int(top_p * 2**30) * sum(fixed) // 2**30)
    chosen = {blocks[-1]}
    for block in sorted(blocks, key=lambda block: (-fixed[block], block)):
        if needed <= 0:
            break
        chosen.add(block)
        needed -= fixed[block]
    return (blocks, True) if len(chosen) > capacity else (sorted(chosen), False)


def one_row(mass: list[float], capacity: int, top_p: float, device: str = "cpu") -> dict[str, Any]:
    """Arguments of a row whose physical blocks are 100, 101, ...; counters of its own."""
    return {
        "mass": torch.tensor([mass], dtype=torch.float32, device=device),
        "block_table": 100 + torch.arange(len(mass), dtype=torch.int32, device=device)[None],
        "n_blocks": torch.tensor([len(mass)], dtype=torch.int32, device=device),
        "capacity": torch.tensor([capacity], dtype=torch.int32, device=device),
        "top_p": torch.tensor([top_p], dtype=torch.float32, device=device),
        "stats": torch.zeros(4, dtype=torch.int64, device=device),
    }


def run_row(implementation: str, arguments: dict[str, Any]) -> tuple[list[int], bool]:
    """Logical blocks that are selected of `one_row`, and whether it overflowed."""
    indices, counts = RUN[implementation](arguments)
    rows, selected, _, overflowed = arguments["stats"].tolist()
    assert (rows, selected) == (1, counts.item())
    return (indices[0, 0, : counts.item()] - 100).tolist(), bool(overflowed)


def smallest_sets(arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """A mask ``[B, M]`` of what is selected and which rows overflowed, by comparing all pairs of blocks of a row."""
    logical = torch.arange(arguments["mass"].shape[1])
    n_blocks = arguments["n_blocks"][:, None]
    held = logical < n_blocks
    fixed = (arguments["mass"].double() * 2**30).floor().where(held, 0)
    needed = ((arguments["top_p"].double() * 2**30).long() * fixed.sum(dim=1).long() + 2**30 - 1) // 2**30
    earlier = logical[:, None] > logical
    higher = (fixed[:, None] > fixed[:, :, None]) | ((fixed[:, None] == fixed[:, :, None]) & earlier)
    above = (higher.double() @ fixed[:, :, None])[:, :, 0]
    chosen = (above < needed[:, None]) & (fixed > 0)
    # Enough, and not without the lowest.
    reached = (fixed * chosen).sum(dim=1)
    assert (reached >= needed).all()
    assert (reached - fixed.where(chosen, 2.0**31).amin(dim=1) < needed).all()
    chosen |= logical == n_blocks - 1
    dense = arguments["capacity"] >= arguments["n_blocks"]
    overflowed = ~dense & (chosen.sum(dim=1) > arguments["capacity"])
    return held & (chosen | (dense | overflowed)[:, None]), overflowed


@pytest.mark.parametrize("case", [case for case in CASES if not case.gpu_only], ids=str)
def test_reference_is_the_head_of_a_sorted_list(case: Case) -> None:
    arguments = make(case, "cpu")
    arguments["stats"] = torch.zeros(4, dtype=torch.int64)
    indices, counts = run_reference(arguments)
    expected = torch.zeros_like(arguments["stats"])
    for row, n_blocks in enumerate(case.n_blocks):
        mass = arguments["mass"][row, :n_blocks].tolist()
        logical, overflowed = selected_of(mass, case.capacity[row], arguments["top_p"][row].item())
        blocks = arguments["block_table"][row, logical].tolist()
        assert indices[row, 0].tolist() == blocks + [-1] * (indices.shape[2] - len(blocks))
        assert counts[row].item() == len(blocks)
        expected += torch.tensor([n_blocks > 0, len(blocks), n_blocks, overflowed])
    assert torch.equal(arguments["stats"], expected)


@kernels
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_equal_the_reference(case: Case, implementation: str, device: str) -> None:
    arguments = make(case, device)
    expected = run_reference(arguments)
    for _ in range(2):  # the same bits twice
        assert_equal(RUN[implementation](arguments), expected)


def test_reference_selects_the_smallest_sets_of_10000_random_rows() -> None:
    overflows = 0
    for seed in range(10):
        arguments = random_rows(1000, 40, "cpu", seed)
        arguments["stats"] = torch.zeros(4, dtype=torch.int64)
        indices, counts = run_reference(arguments)
        selected, overflowed = smallest_sets(arguments)
        assert torch.equal(counts[:, 0], selected.sum(dim=1).int())
        assert torch.equal(indices[indices >= 0], arguments["block_table"][selected])
        assert arguments["stats"][3] == overflowed.sum()
        overflows += int(overflowed.sum())
    assert 1000 < overflows < 9000


@kernels
@pytest.mark.parametrize(
    ("batches", "rows", "width"),
    [(1, 30, 150), *(pytest.param(20, 500, width, marks=pytest.mark.gpu) for width in (40, 1000, 4096, 8192, 20000))],
)
def test_kernels_equal_the_reference_on_random_rows(
    batches: int, rows: int, width: int, implementation: str, device: str
) -> None:
    for seed in range(batches):
        arguments = random_rows(rows, width, device, seed)
        assert_equal(RUN[implementation](arguments), run_reference(arguments))


@pytest.mark.parametrize("config", [(128, 16, 16), (256, 2, 1)], ids=str)
def test_rows_longer_than_a_block(config: tuple[int, int, int], device: str) -> None:
    """Several blocks per row, as in a context of a million tokens, without its size."""
    for mass in ("concentrated", "ties", "constant", "special"):
        arguments = make(Case((400, 385, 130), (399, 300, 1), (0.9, 0.7, 0.6), mass), device)
        assert_equal(run_triton(arguments, *config), run_reference(arguments))


@every
@pytest.mark.parametrize(
    ("mass", "top_p", "selected"),
    [
        ([0.125, 0.25, 0.125, 0.25, 0.25], 0.25, [1, 4]),
        ([0.125, 0.25, 0.125, 0.25, 0.25], 0.75, [1, 3, 4]),
        ([0.125, 0.25, 0.125, 0.25, 0.25], 0.8125, [0, 1, 3, 4]),
        ([0.25, 0.25, 0.25, 0.125, 0.125], 0.5, [0, 1, 4]),
        ([0.125] * 8, 0.5, [0, 1, 2, 3, 7]),
        ([0.125] * 8, 0.515625, [0, 1, 2, 3, 4, 7]),
        ([0.0, 0.0, 1.0, 0.0], 0.99, [2, 3]),
        ([0.5, 0.5, 0.0, 0.0], 0.99999994, [0, 1, 3]),
        ([0.25, 0.5, 0.25], 1e-3, [1, 2]),
        # Below the least unit of a share nothing is needed.
        ([0.25, 0.5, 0.25], 1e-10, [2]),
        ([0.0, 1.0, 0.0], 1e-10, [2]),
        ([0.0, 0.5, 0.0, 0.5], 1.0, [0, 1, 2, 3]),
        # What is needed is rounded up, to all four units here.
        ([2.0**-30] * 4 + [0.0, 0.0], 0.8125, [0, 1, 2, 3, 5]),
        ([2.0**-30] * 4 + [0.0, 0.0], 0.75, [0, 1, 2, 5]),
        # Smaller than the least unit counts as nothing.
        ([1e-10, 0.5, 1e-10], 0.5, [1, 2]),
        ([-0.5, 1.0, -math.inf, 0.25], 0.9, [1, 3]),
        # Nothing is known: no mass at all, too much of it, or what is no number.
        ([0.0, -1.0, 0.0], 0.5, [0, 1, 2]),
        ([1e-10, 1e-10, 1e-10], 0.5, [0, 1, 2]),
        ([0.25, math.nan, 0.5], 0.5, [0, 1, 2]),
        ([math.inf, 0.25, 0.5], 0.5, [0, 1, 2]),
        ([0.25, 0.25, 3e38], 0.5, [0, 1, 2]),
        ([1.0, 0.5, 0.5], 0.5, [0, 1, 2]),
        # Somewhat more than 1 is a rounding.
        ([1.0, 0.5, 0.25], 0.5, [0, 2]),
        ([0.0625, 1.9, 0.0], 0.9, [1, 2]),
    ],
)
def test_small_rows(implementation: str, mass: list[float], top_p: float, selected: list[int], device: str) -> None:
    capacity = len(mass) - 1
    assert selected_of(mass, capacity, top_p) == (selected, False)
    assert run_row(implementation, one_row(mass, capacity, top_p, device)) == (selected, False)


@every
def test_a_row_overflows_beyond_its_capacity(implementation: str, device: str) -> None:
    """The newest block counts, whether it is of the smallest set or not."""
    for mass, top_p, size in [([0.5, 0.25, 0.125, 0.125], 0.75, 3), ([0.125, 0.125, 0.25, 0.5], 0.75, 2)]:
        for capacity in range(5):
            overflows = capacity < size
            selected = [0, 1, 2, 3] if overflows or capacity == 4 else selected_of(mass, 3, top_p)[0]
            got = run_row(implementation, one_row(mass, capacity, top_p, device))
            assert got == (selected, overflows)


@every
def test_dense_and_padded_rows_do_not_read_their_masses(implementation: str, device: str) -> None:
    arguments = make(Case((40, 40, 0, 1), (40, 100, 0, 1), (0.5,) * 4), device)
    arguments["mass"].fill_(math.nan)
    indices, counts = RUN[implementation](arguments)
    assert counts[:, 0].tolist() == [40, 40, 0, 1]
    assert torch.equal(indices[:2, 0], arguments["block_table"][:2])
    assert (indices[2] < 0).all()


@every
def test_stats_count_overflows_apart_from_other_complete_rows(implementation: str, device: str) -> None:
    arguments = make(Case((50, 50, 50, 50, 0), (1, 50, 49, 40, 9), (0.9, 0.9, 1.0, 0.9, 0.9)), device)
    arguments["mass"][3, 7] = math.nan
    arguments["stats"] = torch.tensor([1, 2, 3, 4], device=device)
    RUN[implementation](arguments)
    assert arguments["stats"].tolist() == [1 + 4, 2 + 200, 3 + 200, 4 + 1]


MASSES = st.one_of(
    st.lists(st.floats(0, 0.125, width=32), min_size=1, max_size=60),
    st.lists(st.sampled_from([0.0, -0.0, 2.0**-30, 2.0**-29, 2.0**-31, 0.015625, 0.03125]), min_size=1, max_size=60),
    st.lists(st.floats(width=32), min_size=1, max_size=8),
)


@given(mass=MASSES, capacity=st.integers(0, 61), top_p=st.floats(2.0**-32, 1, width=32, exclude_min=True))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_selects_the_head_of_a_sorted_list(device: str, mass: list[float], capacity: int, top_p: float) -> None:
    expected = selected_of(mass, capacity, top_p)
    for implementation in RUN if device == "cuda" else ("reference", "triton"):
        assert run_row(implementation, one_row(mass, capacity, top_p, device)) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["triton", "cuda"])
def test_replays_of_a_graph_give_the_same_bits(implementation: str, device: str) -> None:
    """A hundred times, between kernels that are launched dependently, into poisoned outputs."""
    run = importlib.import_module(f"sglang_sparse_kernels.block_topp.{implementation}").block_topp
    arguments = make(Case((4096, 37, 0, 1000), (2000, 30, 4, 10), (0.9,) * 4, width=8192), device)
    expected, out, mass = run_reference(arguments), outputs(arguments), arguments["mass"].clone()

    def step() -> None:
        arguments["mass"].copy_(mass)
        for _ in range(2):
            run(**arguments, out=out)

    def same() -> bool:
        assert_equal(out, expected)
        return True

    assert_replays(step, [(arguments["mass"], 0), (out[0], -1), (out[1], -1)], same)


@pytest.fixture(params=SHAPES, ids="{0[0]}x{0[1]}".format)
def check(request: pytest.FixtureRequest, on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Compares a shape of the kernel with the reference; what the kernel leaves unwritten stays -1."""
    threads, items = request.param
    monkeypatch.setattr(cuda, "_THREADS", threads)
    monkeypatch.setattr(cuda, "_ITEMS", (items,))

    def compare(arguments: dict[str, Any]) -> None:
        results = []
        for implementation in (reference, cuda):
            given = {**arguments, "out": outputs(arguments), "stats": torch.zeros(4, dtype=torch.int64)}
            results.append((*implementation.block_topp(**given), given["stats"]))
        assert_equal(results[1][:2], results[0][:2])
        assert torch.equal(results[1][2], results[0][2])

    return compare


@pytest.mark.parametrize("case", [case for case in CASES if not case.gpu_only], ids=str)
def test_the_emulated_cuda_kernel_equals_the_reference(case: Case, check: Callable[..., None]) -> None:
    check(make(case, "cpu"))


@pytest.mark.parametrize("mass", ["concentrated", "flat", "ties", "constant", "zeros", "one"])
def test_long_rows(mass: str, check: Callable[..., None]) -> None:
    """Of all distributions: with bins that are divided up to three times."""
    for top_p in (1e-9, 0.3, 0.9, 0.99999):
        check(make(Case((2000, 1537), (1900, 1536), (top_p, top_p), mass), "cpu"))


@pytest.mark.parametrize("width", [7, 64, 130, 700])
def test_any_row(width: int, check: Callable[..., None]) -> None:
    for seed in range(3):
        check(random_rows(8, width, "cpu", seed))


def test_numbers_of_any_size(check: Callable[..., None]) -> None:
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
            check(rows)


def test_what_it_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not cuda.takes(torch.empty(1, 8))
    monkeypatch.setattr(nvrtc, "available", lambda _: True)
    assert cuda.takes(torch.empty(1, 32768)) and not cuda.takes(torch.empty(1, 32769))
