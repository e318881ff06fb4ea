"""The CUDA kernel of the KT selection: without a GPU its source as C++, its threads taking turns; and on one."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from cuda_library import emulated
from kt_selections import check, selected

from sglang_sparse_kernels.common import nvrtc
from sglang_sparse_kernels.common.launch import dependent_launch
from sglang_sparse_kernels.kt_select import TABLES, cuda
from sglang_sparse_kernels.kt_select.cases import BF16, CASES, E5M2, FP16, Case, Row, make

NAN, INF = math.nan, math.inf
# Dimension, group, type of the queries, dimensions that count, threads of a block, blocks of a cluster.
KINDS = [
    (128, 4, BF16, 128, 256, 1),
    (128, 4, BF16, 32, 512, 2),
    (64, 8, FP16, 64, 256, 1),
    (64, 1, FP16, 16, 256, 4),
    (64, 5, BF16, 63, 512, 1),
]
Kind = tuple[int, int, torch.dtype, int, int, int]
every = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(str(part).split(".")[-1] for part in kind))


def config_of(kind: Kind) -> cuda.Config:
    return cuda.Config(kind[4], 1, kind[5])


on_cpu = emulated(
    ((cuda.SOURCE, "kt_select", cuda.defines(*kind[:4], config_of(kind))) for kind in KINDS), float16=True
)


def select(arguments: dict[str, Any], device: str, config: cuda.Config, **more: Any) -> Any:
    q, summary, *tables = (arguments[name].to(device) for name in ("q", "summary", *TABLES))
    shape = (len(q), summary.shape[1], tables[TABLES.index("block_table")].shape[1])
    out = torch.full(shape, -1, dtype=torch.int32), torch.full(shape[:2], -7, dtype=torch.int32)
    out, stats = (out[0].to(device), out[1].to(device)), torch.zeros(3, dtype=torch.int64, device=device)
    sizes = (arguments["topr"], arguments["sm_scale"], out, stats)
    found = *cuda.kt_select(q, summary, tuple(tables), *sizes, config=config, **more), stats
    return tuple(tensor.cpu() for tensor in found)


@pytest.fixture(params=["emulated", pytest.param("compiled", marks=pytest.mark.gpu)])
def run(request: pytest.FixtureRequest, on_cpu: None) -> Any:
    """The kernel of a case's kind, which finds anything in its scratch."""
    device = torch.device("cuda", 0) if request.param == "compiled" else torch.device("cpu")
    if device.type == "cuda" and not nvrtc.available(device):
        pytest.skip("needs a GPU for which NVRTC compiles the CUDA kernels")

    def call(arguments: dict[str, Any], **more: Any) -> Any:
        q, summary = arguments["q"], arguments["summary"]
        key = q.shape[2], q.shape[1] // summary.shape[1], q.dtype, arguments["topr"]
        config = config_of(next(kind for kind in KINDS if kind[:4] == key))
        if device.type == "cuda" and not dependent_launch(device):
            config = replace(config, cluster=1)
        return select(arguments, str(device), config, **more)

    return call


def case_of(kind: Kind, *rows: Row, **more: Any) -> Case:
    dim, group, dtype, topr, _, _ = kind
    return Case(rows, group=group, dim=dim, topr=topr, dtype=dtype, **more)


