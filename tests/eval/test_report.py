"""The tables of every kind of file are right."""

import json
from pathlib import Path
from typing import Any

import pytest

from eval import compare, report
from eval.live.counters import COUNTED, EvaluationError
from eval.scores.stats import mean_interval
from eval.scores.summary import summarise
from eval.scores.tables import bounds, number, percent, table
from eval.scores.verdicts import lines_of_drift, read_folder


def test_table_leaves_empty_columns_out() -> None:
    rows: list[dict[str, Any]] = [{"a": 0.5, "b": None, "c": (-0.01, 0.02)}, {"a": 1.25, "c": None}]
    columns = [("a", number("a", 1)), ("b", percent("b")), ("c", bounds("c", 2)), ("a %", percent("a"))]
    assert table(rows, columns).splitlines() == [
        "| a | c | a % |",
        "| --- | --- | --- |",
        "| 0.5 | -0.01 … +0.02 | 50.0 % |",
        "| 1.2 |  | 125.0 % |",
    ]


def item(arm: str, index: int, score: float, **more: Any) -> dict[str, Any]:
    row = {"kind": "item", "arm": arm, "id": f"single/1024/0.5/{index}", "task": "single", "length": 1024}
    row |= {"depth": 0.5, "index": index, "prompt_sha": str(index), "completion_tokens": 7}
    return row | {"scores": {"score": score}, **more}


def write(path: Path, command: str, rows: list[dict[str, Any]]) -> None:
    rows = [{"kind": "header", "command": command}, *rows, {"kind": "summary"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_comparison_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [item("base", i, float(i != 3)) for i in range(10)] + [item("compare", i, 1.0) for i in range(10)]
    counted = dict.fromkeys(COUNTED, 0) | {"pages_attended": 10, "pages_held": 100}
    rows += [{"kind": "counters", "arm": "base", "task": "single", "length": 1024, "counters": counted}]
    write(tmp_path / "niah.jsonl", "eval.niah", rows)
    write(tmp_path / "niah--random_pages.jsonl", "eval.niah", [item("base", i, float(i == 0)) for i in range(10)])
    assert report.main([str(tmp_path), "--out", str(tmp_path / "pictures")]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "niah: single" in line]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1:7] == ["1k", "10", "score", "1.000", "0.900", "-0.100"]
    assert cells[8:] == ["10.0 %", "0.100", "yes", "unclear"]
    assert (tmp_path / "pictures" / "niah-base.svg").is_file()


def test_what_the_score_loses_is_told_from_what_the_server_loses(tmp_path: Path) -> None:
    def answers(control: str, right: int) -> None:
        items = [item("base", i, float(i < right)) for i in range(300)]
        write(tmp_path / f"niah{control}.jsonl", "eval.niah", items if control else items + dense)

    dense = [item("compare", i, 1.0) for i in range(300)]
    answers("", 280)
    answers("--random_pages", 0)
    answers("--definition", 280)
    (line,) = read_folder(tmp_path)
    assert line["gates"] and line["verdict"] == "worse" and "definition_verdict" not in line, "who else lost is open"
    answers("--true_mass", 300)
    (line,) = read_folder(tmp_path)
    assert line["verdict"] == "worse" and line["definition_verdict"] == "same" and compare.passes([line])
    answers("--definition", 290)
    (line,) = read_folder(tmp_path)
    assert line["definition_verdict"] == "worse" and not compare.passes([line])
    # A point is lost: that is allowed, and the verdict against dense stands.
    answers("--definition", 297)
    (line,) = read_folder(tmp_path)
    assert "definition_verdict" not in line and not compare.passes([line])


def test_controls_may_leave_tasks_out_but_for_the_random_one(tmp_path: Path) -> None:
    write(tmp_path / "niah.jsonl", "eval.niah", [item(arm, i, 1.0) for arm in ("base", "compare") for i in range(3)])
    write(tmp_path / "niah--definition.jsonl", "eval.niah", [item("base", 0, 0.0, task="another")])
    (line,) = read_folder(tmp_path)
    assert "definition" not in line and line["gates"] is None
    write(tmp_path / "niah--random_pages.jsonl", "eval.niah", [item("base", 0, 0.0, task="another")])
    with pytest.raises(EvaluationError, match="the control random_pages was not asked 3 of the questions"):
        read_folder(tmp_path)


def test_samples_of_one_question_are_one_question() -> None:
    rows = [item("base", i, float(i < 6), prompt_sha=str(i // 4)) for i in range(8)]
    (line,) = summarise(rows, [])
    assert line["n"] == 2 and line["score"] == 0.75
    assert line["score_interval"] == mean_interval([1.0, 0.5])


def test_a_file_of_an_unfinished_run_is_not_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"kind": "header", "command": "eval.niah"}, item("base", 0, 1.0)]
    (tmp_path / "niah.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for path in (tmp_path, tmp_path / "niah.jsonl"):
        assert report.main([str(path)]) == 1
        assert "has no summary: its run was refused or interrupted" in capsys.readouterr().err


def test_a_control_of_another_budget_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, attended in (("niah", 10), ("niah--random_pages", 20)):
        counted = dict.fromkeys(COUNTED, 0) | {"pages_attended": attended, "pages_held": 100}
        rows = [item(arm, i, 1.0) for arm in ("base", "compare") for i in range(3)]
        rows += [{"kind": "counters", "arm": "base", "task": "single", "length": 1024, "counters": counted}]
        write(tmp_path / f"{name}.jsonl", "eval.niah", rows)
    assert report.main([str(tmp_path)]) == 1
    assert "random_pages read 20.0% of the pages in single where the method read 10.0%" in capsys.readouterr().err


def test_a_control_with_other_questions_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [item(arm, i, 1.0) for arm in ("base", "compare") for i in range(3)]
    write(tmp_path / "niah.jsonl", "eval.niah", rows)
    write(tmp_path / "niah--true_mass.jsonl", "eval.niah", [item("base", i, 1.0, prompt_sha="x") for i in range(3)])
    assert report.main([str(tmp_path)]) == 1
    assert "the control true_mass was not asked 3 of the questions of single" in capsys.readouterr().err


def drift(arm: str, ratio: float | None, every: int | None, agreement: float) -> dict[str, Any]:
    row = {"kind": "summary", "task": "book", "arm": arm, "ratio": ratio, "interval": every, "position": 512}
    bounds = (agreement - 1.005, agreement - 0.995)
    row |= {"n": 20, "agreement": agreement, "density": 0.1, "agreement_change": agreement - 1}
    return row | {"agreement_change_interval": bounds}


def test_drift_has_a_line_for_what_the_server_does() -> None:
    noise, off, often = drift("noise", None, None, 1.0), drift("off", 0.1, 0, 0.8), drift("f8", 0.1, 8, 1.0)
    (line,) = lines_of_drift([noise, off, often], {})
    assert line["task"] == "book, ratio 0.1, f = 8" and line["verdict"] == "same" and line["length"] == 512
    (line,) = lines_of_drift([noise, off], {})
    assert line["task"] == "book, ratio 0.1, f = never" and line["verdict"] == "worse"
    (line,) = lines_of_drift([noise, drift("f32", None, 32, 1.0)], {"true_mass": [noise, drift("f32", None, 32, 0.9)]})
    assert line["task"] == "book, f = 32" and line["verdict"] == "same" and line["true_mass"] == 0.9
    (line,) = lines_of_drift([noise, off, often], {"true_mass": [noise, off]})
    assert "true_mass" not in line
