"""Statistics and the table of ``eval.ppl_prefill``, from the rows of its JSONL files alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eval.live.counters import EvaluationError
from eval.live.record import read_finished
from eval.scores.stats import Floats, interval, resamples
from eval.scores.tables import Column, Row, number, table, text

# Of the perplexity that may be lost.
BOUND = 0.005
FIRST_EDGE = 1024


def edges(length: int, begins: int) -> list[int]:
    """Where the buckets of positions end and begin: at powers of two, and at the first position that may be sparse."""
    powers = [FIRST_EDGE << i for i in range(length.bit_length()) if FIRST_EDGE << i < length]
    return sorted({0, begins, *powers, length})


def summarise(rows: Sequence[dict[str, Any]], seed: int = 0, bound: float = BOUND) -> list[dict[str, Any]]:
    """Judge every text.

    Args:
        rows: of the JSONL file: ``item`` rows with task (the text), window, arm ("dense" or "sparse") and the score
            nll (nats per token) over the judged positions; ``buckets`` rows with from, to, and lists of a figure for
            each window: dense, sparse (nll) and change; ``counters`` rows of the sparse arm.
        seed: of the bootstrap.
        bound: largest share by which the perplexity of the judged positions may grow.

    Returns:
        One dict for each text, then one for each of its buckets: perplexities ``dense`` and ``sparse``; ``relative``,
        by what share the second differs from the first, with its paired 95 % interval; ``change``, the mean absolute
        difference of a token's log-probability. That of a text has ``sparsity`` and ``passed`` as well: whether the
        upper end of the interval is within the bound.

    Raises:
        EvaluationError: a text has not the same windows in both arms.
    """
    found = []
    for task in dict.fromkeys(row["task"] for row in rows if row["kind"] == "item"):
        mine = [row for row in rows if row.get("task") == task]
        dense, sparse = judged(mine)
        if dense.keys() != sparse.keys():
            raise EvaluationError(f"{task}: {len(sparse)} windows are sparse and {len(dense)} dense, or other ones")
        weights = resamples(len(dense), seed)
        (counts,) = (row for row in mine if row["kind"] == "counters" and row["arm"] == "sparse")
        line = judge(np.array([dense[i] for i in dense]), np.array([sparse[i] for i in dense]), weights)
        within = line["relative_interval"][1] <= bound
        found.append({"task": task, "positions": "judged", **line, "sparsity": counts["sparsity"], "passed": within})
        for row in mine:
            if row["kind"] == "buckets":
                line = judge(np.array(row["dense"]), np.array(row["sparse"]), weights)
                place = {"task": task, "positions": f"{row['from']}-{row['to']}"}
                found.append({**place, **line, "change": float(np.mean(row["change"]))})
    return found


def perplexities(paths: Sequence[Path]) -> str:
    """A line for each file and text, and one for each of its ranges of positions, with perplexities in both arms."""
    if not paths:
        return "Not measured yet."
    rows = []
    for path in paths:
        header, *mine = read_finished(path)
        rows += [{**row, "file": path.name.split(".")[0]} for row in summarise(mine, header["arguments"]["seed"])]
    columns: list[Column] = [
        ("file", text("file")),
        ("text", text("task")),
        ("positions", text("positions")),
        ("windows", text("windows")),
        ("dense", number("dense", 2)),
        ("sparse", number("sparse", 2)),
        ("difference, %", number("relative", 2, 100, sign=True)),
        ("95 %", percent_interval),
        ("left out", lambda row: f"{row['sparsity']:.1%}" if "sparsity" in row else ""),
        ("within the bound", lambda row: {True: "yes", False: "no"}[row["passed"]] if "passed" in row else ""),
    ]
    return table(rows, columns)


def percent_interval(row: Row) -> str:
    """The 95 % interval of a relative change, in percent."""
    return " … ".join(f"{100 * end:+.2f}" for end in row["relative_interval"])


def judged(rows: Sequence[dict[str, Any]]) -> tuple[dict[int, float], ...]:
    """Of the judged positions of a text, nats a token by window: dense and sparse."""
    items = [row for row in rows if row["kind"] == "item"]
    return tuple(
        {row["window"]: row["scores"]["nll"] for row in items if row["arm"] == arm} for arm in ("dense", "sparse")
    )


def judge(dense: Floats, sparse: Floats, weights: Floats) -> dict[str, Any]:
    """Perplexities of two arms, and their relative change with its 95 % interval, from nats by window."""
    lost = sparse - dense
    low, high = interval(weights @ lost)
    return {
        "windows": len(lost),
        "dense": math.exp(dense.mean()),
        "sparse": math.exp(sparse.mean()),
        "relative": math.expm1(lost.mean()),
        "relative_interval": (math.expm1(low), math.expm1(high)),
    }
