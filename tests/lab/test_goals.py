"""The goals are well formed, and their table says what the result files say and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest

from eval.lab import documents
from eval.lab.tables import goals
from eval.lab.tables.goals import QUALITY, UNITS, Goal, goals_table, measured, read_goals, read_results
from eval.live.counters import EvaluationError

BENCHES = ("kernels", "framework", "mla", "dsa", "prefill", "decode", "serving", "throughput", "goodput")
COMMANDS = tuple(f"bench_{name}" for name in BENCHES)


def results(path: Path, *rows: dict[str, Any], command: str = "eval.lab.bench_kernels", **header: Any) -> None:
    lines = [{"kind": "header", "command": command, **header}, *({"kind": "summary", **row} for row in rows)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def cells(table: str, name: str) -> list[list[str]]:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return [line[1:] for line in lines if line[0] == name]


def goal(**changes: Any) -> Goal:
    row = {"command": "bench_kernels", "op": "page_topk"}
    facts: dict[str, Any] = {"id": "K0", "part": "8x64k", "what": "it", "unit": "ratio", "must": 2.0, "stretch": 3.0}
    return Goal(**facts | {"limit": None, "row": row, "read": "dense_ratio"} | changes)


def test_goals_are_well_formed() -> None:
    found = read_goals()
    assert len({(one.id, one.part) for one in found}) == len(found)
    ids = [f"K{i}" for i in range(1, 14)] + [f"E{i}" for i in range(1, 10)] + ["R1", "R2"]
    assert list(dict.fromkeys(one.id for one in found)) == ids
    assert len({(one.read, *sorted((name, str(value)) for name, value in one.row.items())) for one in found}) == len(
        found
    )
    for one in found:
        _, more_is_better = UNITS[one.unit]
        order = [bound for bound in (one.must, one.stretch, one.limit) if bound is not None]
        assert order == sorted(set(order), reverse=not more_is_better), one
        assert one.row["command"] in COMMANDS and set(one.quality) <= set(QUALITY), one
        assert bool(one.quality_from) == (one.row["command"] == "bench_decode"), one
        if one.quality_from:
            assert one.quality_from["command"] in COMMANDS and one.part.endswith(one.quality_from["shape"]), one
            assert (one.quality_from["active_ratio"] == 0.05) == ("fp8-r.05" in one.row["shape"]), one


def test_nothing_but_files_is_in_the_table(tmp_path: Path) -> None:
    table = goals_table(tmp_path)
    assert table.splitlines()[0] == "| id | goal | must | stretch | limit | reached |"
    assert len(table.splitlines()) == 2 + len(read_goals())
    assert all(line.endswith("| not measured |") for line in table.splitlines()[2:])


def test_measured_goals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {"page_size": 16, "active_ratio": 0.1, "summary_dtype": "bfloat16"}
    sizes = {"q_heads": 32, "kv_heads": 8, "dim": 128, "implementation": "sglang_sparse"}
    rows = [
        {
            "op": "score+topk+decode",
            "shape": "8x64k",
            "dense_ratio": 5.41,
            "us": 105.1,
            "relative_l2": 0.0021,
            "recall": 0.5,
            "dense_l2": 0.31,
        },
        {"op": "score+topk+decode", "shape": "1x128k", "dense_ratio": 4.0},
        {"op": "score+topk+decode", "shape": "1x32k", "dense_ratio": 2.399},
        {"op": "page_topk", "shape": "8x64k", "us": 4.0, "agreement": 1.0},
        {"op": "page_topk", "shape": "1x128k", "us": 4.001},
    ]
    results(tmp_path / "kernels.jsonl", *({**row, **sizes} for row in rows), arguments=arguments)
    decode = {"arm": "rectified", "shape": "qwen3-8b-6x128k-fp8-r.05", "dense_ratio": 3.7, "density": 0.05}
    results(tmp_path / "a.jsonl", decode, command="eval.lab.bench_decode", interval=64)
    results(tmp_path / "b.jsonl", {**decode, "dense_ratio": 3.9}, command="eval.lab.bench_decode", interval=32)
    assert documents.main(["--goals", "--results", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    first, micros = cells(table, "K1")
    assert first[1:] == [
        "5.41x", "4.75x", "5.4x", "6.15x", "stretch",
        "relative L2 0.0021, relative L2 to dense 0.31, mass kept 0.500", "kernels.jsonl",
    ]  # fmt: skip
    assert [*micros[1:3], micros[5]] == ["105.1 µs", "≤ 105 µs", "missed"]
    assert [cells(table, name)[0][5] for name in ("K2", "K3")] == ["must", "missed"]
    assert [line[1:3] + line[5:7] for line in cells(table, "K4")] == [
        ["4 µs", "≤ 4 µs", "must", "same pages 100.0%"],
        ["4.001 µs", "≤ 4 µs", "missed", ""],
        ["", "≤ 4 µs", "not measured", ""],
    ]
    assert [line[1] for line in cells(table, "E3")] == ["", "3.7x"]
    assert cells(table, "E3")[1][5:] == ["must", "read 5.0%", "a.jsonl"]


def test_quality_of_an_operation_beside_a_server(tmp_path: Path) -> None:
    kernel = {"command": "bench_kernels", "op": "whole", "recipe": {}}
    one = goal(row={"command": "bench_decode", "arm": "rectified"}, quality=["density"], quality_from=kernel)

    def quality() -> str | None:
        found = read_results(tmp_path, COMMANDS)
        return goals.line(one, measured(one, found), goals.operation(one, found)).get("quality")

    row = {"op": "whole", "recall": 0.7, "dense_l2": 0.41, "relative_l2": 0.002}
    results(tmp_path / "kernels.jsonl", row, arguments={"recipe": {}}, started="2026-11-20T10:00:00+00:00")
    assert quality() is None, "what was not measured has no quality"
    decode = {"arm": "rectified", "dense_ratio": 3.0, "density": 0.05}
    results(tmp_path / "decode.jsonl", decode, command="eval.lab.bench_decode")
    assert quality() == "read 5.0%; operation: mass kept 0.700, relative L2 to dense 0.41"
    newer = {"started": "2026-11-21T10:00:00+00:00"}
    results(tmp_path / "normal.jsonl", {**row, "recall": 0.1}, arguments={"recipe": None}, **newer)
    results(tmp_path / "other.jsonl", {**row, "op": "page_topk"}, arguments={"recipe": {}}, **newer)
    assert quality() == "read 5.0%; operation: mass kept 0.700, relative L2 to dense 0.41", "other inputs or operations"
    (tmp_path / "kernels.jsonl").unlink()
    assert quality() == "read 5.0%"


def test_bounds_are_inclusive_and_some_goals_have_no_stretch() -> None:
    assert [goal().verdict(figure) for figure in (3.0, 2.999, 2.0, 1.999)] == ["stretch", "must", "must", "missed"]
    assert [goal(unit="us").verdict(figure) for figure in (1.9, 2.0, 2.1)] == ["stretch", "stretch", "stretch"]
    assert [goal(unit="us", stretch=None).verdict(figure) for figure in (2.0, 2.1)] == ["must", "missed"]
    assert goal(unit="pages", must=0, stretch=None).verdict(0) == "must"


def test_what_no_hardware_allows_is_no_success() -> None:
    bounded = goal(limit=4.0)
    assert [bounded.verdict(figure) for figure in (3.9, 4.0, 4.03)] == ["stretch"] * 3
    assert [bounded.verdict(figure) for figure in (4.05, 40.0)] == ["beyond the limit"] * 2
    micros = goal(unit="us", must=4.0, stretch=3.0, limit=2.0)
    assert [micros.verdict(figure) for figure in (3.5, 2.0, 1.99)] == ["must", "stretch", "stretch"]
    assert [micros.verdict(figure) for figure in (1.97, 0.0)] == ["beyond the limit"] * 2
    # What noise can be, is none; but then the end counts that is surely reached.
    ends = [(low, 4.4) for low in (1.9, 2.5, 3.5, 4.03, 4.05)]
    assert [bounded.verdict(4.2, end) for end in ends] == ["missed", "must", "stretch", "stretch", "beyond the limit"]
    assert [micros.verdict(1.9, (1.8, high)) for high in (4.1, 1.99, 1.97)] == ["missed", "stretch", "beyond the limit"]
    assert bounded.verdict(3.5, (1.0, 5.0)) == "stretch"


def found(folder: Path) -> str:
    row = measured(goal(), read_results(folder, ["bench_kernels"]))
    return "none" if row is None else f"{row[1].name} {row[0]['dense_ratio']}"


def test_the_newest_file_counts(tmp_path: Path) -> None:
    row = {"op": "page_topk", "dense_ratio": 1.0}
    results(tmp_path / "b.jsonl", row)
    results(tmp_path / "a.jsonl", row)
    assert found(tmp_path) == "b.jsonl 1.0"
    results(tmp_path / "a.jsonl", row, started="2026-11-20T10:00:00+00:00")
    assert found(tmp_path) == "a.jsonl 1.0"
    results(tmp_path / "0.jsonl", {**row, "dense_ratio": 2.0}, started="2026-11-21T09:00:00+00:00")
    assert found(tmp_path) == "0.jsonl 2.0"
    results(tmp_path / "1.jsonl", {**row, "dense_ratio": None}, started="2026-11-22T09:00:00+00:00")
    assert found(tmp_path) == "0.jsonl 2.0"


def test_only_summaries_of_the_command_count(tmp_path: Path) -> None:
    row = {"op": "page_topk", "dense_ratio": 1.0}
    results(tmp_path / "other.jsonl", row, command="eval.lab.bench_decode")
    results(tmp_path / "unfinished.jsonl", {**row, "kind": "item"})
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert found(tmp_path) == "none"


def test_two_rows_of_one_file_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"op": "page_topk", "dense_ratio": 1.0}
    results(tmp_path / "k.jsonl", row, {**row, "shape": "1x1"})
    with pytest.raises(EvaluationError, match=r"k\.jsonl has 2 rows for goal K0 \(8x64k\): one must count"):
        found(tmp_path)
    monkeypatch.setattr(goals, "read_goals", lambda path: [goal()])
    assert documents.main(["--goals", "--results", str(tmp_path)]) == 1


def test_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert documents.main(["--goals", "--results", str(tmp_path / "none")]) == 1
    assert "none is no folder of results" in capsys.readouterr().err