@every
def test_it_equals_the_operations(kind: Kind, run: Any) -> None:
    """Rows of all kinds; strided queries; before and behind the wait."""
    for ready in (False, True):
        arguments = make(case_of(kind, *CASES[0].rows, Row(700, 300, 650, 600), Row(600, 2, 50, 3)), "cpu")
        q = arguments["q"]
        arguments["q"] = torch.cat([q, torch.randn_like(q)], dim=1)[:, : q.shape[1]]
        check(run(arguments, tables_ready=ready), arguments)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_long_rows(rows: int, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more candidates than shared memory holds the numbers of, and the logits; rows take turns in the scratch."""
    case = case_of(KINDS[2], Row(2300, 64), Row(3000, 64, 2000, 40), Row(1040, 900, 100, 90), heads=1)
    arguments, empty = make(case, "cpu"), torch.empty
    one_row, taken = 8 * 3000 * 4, []

    def poisoned(*shape: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*shape, **options).fill_(NAN)
        taken.append(tensor.nbytes)
        return tensor

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", poisoned)
        found = run(arguments, limit=rows * one_row)
    check(found, arguments)
    assert sum(taken) == max(rows, 1) * one_row == cuda.scratch_bytes(3, 8, 1, 3000, rows * one_row)


@pytest.mark.parametrize("kind", [KINDS[1], KINDS[3]], ids=["2", "4"])
def test_long_rows_are_divided(kind: Kind, run: Any) -> None:
    """Among the blocks of a cluster; some with nothing, with the newest alone, with parts of a tile; dense and tied."""
    for blocks, wanted in ((1025, 64), (1025, 1024), (1029, 1), (1100, 1100), (1090, 2), (3000, 700)):
        arguments = make(case_of(kind, Row(blocks, wanted), Row(40, 7), heads=1), "cpu")
        check(run(arguments), arguments)
    arguments = make(case_of(kind, Row(2000, 1201), heads=1), "cpu")
    bounds = arguments["summary"].fill_(1.0)
    bounds[arguments["block_table"][0, 1900]] = 2.0
    arguments["q"] = arguments["q"].abs() + 0.1
    assert selected(run(arguments), arguments)[0][0] == [*range(1199), 1900, 1999]


@every
def test_ties_go_to_the_lowest(kind: Kind, run: Any) -> None:
    """All blocks are alike but for three, of which one scores less; the newest is selected whatever it scores."""
    arguments = make(case_of(kind, Row(900, 20), heads=1), "cpu")
    arguments["q"] = arguments["q"].abs() + 0.1
    table, bounds = arguments["block_table"][0].tolist(), torch.ones_like(arguments["summary"], dtype=torch.float32)
    for block, factor in ((700, 2.0), (850, 2.0), (5, 0.5), (899, 0.25)):
        bounds[table[block]] *= factor
    arguments["summary"] = bounds.to(E5M2)
    found = selected(run(arguments), arguments)[0][0]
    assert found == [*range(5), *range(6, 18), 700, 850, 899]


@pytest.mark.parametrize("wanted", [1, 2, 3, 4, 17, 98, 99])
def test_any_number_is_selected(wanted: int, run: Any) -> None:
    for rows in ((Row(100, wanted),), (Row(150, wanted, 130, 80),)):
        arguments = make(case_of(KINDS[0], *rows), "cpu")
        check(run(arguments), arguments)


def test_a_broken_block_comes_before_all_but_the_newest(run: Any) -> None:
    """A NaN and an infinity in dimensions that count; the rest is scored without them."""
    for kind in KINDS[:2]:
        arguments = make(case_of(kind, Row(80, 6), heads=1), "cpu")
        arguments["q"][0, :, 7] = 40.0
        table, bounds = arguments["block_table"][0], arguments["summary"].float()
        bounds[table[3], 0, 0, 7], bounds[table[50], 0, 0, 7] = NAN, INF
        # Of no dimension that counts with its minimum.
        bounds[table[60], 0, 1, 7] = NAN
        arguments["summary"] = bounds.to(E5M2)
        found = run(arguments)
        check(found, arguments)
        assert {3, 50, 79} <= set(selected(found, arguments)[0][0])


def test_queries_that_are_no_numbers_or_zero(run: Any) -> None:
    """All blocks are alike then, and the first ones are selected."""
    for value in (NAN, INF, 0.0):
        arguments = make(case_of(KINDS[0], Row(80, 6), heads=1), "cpu")
        arguments["q"][0] = value if value == 0 else arguments["q"][0]
        arguments["q"][0, 1, 9] = value
        found = selected(run(arguments), arguments)[0][0]
        assert found == [0, 1, 2, 3, 4, 79]


@pytest.mark.parametrize("size", [2.0**-40, 2.0**-100, 2.0**40, 2.0**100])
def test_queries_of_any_size_keep_their_precision(size: float, run: Any) -> None:
    """Numbers a million times as large as others, whose dimension all blocks have in common."""
    arguments = make(case_of(KINDS[0], Row(200, 30), heads=1), "cpu")
    arguments["q"][..., 1:] *= 2.0**-20
    arguments["q"] *= size
    arguments["summary"][:, :, :, 0] = 0
    arguments["sm_scale"] = 2.0**20 / size / 10
    check(run(arguments), arguments)


def test_logits_far_apart_keep_their_order(run: Any) -> None:
    arguments = make(case_of(KINDS[3], Row(90, 30), heads=1), "cpu")
    arguments["sm_scale"] = 200.0
    check(run(arguments), arguments)


@pytest.mark.parametrize("dim", [0, 5, 62, 63])
def test_every_number_of_float8(dim: int, run: Any) -> None:
    """A row for each finite number and the next one, the larger one first in every other; then what is no number."""
    numbers = torch.arange(256, dtype=torch.uint8)
    values = numbers.view(E5M2).float()
    finite = numbers[values.isfinite()][values[values.isfinite()].argsort(stable=True)]
    pairs = torch.stack([finite[:-1], finite[1:]], dim=1)
    pairs[::2] = pairs[::2].flip(1)
    broken = numbers[~values.isfinite()]
    pairs = torch.cat([pairs, torch.stack([torch.zeros_like(broken), broken], dim=1)])
    arguments = make(case_of(KINDS[3], *[Row(3, 2)] * len(pairs), heads=1), "cpu")
    arguments["q"] = torch.zeros_like(arguments["q"])
    arguments["q"][:, 0, dim], arguments["sm_scale"] = 1, 1024.0
    summary = torch.zeros_like(arguments["summary"].view(torch.uint8))
    summary[arguments["block_table"][:, :2].long(), 0, 0, dim] = pairs
    arguments["summary"] = summary.view(E5M2)
    larger = pairs.view(E5M2).float().nan_to_num(1e9, 1e9, 1e9)
    expected = [[[int(second > first), 2]] for first, second in larger.tolist()]
    assert selected(run(arguments), arguments) == expected


def test_clusters() -> None:
    found = [cuda.config_of(pairs, 132, True).cluster for pairs in (8, 16, 17, 33, 66, 67, 132, 133)]
    assert found == [2, 2, 2, 2, 2, 1, 1, 1] and cuda.config_of(8, 132, False).cluster == 1


def test_what_it_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    def takes(dim: int = 128, group: int = 4, query: torch.dtype = BF16, dtype: torch.dtype = E5M2, width: int = 9):
        return cuda.takes(torch.zeros(1, group, dim, dtype=query), torch.zeros(1, 1, 2, dim).to(dtype), width)

    assert not takes()
    monkeypatch.setattr(nvrtc, "available", lambda _: True)
    assert takes() and takes(64, 8, FP16)
    assert not any((takes(dim=32), takes(group=9), takes(query=torch.float32), takes(dtype=BF16), takes(width=1 << 20)))
