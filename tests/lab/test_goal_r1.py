"""Goal R1, the first token of a prompt whose prefix is cached: its interval, earlier files, and its leg."""

import json
from pathlib import Path

import pytest
from generated_stubs import goals_of, install_client
from serving_stubs import FakeServer

from eval.lab import bench_serving
from eval.lab.legs.leg import LEGS
from eval.lab.tables import files
from eval.live.record import read_rows

K = 1024
OLD = {"kind": "summary", "id": "sparse/prefix_hit", "task": "prefix_hit", "arm": "sparse", "context": 128 * K}
OLD |= {"hits": 10, "pages_summarised": 40, "recomputed": 0, "ttft": 0.0469, "ttft_range": [0.0406, 0.0536]}
OLD |= {"dense_ttft": 0.0457, "dense_ttft_range": [0.0403, 0.0516], "ttft_over_dense": 1.0252}


def test_the_goal_has_the_interval_of_the_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_client(monkeypatch)
    monkeypatch.setattr(FakeServer, "step", {"sparse": 0.004, "dense": 0.004})
    monkeypatch.setattr(FakeServer, "drift", 0.04 / 130)
    grid = ["--shape", "qwen3-8b", "--contexts", "32k", "--batch", "1", "--server-args", "--page-size 16"]
    assert bench_serving.main([*grid, "--out", str(tmp_path / "serving.jsonl"), "--both", "--hits", "60"]) == 0
    (row,) = [
        row for row in read_rows(tmp_path / "serving.jsonl") if row["kind"] == "summary" and row["task"] == "prefix_hit"
    ]
    low, high = row["ttft_over_dense_interval"]
    measured, verdict, quality = goals_of(tmp_path, "R1")["TTFT"]
    assert measured == f"{row['ttft_over_dense']:.4g} of dense" and verdict == "must"
    assert quality == f"95 % interval {low:.3f} … {high:.3f}"


def test_files_from_before_there_was_an_interval(tmp_path: Path) -> None:
    arguments = {"shape": "qwen3-8b", "sparse_method": "resa", "both": True}
    header = {"kind": "header", "command": "eval.bench_serving", "arguments": arguments}
    path = tmp_path / "serving.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (header, OLD)))
    found = goals_of(tmp_path, "R1")
    assert found["TTFT"] == ["1.025 of dense", "must", ""]
    assert "| 0.046 | 0.040 … 0.052 | 1.025 | 0 |" in files.any_table(path)


def test_the_leg_of_r1_asks_often_enough() -> None:
    (arguments,) = [command.arguments for leg in LEGS for command in leg.commands if "R1" in command.goals]
    assert "--both" in arguments and int(arguments[arguments.index("--hits") + 1]) >= 60
