"""Rows of single kernels of this project beside those of its operations."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_layers import OWN, SHAPE, exact, machine

from eval.lab import bench_kernels
from eval.lab.bench_kernels import measure, parse
from eval.lab.kernels import kernel_table, kernel_votes
from eval.lab.kernels.harness import OURS, Implementation, chosen
from eval.lab.kernels.kernel_inputs import OPS, WHOLE
from eval.lab.kernels.kernel_table import TABLE, summarise
from eval.lab.kernels.kernel_votes import CENTROIDS, VOTES
from eval.live.record import read_rows
from sglang_sparse_kernels.page_score import reference as score_reference
from sglang_sparse_kernels.page_topk import cuda as topk_cuda
from sglang_sparse_kernels.page_topk import reference as topk_reference


def right(q: torch.Tensor, summary: torch.Tensor, *rest: Any, summaries_ready: bool = False) -> torch.Tensor:
    """A kernel of page_score, in its stead."""
    return score_reference.page_score(q, summary, *rest)


def idle(q: torch.Tensor, summary: torch.Tensor, *rest: Any, summaries_ready: bool = False) -> torch.Tensor:
    """One that writes nothing."""
    return rest[2]


def test_each_kernel_of_the_scores_has_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [one for one in chosen(["page_score", WHOLE], [], TABLE, OPS) if one.name not in (VOTES, CENTROIDS)]
    plan = [Implementation("dense_decode", "exact", exact), *own]
    rows = measure(SHAPE, plan, machine(60, 2, 6), 2)
    assert [row["us"] for row in rows if "us" in row] == [60, 2, 6]
    assert [(row["op"], row["implementation"], row["unavailable"]) for row in rows if "us" not in row] == [
        ("page_score", "cuda", "ValueError: page_score's CUDA kernel does not take these inputs here"),
        ("page_score", "triton", "ValueError: Triton's kernels do not run here"),
        (WHOLE, "cuda", "ValueError: page_score's CUDA kernel does not take these inputs here"),
    ]
    monkeypatch.setattr(kernel_table.score_cuda, "takes", lambda *_: True)
    monkeypatch.setattr(kernel_table, "use_reference", lambda _: False)
    for kernel in (kernel_table.score_cuda, kernel_table.score_triton):
        monkeypatch.setattr(kernel, "page_score", right)
    by = {(row["op"], row["implementation"]): row for row in measure(SHAPE, plan, machine(60, 2, 1, 3, 6, 5), 2)}
    assert [by["page_score", name]["us"] for name in (OURS, "cuda", "triton")] == [2, 1, 3]
    assert all(by["page_score", name]["score_error"] < 1e-5 for name in (OURS, "cuda", "triton"))
    assert by[WHOLE, "cuda"]["dense_ratio"] == 12 and by[WHOLE, "cuda"]["agreement"] == 1.0
    # What a server runs is what counts, not what is fastest.
    assert [(row["op"], row["implementation"], row["us"]) for row in summarise(list(by.values()))] == [
        ("dense_decode", "exact", 60),
        ("page_score", OURS, 2),
        (WHOLE, OURS, 6),
    ]
    monkeypatch.setattr(kernel_table.score_cuda, "page_score", idle)
    rows = measure(SHAPE, plan, machine(), 2)
    assert "infinity" in rows[2]["unavailable"] and "it selects" in rows[-1]["unavailable"]
    assert [row["implementation"] for row in rows if "us" not in row] == ["cuda", "cuda"]
    assert "2x118, page_score: no cuda: ValueError: the newest pages do not score" in capsys.readouterr().err


def test_votes_have_rows_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their own scores and selection, not by those of the paper."""
    plan, shape = [one for one in TABLE if one.name in (VOTES, CENTROIDS)], replace(SHAPE, dim=32)
    rows = measure(shape, plan, machine(), 2)
    assert [(row["op"], row["implementation"]) for row in rows if "us" in row] == [
        ("page_summary", CENTROIDS),
        *(("page_score", name) for name in (VOTES, CENTROIDS)),
        *((WHOLE, name) for name in (VOTES, CENTROIDS)),
    ]
    assert all(row["score_error"] < 1e-3 for row in rows if row["op"] == "page_score")
    assert all(row["agreement"] == 1.0 and row["relative_l2"] < 1e-2 for row in rows if row["op"] == WHOLE)
    own = Implementation(WHOLE, OURS, lambda step: [partial(step.whole, layer) for layer in step.layers], peer=False)
    kept = {row["implementation"]: row["recall"] for row in measure(shape, [own, *plan[-2:]], machine(), 2)}
    assert kept[OURS] < kept[CENTROIDS]
    (refused,) = measure(replace(shape, summary_dtype=torch.float8_e4m3fn), plan[-1:], machine(), 2)
    assert "stands beside bounds of bfloat16" in refused["unavailable"]
    monkeypatch.setattr(kernel_votes, "page_vote", lambda *given, **_: given[5].fill_(torch.inf))
    monkeypatch.setattr(kernel_votes, "select_by_votes", lambda *given, **_: (given[8][0].fill_(0), given[8][1]))
    rows = measure(shape, plan[1:], machine(), 2)
    assert ["more than 0.02" in row["unavailable"] or "off by inf" in row["unavailable"] for row in rows] == [True] * 4


def test_a_kernel_that_is_not_picked_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_table.score_cuda, "takes", lambda *_: True)
    monkeypatch.setattr(kernel_table.score_cuda, "page_score", idle)
    args = parse(["--out", str(tmp_path / "k.jsonl"), "--shapes", "1x40", "--rounds", "2", "--ops", "page_score"])
    assert bench_kernels.run(args, machine, TABLE) == 0
    assert "unavailable" in next(row for row in read_rows(args.out) if row.get("implementation") == "cuda")


def test_launch_shapes_of_the_selection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[topk_cuda.Shape] = []

    def select(*arguments: Any, shape: topk_cuda.Shape, tables_ready: bool) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(shape)
        return topk_reference.page_topk(*arguments)

    line = f"--shapes 1x512 --page-size 1 --rounds 2 --ops {WHOLE} --topk-shapes 1x32,2x64,1x512"
    args = parse(["--out", str(tmp_path / "k.jsonl"), *line.split()])
    assert bench_kernels.run(args, machine, OWN) == 0
    rows = {row["implementation"]: row for row in read_rows(args.out) if row["kind"] == "item"}
    assert list(rows) == [OURS, "cuda-1x32", "cuda-2x64", "cuda-1x512"]
    assert all("does not take these inputs" in row["unavailable"] for name, row in rows.items() if name != OURS)
    monkeypatch.setattr(topk_cuda, "takes", lambda _: True)
    monkeypatch.setattr(topk_cuda, "page_topk", select)
    assert bench_kernels.run(args, machine, OWN) == 0
    rows = {row["implementation"]: row for row in read_rows(args.out) if row["kind"] == "item"}
    # The width is that of a context with an answer.
    assert rows["cuda-1x32"]["unavailable"].startswith("ValueError: 2560 pages do not fit 1 blocks of 32 threads")
    assert "no clusters of 2" in rows["cuda-2x64"]["unavailable"] and rows["cuda-1x512"]["agreement"] == 1.0
    assert set(seen) == {topk_cuda.Shape(1, 512, 8)}
    monkeypatch.setattr(kernel_table, "dependent_launch", lambda _: True)
    assert bench_kernels.run(args, machine, OWN) == 0 and set(seen) >= {topk_cuda.Shape(2, 64, 32)}
    assert read_rows(args.out)[0]["arguments"]["topk_shapes"] == [[1, 32], [2, 64], [1, 512]]
