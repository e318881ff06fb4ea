"""Statistics and the plot of the recall command, on hand-made numbers."""

from pathlib import Path
from typing import Any

import pytest

from eval.lab.selection.recall_summary import plot, summarise
from eval.live.counters import EvaluationError


def hand_made(prompts: int) -> list[dict[str, Any]]:
    rows = []
    for index in range(prompts):
        for layer in range(2):
            for head in range(3):
                mass = [0.1 * (index + 1), 0.2 * (layer + 1)]
                scores = {"mass": sum(mass) / 2, "best": 0.8, "random": 0.1, "error": 0.5}
                scores |= {"best_error": 0.25, "random_error": 1.0}
                kept = {"method": mass, "best": [0.8] * 2, "random": [0.1] * 2}
                place = {"length": 100, "index": index, "layer": layer, "head": head, "density": 0.1}
                identity = {"kind": "item", "task": "needle", "arm": "resa", "id": f"100/{index}/{layer}/{head}"}
                rows.append({**identity, **place, "scores": scores, "kept": kept})
    return rows


def test_figures() -> None:
    summary = summarise([{"kind": "header"}, *hand_made(3)])
    assert [(row["layer"], row["head"]) for row in summary] == [
        (None, None),
        *((layer, head) for layer in (0, 1) for head in (None, 0, 1, 2)),
    ]
    whole, layer = summary[:2]
    assert whole["n"] == 3 and whole["mass"] == pytest.approx((0.2 + 0.3) / 2) and layer["mass"] == pytest.approx(0.2)
    assert whole["share"] == pytest.approx(whole["mass"] / 0.8)
    assert layer["mass_interval"] == pytest.approx((0.15, 0.25)) and layer["mass_low"] == pytest.approx(0.1)
    assert (whole["error"], whole["best_error"], whole["density"]) == (0.5, 0.25, 0.1)
    assert summarise(hand_made(1))[0]["mass_interval"] is None
    # Of equal items the last counts.
    assert summarise([{**hand_made(3)[0], "scores": {}}, *hand_made(3)]) == summary


def test_unfinished_files_are_refused() -> None:
    with pytest.raises(EvaluationError, match="unfinished"):
        summarise(hand_made(2)[:-1])
    with pytest.raises(EvaluationError, match="no items"):
        summarise([])


def test_plot_says_what_it_shows(tmp_path: Path) -> None:
    written = plot(summarise(hand_made(2)), tmp_path / "new" / "recall")
    assert [path.name for path in written] == ["recall.svg"]
    assert written[0].stat().st_size > 5000
    drawn = written[0].read_text()
    for text in ("query head", "layer", "attention mass kept"):
        assert f"<!-- {text} -->" in drawn
    assert "100 tokens: resa, 10.0% of the pages" in drawn
