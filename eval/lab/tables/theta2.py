"""What RoBSA's theta2 of 0 costs: needles over theta1, by which layers select, and by which scores.

Of what the other layers read, the files tell the sum over all that select. In tiny-mla they are one, the last one: what
it selects changes nothing that the layers before it read, but for tokens that an answer then has. So what it reads is
what is left of the sum where it selects, less that of the calibrated layers alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.lab.tables.needles import rows_beside_dense
from eval.scores.pictures import save
from eval.scores.tables import Column, bounds, number, percent, table, text

PREFIX = "niah-tiny-mla-theta2-"
# By the part of a file's name, in the order of the legend.
LABELS: Mapping[str, str] = {
    "calibrated": "calibrated layers by rotary scores, others dense",
    "full": "calibrated layers by rotary scores, others by full ones",
    "rotary": "all layers by rotary scores (theta2 0)",
}


def _of_file(path: Path, header: Mapping[str, Any]) -> dict[str, Any]:
    layers = path.name.removeprefix(PREFIX).split("-")[0]
    selecting = header["servers"]["base"]["sparse"]["sparse_layers"]
    return {"layers": layers, "theta1": header["arguments"]["custom_params"]["theta1"], "selecting": selecting}


def points(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """What each file found, by ``layers``, ``theta1`` and task, and how many layers were ``selecting``."""
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
    """Exact match, and under it the share of the blocks that the selecting layers read, over theta1; then over it.

    Args:
        paths: the files.
        stem: path of the picture without a suffix.

    Returns:
        The paths written.
    """
    from matplotlib.figure import Figure

    rows = points(paths)
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure = Figure(figsize=(4.6 * len(tasks), 9.4), layout="constrained")
    panels = figure.subplots(3, len(tasks), sharex="row", sharey="row", squeeze=False)
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
            read = [row["density"] for row in mine]
            panels[1][column].plot(theta1, read, marker="o", label=label)
            panels[2][column].errorbar(read, scores, yerr=spread, marker="o", capsize=3, label=label)
        panels[0][column].set(title=task, xlabel="theta1", ylim=(0, 1.05))
        panels[1][column].set(xlabel="theta1", yscale="log")
        panels[1][column].yaxis.set_major_formatter(_percent)
        panels[2][column].set(xlabel="blocks read by layers that select", xscale="log", ylim=(0, 1.05))
        panels[2][column].xaxis.set_major_formatter(_percent)
    for row in (0, 2):
        panels[row][0].set_ylabel("exact match, 95 %")
    panels[1][0].set_ylabel("blocks read by layers that select")
    panels[0][-1].legend(loc="lower right", fontsize="small")
    return save(figure, stem)


def _percent(share: float, _: object) -> str:
    return f"{100 * share:g} %"
