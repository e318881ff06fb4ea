"""Statistics and the plot of the perplexity command, on hand-made numbers."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval import ppl_rectify
from eval.live.counters import EvaluationError
from eval.scores.ppl_summary import Cell, closing_fraction, drifts, plot, summarise
from eval.scores.stats import resamples, standard_error


def nll_rows(text: str, values: dict[tuple[str, float | None, int | None], list[float]]) -> list[dict[str, Any]]:
    return [
        {"kind": "item", **Cell(text, *setting)._asdict(), "window": i, "scores": {"nll": nll}}
        for setting, nlls in values.items()
        for i, nll in enumerate(nlls)
    ]


ROWS = nll_rows(
    "book",
    {
        ("dense", None, None): [1.0, 2.0, 3.0, 4.0],
        ("off", 0.1, 0): [1.5, 2.4, 3.6, 4.5],
        ("rectified", 0.1, 8): [1.1, 2.2, 3.1, 4.2],
        ("rectified", 0.1, 32): [1.3, 2.3, 3.3, 4.3],
        ("bound", 0.1, None): [1.1, 2.0, 3.2, 4.1],
    },
)


def test_closing_fraction() -> None:
    weights = resamples(4, seed=0)
    bound = np.array([1.0, 2.0, 3.0, 4.0])
    off = bound + np.array([0.4, 0.6, 0.4, 0.6])
    half = bound + np.array([0.2, 0.3, 0.2, 0.3])
    for rectified, expected in ((off, 0.0), (half, 0.5), (bound, 1.0)):
        value, spread = closing_fraction(off, rectified, bound, weights)
        # The same share is won back in every window, so that no resample differs.
        assert value == pytest.approx(expected)
        assert spread == pytest.approx((expected, expected), abs=1e-9)
    value, spread = closing_fraction(off, bound + np.array([0.0, 0.6, 0.0, 0.6]), bound, weights)
    assert value == pytest.approx(0.4)
    assert spread is not None and spread[0] == pytest.approx(0.0) and spread[1] == pytest.approx(1.0)


def test_closing_fraction_of_nothing() -> None:
    weights, bound = resamples(2, seed=0), np.array([1.0, 2.0])
    assert closing_fraction(bound, bound, bound, weights) == (None, None)
    value, spread = closing_fraction(bound + np.array([0.5, -0.1]), bound, bound, weights)
    assert value == pytest.approx(1.0) and spread is None


def test_drift_rule() -> None:
    bound = np.zeros(4)
    # Mean .5, standard error .1 and a little less or more.
    error = 0.1 * math.sqrt(3)
    for factor, expected in ((0.99, True), (1.01, False)):
        lost = 0.5 + factor * error * np.array([1.0, -1.0, 1.0, -1.0])
        assert standard_error(lost) == pytest.approx(0.1 * factor * 2 / math.sqrt(4))
        assert drifts(lost, bound) is expected
    assert not drifts(bound, bound)
    assert not drifts(bound - 1, bound)


def test_summary() -> None:
    given = [*ROWS, {"kind": "counters", **Cell("book", "off", 0.1, 0)._asdict(), "density": 0.11}, {"kind": "header"}]
    summary = summarise(given, seed=0)
    assert summary == summarise(given, seed=0)
    dense, off, often, seldom, bound = summary
    assert dense["nll"] == 2.5 and dense["ppl"] == pytest.approx(math.exp(2.5)) and dense["windows"] == 4
    assert dense["diff"] == 0 and dense["diff_interval"] == (0, 0) and "drifts" not in dense
    assert off["diff"] == pytest.approx(0.5) and off["density"] == 0.11 and "closing" not in off
    assert off["diff_interval"][0] == pytest.approx(0.425, abs=0.02) and off["drifts"]
    assert often["closing"] == pytest.approx((3.0 - 2.65) / (3.0 - 2.6)) and seldom["closing"] == pytest.approx(0.5)
    assert often["closing_interval"][0] < often["closing"] < often["closing_interval"][1]
    assert bound["drifts"] and "closing" not in bound


def test_summary_refuses_missing_windows() -> None:
    with pytest.raises(EvaluationError, match="has 3 windows where dense has 4"):
        summarise(ROWS[:-1])
    with pytest.raises(EvaluationError, match="where dense has 0"):
        summarise(ROWS[4:])


@pytest.mark.parametrize("name", ["ppl.png", "ppl.svg"])
def test_plot_from_a_file(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    repeat = [{**row, "task": "repeat"} for row in ROWS]
    (tmp_path / "ppl.jsonl").write_text("\n".join(json.dumps(row) for row in [{"kind": "header"}, *ROWS, *repeat]))
    arguments = ["--from", str(tmp_path / "ppl.jsonl"), "--plot", str(tmp_path / name)]
    assert ppl_rectify.main(arguments) == 0
    assert (tmp_path / name).stat().st_size > 5000
    assert capsys.readouterr().out.count("rectified") == 4


def test_plot_shows_all_settings(tmp_path: Path) -> None:
    plot(summarise(ROWS), tmp_path / "ppl.svg")
    text = (tmp_path / "ppl.svg").read_text()
    for label in ("dense", "ratio 0.1", "bound, ratio 0.1", "never", "32", "perplexity"):
        assert f"<!-- {label} -->" in text
