"""Whether SGLang's DSA and this project's agree: the summary and the table of a file of ``eval.lab.agree_dsa``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from eval.live.record import read_finished
from eval.scores.tables import Column, number, table, text

COMMAND = "eval.lab.agree_dsa"
# What is to be reached: the share of a query's tokens in common, how far off the others may be, relative to the last
# logit that was chosen, and nats.
LEAST_OVERLAP, MOST_GAP, MOST_KL = 0.999, 1e-4, 0.003
# Whose keys a selection was made over, see ``eval/lab/agreement/server``.
NATIVE, OWN = "native", "own"
PORTABLE = "portable"
SAME_INPUTS, BETWEEN_SERVERS = "same inputs, in one server", "between two servers"

Row = Mapping[str, Any]


def summarise(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """A row for each kind of selection and of replays by layer and phase, and one for each pair of distributions.

    Each has ``agrees``. Of a selection every query counts, not the mean: ``overlap_least``.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["kind"] in ("selection", "replays", "distribution"):
            place = tuple(row.get(name) for name in ("kind", "keys", "phase", "layer", "graph", "arm", "against"))
            groups.setdefault(place, []).append(row)
    made = {"selection": _selections, "replays": _replays, "distribution": _distributions}
    return [made[found[0]["kind"]](found) for _, found in sorted(groups.items(), key=lambda one: str(one[0]))]


def _place(row: Row) -> dict[str, Any]:
    return {name: row[name] for name in ("keys", "phase", "layer", "graph", "arm", "against") if name in row}


def _selections(rows: Sequence[Row]) -> dict[str, Any]:
    queries = sum(row["queries"] for row in rows)
    least, gap = min(row["overlap_least"] for row in rows), max(row["worst_relative_gap"] for row in rows)
    return {
        "of": "selection",
        "compared": SAME_INPUTS,
        **_place(rows[0]),
        "queries": queries,
        "overlap": sum(row["overlap"] * row["queries"] for row in rows) / queries,
        "overlap_least": least,
        "below": sum(row["below"] for row in rows),
        "differing": sum(row["differing"] for row in rows),
        "worst_relative_gap": gap,
        "other_keys": sum(row["other_keys"] for row in rows),
        "agrees": least >= LEAST_OVERLAP and gap <= MOST_GAP,
    }


def _replays(rows: Sequence[Row]) -> dict[str, Any]:
    n, same = sum(row["n"] for row in rows), sum(row["same"] for row in rows)
    queries = sum(row["queries"] for row in rows)
    place = {"of": "replays", "compared": SAME_INPUTS, **_place(rows[0])}
    return {**place, "queries": queries, "n": n, "same": same, "agrees": same == n}


def _distributions(rows: Sequence[Row]) -> dict[str, Any]:
    found = [value for row in rows for value in row["kl"]]
    return {
        "of": "distribution",
        "compared": BETWEEN_SERVERS,
        **_place(rows[0]),
        "queries": len(found),
        "kl_mean": fmean(found),
        "kl_max": max(found),
        "same_best": fmean(row["same_best"] for row in rows),
        "agrees": fmean(found) < MOST_KL,
    }


def required(row: Row) -> bool:
    """Whether the command fails where a row of the summary does not agree: all but the noise of one server."""
    return row.get("arm") != NATIVE


def agreement(path: Path) -> str:
    """Return a table of the comparisons: the keys of each, its differences, and whether these are small enough."""
    columns: list[Column] = [
        ("of", text("of")),
        ("compared", text("compared")),
        ("server", text("arm")),
        ("against", text("against")),
        ("keys", text("keys")),
        ("phase", text("phase")),
        ("layer", text("layer")),
        ("queries", text("queries")),
        ("tokens in common", number("overlap", 6)),
        ("at least", number("overlap_least", 5)),
        ("queries below .999", text("below")),
        ("differing tokens", text("differing")),
        ("off the k-th logit", lambda row: f"{row['worst_relative_gap']:.1e}" if "worst_relative_gap" in row else ""),
        ("keys of other bytes", text("other_keys")),
        ("CUDA graph", lambda row: {None: "", True: "yes", False: "no"}[row.get("graph")]),
        ("same replays", lambda row: f"{row['same']} of {row['n']}" if "n" in row else ""),
        ("KL, nats", number("kl_mean", 6)),
        ("most", number("kl_max", 6)),
        ("same best token", number("same_best", 3)),
        ("agrees", lambda row: "yes" if row["agrees"] else "no"),
    ]
    return table([row for row in read_finished(path) if row["kind"] == "summary"], columns)
