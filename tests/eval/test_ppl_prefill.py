"""Buckets, verdicts and refusals of the perplexity of prefill, on hand-made numbers."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from suites import LENGTH, WINDOWS, perplexity_rows

from eval import ppl_prefill
from eval.live.counters import EvaluationError
from eval.ppl_prefill import edges, summarise
from eval.texts.windows import SCORED, Window


def facts(**config: int) -> dict[str, Any]:
    return {"sparse": {"method": None, "prefill": {"method": "anchor", "config": config}}}


def test_buckets_part_where_sparse_queries_begin() -> None:
    assert edges(300, 100) == [0, 100, 300]
    assert edges(16383, 8192) == [0, 1024, 2048, 4096, 8192, 16383]
    assert edges(4096, 2048) == [0, 1024, 2048, 4096]
    assert edges(2000, 0) == [0, 1024, 2000]


def test_a_loss_is_relative_and_of_the_judged_positions_alone() -> None:
    judged, dense, sparse = summarise(perplexity_rows(0.01))
    assert judged["positions"] == "judged" and judged["windows"] == WINDOWS and judged["sparsity"] == 0.4
    assert judged["relative"] == pytest.approx(math.expm1(0.01), abs=1e-5)
    assert judged["sparse"] / judged["dense"] == pytest.approx(math.exp(0.01), abs=1e-5) and not judged["passed"]
    assert (dense["positions"], sparse["positions"]) == ("0-100", "100-300")
    assert dense["relative"] == dense["change"] == 0 and "passed" not in dense
    assert sparse["change"] == pytest.approx(0.01, abs=1e-5)


@pytest.mark.parametrize(
    ("lost", "noise", "passed"),
    [(0.0, 0.0, True), (0.0049, 0.0, True), (0.0051, 0.0, False), (-0.0051, 0.0, True), (0.0, 0.05, False)],
)
def test_the_interval_must_end_within_the_bound(lost: float, noise: float, passed: bool) -> None:
    assert summarise(perplexity_rows(lost, noise=noise))[0]["passed"] is passed
    assert summarise(perplexity_rows(lost, noise=noise), bound=0.1)[0]["passed"]


def test_of_a_repetition_its_end_is_judged() -> None:
    found = perplexity_rows(0.01, "repeat")
    assert not [row for row in found if row["kind"] == "buckets"]
    (line,) = summarise([*found])
    assert line["task"] == "repeat" and line["relative"] == pytest.approx(math.expm1(0.01), abs=1e-5)
    dense = np.zeros((1, LENGTH - 1))
    dense[0, -SCORED:] = 1.0
    windows = [Window("a", 0, tuple(range(LENGTH)), 0.5)]
    assert {row["scores"]["nll"] for row in ppl_prefill.rows_of("repeat", windows, {"dense": dense}, 0)} == {1.0}


def test_of_records_the_answer_is_judged() -> None:
    args = ppl_prefill.parse(["--base-url", "u", "--out", "x.jsonl", "--length", "4096", "--windows", "30"])

    def encode(text: str) -> list[int]:
        return [-ord(letter) for letter in text]

    windows = ppl_prefill.make_text("records", args, {"book": list(range(1, 6001))}, encode)
    # More than stand side by side in so short a book.
    assert len(windows) == 30 == len({window.start for window in windows}) == len({window.tokens for window in windows})
    for window in windows:
        assert len(window.tokens) == 4096 and window.depth is not None
        first, *_, last = [i for i, token in enumerate(window.tokens) if token == -ord("O")]
        assert first >= ppl_prefill.FIRST_RECORD and last < 4096 - ppl_prefill.APART
    scored = windows[0].scored
    found = {"dense": np.tile(np.arange(scored, dtype=np.float64), (30, 1))}
    rows = ppl_prefill.rows_of("records", windows, found, 2048)
    assert {row["scores"]["nll"] for row in rows} == {(scored - 1) / 2} and len(rows) == 30
    for text in ("book", "repeat"):
        with pytest.raises(EvaluationError, match="hold 1 windows of 4096 tokens, wanted 30"):
            ppl_prefill.make_text(text, args, {"book": list(range(1, 6001))}, encode)


def test_windows_of_both_arms_must_be_the_same() -> None:
    found = perplexity_rows(0.0)
    with pytest.raises(EvaluationError, match="book: 40 windows are sparse and 39 dense"):
        summarise(found[1:])


def test_servers_that_prefill_dense_are_refused() -> None:
    assert ppl_prefill.begins_at(facts(crossover_tokens=2048, dense_tail=128), 4096) == 2048
    for length in (2048, 2176):
        with pytest.raises(EvaluationError, match=f"windows of {length} tokens dense: it is sparse from position 2048"):
            ppl_prefill.begins_at(facts(crossover_tokens=2048, dense_tail=128), length)
    for found in ({"sparse": None}, {"sparse": {"method": "resa"}}):
        with pytest.raises(EvaluationError, match=r"runs no prefill method; eval\.ppl_rectify judges decode"):
            ppl_prefill.begins_at(found, 4096)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--length", "63"], "--length must be at least 64"),
        (["--apart", "-1"], "--apart must be at least 0"),
        (["--bound", "0"], "--bound must be above 0"),
        (["--book", "a/x.txt", "--book", "b/x.txt"], "--book: two files have the same name, a/x.txt and b/x.txt"),
    ],
)
def test_command_line(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        ppl_prefill.parse(["--base-url", "u", "--out", "x.jsonl", *given])
    assert message in capsys.readouterr().err


def test_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--base-url", "http://127.0.0.1:1", "--out", str(tmp_path / "x.jsonl")]
    args = ppl_prefill.parse(arguments)
    assert args.book is None and args.kind == ["book"] and args.bound == 0.005 and args.windows is None
    assert ppl_prefill.main(arguments) == 1
    assert "eval.ppl_prefill: no server answers" in capsys.readouterr().err and not (tmp_path / "x.jsonl").exists()
