"""Files of results that figures are made of, files of pictures, and heat maps of scores by depth and length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eval.live.counters import EvaluationError
from eval.live.record import command_name, read_rows
from eval.texts.lengths import short_length

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage


def rows_of(path: Path, command: str) -> list[dict[str, Any]]:
    """The rows of a file that a command wrote; refuses one of another command."""
    rows = read_rows(path)
    writer = rows[0].get("command") if rows else None
    if command_name(writer) != command_name(command):
        raise EvaluationError(f"{path} is no file of {command}: its header names {writer}")
    return rows


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write a picture as SVG to a path without a suffix, making its folders; returns the paths written."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    path = Path(f"{stem}.svg")
    write(figure, path)
    return [path]


def write(figure: Figure, path: Path) -> None:
    """Write a picture; the same rows give the same file."""
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def heatmap(rows: Sequence[Mapping[str, Any]], path_stem: str) -> list[str]:
    """Draw the mean score and the number of questions for each depth and length, one panel a task, as SVG.

    Item rows have ``task``, ``length``, ``depth`` and ``scores``; none draw nothing. `path_stem` has no suffix.
    """
    if not rows:
        return []
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(row["task"] for row in rows))
    lengths, depths = sorted({row["length"] for row in rows}), sorted({row["depth"] for row in rows})
    size = (1.6 + (1.0 + 0.8 * len(lengths)) * len(tasks), 1.4 + 0.6 * len(depths))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(tasks), squeeze=False, sharey=True)[0]
    images = [_panel(axes, task, rows, lengths, depths) for axes, task in zip(panels, tasks, strict=True)]
    panels[0].set_ylabel("depth, %")
    figure.colorbar(images[0], ax=list(panels), label="mean score")
    return [str(path) for path in save(figure, Path(path_stem))]


def _panel(
    axes: Axes, task: str, rows: Sequence[Mapping[str, Any]], lengths: Sequence[int], depths: Sequence[float]
) -> AxesImage:
    means = np.full((len(depths), len(lengths)), np.nan)
    for i, depth in enumerate(depths):
        for j, length in enumerate(lengths):
            place = (task, depth, length)
            mine = [row for row in rows if (row["task"], row["depth"], row["length"]) == place]
            scores = [row["scores"]["score"] for row in mine]
            if not scores:
                continue
            means[i, j] = np.mean(scores)
            # Yellow is bright, the rest of the scale is dark.
            colour = "black" if means[i, j] > 0.6 else "white"
            text = f"{means[i, j]:.2f}\nn={len(scores)}"
            axes.text(j, i, text, ha="center", va="center", color=colour, fontsize=8)
    image = axes.imshow(means, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    axes.set_title(task)
    axes.set_xticks(range(len(lengths)), [short_length(n) for n in lengths])
    axes.set_yticks(range(len(depths)), [f"{100 * depth:g}" for depth in depths])
    axes.set_xlabel("length, tokens")
    return image
