"""Answers of a checkpoint by chosen pages: all of them are dense, and a few wrong ones are not enough."""

from pathlib import Path

import pytest
import torch

from eval.lab.selection import page_answers
from eval.lab.selection.page_statistics import TRUE
from eval.live.record import read_rows

MODEL = str(Path(__file__).parents[2] / "eval" / "models" / "tiny-gqa")
VOTE = "6 centroids; vote"


def first_pages(keys: torch.Tensor, *_: object) -> torch.Tensor:
    return -torch.arange(len(keys)).float().expand(1, keys.shape[2], -1)


def test_a_needle_is_answered_by_the_pages_that_hold_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first pages alone, as many, do not."""
    monkeypatch.setitem(page_answers.STATISTICS, "first", (0, first_pages))
    out = tmp_path / "answers.jsonl"
    given = ["--model-path", MODEL, "--tasks", "single", "--lengths", "2k", "--n", "1", "--depths", "50,75"]
    given += ["--ratio", "0.15", "--out", str(out), "--revision", "r", "--name", "tiny"]
    for name in (page_answers.DENSE, TRUE, VOTE, "first"):
        given += ["--statistics", name]
    assert page_answers.main(given) == 0
    header, *rows = read_rows(out)
    assert header["model"]["name"] == "tiny" and len(header["model"]["weights"]) == 64
    scores = {row["statistic"]: row for row in rows if row["kind"] == "summary"}
    assert [scores[name]["score"] for name in (page_answers.DENSE, TRUE, VOTE, "first")] == [1.0, 1.0, 1.0, 0.0]
    assert (
        scores["first"]["mass"] < scores[VOTE]["mass"] <= scores[TRUE]["mass"] + 1e-3
        and scores["dense"]["mass"] is None
    )
    assert VOTE in capsys.readouterr().out
    # Written whole: a second run asks nothing.
    assert page_answers.main(given) == 0
    assert sum(row["kind"] == "item" for row in read_rows(out)) == 8


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--statistics", "median"], "--statistics median: allowed are dense; true mass; minimum, maximum"),
        (["--ratio", "0"], "--ratio 0.0: allowed are numbers between 0 and 1"),
    ],
)
def test_bad_arguments_are_named(
    given: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert page_answers.main(["--model-path", MODEL, "--out", str(tmp_path / "a.jsonl"), *given]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--tasks", "poem"], "--tasks: got poem, allowed: single"),
        (["--tasks", ","], "--tasks: got none, allowed: single"),
        (["--lengths", ","], "--lengths: got none, allowed: one or more"),
        (["--n", "0"], "--n: must be at least 1, got 0"),
        (["--depths", ","], "--depths: got none, allowed: one or more"),
        (["--depths", "150"], "--depths: must be a percentage from 0 to 100, got 150"),
    ],
)
def test_bad_values_are_refused_by_the_parser(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        page_answers.main(["--model-path", MODEL, "--out", "a.jsonl", *given])
    assert message in capsys.readouterr().err
