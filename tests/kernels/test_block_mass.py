"""Block mass: reference against float64, Triton against the reference, and what the masses promise."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_runs import replay_with

from sglang_sparse_kernels.block_mass import block_mass, cuda, reference
from sglang_sparse_kernels.block_mass import triton as kernels
from sglang_sparse_kernels.block_mass.cases import BF16, CASES, FP8, FP16, FP32, Case, make
from sglang_sparse_kernels.block_mass.triton import Config

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
# Largest difference of a mass by the dtype of the query, which decides whether block sums are rounded to float16.
TOLERANCE = {FP32: 1e-6, FP16: 2.5e-4, BF16: 2.5e-4}
NAN, INF = float("nan"), float("inf")

SMALL = Case((300, 0, 33, 1), 16, 5, 64, FP16, FP16, stored=576, sm_scale=0.4, width=40)
# What the CUDA kernels take.
EVEN = replace(SMALL, heads=32)
# One program for everything, and many that take one tile or nothing each.
VARIANTS = [
    Config(tile_tokens=64, programs_per_processor=1, merge_tiles=1),
    Config(tile_tokens=64, programs_per_processor=64, merge_tiles=2),
    Config(tile_tokens=128, programs_per_processor=2, merge_tiles=64),
]


def run_reference(arguments: dict[str, Any]) -> torch.Tensor:
    return reference.block_mass(**arguments, out=torch.full_like(arguments["block_table"], NAN, dtype=FP32))


def held(arguments: dict[str, Any]) -> torch.Tensor:
    """The entries of the result that belong to a row's blocks."""
    logical = torch.arange(arguments["block_table"].shape[1], device=arguments["q"].device)
    return logical < arguments["n_blocks"][:, None]


