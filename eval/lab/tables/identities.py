"""The table of files of ``eval.identity``: sparse servers that leave nothing out beside dense ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.lab.tables.weights import weights
from eval.live.record import read_finished
from eval.scores.stats import is_same
from eval.scores.tables import Column, number, table, text

Found = Mapping[str, Any]
_FLOAT8 = "fp8"


def identities(paths: Sequence[Path]) -> str:
    """A line for each file: answers that are the same, and how far apart the distributions of tokens are."""
    columns: list[Column] = [
        ("file", text("file")),
        ("weights", text("weights")),
        ("decode", text("sparse_method")),
        ("prefill", text("sparse_prefill_method")),
        ("backend", text("attention_backend")),
        ("answers", text("prompts")),
        ("tokens of each", text("tokens")),
        ("the same", text("equal")),
        ("nats between the best two, of others at most", number("gap", 3)),
        ("excused up to", number("noise", 3)),
        ("mean KL", number("mean_kl", 7)),
        ("rows of sparse layers", text("sparse_layer_rows")),
        ("tokens prefilled sparse", text("prefill_sparse_tokens")),
        ("verdict", lambda row: "same" if row["passed"] else "not the same"),
    ]
    return table(judged([_line(path) for path in paths]), columns)


def judged(lines: Sequence[Found]) -> list[dict[str, Any]]:
    """The lines with their verdict: a server with float8 KV is excused by no more than what bfloat16's noise is.

    That is of the file with the same methods and backend; where there is none, nothing is excused.
    """
    noises = {_served(line): line["noise"] for line in lines if not _is_float8(line)}
    found = []
    for line in lines:
        noise = noises.get(_served(line), 0.0) if _is_float8(line) else line["noise"]
        passed = line["sparse_path_proven"] and is_same(line["mean_kl"], line["gaps"], noise)
        found.append({**line, "noise": noise, "passed": passed})
    return found


def _served(line: Found) -> tuple[Any, ...]:
    return line["model_path"], line["sparse_method"], line.get("sparse_prefill_method"), line["attention_backend"]


def _is_float8(line: Found) -> bool:
    return line["kv_cache_dtype"].startswith(_FLOAT8)


def _line(path: Path) -> dict[str, Any]:
    header, *rows = read_finished(path)
    # The first files had the servers in the header itself.
    server = header.get("servers", header)["sparse"]
    gaps = [row["dense_gap"] for row in rows if row["kind"] == "prompt" and not row["equal"]]
    own = {"file": path.name.split(".")[0], "weights": weights(header), "gaps": gaps}
    return {**server, **rows[-1], **own, "gap": max(gaps, default=None)}
