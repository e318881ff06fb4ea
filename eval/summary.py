"""The summary of a suite's run, from the rows of its JSONL file alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from eval.stats import compare, mean_interval

Row = Mapping[str, Any]


def summarise(items: Sequence[Row], counters: Sequence[Row]) -> list[dict[str, Any]]:
    """Judge every task and length.

    Args:
        items: rows of kind ``item``; a failed one counts as wrong.
        counters: rows of kind ``counters``.

    Returns:
        One dict for each task, length and arm, in the order of the items: ``n`` and ``failed``; ``score`` with its
        95 % interval; the means of any further scores; ``tokens``, the mean length of the answers; ``density``, the
        share of the held pages that decode attended to (None where nobody counts). The base arm of a run with two
        servers has the figures of `eval.stats.compare` too: paired, over the questions that both answered.
    """
    groups: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in items:
        groups.setdefault((row["task"], row["length"], row["arm"]), {})[row["id"]] = row
    found = []
    for (task, length, arm), rows in groups.items():
        line = {"task": task, "length": length, "arm": arm, **_figures(list(rows.values()))}
        line["density"] = density([c for c in counters if (c["task"], c["length"], c["arm"]) == (task, length, arm)])
        theirs = groups.get((task, length, "compare"))
        if arm == "base" and theirs:
            both = [key for key in rows if key in theirs]
            line |= compare([score(rows[key]) for key in both], [score(theirs[key]) for key in both])
        found.append(line)
    return found


def score(row: Row, name: str = "score") -> float:
    """A figure of an item; 0 where it failed."""
    return float(row["scores"][name]) if not row.get("failed") else 0.0


def _figures(rows: list[Row]) -> dict[str, Any]:
    whole = [row for row in rows if not row.get("failed")]
    scores = [score(row) for row in rows]
    figures: dict[str, Any] = {"n": len(rows), "failed": len(rows) - len(whole)}
    figures |= {"score": fmean(scores), "score_interval": mean_interval(scores)}
    further = dict.fromkeys(name for row in whole for name in row["scores"] if name != "score")
    # Some tasks score a subset of their questions by a further name, such as those of one difficulty.
    figures |= {name: fmean(score(row, name) for row in whole if name in row["scores"]) for name in further}
    figures["tokens"] = fmean(row["completion_tokens"] for row in whole) if whole else None
    return figures


def density(rows: Sequence[Row]) -> float | None:
    """Share of the held pages that decode attended to, over ``counters`` rows; None where nobody counted."""
    held = sum(row["counters"]["pages_held"] for row in rows)
    return sum(row["counters"]["pages_attended"] for row in rows) / held if held else None