def poisoned(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same rows in a table that holds anything beyond them, as memory that was never written does."""
    table = arguments["block_table"].masked_fill(~held(arguments), 2**31 - 1)
    return {
        **arguments,
        "block_table": torch.cat([table, torch.full_like(table, -(2**31))], dim=1)[:, : table.shape[1]],
    }


def assert_masses(got: torch.Tensor, arguments: dict[str, Any]) -> None:
    """Close to the reference, 1 in all for every row that is not padded, and unwritten where no block is."""
    expected, mask = run_reference(arguments), held(arguments)
    torch.testing.assert_close(got[mask], expected[mask], rtol=0, atol=TOLERANCE[arguments["q"].dtype])
    totals = got.where(mask, 0.0).sum(dim=1)
    torch.testing.assert_close(totals, (arguments["n_blocks"] > 0).float(), rtol=0, atol=1e-5)
    assert got[~mask].isnan().all()


def run_kernels(arguments: dict[str, Any], **options: Any) -> torch.Tensor:
    """Triton's kernels, on a result that nothing has written to."""
    out = torch.full_like(arguments["block_table"], NAN, dtype=FP32)
    return kernels.block_mass(**arguments, out=out, **options)


def run_cuda(arguments: dict[str, Any]) -> torch.Tensor:
    """The CUDA kernels, likewise."""
    if not cuda.takes(arguments["q"], arguments["k_cache"], arguments["block_size"]):
        pytest.skip("these are Triton's")
    return cuda.block_mass(**arguments, out=torch.full_like(arguments["block_table"], NAN, dtype=FP32))


RUNS = {"reference": run_reference, "triton": run_kernels, "cuda": run_cuda}


def naive(arguments: dict[str, Any], row: int) -> torch.Tensor:
    """The masses of one row in float64, token by token."""
    size, last_slot = arguments["block_size"], arguments["last_slots"][row].item()
    blocks = arguments["block_table"][row, : arguments["n_blocks"][row]].tolist()
    slots = [list(range(block * size, (block + 1) * size)) for block in blocks]
    slots[-1] = [slot for slot in slots[-1] if slot <= last_slot]
    keys = arguments["k_cache"][[slot for part in slots for slot in part]].double() * arguments["k_scale"]
    weights = torch.exp(arguments["q"][row].double() @ keys.T * arguments["sm_scale"])
    weights /= weights.sum(dim=1, keepdim=True)
    return torch.stack([part.sum() for part in weights.split([len(part) for part in slots], dim=1)]) / len(weights)


@pytest.mark.parametrize("case", [case for case in CASES if not case.gpu_only], ids=str)
def test_reference_is_the_softmax_averaged_over_heads_and_summed_over_blocks(case: Case) -> None:
    arguments = make(case, "cpu")
    got = run_reference(poisoned(arguments))
    for row, length in enumerate(case.lengths):
        n_blocks = arguments["n_blocks"][row]
        assert (got[row, n_blocks:] == 0.0).all()
        if length:
            torch.testing.assert_close(got[row, :n_blocks].double(), naive(arguments, row), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("implementation", ["triton", CUDA])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_equal_the_reference(case: Case, implementation: str, device: str) -> None:
    if case.dtype == FP32 and device == "cuda":
        pytest.skip("float32 caches are for the CPU")
    arguments, run = make(case, device), RUNS[implementation]
    got = run(poisoned(arguments))
    assert_masses(got, arguments)
    again = run(poisoned(arguments))
    assert torch.equal(got[held(arguments)], again[held(arguments)])


@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_the_operation_is_one_of_them(case: Case, device: str) -> None:
    if case.dtype == FP32 and device == "cuda":
        pytest.skip("float32 caches are for the CPU")
    arguments = make(case, device)
    assert_masses(block_mass(**arguments, out=torch.full_like(arguments["block_table"], NAN, dtype=FP32)), arguments)


@pytest.mark.parametrize("config", VARIANTS, ids=str)
def test_any_number_of_splits_and_any_scratch(config: Config, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = make(replace(SMALL, lengths=(700, 0, 64, 1, 65, 640), width=50), device)
    empty = torch.empty
    # What the allocator hands out may be another layer's scratch.
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(NAN))
    assert_masses(run_kernels(poisoned(arguments), config=config), arguments)


@pytest.mark.parametrize("config", VARIANTS[:2], ids=str)
def test_rows_take_turns_where_the_scratch_is_small(config: Config, device: str) -> None:
    arguments = make(replace(SMALL, lengths=(70, 300, 16, 0, 130)), device)
    row_bytes = 40 * 16 * 5 * 3
    for rows in (0, 1, 2):
        assert_masses(run_kernels(arguments, config=config, limit=rows * row_bytes), arguments)


def test_more_rows_than_programs(device: str) -> None:
    arguments = make(replace(SMALL, lengths=(20, 3) * 8), device)
    assert_masses(run_kernels(arguments), arguments)


@pytest.mark.parametrize("implementation", ["reference", "triton", CUDA])
def test_what_is_not_finite_makes_its_row_nan(implementation: str, device: str) -> None:
    run = RUNS[implementation]
    # A token in a full tile of the row, and one in its last block.
    for value, token in ((NAN, 5), (INF, 5), (INF, 295)):
        arguments = make(EVEN, device)
        slot = arguments["block_table"][0, token // 16] * 16 + token % 16
        arguments["k_cache"][slot, 3] = value
        # +inf in one head, -inf in the others.
        arguments["q"][0, :, 3] = -1.0
        arguments["q"][0, 2, 3] = 1.0
        got, expected, mask = run(arguments), run_reference(arguments), held(arguments)
        assert got[0][mask[0]].isnan().all()
        mask[0] = False
        assert got[mask].isfinite().all()
        torch.testing.assert_close(got[mask], expected[mask], rtol=0, atol=TOLERANCE[FP16])


@pytest.mark.parametrize("implementation", ["reference", "triton", CUDA])
def test_a_logit_of_minus_infinity_weighs_nothing(implementation: str, device: str) -> None:
    run = RUNS[implementation]
    arguments = make(replace(EVEN, lengths=(300,), width=0), device)
    arguments["q"][:, :, 3] = 1.0
    slots = arguments["block_table"][0, :8, None] * 16 + torch.arange(16, device=device)
    # A whole tile of the kernel, so that there is no finite maximum either.
    arguments["k_cache"][slots.flatten().long(), 3] = -INF
    got = run(arguments)
    assert (got[0, :8] == 0.0).all()
    assert got.sum().item() == pytest.approx(1.0, abs=1e-5)
    arguments["k_cache"][:, 3] = -INF
    assert run(arguments).isnan().all()


@pytest.mark.parametrize("implementation", ["triton", CUDA])
@pytest.mark.parametrize("factor", [1e-4, 1e3])
def test_flat_and_steep_distributions(factor: float, implementation: str, device: str) -> None:
    arguments = make(EVEN, device)
    arguments["sm_scale"] *= factor
    assert_masses(RUNS[implementation](arguments), arguments)


@pytest.mark.parametrize("implementation", ["triton", CUDA])
def test_a_block_that_holds_nearly_all(implementation: str, device: str) -> None:
    """The newest block's mass is exact however far the other blocks lie below it."""
    arguments = make(replace(EVEN, lengths=(300,), width=0, sm_scale=1.0), device)
    arguments["k_cache"][arguments["last_slots"][0]] = 32 * arguments["q"][0].mean(dim=0)
    arguments["q"][:] = arguments["q"].mean(dim=1, keepdim=True)
    got = RUNS[implementation](arguments)
    assert got[0, -1].item() == pytest.approx(1.0, abs=1e-5)
    assert_masses(got, arguments)


def test_without_rows_or_blocks(device: str) -> None:
    arguments = make(SMALL, device)
    arguments["n_blocks"] = torch.zeros_like(arguments["n_blocks"])
    assert run_kernels(arguments).isnan().all()
    assert run_reference(arguments).count_nonzero() == 0
    assert block_mass(**{**arguments, "block_table": arguments["block_table"][:, :0]}).shape == (4, 0)
    none = {name: value[:0] for name, value in arguments.items() if torch.is_tensor(value) and name != "k_cache"}
    assert block_mass(**{**arguments, **none}).shape == (0, 40)


@given(
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=3),
    block_size=st.sampled_from([1, 2, 8, 16, 32, 64]),
    heads=st.integers(1, 20),
    dim=st.sampled_from([16, 48, 64, 144]),
    dtypes=st.sampled_from([(FP32, FP32), (FP16, FP16), (BF16, BF16), (BF16, FP8)]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=15, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_shape(
    device: str,
    lengths: list[int],
    block_size: int,
    heads: int,
    dim: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    seed: int,
) -> None:
    if dtypes[0] == FP32 and device == "cuda":
        return
    arguments = make(Case(tuple(lengths), block_size, heads, dim, *dtypes, sm_scale=0.3), device, seed)
    assert_masses(run_kernels(poisoned(arguments)), arguments)


def test_wrong_arguments_are_refused() -> None:
    arguments = make(replace(SMALL, dtype=FP32, kv_dtype=FP32), "cpu")
    q, k_cache = arguments["q"], arguments["k_cache"]
    for change, message in [
        ({"q": q[:, :0]}, "at least one head"),
        ({"q": q[..., :40], "k_cache": k_cache[:, :40]}, "multiple of 16 up to 576, got 40"),
        ({"q": torch.zeros(4, 5, 592), "k_cache": torch.zeros(8, 592)}, "multiple of 16 up to 576, got 592"),
        ({"k_cache": k_cache.half()}, "k_cache must have one of the dtypes"),
        ({"block_size": 48}, "block_size must be a power of two from 1 to 64, got 48"),
        ({"block_size": 128}, "block_size must be a power of two from 1 to 64, got 128"),
        ({"sm_scale": 0.0}, "sm_scale must be positive and finite, got 0.0"),
        ({"k_scale": NAN}, "k_scale must be positive and finite, got nan"),
    ]:
        with pytest.raises(ValueError, match=message):
            block_mass(**{**arguments, **change})


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["triton", "cuda"])
def test_replays_as_a_cuda_graph_with_other_lengths(implementation: str, device: str) -> None:
    arguments = make(Case((3000, 64, 0, 1), 16, 128, 64, BF16, BF16, stored=576, sm_scale=0.5, width=256), device)
    run = cuda.block_mass if implementation == "cuda" else kernels.block_mass
    out = run(**arguments, out=torch.full_like(arguments["block_table"], NAN, dtype=FP32))
    other = make(Case((17, 0, 2000, 983), 16, 128, 64, BF16, BF16, stored=576, sm_scale=0.5, width=256), device)
    replay_with(run, arguments, other, out, NAN)
    assert_masses(out, other)
