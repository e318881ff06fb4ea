"""Statistics and plot of ``eval.theta``, from the rows of its JSONL file alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from eval.figures.pictures import save
from eval.figures.report_tables import length, number, percent, table, text
from eval.live.counters import EvaluationError
from eval.live.record import read_finished

Row = Mapping[str, Any]
VISIBLE = 0.002
LABELS = {True: "with anchor", False: "without anchor"}


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Average over prompts, layers and query heads.

    Args:
        rows: of the JSONL file: ``item`` rows with task, length, layer, anchor, theta, sparsity and recall by head.
            Of equal items the last counts.

    Returns:
        One dict for each task, length, comparison and threshold: sparsity and recall, means of all heads, and
        ``recall_low``, the recall of the worst head of a layer.

    Raises:
        EvaluationError: there are no items.
    """
    items = {row["id"]: row for row in rows if row["kind"] == "item"}
    if not items:
        raise EvaluationError("there are no items to judge")
    names = ("task", "length", "anchor", "theta")
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in items.values():
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return [
        {
            **dict(zip(names, place, strict=True)),
            "sparsity": fmean(share for row in found for share in row["sparsity"]),
            "recall": fmean(share for row in found for share in row["recall"]),
            "recall_low": min(share for row in found for share in row["recall"]),
        }
        for place, found in sorted(groups.items(), key=lambda group: (*group[0][:2], not group[0][2], group[0][3]))
    ]


def theta(paths: Sequence[Path]) -> str:
    """Sparsity and recall of files of ``eval.theta``, at every threshold that changes them."""
    rows: list[dict[str, Any]] = []
    for path in paths:
        for row in summarise(read_finished(path)):
            last = rows[-1] if rows else {}
            same = all(last.get(name) == row[name] for name in ("task", "length", "anchor"))
            if not same or max(abs(last[name] - row[name]) for name in ("sparsity", "recall")) > VISIBLE:
                rows.append({**row, "score": LABELS[row["anchor"]], "threshold": f"{row['theta']:g}"})
    columns = [
        ("input", text("task")),
        ("length", length),
        ("compared", text("score")),
        ("θ", text("threshold")),
        ("left out", percent("sparsity")),
        ("mass kept", number("recall", 3)),
        ("worst head", number("recall_low", 3)),
    ]
    return table(rows, columns)


def plot(summary: Sequence[Row], stem: Path) -> list[Path]:
    """Recall over sparsity, a line with the anchor and one without, a panel for each task and length.

    Args:
        summary: rows of `summarise`.
        stem: path without a suffix.

    Returns:
        The paths written: PNG and SVG.
    """
    from matplotlib.figure import Figure

    places = list(dict.fromkeys((row["task"], row["length"]) for row in summary))
    figure = Figure(figsize=(4.5 * len(places), 3.5), layout="constrained")
    panels = figure.subplots(1, len(places), squeeze=False, sharey=True)[0]
    for (task, size), axes in zip(places, panels, strict=True):
        for anchor, label in LABELS.items():
            line = [row for row in summary if (row["task"], row["length"], row["anchor"]) == (task, size, anchor)]
            axes.plot([row["sparsity"] for row in line], [row["recall"] for row in line], marker="o", label=label)
            for row in line:
                axes.annotate(f"{row['theta']:g}", (row["sparsity"], row["recall"]), fontsize=7)
        axes.set_title(f"{task}, {size} tokens (numbers: θ)")
        axes.set_xlabel("sparsity: pairs left out")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("attention mass kept")
    panels[0].legend()
    return save(figure, stem)
