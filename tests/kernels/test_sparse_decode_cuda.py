"""The CUDA kernel of sparse decode: its source as C++ without a GPU, its threads taking turns; itself on one."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cuda_library import assert_takes, emulated, names
from kernel_runs import assert_replays

from sglang_sparse_kernels.common import nvrtc
from sglang_sparse_kernels.common.launch import dependent_launch
from sglang_sparse_kernels.sparse_decode import cuda, reference, sparse_decode
from sglang_sparse_kernels.sparse_decode.cases import BF16, CASES, FP16, Case, make
from sglang_sparse_kernels.sparse_decode.cuda import Config

NAN, INF = math.nan, math.inf
TOLERANCE = {FP16: 2e-3, BF16: 1e-2}
# Dimension, query heads of a KV head, type, and launch parameters.
KINDS = [
    (128, 4, BF16, Config(2, 1, 4)),
    (64, 8, FP16, Config(4, 2)),
    (64, 1, BF16, Config(1, 4, 2)),
    (128, 7, FP16, Config(4, 1)),
]
on_cpu = emulated((cuda.SOURCE, "sparse_decode", cuda.defines(*kind)) for kind in KINDS)


@pytest.fixture
def run(on_cpu: None) -> Callable[..., torch.Tensor]:
    """Return a function that runs the kernel; the output is NaN before."""

    def call(arguments: dict[str, Any]) -> torch.Tensor:
        q = arguments["q"]
        config = {kind[:3]: kind[3] for kind in KINDS}[q.shape[2], q.shape[1] // arguments["k_cache"].shape[1], q.dtype]
        if config.cluster > 1 and q.device.type == "cuda" and not dependent_launch(q.device):
            pytest.skip("needs clusters of blocks")
        return cuda.sparse_decode(reference.Inputs(**arguments), torch.full_like(q, NAN), config)

    return call


def case_of(kind: tuple[int, int, torch.dtype, Config], lengths: tuple[int, ...], **more: Any) -> Case:
    dim, group, dtype, _ = kind
    return Case(lengths, more.pop("page_size", 4), 2, group, dim, dtype, dtype, **more)


def expected_of(arguments: dict[str, Any]) -> torch.Tensor:
    q = arguments["q"].float()
    return reference.sparse_decode(reference.Inputs(**{**arguments, "q": q}), torch.empty_like(q))


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    difference, size = (got.float() - expected).norm(), expected.norm()
    assert difference <= TOLERANCE[got.dtype] * size + 1e-30


@pytest.mark.parametrize("kind", KINDS, ids=names)
def test_it_equals_the_reference(kind: Any, run: Any, device: str) -> None:
    """Rows of none, of one token, of a piece and one more, and of more pieces than are on their way at once."""
    for lengths in ((150, 0, 33, 1), (1030, 17)):
        arguments = make(case_of(kind, lengths, ratio=0.7, max_select=270, k_scale=0.5, v_scale=2.0), device)
        got = run(arguments)
        assert_close(got, expected_of(arguments))
        assert torch.equal(got, run(arguments))
        assert got[torch.tensor(lengths) == 0].count_nonzero() == 0


@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 16, 32, 64])
def test_any_page_size_and_strides(page_size: int, run: Any, device: str) -> None:
    """Indices past the counts name no page, and caches and queries are slices of larger tensors."""
    arguments = make(case_of(KINDS[0], (300, 70), page_size=page_size), device)
    expected = expected_of(arguments)
    beyond = torch.arange(arguments["indices"].shape[2], device=device) >= arguments["counts"][..., None]
    garbage = torch.where(torch.arange(beyond.shape[2], device=device) % 2 > 0, 2**31 - 1, -(2**31)).int()
    arguments["indices"] = torch.where(beyond, garbage, arguments["indices"])
    for name in ("q", "k_cache", "v_cache"):
        arguments[name] = torch.cat([arguments[name], arguments[name]], dim=1)[:, : arguments[name].shape[1]]
    assert_close(run(arguments), expected)


@pytest.mark.parametrize("broken", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_what_is_no_number_shows_in_its_heads(broken: float, name: str, run: Any, device: str) -> None:
    for kind in KINDS[:3]:
        arguments = make(case_of(kind, (200,)), device)
        arguments["q"][..., 0] = 1.0
        slot = arguments["indices"][0, 1, 2] * 4 + 1
        arguments[name][slot, 1, 0] = broken
        got, expected = run(arguments), expected_of(arguments)
        assert torch.equal(got.isnan(), expected.isnan()) and torch.equal(got.isinf(), expected.isinf())
        assert_close(got.nan_to_num(0, 0, 0), expected.nan_to_num(0, 0, 0))


def test_keys_of_minus_infinity_alone_give_zeros(run: Any, device: str) -> None:
    for kind in KINDS[:2]:
        arguments = make(case_of(kind, (200,)), device)
        arguments["q"][:] = arguments["q"].abs() + 0.1
        arguments["k_cache"][:] = -INF
        assert not run(arguments).any()


def test_what_it_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_takes(cuda.takes, monkeypatch)


STEP = Case((8192,) * 32, 4, 8, 4, 128, BF16, BF16, ratio=1 / 32, max_select=8192)
TAKEN = [
    case for case in CASES if case.gpu_only and case.kv_dtype == case.dtype and case.dim in cuda.DIMS and case.group < 9
]
LARGE = [STEP, replace(STEP, lengths=(8192,)), *TAKEN]


@pytest.mark.gpu
@pytest.mark.parametrize("config", [*cuda.CONFIGS, Config(4, 3, 2), Config(2, 2, 8)], ids=str)
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large_cases_on_a_gpu(case: Case, config: Config, device: str) -> None:
    """Also by a graph, between kernels that are launched dependently, a hundred times: the same bits."""
    arguments = make(case, device)
    out = torch.full_like(arguments["q"], NAN)
    if not cuda.takes(arguments["q"], arguments["k_cache"], arguments["v_cache"], out):
        pytest.skip("needs a GPU for which NVRTC compiles the CUDA kernels")
    if config.cluster > 1 and not dependent_launch(out.device):
        pytest.skip("needs clusters of blocks")
    cuda.sparse_decode(reference.Inputs(**arguments), out, config)
    got = out.clone()
    assert_close(got, expected_of(arguments))
    pages, copied = arguments["indices"].clone(), arguments["indices"]

    def step() -> None:
        copied.copy_(pages)
        for _ in range(2):
            cuda.sparse_decode(reference.Inputs(**arguments), out, config)

    assert_replays(step, [(copied, 0), (out, NAN)], lambda: torch.equal(out, got))


@pytest.mark.gpu
def test_it_serves_few_tokens_where_it_is_faster(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    arguments, launched = make(CASES[0], device), []
    kernel = nvrtc.Kernel.__call__
    monkeypatch.setattr(nvrtc.Kernel, "__call__", lambda *given: launched.append(kernel(*given)))
    for few in (0, 1024):
        monkeypatch.setattr(cuda, "FEW_TOKENS", few)
        assert_close(sparse_decode(**arguments), expected_of(arguments))
        assert len(launched) == (few > 0)
