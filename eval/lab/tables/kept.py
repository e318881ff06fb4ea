"""Needles of servers that keep a part of a prompt: a table of files of ``eval.niah``, each with its dense answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.lab.tables.needles import rows_beside_dense
from eval.scores.tables import Column, Row, bounds, length, number, percent, table, text

# The gate of RocketKV, which is wider than that of the verdict.
POINTS = 0.02
ASKED = {"chat": "with the text", "second_turn": "in a second turn"}


def _of_file(_: Path, header: Mapping[str, Any]) -> dict[str, Any]:
    server = header["servers"]["base"]
    served = server["sparse"]
    asked = {"method": served["method"], "device": server["device"], "asked": ASKED[header["arguments"]["form"]]}
    config = served["config"]
    return asked | {"budget": config["prompt_budget"], "topk": config["topk"], "eviction": config["eviction"]}


def kept(paths: Sequence[Path]) -> str:
    """What was found, by method and form of the question, beside the same server asked to run dense."""
    columns: list[Column] = [
        ("method", text("method")),
        ("eviction", text("eviction")),
        ("device", text("device")),
        ("asked", text("asked")),
        ("task", text("task")),
        ("length", length),
        ("tokens kept", text("budget")),
        ("read", percent("density")),
        ("n", text("n")),
        ("dense", number("dense", 3)),
        ("sparse", number("score", 3)),
        ("95 %", bounds("score_interval", 3, sign=False)),
        ("difference", number("diff", 3, sign=True)),
        ("95 % of it", bounds("diff_interval", 3)),
        ("verdict", text("verdict")),
        ("within two points", within),
    ]
    return table(rows_beside_dense(paths, _of_file), columns)


def within(row: Row) -> str:
    """Whether the loss is at most `POINTS`: the whole interval says yes or no, or the mean alone does."""
    if row.get("diff_interval") is None:
        return ""
    low, high = row["diff_interval"]
    if low > -POINTS or high < -POINTS:
        return "yes" if low > -POINTS else "no"
    return f"the mean is{'' if row['diff'] >= -POINTS else ' not'}"
