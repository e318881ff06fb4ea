"""Which layers look numbers up: the table of files of ``eval.lab.blind``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eval.live.record import read_finished
from eval.scores.tables import Column, bounds, length, number, table, text


def blind(paths: Sequence[Path]) -> str:
    """A line for each model and layer that does not see a number, and for none."""
    rows = []
    for path in paths:
        header, *found = read_finished(path)
        model = Path(header["arguments"]["model_path"]).name
        rows += [{"model": model, **row} for row in found if row["kind"] == "summary"]
    columns: list[Column] = [
        ("model", text("model")),
        ("length", length),
        ("layer that does not see the number", lambda row: "none" if row["layer"] is None else str(row["layer"])),
        ("n", text("n")),
        ("first digit right", number("first", 3)),
        ("95 %", bounds("first_interval", 3, sign=False)),
        ("all digits right", number("all", 3)),
    ]
    return table(rows, columns)
