"""Decode steps of RocketKV and Skip-Softmax beside dense ones: the picture of a file of ``bench_framework``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.scores.pictures import save

COMMAND, DENSE, PART = "eval.lab.bench_framework", "dense_decode", "rocketkv_predict"

Row = Mapping[str, Any]


def bars(rows: Sequence[Row], shape: str) -> list[tuple[str, Row]]:
    """Return the bars of a shape with their names: whole steps only, dense peers first, the fastest of them first.

    Args:
        rows: of the file.
        shape: batch and context, as the rows have it.
    """
    mine = [
        row for row in rows if row["kind"] == "item" and row["shape"] == shape and "us" in row and row["op"] != PART
    ]
    dense = sorted((row for row in mine if row["op"] == DENSE), key=lambda row: row["us"])
    named = [(f"dense, {row['implementation']}", row) for row in dense]
    return named + [(row["op"], row) for row in mine if row["op"] != DENSE]


def plot(rows: Sequence[Row], stem: Path) -> list[Path]:
    """Microseconds a layer, a panel for each batch and context; numbers: times faster than the fastest dense peer.

    Args:
        rows: of the file.
        stem: path without a suffix.

    Returns:
        The paths written.
    """
    from matplotlib.figure import Figure

    shapes = list(dict.fromkeys(row["shape"] for row in rows if row["kind"] == "item"))
    figure = Figure(figsize=(5.5 * max(1, len(shapes)), 3.2), layout="constrained")
    panels = figure.subplots(1, max(1, len(shapes)), squeeze=False)[0]
    for shape, axes in zip(shapes, panels, strict=False):
        found = bars(rows, shape)
        names, times = [name for name, _ in found], [row["us"] for _, row in found]
        drawn = axes.barh(names, times, color=["C7" if row["op"] == DENSE else "C0" for _, row in found])
        said = [f"{row['dense_ratio']:.2f}" if row.get("dense_ratio") else "" for _, row in found]
        axes.bar_label(drawn, said, padding=3, fontsize=7)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set(title=shape, xlabel="µs a layer (numbers: times faster than dense)")
    return save(figure, stem)
