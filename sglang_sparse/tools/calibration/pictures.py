"""Pictures of a calibration, which come with matplotlib and never stand in the way of what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure | None:
    """An empty figure, in inches; without matplotlib None, and a note."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed (it comes with sglang-sparse[eval])")
        return None
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: Path) -> None:
    """Write a figure and say where; where that cannot be done, it is a note."""
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        print(f"no plot: {error}")
        return
    print(f"plot: {path}")
