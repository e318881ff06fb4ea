"""Sentences of the documents about what tiny-mla and its controls answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from eval.figures.summary import score
from eval.figures.verdicts import GATE_DENSE
from eval.live.record import read_finished

HOPS = "var_2hop"


def depths(paths: Sequence[Path]) -> str:
    """At which depths the base servers of files of ``eval.niah`` found their needles, and how many were asked."""
    found: dict[float, list[float]] = {}
    for path in paths:
        for row in read_finished(path):
            if row["kind"] == "item" and row["arm"] == "base":
                found.setdefault(row["depth"], []).append(score(row))
    means = {depth: fmean(scores) for depth, scores in sorted(found.items())}
    right = [f"{depth:.0%} (exact match {mean:.2f})" for depth, mean in means.items() if mean]
    return f"A needle is found at depths of {' and '.join(right) or 'none'}, of {len(means)} depths that were asked."


def hops(lines: Sequence[Mapping[str, Any]]) -> str:
    """Why variables of two hops judge no method, from the lines of ``eval.train.accuracy``."""
    found = {row["length"]: row["exact_match"] for row in lines if _is_hops(row)}
    return (
        f"Variables of two hops decide nothing here: dense, tiny-mla answers {min(found.values()):.3f} to "
        f"{max(found.values()):.3f} of them at {min(found)} to {max(found)} tokens "
        f"([its card](../models/tiny-mla/README.md)), and a task decides from {GATE_DENSE:g} on."
    )


def _is_hops(row: Mapping[str, Any]) -> bool:
    return row.get("selector") == "dense" and row["task"].startswith(HOPS)
