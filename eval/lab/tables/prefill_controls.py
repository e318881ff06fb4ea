"""Perplexity of sparse prefill beside that of a control, which leaves out as much at random."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eval.live.counters import EvaluationError
from eval.live.record import read_finished
from eval.ppl_prefill import BOUND, judge, judged, percent_interval, summarise
from eval.scores.stats import resamples
from eval.scores.tables import Column, Row, number, table, text

# Nats a token between two dense runs of the same windows, at most: of a GPU's bf16, between batches, it is .0002.
SAME_WINDOWS = 0.01


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
        (dense, sparse), (control_dense, control_sparse) = judged(mine), judged(theirs)
        far = [i for i in dense if i not in control_dense or abs(dense[i] - control_dense[i]) > SAME_WINDOWS]
        if far or dense.keys() != control_dense.keys():
            raise EvaluationError(f"{task}: the control's windows are not those of the method")
        weights = resamples(len(dense), seed)
        line = judge(np.array([sparse[i] for i in dense]), np.array([control_sparse[i] for i in dense]), weights)
        found.append({"task": task, "positions": "judged", **line})
        buckets = ([row for row in part if row["kind"] == "buckets"] for part in (mine, theirs))
        for row, other in zip(*buckets, strict=True):
            line = judge(np.array(row["sparse"]), np.array(other["sparse"]), weights)
            changes = {"change": float(np.mean(row["change"])), "control_change": float(np.mean(other["change"]))}
            found.append({"task": task, "positions": f"{row['from']}-{row['to']}", **line, **changes})
    return found


def gate(
    rows: Sequence[dict[str, Any]], control: Sequence[dict[str, Any]], seed: int = 0, bound: float = BOUND
) -> list[dict[str, Any]]:
    """Whether a loss is within the bound, and whether a selection as large would lose more.

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
    """The texts of a file beside a control's, see `gate`."""
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
        ("95 %", percent_interval),
        ("change of a token, found", number("change", 3)),
        ("random", number("control_change", 3)),
    ]
    return table(rows, columns)
