"""Statistics and the plot of the drift command, on hand-made numbers."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from eval import long_generation
from eval.live.counters import EvaluationError
from eval.scores.long_summary import plot, summarise


def hand_made(settings: Sequence[tuple[str, float | None, int | None, float]]) -> list[dict[str, Any]]:
    rng = random.Random(0)
    rows: list[dict[str, Any]] = [{"kind": "header", "command": long_generation.COMMAND}]
    for name, ratio, every, level in settings:
        for index in range(8):
            for position in (64, 256, 1024):
                scores = {"kl": level * position / 64 * rng.uniform(0.5, 1.5), "agreement": 1 - level}
                row = {"task": "book", "arm": name, "ratio": ratio, "interval": every, "index": index}
                rows.append({"kind": "item", **row, "position": position, "scores": scores})
    return rows


HAND_MADE = hand_made([("noise", None, None, 0.0), ("off", None, 0, 0.02), ("every 32", None, 32, 0.01)])


def test_figures_of_hand_made_rows() -> None:
    summary = summarise(HAND_MADE, seed=3)
    assert summary == summarise(HAND_MADE, seed=3) and len(summary) == 9
    off = [row for row in summary if row["arm"] == "off"]
    assert all(row["kl_interval"][0] < row["kl"] < row["kl_interval"][1] for row in off)
    assert off[0]["kl"] < off[1]["kl"] < off[2]["kl"] and off[0]["agreement"] == pytest.approx(0.98)
    for row in summary:
        if row["arm"] == "every 32":
            assert row["kl_change_interval"][0] < row["kl_change"] < row["kl_change_interval"][1] < 0


def test_unfinished_files_are_refused() -> None:
    with pytest.raises(EvaluationError, match=r"every 32 has 23 items where noise has 24.*not finished"):
        summarise(HAND_MADE[:-1])
    with pytest.raises(EvaluationError, match="no items"):
        summarise(HAND_MADE[:1])


def test_plot_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in HAND_MADE))
    assert long_generation.main(["--from", str(file), "--plot", str(tmp_path / "new" / "drift")]) == 0
    assert "every 32" in capsys.readouterr().out
    drawn = (tmp_path / "new" / "drift.svg").read_text()
    for text in ("dense again (noise)", "off", "every 32", "KL(dense, sparse), nats", "1024"):
        assert f"<!-- {text} -->" in drawn


def test_plot_has_a_column_for_each_text(tmp_path: Path) -> None:
    both = [*summarise(HAND_MADE), *({**row, "task": "records"} for row in summarise(HAND_MADE))]
    plot(both, tmp_path / "drift")
    drawn = (tmp_path / "drift.svg").read_text()
    assert "<!-- book -->" in drawn and "<!-- records -->" in drawn
