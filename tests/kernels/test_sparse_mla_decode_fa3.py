"""Sparse MLA decode attention by FA3: what it is handed, by a stand-in in plain torch; on a Hopper GPU FA3 itself."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from anchor_runs import relative_error
from fa3_stand_in import FA3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mla_decode import TOLERANCE, poisoned, run_reference

from sglang_sparse_kernels.common import launch
from sglang_sparse_kernels.common.flash_decode import split_bytes
from sglang_sparse_kernels.sparse_mla_decode import fa3, scratch_bytes, sparse_mla_decode
from sglang_sparse_kernels.sparse_mla_decode import triton as kernels
from sglang_sparse_kernels.sparse_mla_decode.cases import CASES, Case, make
from sglang_sparse_kernels.sparse_mla_decode.reference import Inputs
from sglang_sparse_kernels.sparse_mla_decode.triton import selected_tokens

FP32, FP16, BF16, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
IMPLEMENTATIONS = {"triton": kernels.sparse_mla_decode, "fa3": fa3.sparse_mla_decode}
# Ragged rows: full and partial last blocks, a padded one, a single token, all blocks and a part of them.
RAGGED = Case((150, 0, 33, 1, 96, 512), 16, 16, 512, BF16, BF16, ratio=0.4, max_select=40)
# Like what FA3 is chosen for, and small.
SERVED = Case((64, 0, 33, 1, 40, 7, 50, 16), 16, 64, 512, BF16, BF16)
H200 = launch.Properties((9, 0), 132, 232448)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> FA3:
    """In the place of FA3; that it is installed has to be said beside."""
    found = FA3()
    monkeypatch.setattr(fa3, "attention", lambda: found)
    return found


@pytest.fixture
def no_fa3() -> Iterator[None]:
    """Forget the imported FA3 before and after a test."""
    fa3.attention.cache_clear()
    yield
    fa3.attention.cache_clear()


def run(implementation: str, arguments: dict[str, Any]) -> torch.Tensor:
    """One implementation, whatever would be chosen."""
    out = torch.full_like(arguments["q_nope"], float("nan"), memory_format=torch.contiguous_format)
    return IMPLEMENTATIONS[implementation](Inputs(**arguments), out)


def takes(arguments: dict[str, Any]) -> bool:
    names = ("q_nope", "q_rope", "kv_cache", "indices", "block_size", "kv_scale")
    return fa3.takes(**{name: arguments[name] for name in names}, out=torch.empty(arguments["q_nope"].shape))


def require(implementation: str, case: Case, arguments: dict[str, Any]) -> None:
    if implementation == "triton":
        return
    device = arguments["q_nope"].device
    if not fa3.installed(device):
        pytest.skip("FA3 is not installed for this GPU")
    if not fa3.has_kernel(case.latent_dim, case.block_size, case.dtype, device) or not takes(arguments):
        pytest.skip("FA3 has no kernel for this")


@pytest.mark.parametrize(
    "case", [RAGGED, *(case for case in CASES if not case.gpu_only and case.kv_dtype == case.dtype)], ids=str
)
def test_fa3_is_handed_the_selected_tokens(case: Case, device: str, stand_in: FA3) -> None:
    """Whatever its dimensions are: those that FA3 has kernels for are a part of them."""
    if case.dtype == FP32 and device == "cuda":
        pytest.skip("float32 caches are for the CPU")
    arguments = poisoned(make(case, device))
    got = run("fa3", arguments)
    assert relative_error(got, run_reference(arguments)) < TOLERANCE[case.dtype]
    padded = [row for row, length in enumerate(case.lengths) if length == 0]
    assert got[padded].count_nonzero() == 0 and len(stand_in.splits) == 1


@given(
    seed=st.integers(0, 1000),
    lengths=st.lists(st.integers(0, 100), min_size=1, max_size=4),
    ratio=st.sampled_from([0.1, 0.5, 1.0]),
    block_size=st.sampled_from([16, 32]),
    elsewhere=st.booleans(),
)
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_rows(
    device: str, stand_in: FA3, seed: int, lengths: list[int], ratio: float, block_size: int, elsewhere: bool
) -> None:
    """Dense rows, and rows whose newest block is not selected, which then attend to whole blocks."""
    case = Case(tuple(lengths), block_size, 5, 64, FP16, FP16, rope_dim=16, ratio=ratio)
    arguments = poisoned(make(case, device, seed))
    if elsewhere:
        cache = arguments["kv_cache"]
        arguments["kv_cache"] = torch.where(cache.isnan(), 1.0, cache)
        arguments["last_slots"] = torch.full_like(arguments["last_slots"], len(cache) + 3)
    assert relative_error(run("fa3", arguments), run_reference(arguments)) < TOLERANCE[FP16]


@pytest.mark.parametrize("rows", [1, 128, 300])
def test_tokens_of_many_rows(rows: int, device: str) -> None:
    case = Case(tuple(7 * row % 50 for row in range(rows)), 16, 1, 64, FP16, FP16, rope_dim=16, ratio=0.7)
    arguments = poisoned(make(case, device))
    indices, counts, last_slots = (arguments[name] for name in ("indices", "counts", "last_slots"))
    expected = []
    for row, count in enumerate(counts[:, 0].tolist()):
        newest = count > 0 and int(indices[row, 0, count - 1]) == int(last_slots[row]) // 16
        expected.append(count * 16 - (15 - int(last_slots[row]) % 16 if newest else 0))
    got = selected_tokens(indices, counts, last_slots, 16)
    assert got.tolist() == expected and got.dtype == torch.int32


def test_no_copy_is_made(device: str, stand_in: FA3) -> None:
    """Neither of the selection nor of the queries or the cache, of which rows may lie apart."""
    arguments = make(RAGGED, device)
    expected = run("fa3", arguments)
    q_nope, cache = arguments["q_nope"], arguments["kv_cache"]
    arguments["q_nope"] = q_nope.transpose(0, 1).contiguous().transpose(0, 1)
    arguments["kv_cache"] = torch.cat([cache, cache], dim=1)[:, : cache.shape[1]]
    assert takes(arguments) and torch.equal(run("fa3", arguments), expected)


@pytest.fixture
def chosen(stand_in: FA3, monkeypatch: pytest.MonkeyPatch) -> FA3:
    """A machine where FA3 is installed, and chosen where it is faster."""
    monkeypatch.setattr(fa3, "installed", lambda _: True)
    return stand_in


def test_it_is_chosen_where_it_is_faster_and_takes_the_arguments(device: str, chosen: FA3) -> None:
    arguments = poisoned(make(SERVED, device))
    got = sparse_mla_decode(**arguments, newest_last=True)
    assert len(chosen.splits) == 1 and relative_error(got, run_reference(arguments)) < TOLERANCE[BF16]
    sparse_mla_decode(**arguments)
    fewer = {name: arguments[name][:3] for name in ("q_nope", "q_rope", "indices", "counts", "last_slots")}
    sparse_mla_decode(**{**arguments, **fewer}, newest_last=True)
    assert len(chosen.splits) == 1


@pytest.mark.parametrize(
    "case",
    [
        replace(SERVED, block_size=64),
        replace(SERVED, block_size=8),
        replace(SERVED, latent_dim=256),
        replace(SERVED, rope_dim=32),
        replace(SERVED, kv_dtype=FP8),
        replace(SERVED, kv_scale=0.5),
        replace(SERVED, heads=16),
        replace(SERVED, dtype=FP16, kv_dtype=FP16),
    ],
    ids=str,
)
def test_triton_serves_what_it_has_no_kernel_for(case: Case, device: str, chosen: FA3) -> None:
    arguments = poisoned(make(case, device))
    got = sparse_mla_decode(**arguments, newest_last=True)
    assert not chosen.splits and relative_error(got, run_reference(arguments)) < TOLERANCE[BF16]


def test_what_does_not_lie_in_whole_aligned_blocks_is_not_taken() -> None:
    arguments = make(SERVED, "cpu")
    assert takes(arguments)
    cache = arguments["kv_cache"]
    odd = {
        "kv_cache": cache[:-1],
        "q_rope": torch.cat([arguments["q_rope"], arguments["q_rope"]], dim=2)[..., 1:65],
        "q_nope": torch.cat([arguments["q_nope"], arguments["q_nope"][..., :1]], dim=2)[..., :-1],
        "indices": arguments["indices"][..., :0],
    }
    assert not any(takes({**arguments, name: value}) for name, value in odd.items())


def test_wrong_arguments_are_refused_alike(chosen: FA3) -> None:
    arguments = make(SERVED, "cpu")
    with pytest.raises(ValueError, match="block_size must be one of 1, 2, 4, 8, 16, 32, 64, got 48"):
        sparse_mla_decode(**{**arguments, "block_size": 48}, newest_last=True)
    with pytest.raises(ValueError, match="counts must have 2 dimensions"):
        sparse_mla_decode(**{**arguments, "counts": arguments["counts"][:, 0]}, newest_last=True)
    assert not chosen.splits


def test_without_a_gpu_it_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa3, "attention", lambda: pytest.fail("imported"))
    monkeypatch.setattr(launch, "stand_in", H200)
    assert not fa3.installed(torch.device("cpu"))


@pytest.mark.usefixtures("no_fa3")
def test_a_package_without_an_output_is_no_fa3(monkeypatch: pytest.MonkeyPatch) -> None:
    def give(**named: Any) -> None:
        monkeypatch.setattr(fa3.importlib, "import_module", lambda _: SimpleNamespace(**named))
        fa3.attention.cache_clear()

    give(flash_attn_with_kvcache=(old := lambda q, qv=None, num_splits=0: q))
    assert fa3.attention() is None
    give(flash_attn_with_kvcache=lambda q, qv=None, num_splits=0, out=None: old(q))
    assert fa3.attention() is not None

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(fa3.importlib, "import_module", missing)
    fa3.attention.cache_clear()
    assert fa3.attention() is None


def test_splits_and_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row alone may have as many as FA3 would make of it, and rows that fill the GPU are not divided."""
    splits = {rows: fa3.most_splits(rows, 128, 132) for rows in (1, 2, 8, 24, 48, 59, 60, 4096)}
    assert splits == {1: 60, 2: 60, 8: 16, 24: 6, 48: 4, 59: 4, 60: 1, 4096: 1}
    assert fa3.most_splits(1, 16, 132) == 120 and fa3.most_splits(1, 1, 1) == 1
    monkeypatch.setattr(launch, "stand_in", H200)
    cpu = torch.device("cpu")
    assert fa3.scratch_bytes(8, 128, cpu) == 4 * (8 + 33 + 8 * 128 * (1 + 16 * 513))
    assert all(fa3.scratch_bytes(rows, 128, cpu) < 64 * 2**20 for rows in range(1, 500))


