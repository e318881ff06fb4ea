"""Files of results that figures are made of, and files of pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.live.counters import EvaluationError
from eval.live.record import command_name, read_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
