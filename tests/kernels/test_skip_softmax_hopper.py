"""Skip-Softmax prefill on Hopper: the Gluon kernel against the reference, at the sizes that it takes."""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from anchor_runs import dense, relative_error, row_slots
from skip_softmax_runs import BF16, FP16, INF, NAN, TOLERANCE, counts, run_reference, with_factor

from sglang_sparse_kernels.common import launch as device_launch
from sglang_sparse_kernels.skip_softmax_prefill import Span, launch, make_plan, skip_softmax_prefill, triton
from sglang_sparse_kernels.skip_softmax_prefill.cases import Case, make

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
# Sums in another order may move a block across the threshold; so many of all blocks, at most.
BORDERLINE = 2e-4
NAMES = ("q", "k_cache", "v_cache", "plan", "page_size")
FULL: dict[str, Any] = {"tile_queries": 128, "block_keys": 64}
ROWS = Case((4000, 0, 63), (3000, 8192, 1), 16, 2, 4, 128, BF16, BF16, factor=300.0, stripes=0.002, **FULL)
SMALL = Case((0,), (300,), 16, 1, 2, 128, FP16, FP16, factor=30.0, **FULL)

hopper_only = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")


def taken(arguments: dict[str, Any]) -> bool:
    return launch.kernels(*(arguments[name] for name in NAMES)) is launch.hopper_kernel(arguments["q"].device)


def run_hopper(arguments: dict[str, Any], stats: torch.Tensor | None = None) -> torch.Tensor:
    assert taken(arguments)
    return skip_softmax_prefill(**arguments, stats=stats)


def assert_as_the_reference(arguments: dict[str, Any]) -> None:
    stats, expected = counts("cuda"), counts("cuda")
    got = run_hopper(arguments, stats)
    assert relative_error(got, run_reference(arguments, expected)) < TOLERANCE[got.dtype]
    assert stats[1] == expected[1] and stats[3] == expected[3]
    assert abs(stats[2] - expected[2]) <= BORDERLINE * expected[3]
    # The pairs of a borderline block may count, too.
    assert abs(stats[0] - expected[0]) <= BORDERLINE * expected[1]


@pytest.mark.gpu
@hopper_only
@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize(("dim", "v_dim"), [(64, 64), (128, 128), (128, 64), (64, 128)])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_long_rows_in_one_pass(page_size: int, dim: int, v_dim: int, dtype: torch.dtype) -> None:
    """Rows that end within a page, a block and a tile; never written slots are NaN."""
    case = replace(ROWS, page_size=page_size, dim=dim, v_dim=v_dim, dtype=dtype, kv_dtype=dtype)
    assert_as_the_reference(make(case, "cuda"))


@pytest.mark.gpu
@hopper_only
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 257, 319, 383, 641])
@pytest.mark.parametrize("prefix", [0, 5, 64, 1000])
def test_short_rows(length: int, prefix: int) -> None:
    assert_as_the_reference(make(replace(SMALL, prefixes=(prefix,), extends=(length,)), "cuda"))


@pytest.mark.gpu
@hopper_only
def test_dense_spans_beside_sparse_ones() -> None:
    arguments = make(ROWS, "cuda")
    spans = [Span(0, 4000, 5100), Span(0, 5100, 7000, sparse=False), Span(1, 0, 3001, sparse=False)]
    spans += [Span(1, 3001, 8192), Span(2, 63, 64)]
    assert_as_the_reference({**arguments, "plan": make_plan(spans, 3, "cuda")})
    assert_as_the_reference(with_factor(arguments, 0.0, 500.0, NAN))


@pytest.mark.gpu
@hopper_only
@pytest.mark.parametrize("group", [2, 6, 8])
def test_groups_of_heads(group: int) -> None:
    assert_as_the_reference(make(replace(SMALL, prefixes=(2000,), heads=3, group=group), "cuda"))


@pytest.mark.gpu
@hopper_only
def test_chunks_of_whole_tiles_equal_one_piece() -> None:
    arguments = make(replace(ROWS, prefixes=(0,), extends=(8000,)), "cuda")
    whole = run_hopper(arguments)
    for size in (128, 1024, 4096):
        outs = []
        for first in range(0, 8000, size):
            part = arguments["q"][first : first + size]
            plan = make_plan([Span(0, first, first + len(part))], 1, "cuda")
            outs.append(run_hopper({**arguments, "q": part, "plan": plan}))
        assert torch.equal(torch.cat(outs), whole), f"chunks of {size}"


@pytest.mark.gpu
@hopper_only
def test_results_are_equal_from_run_to_run_and_for_other_launch_parameters() -> None:
    from sglang_sparse_kernels.skip_softmax_prefill import hopper, reference

    arguments = make(ROWS, "cuda")
    expected = run_hopper(arguments)
    for _ in range(20):
        assert torch.equal(run_hopper(arguments), expected)
    for config in (hopper.Config(num_stages=2), hopper.Config(4, 232, 40)):
        out = torch.empty_like(expected)
        assert torch.equal(hopper.skip_softmax_prefill(reference.Inputs(**arguments), out, config=config), expected)


@pytest.mark.gpu
@hopper_only
def test_what_lies_behind_a_row_is_not_read() -> None:
    """Neither pages behind the last one, nor slots behind the last token, finite or not."""
    arguments = make(SMALL, "cuda")
    expected = run_hopper(arguments)
    table = torch.full((1, 64), 2**31 - 1, dtype=torch.int32, device="cuda")
    table[:, :19] = arguments["page_table"]
    written = torch.zeros(len(arguments["k_cache"]), dtype=torch.bool, device="cuda")
    written[row_slots(arguments, 0, 300)] = True
    for other in (NAN, INF, 1e4):
        changed = {**arguments, "page_table": table}
        for name in ("k_cache", "v_cache"):
            changed[name] = torch.where(written[:, None, None], arguments[name], other)
        assert torch.equal(run_hopper(changed), expected)


