"""The judge on the trained tiny model: ReSA finds needles, and a window does not."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eval import niah
from eval.live.record import read_rows
from launch.server import ServerProcess

pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent.parent
MODEL = ROOT / "eval" / "models" / "tiny-gqa"
TENTH = {"active_ratio": 0.1, "dense_fallback": "never"}
SHORT = "2k"


def start(serve, method: str, config: dict[str, object], python_path: Path):
    flags = ["--sparse-method", method, "--sparse-config", json.dumps(config), "--context-length", "10240"]
    return serve(MODEL, *flags, env={"PYTHONPATH": str(python_path)})


def ask(server: ServerProcess, out: Path, *more: str) -> list[dict[str, Any]]:
    """The summary of single needles and multi-key ones."""
    # An answer has eight; a control that does not find it would go on.
    arguments = ["--base-url", server.url, "--out", str(out), "--concurrency", "4", "--answer-tokens", "12"]
    if "--tasks" not in more:
        arguments += ["--tasks", "single,multikey"]
    assert niah.main([*arguments, *more]) == 0
    return [row for row in read_rows(out) if row["kind"] == "summary"]


@pytest.fixture(scope="module")
def resa(serve) -> Iterator[ServerProcess]:
    # Room for all prompts that the judge asks, which are asked once more for its dense reference.
    with serve(MODEL, "--context-length", "10240", "--max-total-tokens", "131072", config=TENTH) as server:
        yield server


def test_resa_finds_needles_in_4k(resa: ServerProcess, tmp_path: Path) -> None:
    for line in ask(resa, tmp_path / "niah.jsonl", "--lengths", "4k", "--n", "1", "--expect", "resa"):
        assert line["score"] == 1.0 and line["density"] < 0.12 and line["dense_rows"] == 0, line


def test_dense_scores_repeat_over_seeds(resa: ServerProcess, tmp_path: Path) -> None:
    dense = ("--custom-params", '{"sparse": false}', "--tasks", "multikey")
    sizes = ("--lengths", "1k", "--n", "4", "--depths", "0,50,100")
    found = [ask(resa, tmp_path / f"{seed}.jsonl", "--seed", str(seed), *dense, *sizes)[0] for seed in range(3)]
    low, high = (pick(line["score_interval"][i] for line in found) for i, pick in ((0, max), (1, min)))
    assert all(low <= line["score"] <= high for line in found), found


def test_the_window_of_contributing_does_not_find_them(serve, contributed: Path, tmp_path: Path) -> None:
    config = {"dense_fallback": "never", "window_pages": 12}
    with start(serve, "window", config, contributed) as server:
        lines = ask(server, tmp_path / "niah.jsonl", "--lengths", SHORT, "--n", "3", "--depths", "0,30,60")
    assert all(line["score"] < 0.2 for line in lines), lines
