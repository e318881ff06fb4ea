"""Needles of servers with sparse methods: a table of files of ``eval.niah``, with dense answers where they have any."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.figures.report_tables import Column, bounds, length, number, percent, table, text
from eval.live.record import read_finished


def needles(paths: Sequence[Path]) -> str:
    """A line for each file, task and length."""
    rows: list[dict[str, Any]] = []
    for path in paths:
        header, *found = read_finished(path)
        served = header["servers"]["base"]
        shared = {"file": path.name.split(".jsonl")[0].removeprefix("niah-"), "device": served["device"]}
        shared |= {"form": header["arguments"]["form"]}
        summary = [row for row in found if row["kind"] == "summary"]
        dense = {(row["task"], row["length"]): row["score"] for row in summary if row["arm"] == "compare"}
        rows += [
            {**shared, **row, "dense": dense.get((row["task"], row["length"]))}
            for row in summary
            if row["arm"] == "base"
        ]
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
        ("left out of prefill", percent("sparsity")),
        ("verdict", text("verdict")),
    ]
    return table(rows, columns)
