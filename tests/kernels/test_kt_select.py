"""KT selection: the operations that define it, and the kernel of the machine that runs the tests."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from kernel_runs import assert_replays
from kt_selections import check

from sglang_sparse_kernels.common import nvrtc
from sglang_sparse_kernels.common.launch import dependent_launch
from sglang_sparse_kernels.kt_select import TABLES, cuda, kt_select, scratch_bytes, triton
from sglang_sparse_kernels.kt_select.cases import BF16, CASES, E5M2, Case, Row, make

STEP = Row(8192, 64, 8184, 504)


def run(arguments: dict[str, Any], **more: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the selection and its counters; places that are left unwritten are -1."""
    q, table = arguments["q"], arguments["block_table"]
    shape = len(q), arguments["summary"].shape[1], table.shape[1]
    options = {"dtype": torch.int32, "device": q.device}
    out = torch.full(shape, -1, **options), torch.full(shape[:2], -7, **options)
    stats = torch.zeros(3, dtype=torch.int64, device=q.device)
    return *kt_select(**arguments, out=out, stats=stats, **more), stats


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_selects_the_highest(case: Case, device: str) -> None:
    arguments = make(case, device)
    found = run(arguments)
    check(found, arguments)
    for ready in (False, True):
        again = run(arguments, tables_ready=ready)
        assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


def test_scratch_that_is_given_is_used(device: str) -> None:
    arguments = make(CASES[0], device)
    shape = len(arguments["q"]), 2, arguments["block_table"].shape[1]
    lists = (torch.full(size, -7, dtype=torch.int32, device=device) for size in (shape, shape[:2], shape[:2]))
    scratch = (*lists, torch.full(shape, -7.0, device=device))
    check(run(arguments, scratch=scratch), arguments)
    if cuda.takes(arguments["q"], arguments["summary"], shape[2]):
        assert all((tensor == -7).all() for tensor in scratch)
    else:
        assert scratch[1][0].tolist() == [50, 50], "visible blocks of the first row"


