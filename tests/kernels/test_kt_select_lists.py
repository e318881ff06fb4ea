"""The lists of a KT selection: reference against plain lists, Triton against the reference, what neither may touch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_runs import replay_with

from sglang_sparse_kernels.kt_select import reference
from sglang_sparse_kernels.kt_select import triton as kernel
from sglang_sparse_kernels.kt_select.cases import CASES, Case, Row
from sglang_sparse_kernels.kt_select.cases import make_tables as make
from sglang_sparse_kernels.kt_select.triton import visible_blocks
from sglang_sparse_kernels.page_topk import page_topk

Output = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# What no kernel writes.
UNWRITTEN = -7
GUARD = 64

RAGGED = Case((Row(100, 10, 80, 30), Row(37, 5, 30, 0), Row(0), Row(50, 50, 40, 10)), width=110)
# Lists of more than a program takes at once.
LONG = [
    Case((Row(3000, 64, 2990, 1100), Row(2100, 64, 3, 1), Row(1024, 64, 1000, 1000), Row(0)), width=5000),
    Case((Row(1400, 20, 1390, 1200), Row(1030)) * 5, heads=8),
]
# More than int32 counts.
HUGE = 5 * 2**29
BOTH = pytest.mark.parametrize("implementation", [reference.visible_blocks, visible_blocks], ids=["torch", "triton"])


def run(implementation: Any, arguments: dict[str, Any], **options: Any) -> Output:
    """Into poisoned outputs, beside which nothing may be written."""
    batch, width = arguments["block_table"].shape
    heads, device = arguments["kept"].shape[1], arguments["kept"].device
    buffers, out = [], []
    for shape in ((batch, heads, width), (batch, heads), (batch, heads)):
        size = torch.Size(shape).numel()
        buffers.append(torch.full((size + 2 * GUARD,), UNWRITTEN, dtype=torch.int32, device=device))
        out.append(buffers[-1][GUARD : GUARD + size].view(shape))
    result = implementation(**arguments, out=tuple(out), **options)
    assert all(got is given for got, given in zip(result, out, strict=True))
    for buffer in buffers:
        assert (buffer[:GUARD] == UNWRITTEN).all() and (buffer[len(buffer) - GUARD :] == UNWRITTEN).all()
    return result


def assert_equals_the_reference(got: Output, arguments: dict[str, Any]) -> None:
    expected, (blocks, counts, wanted) = run(reference.visible_blocks, arguments), got
    assert torch.equal(counts, expected[1]) and torch.equal(wanted, expected[2])
    beyond = torch.arange(blocks.shape[2], device=blocks.device) >= counts[..., None]
    assert torch.equal(blocks.masked_fill(beyond, -1), expected[0])
    assert (blocks[beyond] == UNWRITTEN).all()


@pytest.mark.parametrize("case", [case for case in CASES if not case.gpu_only] + LONG, ids=str)
def test_reference_lists_kept_blocks_and_then_all(case: Case) -> None:
    arguments = make(case, "cpu")
    blocks, counts, wanted = run(reference.visible_blocks, arguments)
    for b, row in enumerate(case.rows):
        table = arguments["block_table"][b].tolist()
        for head in range(case.heads):
            visible = list(range(row.blocks))
            if row.select < row.blocks:
                kept = arguments["kept"][arguments["requests"][b], head, : row.kept].tolist()
                visible = [block for block in visible if block in set(kept) or block >= row.first]
            assert blocks[b, head].tolist() == [table[block] for block in visible] + [-1] * (len(table) - len(visible))
            assert counts[b, head] == len(visible) and wanted[b, head] == min(row.select, len(visible))


@pytest.mark.parametrize("case", CASES + LONG, ids=str)
def test_triton_equals_the_reference(case: Case, device: str) -> None:
    arguments = make(case, device)
    got = run(visible_blocks, arguments)
    assert_equals_the_reference(got, arguments)
    assert all(torch.equal(one, other) for one, other in zip(got, run(visible_blocks, arguments), strict=True))


@pytest.mark.parametrize(("block", "programs"), [(16, 1), (16, 1000), (32, 5), (128, 1)])
def test_any_number_of_programs(block: int, programs: int, device: str) -> None:
    arguments = make(RAGGED, device)
    arguments["stats"] = torch.zeros(3, dtype=torch.int64, device=device)
    config = kernel.ListConfig(block=block, programs_per_processor=programs)
    got = run(kernel.visible_blocks, arguments, config=config)
    stats = arguments.pop("stats").tolist()
    assert_equals_the_reference(got, arguments)
    assert stats == [2 * 3, 2 * (10 + 5 + 50), 2 * (100 + 37 + 50)]


@BOTH
def test_padded_and_dense_rows_have_no_request(implementation: Any, device: str) -> None:
    rows = (Row(0), Row(0, -1), Row(0, 5), Row(40, 40), Row(40, 41), Row(40, 39, 30, 3))
    arguments = make(Case(rows, width=50), device)
    slot = int(arguments["requests"][5])
    arguments["requests"] = torch.tensor([2**63 - 1, -(2**60), -1, 2**60, -(2**63), slot], device=device)
    blocks, counts, wanted = run(implementation, arguments)
    assert counts[:, 0].tolist() == [0, 0, 0, 40, 40, 13] and wanted[:, 0].tolist() == [0, 0, 0, 40, 40, 13]
    assert torch.equal(blocks[3:5, :, :40], arguments["block_table"][3:5, None, :40].expand(2, 2, 40))


@BOTH
def test_stats_count_as_those_of_the_page_selection(implementation: Any, device: str) -> None:
    """The page selection is told that all blocks of the same rows are visible."""
    rows = (Row(100, 10, 80, 30), Row(50, 0, 40, 5), Row(0), Row(0, 4), Row(8, 16), Row(90, 7))
    arguments = make(Case(rows, heads=3), device)
    stats, expected = (torch.tensor([1, 2, 3, 4], device=device) for _ in "12")
    run(implementation, {**arguments, "stats": stats})
    table, held, select = (arguments[name] for name in ("block_table", "n_blocks", "n_select"))
    page_topk(torch.zeros(6, 3, 100, device=device), table, held, select, max_select=100, stats=expected)
    assert stats.tolist() == expected.tolist() == [1 + 3 * 3, 2 + 3 * (10 + 8 + 7), 3 + 3 * (100 + 8 + 90), 4]


@BOTH
def test_stats_count_what_is_wanted_of_few_visible_blocks(implementation: Any, device: str) -> None:
    arguments = make(Case((Row(100, 60, 80, 3),)), device)
    stats = torch.zeros(3, dtype=torch.int64, device=device)
    run(implementation, {**arguments, "stats": stats})
    assert stats.tolist() == [2, 2 * 23, 2 * 100]


def test_results_are_what_the_page_selection_takes(device: str) -> None:
    arguments = make(RAGGED, device)
    blocks, counts, wanted = run(visible_blocks, arguments)
    scores = torch.arange(8 * 110.0, device=device).view(8, 1, 110)
    indices, taken = page_topk(scores, blocks.view(8, 110), counts.view(8), wanted.view(8), max_select=50)
    assert torch.equal(taken.view(4, 2), wanted)
    for head in range(2):
        newest = blocks[0, head, 40:50]
        assert torch.equal(indices[head, 0, :10], newest) and torch.equal(newest, arguments["block_table"][0, 90:100])


@BOTH
def test_numbers_that_contradict_one_another_stay_within_bounds(implementation: Any, device: str) -> None:
    most, least = 2**31 - 1, -(2**31)
    arguments = make(Case((Row(10, 3, 6, 4),) * 6, heads=1, max_kept=8), device)
    slots, table = arguments["requests"], arguments["block_table"].tolist()
    arguments["kept"][slots, 0] = torch.tensor([0, 1, 4, 5, 7, 12, most, least], dtype=torch.int32, device=device)
    changes = {
        "n_blocks": [most, 5, 5, 10, 10, 1],
        "first_visible": [6, 6, 5, 10, least, most],
        "n_kept": [4, 2, most, most, 4, 8],
        "n_select": [3, 3, 3, 3, 3, least],
    }
    for name, values in changes.items():
        target = slots if name in ("first_visible", "n_kept") else torch.arange(6, device=device)
        arguments[name][target] = torch.tensor(values, dtype=torch.int32, device=device)
    blocks, counts, wanted = run(implementation, arguments)
    # All within the row: a kept block that is none is the nearest.
    logical = [[0, 1, 4, 5, 6, 7, 8, 9], [0, 1], [0, 1, 4, 4, 4], [0, 1, 4, 5, 7, 9, 9, 0], list(range(10)), [0]]
    for row, expected in enumerate(logical):
        assert blocks[row, 0, : len(expected)].tolist() == [table[row][block] for block in expected]
        assert counts[row, 0] == len(expected) and wanted[row, 0] == (min(3, len(expected)) if row < 5 else 0)


def test_strided_tables_and_none(device: str) -> None:
    arguments = make(RAGGED, device)
    table = arguments["block_table"]
    expected = run(visible_blocks, arguments)
    strided = {**arguments, "block_table": torch.cat([torch.full_like(table[:, :9], -3), table], dim=1)[:, 9:]}
    assert not strided["block_table"].is_contiguous()
    assert torch.equal(run(visible_blocks, strided)[0][0, 0, :50], expected[0][0, 0, :50])
    assert_equals_the_reference(run(visible_blocks, strided), arguments)
    kept = arguments["kept"]
    for empty in ({"kept": kept[..., :0]}, {"kept": kept[:, :0]}, {"block_table": table[:, :0]}):
        changed = {**arguments, **empty}
        assert_equals_the_reference(run(visible_blocks, changed), changed)


def huge_tensor(path: Path, device: str, size: int = HUGE) -> torch.Tensor:
    """So many int32; on the CPU in a file of which only what was written takes room."""
    if device == "cuda":
        return torch.empty(size, dtype=torch.int32, device=device)
    return torch.from_file(str(path / str(size)), shared=True, size=size, dtype=torch.int32)


def test_tables_beyond_int32(device: str, tmp_path: Path) -> None:
    arguments = make(Case((Row(0), Row(37, 5, 30, 0), Row(50, 10, 40, 10)), width=110), device)
    table = torch.as_strided(huge_tensor(tmp_path, device), (3, 110), (2**30, 1)).copy_(arguments["block_table"])
    assert_equals_the_reference(run(visible_blocks, {**arguments, "block_table": table}), arguments)


def test_kept_blocks_beyond_int32(device: str, tmp_path: Path) -> None:
    arguments = make(Case((Row(40, 5),)), device)
    arguments["kept"] = torch.arange(16, dtype=torch.int32, device=device).view(4, 2, 2)
    arguments["n_kept"].fill_(2)
    arguments["first_visible"].fill_(30)
    wide = huge_tensor(tmp_path, device).view(4, 2, -1)
    wide[..., :2] = arguments["kept"]
    for slot in range(4):
        arguments["requests"] = torch.tensor([slot], device=device)
        got = run(visible_blocks, {**arguments, "kept": wide})
        assert (got[1] == 12).all()
        assert_equals_the_reference(got, arguments)


def test_results_beyond_int32(device: str, tmp_path: Path) -> None:
    arguments = make(Case((Row(100, 10, 80, 30), Row(100, 10, 60, 7)), heads=4), device)
    expected, counts, wanted = run(visible_blocks, arguments)
    blocks = huge_tensor(tmp_path, device).view(2, 4, -1)
    width = blocks.shape[2]
    table = huge_tensor(tmp_path, device, 2 * width).view(2, width)
    table[:, :100] = arguments["block_table"]
    visible_blocks(**{**arguments, "block_table": table}, out=(blocks, counts.zero_(), wanted.zero_()))
    for row, count in enumerate((50, 47)):
        assert torch.equal(blocks[row, :, :count], expected[row, :, :count])
        assert (counts[row] == count).all() and (wanted[row] == 10).all()


@given(data=st.data(), heads=st.integers(1, 3), spare=st.integers(0, 40), seed=st.integers(0, 1000))
@settings(max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ragged_rows(device: str, data: st.DataObject, heads: int, spare: int, seed: int) -> None:
    def row() -> Row:
        blocks = data.draw(st.integers(0, 90))
        first = data.draw(st.integers(0, max(0, blocks - 1)))
        return Row(blocks, data.draw(st.integers(0, 100)), first, data.draw(st.integers(0, first)))

    rows = tuple(row() for _ in range(data.draw(st.integers(1, 4))))
    width = max(1, *(row.blocks for row in rows), 0) + spare
    arguments = make(Case(rows, heads, width=width), device, seed)
    assert_equals_the_reference(run(kernel.visible_blocks, arguments, config=kernel.ListConfig(block=32)), arguments)


@pytest.mark.gpu
def test_replays_as_a_cuda_graph_with_other_rows(device: str) -> None:
    arguments = make(Case((Row(3000, 64, 2990, 1100), Row(0), Row(40, 64), Row(500, 64, 400, 0)), width=4096), device)
    out = run(visible_blocks, arguments)
    rows = (Row(0), Row(4096, 64, 4000, 1100), Row(100, 64, 70, 20), Row(4096, 4096))
    replay_with(visible_blocks, arguments, make(Case(rows, max_kept=1100, width=4096), device), out, UNWRITTEN)
    assert_equals_the_reference(out, arguments)
