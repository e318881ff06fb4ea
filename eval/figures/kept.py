"""Needles of servers that keep a part of a prompt: a table of files of ``eval.niah``, each with its dense answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.figures.needles import rows_beside_dense
from eval.figures.report_tables import Column, bounds, length, number, percent, table, text

ASKED = {"chat": "with the text", "second_turn": "in a second turn"}


def _of_file(_: Path, header: Mapping[str, Any]) -> dict[str, Any]:
    served = header["servers"]["base"]["sparse"]
    asked = {"method": served["method"], "asked": ASKED[header["arguments"]["form"]]}
    config = served["config"]
    return asked | {"budget": config["prompt_budget"], "topk": config["topk"], "eviction": config["eviction"]}


def kept(paths: Sequence[Path]) -> str:
    """What was found, by method and form of the question, beside the same server asked to run dense."""
    columns: list[Column] = [
        ("method", text("method")),
        ("eviction", text("eviction")),
        ("asked", text("asked")),
        ("task", text("task")),
        ("length", length),
        ("tokens kept", text("budget")),
        ("read", percent("density")),
        ("n", text("n")),
        ("dense", number("dense", 2)),
        ("sparse", number("score", 2)),
        ("95 %", bounds("score_interval", 2, sign=False)),
    ]
    return table(rows_beside_dense(paths, _of_file), columns)
