"""The table of cold prompts in files of ``eval.bench_serving``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eval.live.record import read_finished
from eval.scores.tables import Column, Row, bounds, number, percent, table, text
from eval.serving.first_token import TASK
from eval.texts.lengths import short_length


def first_tokens(paths: Sequence[Path]) -> str:
    """Seconds to the first token of cold prompts, dense and sparse, see `cells_of`."""
    columns: list[Column] = [
        ("prompt", lambda row: short_length(row["context"])),
        ("chunks", lambda row: short_length(row["chunked_prefill_size"])),
        ("dense, s", number("dense_ttft", 3)),
        ("of its runs", bounds("dense_ttft_range", 3, sign=False)),
        ("sparse, s", number("ttft", 3)),
        ("of the runs", bounds("ttft_range", 3, sign=False)),
        ("times faster", number("ttft_ratio", 3)),
        ("left out", percent("sparsity")),
        ("mass kept", number("recall", 3)),
        ("theta", text("theta")),
        ("factor", number("threshold_scale_factor", 0)),
    ]
    return table(cells_of(paths)[1:], columns)


def cells_of(paths: Sequence[Path]) -> list[Row]:
    """The header of the first of some files, and first tokens of all of them, short chunks and prompts first.

    What several of them have is the newest one's.
    """
    files = [read_finished(path) for path in paths]
    oldest_first = sorted(files, key=lambda rows: rows[0]["started"])
    found = (row for rows in oldest_first for row in rows if row["kind"] == "summary" and row["task"] == TASK)
    cells = {(row["chunked_prefill_size"], row["context"], row["arm"]): row for row in found}
    return [files[0][0], *(cells[key] for key in sorted(cells))]
