"""A sentence of the documents about where in a prompt needles are found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from eval.live.record import read_finished
from eval.scores.summary import score


def depths(paths: Sequence[Path]) -> str:
    """At which depths the base servers of files of ``eval.niah`` found their needles, and how many were asked."""
    found: dict[float, list[float]] = {}
    for path in paths:
        for row in read_finished(path):
            if row["kind"] == "item" and row["arm"] == "base":
                found.setdefault(row["depth"], []).append(score(row))
    means = {depth: fmean(scores) for depth, scores in sorted(found.items())}
    right = [f"{depth:.0%} (exact match {mean:.2f})" for depth, mean in means.items() if mean]
    return f"A needle is found at depths of {', '.join(right) or 'none'}, of {len(means)} depths that were asked."
