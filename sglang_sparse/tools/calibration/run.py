"""Store the results of a long calibration prompt by prompt until it is complete, and write its plots."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_sparse.tools.calibration.capture import CalibrationError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def partial_path(out: Path) -> Path:
    """Return the file of a run's results until they are complete, next to its output file."""
    return out.with_suffix(".partial.jsonl")


class Partial:
    """A JSONL file: what identifies the run, then a row for each prompt, in their order.

    Args:
        path: of the file; made if it is absent, continued if it is of the same run.
        run: what identifies the run, as JSON has it.

    Attributes:
        rows: what was found so far.

    Raises:
        CalibrationError: the file is of another run.
    """

    def __init__(self, path: Path, run: Mapping[str, object]) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        # An interruption may have cut the last one. What follows a broken row would be taken for other prompts'.
        parsed = list(_parsed(lines))
        if parsed and parsed[0] != run:
            other = sorted(name for name in {*run, *parsed[0]} if parsed[0].get(name) != run.get(name))
            message = (
                f"{path}: is of an interrupted run with other {', '.join(other)}; remove it, or give another --out"
            )
            raise CalibrationError(message, field="--out", got=path)
        self.rows: list[dict[str, Any]] = parsed[1:]
        # At any moment the file is the old one or the new one.
        whole = path.with_suffix(".tmp")
        whole.write_text("".join(json.dumps(row) + "\n" for row in (run, *self.rows)))
        os.replace(whole, path)

    def add(self, row: Mapping[str, object]) -> None:
        """Keep the next prompt's."""
        self.rows.append(dict(row))
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def _parsed(lines: Sequence[str]) -> Iterator[dict[str, object]]:
    """The rows up to the first line that is none."""
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            return
        if not isinstance(row, dict):
            return
        yield row


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