def test_the_memory_of_a_call_is_the_most_of_both(chosen: FA3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "stand_in", H200)
    cpu = torch.device("cpu")

    def both(rows: int, heads: int) -> tuple[int, int]:
        config, *_, splits = kernels.plan(rows, heads, 4096, 16, cpu)
        by_triton = split_bytes(rows * heads, splits, 512, BF16, config.narrow)
        return scratch_bytes(rows, heads, 512, 4096, 16, BF16, cpu), by_triton

    assert both(1, 128)[0] == both(1, 128)[1] > 0 and both(8, 16)[0] == both(8, 16)[1]
    assert both(24, 128)[0] == fa3.scratch_bytes(24, 128, cpu) > both(24, 128)[1]
    assert scratch_bytes(24, 128, 512, 4096, 1, BF16, cpu) < fa3.scratch_bytes(24, 128, cpu)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", [RAGGED, SERVED, *(case for case in CASES if case.latent_dim == 512)], ids=str)
def test_each_implementation_equals_the_reference(case: Case, implementation: str, device: str) -> None:
    arguments = poisoned(make(case, device))
    require(implementation, case, arguments)
    got = run(implementation, arguments)
    assert relative_error(got, run_reference(arguments)) < TOLERANCE[case.dtype]
    assert torch.equal(got, run(implementation, arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("splits", [None, 1, 3, 0])
def test_a_graph_serves_any_counts(implementation: str, splits: int | None, device: str) -> None:
    """Captured with nothing selected; replayed with rows that are sparse, dense, padded, and all padded again."""
    dense = replace(RAGGED, ratio=1.0, heads=128, lengths=(3000, 16, 700, 1, 40, 5000), max_select=320)
    all_of, few, half = (make(replace(dense, ratio=ratio), device) for ratio in (1.0, 0.1, 0.5))
    every_other = all_of["counts"] * torch.tensor([1, 0], device=device).int().repeat(3)[:, None]
    none = torch.zeros_like(every_other)
    arguments = {name: value.clone() if torch.is_tensor(value) else value for name, value in all_of.items()}
    require(implementation, dense, arguments)
    options: dict[str, Any] = {"splits": splits} if implementation == "fa3" else {"usual_blocks": splits or None}
    arguments["counts"].zero_()
    out = torch.empty_like(arguments["q_nope"])
    attend = IMPLEMENTATIONS[implementation]
    attend(Inputs(**arguments), out, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(Inputs(**arguments), out, **options)
    replays = [(one, one["counts"]) for one in (all_of, few, half)]
    replays += [(all_of, none), (all_of, every_other), (few, none)]
    for step, (selection, counts) in enumerate([*replays, replays[1]]):
        for name in ("q_nope", "q_rope", "kv_cache", "indices", "last_slots"):
            arguments[name].copy_(selection[name])
        arguments["counts"].copy_(counts)
        out.fill_(float("nan"))
        graph.replay()
        assert relative_error(out, run_reference(arguments)) < TOLERANCE[BF16], step
        assert out[(counts == 0)[:, 0]].count_nonzero() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [4, 24, 70])
def test_fa3_allocates_no_more_than_is_said(rows: int, device: str) -> None:
    case = replace(SERVED, lengths=(900,) * rows, heads=128)
    arguments = make(case, device)
    require("fa3", case, arguments)
    said = scratch_bytes(rows, 128, 512, arguments["indices"].shape[2], 16, BF16, torch.device(device))
    assert said >= fa3.scratch_bytes(rows, 128, torch.device(device))
    expected = run("fa3", arguments)
    out = torch.empty_like(expected)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    sparse_mla_decode(**arguments, out=out, newest_last=True)
    taken = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    assert said - 64 * rows <= taken <= said and torch.equal(out, expected)