@pytest.mark.parametrize("given", [False, True])
def test_what_is_allocated_is_in_scratch_bytes(given: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the three operations, where the kernel in CUDA C++ does not serve."""
    monkeypatch.setattr(nvrtc, "available", lambda _: False)
    arguments, taken, empty = make(CASES[0], device), [], torch.empty
    rows, heads, width = len(arguments["q"]), 2, arguments["block_table"].shape[1]
    lists = (empty(size, dtype=torch.int32, device=device) for size in ((rows, heads, width), (rows, 2), (rows, 2)))
    scratch = (*lists, empty(rows, heads, width, device=device)) if given else None

    def noted(*shape: Any, **options: Any) -> torch.Tensor:
        taken.append(empty(*shape, **options))
        return taken[-1]

    monkeypatch.setattr(torch, "empty", noted)
    run(arguments, scratch=scratch)
    assert sum(tensor.nbytes for tensor in taken) == scratch_bytes(rows, 8, heads, width, given)


@pytest.mark.parametrize("heads", [(64, 8), (32, 4), (8, 8), (40, 8)], ids=str)
def test_what_a_call_allocates_is_reserved(heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the widest rows, whatever the width of a call; launch parameters are those of the rows that go at once."""
    grids: list[tuple[tuple[int, int], int]] = []
    monkeypatch.setattr(cuda, "_kernel", lambda *_: lambda grid, threads, *_: grids.append((grid, threads)))
    monkeypatch.setattr(cuda, "config_of", lambda pairs, *_: cuda.Config(pairs, 1))
    monkeypatch.setattr(cuda, "num_processors", lambda _: 132)
    monkeypatch.setattr(cuda, "dependent_launch", lambda _: True)
    group, empty = heads[0] // heads[1], partial(torch.empty, device="meta")
    for rows, widest in (
        (1, 262144),
        (4, 262144),
        (7, 200000),
        (300, 9000),
        (5, 8192 // group),
        (3, 8192 // group + 1),
    ):
        reserved = scratch_bytes(rows, *heads, widest)
        assert reserved >= triton.scratch_bytes(rows, heads[0], widest)
        for width in (widest, widest - 1, widest * 3 // 4, widest // 2):
            q, tables = empty(rows, heads[0], 128, dtype=BF16), (empty(rows, heads[1], 4), *[empty(rows, 9)] * 6)
            out, taken = (empty(rows, heads[1], width), empty(rows, heads[1])), []
            with monkeypatch.context() as patch:
                patch.setattr(torch, "empty", lambda *shape, **_: taken.append(4 * math.prod(shape)))  # noqa: B023
                cuda.kt_select(q, q, tables, 128, 0.1, out)
            assert sum(taken) <= reserved and bool(taken) == (width * group > 8192)
            assert sum(grid[1] for grid, _ in grids) == rows
            assert {threads for _, threads in grids} == {grids[0][0][1] * heads[1]}
            grids.clear()


def test_wrong_arguments_are_refused() -> None:
    arguments = make(CASES[0], "cpu")
    q, summary, table = (arguments[name] for name in ("q", "summary", "block_table"))
    for change, message in [
        ({"q": q[:, :7]}, "query heads must be a multiple of KV heads, got 7 and 2"),
        ({"q": q[..., :48], "summary": summary[..., :48]}, "must be a power of two from 16 to 128, got 48"),
        ({"topr": 0}, "topr must be 1 to 128"),
        ({"topr": 129}, "topr must be 1 to 128, the last dimension of q, got 129"),
        ({"sm_scale": 0.0}, r"sm_scale \* k_scale must be positive"),
        (
            {"scratch": (table[:, None], *[table[:, :2].contiguous()] * 2, table)},
            r"blocks must have the shape \(7, 2, 110\)",
        ),
        ({"stats": torch.zeros(2, dtype=torch.int64)}, "stats must have at least 3 counters, got 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            kt_select(**{**arguments, **change})


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize("config", [(256, 2, 1), (512, 1, 1), (512, 1, 8)], ids=str)
def test_replays_of_a_graph_give_the_same_bits(config: tuple[int, int, int], rows: int, device: str) -> None:
    """A hundred times, between kernels that are launched dependently, into poisoned outputs; and in any batch."""
    arguments = make(Case((Row(8192, 64), STEP, Row(30, 40))[:rows] + (STEP,) * (rows - 3), heads=8), device)
    if not cuda.takes(arguments["q"], arguments["summary"], 8192):
        pytest.skip("needs a GPU for which NVRTC compiles the CUDA kernels")
    given = arguments["q"], arguments["summary"], tuple(arguments[name] for name in TABLES), 128, 128**-0.5
    shape = len(arguments["q"]), 8, 8192
    options = {"dtype": torch.int32, "device": device}
    out = torch.full(shape, -1, **options), torch.full(shape[:2], -7, **options)
    if config[2] > 1 and not dependent_launch(arguments["q"].device):
        pytest.skip("needs clusters of blocks")
    launch = cuda.Config(*config)
    cuda.kt_select(*given, out, config=launch)
    expected = [tensor.clone() for tensor in run(arguments)[:2]]
    assert torch.equal(out[0], expected[0]) and torch.equal(out[1], expected[1])
    summary = arguments["summary"].clone()

    def step() -> None:
        arguments["summary"].copy_(summary)
        for _ in range(2):
            cuda.kt_select(*given, out, tables_ready=True, config=launch)

    poisoned = (arguments["summary"].view(torch.uint8), 0), (out[0], -1), (out[1], -1)
    assert_replays(step, poisoned, lambda: all(torch.equal(*pair) for pair in zip(out, expected, strict=True)))


@pytest.mark.gpu
def test_it_runs_where_it_is_compiled(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel in CUDA C++ is what serves the default configuration on NVIDIA GPUs."""
    pytest.importorskip("cuda.bindings.nvrtc")
    if torch.version.cuda is None or torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs an NVIDIA GPU from Ampere on")
    arguments, launched = make(CASES[0], device), []
    assert (arguments["q"].dtype, arguments["summary"].dtype) == (BF16, E5M2)
    kernel = nvrtc.Kernel.__call__
    monkeypatch.setattr(nvrtc.Kernel, "__call__", lambda *given: launched.append(kernel(*given)))
    kt_select(**arguments)
    assert len(launched) == 1
