"""The table of files of ``eval.lab.bench_lossless``: how often drafts are right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eval.live.counters import EvaluationError
from eval.live.record import read_rows
from eval.scores.tables import Column, number, percent, table, text


def acceptance(paths: Sequence[Path]) -> str:
    """A line for each text and share of pages: acceptance of drafts, and how many answers equal the dense ones.

    Other answers part from them where the dense server's two best tokens were as near as the line says.

    Raises:
        EvaluationError: a file lacks cells.
    """
    rows = []
    for path in paths:
        header, *found = read_rows(path)
        if len(found) != len(header["texts"]) * len(header["ratios"]):
            raise EvaluationError(f"{path} lacks cells: its run was interrupted; run the same command again")
        model = Path(header["server"]["model_path"]).name
        about = {"model": model, "asked": f"{header['n']} x {header['context']}", "answers": header["n"]}
        rows += [{**about, **row, **row["counters"]} for row in found if "gaps" in row]
    for row in rows:
        row["gap"] = max(row["gaps"], default=None)
    columns: list[Column] = [
        ("model", text("model")),
        ("prompts", text("asked")),
        ("text", text("text")),
        ("pages read", percent("active_ratio")),
        ("drafts right", percent("acceptance")),
        ("of drafts", text("judged_drafts")),
        ("answers equal", lambda row: f"{row['equal']} of {row['answers']}"),
        ("largest gap at a first difference, nats", number("gap", 3)),
    ]
    return table(rows, columns)
