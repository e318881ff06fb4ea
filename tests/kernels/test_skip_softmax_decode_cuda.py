"""The CUDA kernel of Skip-Softmax decode: its source as C++ without a GPU, its threads taking turns; itself on one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from anchor_runs import relative_error, row_slots
from cuda_library import assert_takes, emulated, names
from kernel_runs import assert_replays
from skip_softmax_runs import INF, NAN, TOLERANCE, garbled_table, with_factor

from sglang_sparse_kernels.common import launch, nvrtc
from sglang_sparse_kernels.skip_softmax_decode import cuda, reference, scratch_bytes, skip_softmax_decode
from sglang_sparse_kernels.skip_softmax_decode.cases import BF16, CASES, FP16, Case, make
from sglang_sparse_kernels.skip_softmax_decode.cuda import Config

# Dimension, query heads of a KV head, type, and launch parameters: the ring of one piece more than a block has at most,
# of whole blocks, of less than a block.
KINDS = [
    (128, 4, BF16, Config(2, 6)),
    (64, 8, FP16, Config(4, 5)),
    (64, 1, BF16, Config(1, 12)),
    (128, 7, FP16, Config(4, 3)),
]
on_cpu = emulated((cuda.SOURCE, "skip_softmax_decode", cuda.defines(*kind)) for kind in KINDS)


@pytest.fixture
def run(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    """Return a function that runs the kernel; its output and the results of splits are NaN before."""

    def call(arguments: dict[str, Any], processors: int = 4, **more: Any) -> torch.Tensor:
        q, empty = arguments["q"], torch.empty
        config = {kind[:3]: kind[3] for kind in KINDS}[q.shape[2], q.shape[1] // arguments["k_cache"].shape[1], q.dtype]
        with monkeypatch.context() as patch:
            patch.setattr(cuda, "num_processors", lambda _: processors)
            patch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(NAN))
            return cuda.skip_softmax_decode(
                reference.Inputs(**arguments), torch.full_like(q, NAN), config=config, **more
            )

    return call


def case_of(kind: tuple[int, int, torch.dtype, Config], lengths: tuple[int, ...], **more: Any) -> Case:
    dim, group, dtype, _ = kind
    return Case(lengths, 16, 2, group, dim, dtype, dtype, **more)


def counts(device: str) -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int64, device=device)


def no_arrivals(arguments: dict[str, Any]) -> torch.Tensor:
    rows, heads = len(arguments["q"]), arguments["k_cache"].shape[1]
    return torch.zeros(rows, heads, dtype=torch.int32, device=arguments["q"].device)


def expected_of(arguments: dict[str, Any], stats: torch.Tensor | None = None) -> torch.Tensor:
    q = arguments["q"].float()
    return reference.skip_softmax_decode(reference.Inputs(**{**arguments, "q": q}), torch.empty_like(q), stats)


@pytest.mark.parametrize("processors", [1, 7, 100])
@pytest.mark.parametrize("kind", KINDS, ids=names)
def test_it_equals_the_reference(kind: Any, processors: int, run: Any, device: str) -> None:
    """Rows of no token, of one, of one block and more; from no split to one for each block; combined here or there."""
    arguments = make(case_of(kind, (900, 0, 65, 1, 320)), device)
    stats, expected = counts(device), counts(device)
    wanted, arrivals = expected_of(arguments, expected), no_arrivals(arguments)
    got = run(arguments, processors, stats=stats, arrivals=arrivals)
    assert relative_error(got, wanted) < TOLERANCE[kind[2]]
    assert torch.equal(stats, expected) and 0 < expected[1] < expected[0]
    assert arrivals.count_nonzero() == 0, "ready for the next call"
    assert torch.equal(got, run(arguments, processors, arrivals=arrivals))
    apart = run(arguments, processors)
    assert relative_error(apart, wanted) < TOLERANCE[kind[2]] and got[1].count_nonzero() == 0


@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 16, 32, 64])
def test_any_page_size_and_strides(page_size: int, run: Any, device: str) -> None:
    """Page table entries past a row name no page, and caches and queries are slices of larger tensors."""
    arguments = make(replace(case_of(KINDS[0], (500, 130)), page_size=page_size, k_scale=0.5, v_scale=2.0), device)
    expected = expected_of(arguments)
    arguments["page_table"] = garbled_table(arguments)
    for name in ("q", "k_cache", "v_cache"):
        arguments[name] = torch.cat([arguments[name], arguments[name]], dim=1)[:, : arguments[name].shape[1]]
    assert relative_error(run(arguments, 8), expected) < TOLERANCE[BF16]


@pytest.mark.parametrize("kind", KINDS, ids=names)
def test_rows_that_attend_densely(kind: Any, run: Any, device: str) -> None:
    arguments, stats = make(case_of(kind, (1100, 500)), device), counts(device)
    arguments["threshold_scale_factor"] = torch.tensor([0.0, NAN], device=device)
    assert relative_error(run(arguments, stats=stats), expected_of(arguments)) < TOLERANCE[kind[2]]
    assert stats.tolist() == [0, 0]


def test_what_is_skipped_is_not_read(run: Any, device: str) -> None:
    """Values of skipped blocks may be anything while the first and the newest blocks hold the largest logits."""
    kind = KINDS[2]
    arguments, stats = with_factor(make(case_of(kind, (1100, 500)), device), INF), counts(device)
    for row, length in enumerate((1100, 500)):
        slots = row_slots(arguments, row, length)
        arguments["k_cache"][slots] = 0.0
        arguments["k_cache"][slots[[0, length - 1]]] = arguments["q"][row]
        arguments["v_cache"][slots[64 : (length - 1) // 64 * 64 - 64]] = NAN
    assert relative_error(run(arguments, stats=stats), expected_of(arguments)) < TOLERANCE[kind[2]]
    assert stats.tolist() == [52, 40]


@pytest.mark.parametrize("broken", [NAN, INF, -INF])
@pytest.mark.parametrize("position", [3, 200, 499])
def test_broken_keys_show_as_in_the_reference(broken: float, position: int, run: Any, device: str) -> None:
    """In the sink block, in the newest, and in one between."""
    for kind in KINDS[:2]:
        arguments, stats, expected = make(case_of(kind, (500,)), device), counts(device), counts(device)
        arguments["q"][..., 0] = 1.0
        arguments["q"][:, 1::2, 0] = 0.0
        arguments["k_cache"][row_slots(arguments, 0, 500)[position], 0, 0] = broken
        wanted = expected_of(arguments, expected)
        got = run(arguments, stats=stats, arrivals=no_arrivals(arguments))
        assert torch.equal(got.isnan(), wanted.isnan()) and torch.equal(stats, expected)
        assert relative_error(got.nan_to_num(), wanted.nan_to_num()) < TOLERANCE[kind[2]]


def test_keys_of_minus_infinity_have_no_weight(run: Any, device: str) -> None:
    arguments = with_factor(make(case_of(KINDS[0], (500,)), device), INF)
    arguments["q"][:] = arguments["q"].abs() + 0.1
    slots = row_slots(arguments, 0, 500)
    arguments["k_cache"][slots[:64]] = arguments["k_cache"][slots[300:]] = -INF
    for arrivals in (None, no_arrivals(arguments)):
        assert relative_error(run(arguments, arrivals=arrivals), expected_of(arguments)) < TOLERANCE[BF16]
    arguments["k_cache"][slots] = -INF
    for arrivals in (None, no_arrivals(arguments)):
        assert not run(arguments, arrivals=arrivals).any()


def test_what_is_allocated(run: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "config_of", lambda *_: KINDS[0][3])
    monkeypatch.setattr(cuda, "faster", lambda _: True)
    monkeypatch.setattr(cuda, "takes_sizes", lambda *_: True)
    arguments, sizes, fill = make(case_of(KINDS[0], (900, 30)), device), [], torch.Tensor.fill_
    monkeypatch.setattr(torch.Tensor, "fill_", lambda *given: sizes.append(given[0].nbytes) or fill(*given))
    run(arguments, 40)
    monkeypatch.setattr(cuda, "num_processors", lambda _: 40)
    rows = (2, (8, 2), 128, arguments["page_table"].shape[1], 16, arguments["q"].device)
    assert sum(sizes) == cuda.scratch_bytes(*rows) > 0
    sizes_of_both = (2, 8, 2, 128, 128, *rows[3:5], BF16, rows[5])
    assert scratch_bytes(*sizes_of_both) >= cuda.scratch_bytes(*rows)


def test_the_ring_fits_the_shared_memory_of_a_gpu() -> None:
    for limit, config in ((232448, Config(12, 4)), (166912, Config(8, 4)), (101376, Config(4, 5)), (65536, None)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "stand_in", launch.Properties((9, 0), 132, limit))
            assert cuda.config_of(128, torch.device("cpu")) == config


def test_splits() -> None:
    """Of eight heads on 132 multiprocessors; no multiprocessor waits long for the last ones, nor a warp for keys."""
    for rows, pages, splits in (1, 8192, 16), (8, 8192, 2), (16, 8192, 1), (20, 2048, 4), (32, 2048, 1), (1, 128, 4):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda, "num_processors", lambda _: 132)
            assert cuda.splits_of(8 * rows, pages, 16, Config(8, 6), torch.device("cpu")) == splits


def test_what_it_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_takes(cuda.takes, monkeypatch)


TAKEN = [
    case for case in CASES if case.gpu_only and case.kv_dtype == case.dtype and case.dim in cuda.DIMS and case.group < 9
]


@pytest.mark.gpu
@pytest.mark.parametrize("config", cuda.CONFIGS, ids=str)
@pytest.mark.parametrize("case", TAKEN, ids=str)
def test_large_cases_on_a_gpu(case: Case, config: Config, device: str) -> None:
    """Also by a graph, between kernels that are launched dependently, a hundred times: the same bits."""
    arguments = make(case, device)
    out, stats, expected = torch.full_like(arguments["q"], NAN), counts(device), counts(device)
    if not cuda.takes(arguments["q"], arguments["k_cache"], arguments["v_cache"], out):
        pytest.skip("needs a GPU for which NVRTC compiles the CUDA kernels")
    given = {"inputs": reference.Inputs(**arguments), "out": out, "config": config, "arrivals": no_arrivals(arguments)}
    wanted = expected_of(arguments, expected)
    cuda.skip_softmax_decode(**given, stats=stats)
    got = out.clone()
    assert relative_error(got, wanted) < TOLERANCE[case.dtype]
    visited, skipped = (stats - expected).tolist()
    # Sums in another order may move a block across the threshold.
    assert visited == 0 and abs(skipped) <= 2e-4 * expected[0]
    apart = cuda.skip_softmax_decode(**{**given, "out": torch.full_like(out, NAN), "arrivals": None})
    assert relative_error(apart, wanted) < TOLERANCE[case.dtype]

    def step() -> None:
        for _ in range(2):
            cuda.skip_softmax_decode(**given)

    assert_replays(step, [(out, NAN)], lambda: torch.equal(out, got))
    assert given["arrivals"].count_nonzero() == 0


@pytest.mark.gpu
def test_it_serves_where_it_is_faster(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    arguments, launched = make(CASES[0], device), []
    kernel = nvrtc.Kernel.__call__
    monkeypatch.setattr(nvrtc.Kernel, "__call__", lambda *given: launched.append(kernel(*given)))
    for faster in (False, True):
        monkeypatch.setattr(cuda, "faster", lambda _, faster=faster: faster)
        got = skip_softmax_decode(**arguments, arrivals=no_arrivals(arguments))
        assert relative_error(got, expected_of(arguments)) < TOLERANCE[BF16] and bool(launched) == faster
