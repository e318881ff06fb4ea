"""What selections keep of the attention: the table of a file of ``eval.recall``."""

from __future__ import annotations

from pathlib import Path

from eval.figures.report_tables import Column, length, number, percent, table, text
from eval.live.record import read_finished


def recall(path: Path) -> str:
    """A line for each length of a file of ``eval.recall``, and for each of its layers."""
    columns: list[Column] = [
        ("length", length),
        ("layer", lambda row: "all" if row["layer"] is None else str(row["layer"])),
        ("prompts", text("n")),
        ("read", percent("density")),
        ("mass kept", number("mass", 3)),
        ("5th percentile", number("mass_low", 3)),
        ("of the best as many", number("share", 4)),
        ("random", number("random", 3)),
        ("its 5th percentile", number("random_low", 3)),
        ("error of the output", number("error", 3)),
        ("random's", number("random_error", 3)),
    ]
    return table([row for row in read_finished(path) if row["kind"] == "summary" and row["head"] is None], columns)
