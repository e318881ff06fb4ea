"""Statistics and the table of ``eval.ppl_prefill``, from the rows of its JSONL files alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
# Nats a token between two dense runs of the same windows, at most: of a GPU's bf16, between batches, it is .0002.
SAME_WINDOWS = 0.01


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
        dense, sparse = _judged(mine)
        if dense.keys() != sparse.keys():
            raise EvaluationError(f"{task}: {len(sparse)} windows are sparse and {len(dense)} dense, or other ones")
        weights = resamples(len(dense), seed)
        (counts,) = (row for row in mine if row["kind"] == "counters" and row["arm"] == "sparse")
        line = _judge(np.array([dense[i] for i in dense]), np.array([sparse[i] for i in dense]), weights)
        within = line["relative_interval"][1] <= bound
        found.append({"task": task, "positions": "judged", **line, "sparsity": counts["sparsity"], "passed": within})
        for row in mine:
            if row["kind"] == "buckets":
                line = _judge(np.array(row["dense"]), np.array(row["sparse"]), weights)
                place = {"task": task, "positions": f"{row['from']}-{row['to']}"}
                found.append({**place, **line, "change": float(np.mean(row["change"]))})
    return found


def against(rows: Sequence[dict[str, Any]], control: Sequence[dict[str, Any]], seed: int = 0) -> list[dict[str, Any]]:
    """What a control loses where the method does not: both sparse arms of the same windows, paired.

    Args:
        rows: of the method's file, see `summarise`.
        control: of the control's.
        seed: of the bootstrap.

    Returns:
        One dict for each text, with ``positions`` "judged", and one for each of its buckets: ``relative``, the share by
        which the control's perplexity is higher, with its 95 % interval; for buckets ``change`` and
        ``control_change``, the mean absolute difference of a token's log-probability to dense.

    Raises:
        EvaluationError: they are not of the same windows.
    """
    found = []
    for task in dict.fromkeys(row["task"] for row in rows if row["kind"] == "item"):
        mine, theirs = ([row for row in part if row.get("task") == task] for part in (rows, control))
        (dense, sparse), (control_dense, control_sparse) = _judged(mine), _judged(theirs)
        far = [i for i in dense if i not in control_dense or abs(dense[i] - control_dense[i]) > SAME_WINDOWS]
        if far or dense.keys() != control_dense.keys():
            raise EvaluationError(f"{task}: the control's windows are not those of the method")
        weights = resamples(len(dense), seed)
        line = _judge(np.array([sparse[i] for i in dense]), np.array([control_sparse[i] for i in dense]), weights)
        found.append({"task": task, "positions": "judged", **line})
        buckets = ([row for row in part if row["kind"] == "buckets"] for part in (mine, theirs))
        for row, other in zip(*buckets, strict=True):
            line = _judge(np.array(row["sparse"]), np.array(other["sparse"]), weights)
            changes = {"change": float(np.mean(row["change"])), "control_change": float(np.mean(other["change"]))}
            found.append({"task": task, "positions": f"{row['from']}-{row['to']}", **line, **changes})
    return found


def gate(
    rows: Sequence[dict[str, Any]], control: Sequence[dict[str, Any]], seed: int = 0, bound: float = BOUND
) -> list[dict[str, Any]]:
    """Gate E with its control: whether a loss is within the bound, and whether a selection as large would lose more.

    Args:
        rows: of the method's file, see `summarise`.
        control: of the control's, over the same windows.
        seed: of the bootstrap.
        bound: largest share by which perplexity may grow.

    Returns:
        One dict for each text, with ``positions`` "judged", and for each of its buckets in which something changed:
        ``lost``, the mean difference of the log-perplexity of its windows, sparse minus dense, in nats a token, with
        its 95 % interval; ``control``, likewise the control's; ``over``, the control's minus the method's; ``passed``
        and ``control_passed``, whether an interval ends within the bound; ``apart``, whether all of the last one is
        above 0.

    Raises:
        EvaluationError: they are not of the same windows.
    """
    found = []
    parts = (summarise(rows, seed, bound), summarise(control, seed, bound), against(rows, control, seed))
    for lines in zip(*parts, strict=True):
        if lines[0].get("change") == 0:
            continue
        row = {name: lines[0][name] for name in ("task", "positions", "windows")}
        for name, line in zip(("lost", "control", "over"), lines, strict=True):
            row |= {name: math.log1p(line["relative"])}
            row |= {f"{name}_interval": tuple(math.log1p(end) for end in line["relative_interval"])}
        limit = math.log1p(bound)
        row |= {"passed": row["lost_interval"][1] <= limit, "control_passed": row["control_interval"][1] <= limit}
        found.append({**row, "apart": row["over_interval"][0] > 0})
    return found


def gates(path: Path, control: Path) -> str:
    """Gate E of a file's texts beside a control's, see `gate`."""
    header, *rows = read_finished(path)
    found = gate(rows, read_finished(control), header["arguments"]["seed"])
    yes_no = {True: "yes", False: "no"}
    columns: list[Column] = [
        ("text", text("task")),
        ("positions", text("positions")),
        ("windows", text("windows")),
        ("log-perplexity lost, found", _nats("lost")),
        ("random", _nats("control")),
        ("random minus found", _nats("over")),
        (f"found within {math.log1p(BOUND):.4f}", lambda row: yes_no[row["passed"]]),
        ("random within it", lambda row: yes_no[row["control_passed"]]),
        ("random loses more", lambda row: yes_no[row["apart"]]),
    ]
    return table(found, columns)


def _nats(name: str) -> Callable[[Row], str]:
    def written(row: Row) -> str:
        low, high = row[f"{name}_interval"]
        return f"{row[name]:+.4f} ({low:+.4f} … {high:+.4f})"

    return written


def controls(path: Path, control: Path) -> str:
    """A line for each text, and one for each range of its positions where something was left out; see `against`."""
    rows = [row for row in against(read_finished(path), read_finished(control)) if row.get("change") != 0]
    columns: list[Column] = [
        ("text", text("task")),
        ("positions", text("positions")),
        ("windows", text("windows")),
        ("found", number("dense", 2)),
        ("random", number("sparse", 2)),
        ("random higher by, %", number("relative", 2, 100, sign=True)),
        ("95 %", _interval),
        ("change of a token, found", number("change", 3)),
        ("random", number("control_change", 3)),
    ]
    return table(rows, columns)


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
        ("95 %", _interval),
        ("left out", lambda row: f"{row['sparsity']:.1%}" if "sparsity" in row else ""),
        ("within the bound", lambda row: {True: "yes", False: "no"}[row["passed"]] if "passed" in row else ""),
    ]
    return table(rows, columns)


def _interval(row: Row) -> str:
    return " … ".join(f"{100 * end:+.2f}" for end in row["relative_interval"])


def _judged(rows: Sequence[dict[str, Any]]) -> tuple[dict[int, float], ...]:
    """Of the judged positions of a text, nats a token by window: dense and sparse."""
    items = [row for row in rows if row["kind"] == "item"]
    return tuple(
        {row["window"]: row["scores"]["nll"] for row in items if row["arm"] == arm} for arm in ("dense", "sparse")
    )


def _judge(dense: Floats, sparse: Floats, weights: Floats) -> dict[str, Any]:
    lost = sparse - dense
    low, high = interval(weights @ lost)
    return {
        "windows": len(lost),
        "dense": math.exp(dense.mean()),
        "sparse": math.exp(sparse.mean()),
        "relative": math.expm1(lost.mean()),
        "relative_interval": (math.expm1(low), math.expm1(high)),
    }
