"""Needles of servers with sparse methods: a table of files of ``eval.niah``, with dense answers where they have any."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.live.record import read_finished
from eval.scores.tables import Column, bounds, length, number, percent, table, text


def beside_dense(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The header of a file of ``eval.niah`` or its like, and the summaries of its base server, each with ``dense``.

    That is the score of the server that it was compared with; None where there is none.
    """
    header, *rows = read_finished(path)
    summary = [row for row in rows if row["kind"] == "summary"]
    dense = {(row["task"], row["length"]): row["score"] for row in summary if row["arm"] == "compare"}
    base = [row for row in summary if row["arm"] == "base"]
    return header, [{**row, "dense": dense.get((row["task"], row["length"]))} for row in base]


def rows_beside_dense(
    paths: Sequence[Path], shared: Callable[[Path, Mapping[str, Any]], Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The rows of `beside_dense` of several files, each with what its file, by path and header, has in common."""
    found = [(path, *beside_dense(path)) for path in paths]
    return [{**shared(path, header), **row} for path, header, rows in found for row in rows]


def _of_file(path: Path, header: Mapping[str, Any]) -> dict[str, Any]:
    name = path.name.split(".jsonl")[0].removeprefix("niah-")
    return {"file": name, "device": header["servers"]["base"]["device"]}


def needles(paths: Sequence[Path]) -> str:
    """A line for each file, task and length."""
    columns: list[Column] = [
        ("file", text("file")),
        ("device", text("device")),
        ("task", text("task")),
        ("length", length),
        ("n", text("n")),
        ("dense", number("dense", 3)),
        ("sparse", number("score", 3)),
        ("95 %", bounds("score_interval", 3, sign=False)),
        ("95 % of the difference", bounds("diff_interval", 3)),
        ("read", percent("density")),
        ("skipped in decode", percent("skipped")),
        ("left out of prefill", percent("sparsity")),
        ("verdict", text("verdict")),
    ]
    return table(rows_beside_dense(paths, _of_file), columns)
