"""The table of files of ``eval.identity``: sparse servers that leave nothing out beside dense ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.figures.report_tables import Column, number, table, text
from eval.live.record import read_finished


def identities(paths: Sequence[Path]) -> str:
    """A line for each file: answers that are the same, and how far apart the distributions of tokens are."""
    columns: list[Column] = [
        ("file", text("file")),
        ("decode", text("sparse_method")),
        ("prefill", text("sparse_prefill_method")),
        ("backend", text("attention_backend")),
        ("answers", text("prompts")),
        ("tokens of each", text("tokens")),
        ("the same", text("equal")),
        ("mean KL", number("mean_kl", 7)),
        ("rows of sparse layers", text("sparse_layer_rows")),
        ("tokens prefilled sparse", text("prefill_sparse_tokens")),
        ("verdict", lambda row: "same" if row["passed"] else "not the same"),
    ]
    return table([_line(path) for path in paths], columns)


def _line(path: Path) -> dict[str, Any]:
    header, *rows = read_finished(path)
    # The first files had the servers in the header itself.
    server = header.get("servers", header)["sparse"]
    return {**server, **rows[-1], "file": path.name.split(".")[0]}
