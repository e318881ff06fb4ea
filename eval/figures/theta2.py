"""What RoBSA's theta2 of 0 costs: needles over theta1, by which layers select, and by which scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.figures.needles import rows_beside_dense
from eval.figures.pictures import save
from eval.figures.report_tables import Column, bounds, number, percent, table, text

PREFIX = "niah-tiny-mla-theta2-"
# By the part of a file's name, in the order of the legend.
LABELS: Mapping[str, str] = {
    "calibrated": "calibrated layers by rotary scores, others dense",
    "full": "calibrated layers by rotary scores, others by full ones",
    "rotary": "all layers by rotary scores (theta2 0)",
}


def _of_file(path: Path, header: Mapping[str, Any]) -> dict[str, Any]:
    layers = path.name.removeprefix(PREFIX).split("-")[0]
    return {"layers": layers, "theta1": header["arguments"]["custom_params"]["theta1"]}


def points(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """What each file found, by ``layers``, ``theta1`` and task; the last two as its header and its rows have them."""
    order = list(LABELS)
    return sorted(
        rows_beside_dense(paths, _of_file), key=lambda row: (order.index(row["layers"]), row["task"], row["theta1"])
    )


def theta2(paths: Sequence[Path]) -> str:
    """A line for each choice of layers, task and theta1."""
    columns: list[Column] = [
        ("layers", lambda row: LABELS[row["layers"]]),
        ("task", text("task")),
        ("theta1", text("theta1")),
        ("n", text("n")),
        ("dense", number("dense", 2)),
        ("sparse", number("score", 2)),
        ("95 %", bounds("score_interval", 2, sign=False)),
        ("read", percent("density")),
    ]
    return table(points(paths), columns)


def plot(paths: Sequence[Path], stem: Path) -> list[Path]:
    """Exact match, and under it the share of the blocks that the selecting layers read, over theta1.

    Args:
        paths: the files.
        stem: path of the picture without a suffix.

    Returns:
        The paths written.
    """
    from matplotlib.figure import Figure

    rows = points(paths)
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure = Figure(figsize=(4.6 * len(tasks), 6.4), layout="constrained")
    panels = figure.subplots(2, len(tasks), sharex=True, sharey="row", squeeze=False)
    for column, task in enumerate(tasks):
        for layers, label in LABELS.items():
            mine = [row for row in rows if (row["layers"], row["task"]) == (layers, task)]
            theta1 = [row["theta1"] for row in mine]
            scores, limits = [row["score"] for row in mine], [row["score_interval"] for row in mine]
            spread = [
                [score - low for score, (low, _) in zip(scores, limits, strict=True)],
                [high - score for score, (_, high) in zip(scores, limits, strict=True)],
            ]
            panels[0][column].errorbar(theta1, scores, yerr=spread, marker="o", capsize=3, label=label)
            panels[1][column].plot(theta1, [row["density"] for row in mine], marker="o", label=label)
        panels[0][column].set(title=task, ylim=(0, 1.05))
        panels[1][column].set(xlabel="theta1", yscale="log")
        panels[1][column].yaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
    panels[0][0].set_ylabel("exact match, 95 %")
    panels[1][0].set_ylabel("blocks read by layers that select")
    panels[0][-1].legend(loc="lower right", fontsize="small")
    return save(figure, stem)
