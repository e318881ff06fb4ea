"""The tables of files of ``eval.lab.bench_lossless``: how often drafts are right, and what rounds take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.live.counters import EvaluationError
from eval.live.record import read_rows
from eval.scores.tables import Column, length, number, percent, table, text


def _cells(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The cells of finished files, each with what its file says of the model and the prompts."""
    rows = []
    for path in paths:
        header, *found = read_rows(path)
        if len(found) != len(header["texts"]) * len(header["ratios"]):
            raise EvaluationError(f"{path} lacks cells: its run was interrupted; run the same command again")
        about = {"model": Path(header["server"]["model_path"]).name, "backend": header["server"]["decode_backend"]}
        about |= {"asked": f"{header['n']} x {header['context']}", "answers": header["n"]}
        about |= {"batch": header["batch"], "length": header["context"], "simulated": header["simulated"]}
        about |= {"peers": header["peers"]}
        rows += [{**about, **row, **row["counters"]} for row in found]
    return rows


def acceptance(paths: Sequence[Path]) -> str:
    """A line for each text and share of pages: acceptance of drafts, and how many answers equal the dense ones.

    Other answers part from them where the dense server's two best tokens were as near as the line says.

    Raises:
        EvaluationError: a file lacks cells.
    """
    rows = [row for row in _cells(paths) if "gaps" in row]
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


def speed(paths: Sequence[Path]) -> str:
    """A line for each cell with simulated acceptance or other dense servers: what a round takes and gives.

    Ratios are against the fastest dense decode of a shape in all files and their peers.

    Raises:
        EvaluationError: a file lacks cells.
    """
    rows = [row for row in _cells(paths) if row["simulated"] is not None or row["peers"]]
    for row in rows:
        row["drafts"] = row["draft_steps"] / max(row["verified_rounds"], 1)
        # Requests end at different times: a round has as many of them as have drafts.
        row["given"] = 1 + row["accepted_tokens"] / max(row["drafted_tokens"], 1) * row["drafts"]
        row["round"] = row["tpot"] * row["given"]
        row["fastest"] = min(other["dense_ratio"] * other["tpot"] for other in rows if other["shape"] == row["shape"])
        row["gain"] = row["fastest"] / row["tpot"]
    columns: list[Column] = [
        ("model", text("model")),
        ("requests", text("batch")),
        ("context", length),
        ("attention", text("backend")),
        ("text", text("text")),
        ("drafts right", percent("acceptance")),
        ("drafts a round", number("drafts", 1)),
        ("tokens a round", number("given", 1)),
        ("ms a round", number("round", 1, 1e3)),
        ("ms a token", number("tpot", 1, 1e3)),
        ("fastest dense, ms a token", number("fastest", 1, 1e3)),
        ("times the fastest dense", number("gain", 2)),
    ]
    return table(rows, columns)
