"""Sparse prefill against its peers: the table and the picture of a file of ``eval.lab.bench_prefill``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eval.live.record import read_finished
from eval.scores.pictures import save
from eval.scores.tables import Column, number, percent, table, text

COMMAND = "eval.lab.bench_prefill"

Row = Mapping[str, Any]


def prefill(path: Path) -> str:
    """Milliseconds of a prompt's attention in one layer, and what the output is worth."""
    columns: list[Column] = [
        ("prompt", text("shape")),
        ("by", text("label")),
        ("ms a layer", number("us", 2, 1e-3)),
        ("times faster", number("dense_ratio", 2)),
        ("TFLOP/s", number("tflops", 0)),
        ("left out", percent("sparsity")),
        ("mass kept", number("recall", 3)),
        ("relative L2 to dense", number("dense_l2", 3)),
        ("finding the keys", percent("search")),
        ("anchor at this mass, times faster", number("equal_recall", 2)),
        ("why not", text("unavailable")),
    ]
    items = _absent_once([row for row in read_finished(path) if row["kind"] == "item"])
    return table(with_equal_recall([with_search(row) for row in items]), columns)


def _absent_once(items: Sequence[Row]) -> list[Row]:
    """The rows, of a peer that is not there for the same reason at any setting one."""
    found: dict[tuple[str, ...], Row] = {}
    for row in items:
        if "unavailable" in row:
            name = row["implementation"]
            found.setdefault((row["shape"], name, row["unavailable"]), {**row, "label": name})
        else:
            found[row["id"],] = row
    return list(found.values())


def with_equal_recall(items: Sequence[Row]) -> list[Row]:
    """The rows, those of sparse peers with ``equal_recall``: their time over that of this project's op at their recall.

    Between two of its thresholds the logarithm of its time is linear in the recall; a peer whose recall none of them
    spans has no such figure.

    Args:
        items: rows of kind ``item``.
    """
    found: list[Row] = []
    for row in items:
        ours = [other for other in items if not other["peer"] and other["shape"] == row["shape"] and "us" in other]
        ours = sorted((other["recall"], math.log(other["us"])) for other in ours)
        if row["peer"] and row.get("setting") and "us" in row and ours and ours[0][0] <= row["recall"] <= ours[-1][0]:
            recalls, times = zip(*ours, strict=True)
            row = {**row, "equal_recall": row["us"] / math.exp(np.interp(row["recall"], recalls, times))}
        found.append(row)
    return found


def with_search(row: Row) -> Row:
    """With ``search``, the share of the kernels' time that finding the active keys takes, where ``parts`` say it."""
    parts = row.get("parts") or {}
    search = sum(us for name, us in parts.items() if "identify" in name or "compact" in name)
    return {**row, "search": search / sum(parts.values())} if search else row


def plot(rows: Sequence[Row], stem: Path) -> list[Path]:
    """Times faster than dense over the attention mass kept: a line for each method, a panel for each length.

    Args:
        rows: of the file.
        stem: path without a suffix.

    Returns:
        The paths written.
    """
    from matplotlib.figure import Figure

    items = [row for row in rows if row["kind"] == "item" and "dense_ratio" in row]
    shapes = list(dict.fromkeys(row["shape"] for row in items))
    figure = Figure(figsize=(4.5 * max(1, len(shapes)), 3.5), layout="constrained")
    panels = figure.subplots(1, max(1, len(shapes)), squeeze=False)[0]
    for shape, axes in zip(shapes, panels, strict=False):
        mine = [row for row in items if row["shape"] == shape]
        for name in dict.fromkeys(row["implementation"] for row in mine if row.get("setting")):
            line = sorted((row for row in mine if row["implementation"] == name), key=lambda row: row["recall"])
            axes.plot([row["recall"] for row in line], [row["dense_ratio"] for row in line], marker="o", label=name)
            for row in line:
                axes.annotate(f"{row['value']:g}", (row["recall"], row["dense_ratio"]), fontsize=7)
        axes.axhline(1, color="gray", linewidth=1)
        axes.set_title(f"{shape} (numbers: the setting)")
        axes.set_xlabel("attention mass kept")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("times faster than dense")
    if shapes:
        panels[0].legend()
    return save(figure, stem)