@pytest.mark.gpu
@hopper_only
def test_views_of_larger_tensors() -> None:
    arguments = make(SMALL, "cuda")
    expected, q = run_hopper(arguments), arguments["q"]
    both = torch.cat([arguments["k_cache"], arguments["v_cache"]], dim=1)
    arguments.update(k_cache=both[:, :1], v_cache=both[:, 1:])
    arguments["q"] = torch.cat([q, torch.randn_like(q)], dim=1)[:, : q.shape[1]]
    assert torch.equal(run_hopper(arguments), expected)


@pytest.mark.gpu
@hopper_only
@pytest.mark.parametrize("broken", [NAN, INF])
def test_broken_keys_show_where_they_are_seen(broken: float) -> None:
    arguments = with_factor(make(SMALL, "cuda"), 1e9)
    arguments["q"][:, :, 0] = 2.0**-10
    arguments["k_cache"][row_slots(arguments, 0, 300)[140], 0, 0] = broken
    got = run_hopper(arguments)
    assert got[140:].isnan().all() and not got[:140].isnan().any()


@pytest.mark.gpu
@hopper_only
def test_a_query_that_is_broken_keeps_the_blocks_of_its_tile() -> None:
    """To the first head's queries of a tile, one block of keys is fainter than all others."""
    arguments = with_factor(make(SMALL, "cuda"), 1e9)
    arguments["q"][:, :, 0] = arguments["k_cache"][:, :, 0] = 0.0
    arguments["q"][128:256, 0] = 0.0
    arguments["q"][128:256, 0, 0] = 1.0
    arguments["k_cache"][row_slots(arguments, 0, 128)[64:], 0, 0] = -3.0 / arguments["sm_scale"]
    sparse, exact = run_hopper(arguments), dense(arguments, SMALL)
    arguments["q"][200, 0] = NAN
    got = run_hopper(arguments)
    others = [*range(128, 200), *range(201, 256)]
    assert got[200, 0].isnan().all()
    assert relative_error(got[others, 0], exact[others, 0]) < TOLERANCE[FP16]
    assert relative_error(sparse[others, 0], exact[others, 0]) > TOLERANCE[FP16]
    assert torch.equal(got[:128], sparse[:128]) and torch.equal(got[256:], sparse[256:])
    assert torch.equal(got[:, 1], sparse[:, 1])


@pytest.mark.gpu
@hopper_only
def test_keys_of_minus_infinity_have_no_weight() -> None:
    arguments = with_factor(make(SMALL, "cuda"), 0.0)
    arguments["q"][:] = arguments["q"].abs() + 0.1
    arguments["k_cache"][row_slots(arguments, 0, 300)[1:128]] = -INF
    got = run_hopper(arguments)
    assert not got.isnan().any() and relative_error(got, dense(arguments, SMALL)) < TOLERANCE[FP16]


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Nothing has imported the kernel yet, and devices are GPUs to Triton; what is asked for is noted."""
    asked: list[str] = []

    def noted(name: str, package: str) -> Any:
        asked.append(name)
        return importlib.import_module(name, package)

    monkeypatch.setattr(launch, "importlib", SimpleNamespace(import_module=noted))
    # A knob that was set once no longer heeds the environment, in which other tests turn the interpreter on.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    launch._gluon.cache_clear()
    yield asked
    launch._gluon.cache_clear()


CPU, HOPPER = torch.device("cpu"), device_launch.Properties((9, 0), 132, 232448)
NOTHING: Any = [None] * 4
MODULE = f"{launch.__package__}.hopper"


def test_gluon_is_imported_on_hopper_alone(imports: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        monkeypatch.setattr(device_launch, "stand_in", replace(HOPPER, capability=capability))
        assert launch.hopper_kernel(CPU) is None
    monkeypatch.setattr(device_launch, "stand_in", HOPPER)
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "hip", "6.4")
        assert launch.hopper_kernel(CPU) is None
    with monkeypatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        assert launch.hopper_kernel(CPU) is None
    assert not imports
    gl = SimpleNamespace(shared_memory_descriptor=SimpleNamespace(_reinterpret=None))
    module: Any = SimpleNamespace(gl=gl, takes=lambda *_: True)
    monkeypatch.setitem(sys.modules, MODULE, module)
    assert launch.kernels(torch.zeros(1), *NOTHING) is module and imports == [".hopper"]
    module.takes = lambda *_: False
    assert launch.kernels(torch.zeros(1), *NOTHING) is triton


@pytest.mark.parametrize("module", [None, SimpleNamespace(), SimpleNamespace(gl=SimpleNamespace())], ids=str)
def test_without_gluon_triton_serves_and_says_so_once(
    module: Any, imports: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not there, or another Triton's."""
    monkeypatch.setattr(device_launch, "stand_in", HOPPER)
    monkeypatch.setitem(sys.modules, MODULE, module)
    for _ in range(3):
        assert launch.kernels(torch.zeros(1), *NOTHING) is triton
    assert len(imports) == 1
    assert [record.message.split(": ")[1] for record in caplog.records] == [
        "Skip-Softmax prefill has no kernel of its own on Hopper"
    ]
