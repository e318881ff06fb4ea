"""Files of results that figures are made of, and files of pictures."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.live.counters import EvaluationError
from eval.live.record import command_name, read_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def add_file_arguments(parser: argparse.ArgumentParser, without: str) -> None:
    """Arguments of a command that writes a file and can draw it again: ``--out --plot --from --label --revision``.

    `without` is not needed to take the figures of a file, such as "a server".
    """
    parser.add_argument("--out", type=Path, help="JSONL file; a run that was interrupted goes on")
    parser.add_argument("--plot", type=Path, help="path without a suffix, for a picture as SVG")
    parser.add_argument(
        "--from", type=Path, dest="file", help=f"take the figures of this JSONL file, without {without}"
    )
    parser.add_argument("--label", help="kept in the file's header")
    parser.add_argument("--revision", help="of this code, where its git history is not at hand")


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
