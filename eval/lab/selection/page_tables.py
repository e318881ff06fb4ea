"""The attention that selections keep: tables of `page_statistics` and `page_answers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from eval.lab.selection.page_statistics import STATISTICS, TRUE
from eval.live.record import read_finished
from eval.scores.tables import Column, Row, number, table, text


def answers(path: Path) -> str:
    """Return the table of `eval.lab.selection.page_answers`: the right answers and the mass kept, by statistic."""
    header, *rows = read_finished(path)
    columns: list[Column] = [("pages by", text("statistic")), ("bytes", text("bytes")), ("right", text("right"))]
    columns.append(("mass", number("mass", 3)))
    found = [row for row in rows if row["kind"] == "summary"]
    sizes = {name: size for name, (size, _) in STATISTICS.items()}
    lines = [
        {**row, "bytes": sizes.get(row["statistic"]), "right": f"{row['score'] * row['n']:g} of {row['n']}"}
        for row in found
    ]
    return f"{header['model']['name']}:\n\n{table(lines, columns)}"


def statistics(paths: Sequence[Path]) -> str:
    """For each model of `eval.lab.selection.page_statistics` a line for each statistic, at the first share of pages.

    Cells are the mass that is kept, and how often the page of most mass is found. Bytes are those of a page's summary
    for each dimension of a key.
    """
    tables = []
    for path in paths:
        header, *rows = read_finished(path)
        texts, (first, *others) = [*header["arguments"]["texts"], "all"], header["arguments"]["ratios"]
        found = {(row["statistic"], row["ratio"], row["text"]): row for row in rows if row["kind"] == "summary"}

        def cell(row: Row, ratio: float, name: str, found: Mapping[tuple[str, float, str], Row] = found) -> str:
            one = found[row["statistic"], ratio, name]
            return f"{one['mass']:.3f} / {one['found']:.3f}"

        columns: list[Column] = [("statistic of a page", text("statistic")), ("bytes", text("bytes"))]
        columns += [(f"{name}, {first:.0%}", partial(cell, ratio=first, name=name)) for name in texts]
        columns += [(f"all, {ratio:.0%}", partial(cell, ratio=ratio, name="all")) for ratio in others]
        lines = [{"statistic": TRUE}, *({"statistic": name, "bytes": size} for name, (size, _) in STATISTICS.items())]
        tables.append(f"{header['model']['name']}:\n\n{table(lines, columns)}")
    return "\n\n".join(tables)
