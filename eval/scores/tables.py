"""Markdown tables from result files: one function for each kind of file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.live.record import read_finished, read_rows
from eval.scores import long_summary, ppl_summary, summary
from eval.scores.verdicts import DEFINITION, NLL_MARGIN, RANDOM
from eval.texts.lengths import short_length

Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], str]]


def table(rows: Iterable[Row], columns: Sequence[Column]) -> str:
    """A Markdown table with a line for each row; columns that are empty throughout are left out."""
    cells = [[write(row) for _, write in columns] for row in rows]
    kept = [i for i in range(len(columns)) if any(line[i] for line in cells)]
    lines = [[columns[i][0] for i in kept], ["---"] * len(kept), *([line[i] for i in kept] for line in cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(name: str, places: int, scale: float = 1.0, sign: bool = False) -> Callable[[Row], str]:
    """Write a field with so many decimal places; nothing where it is missing."""

    def write(row: Row) -> str:
        value = row.get(name)
        return "" if value is None else f"{value * scale:{'+' if sign else ''}.{places}f}"

    return write


def text(name: str) -> Callable[[Row], str]:
    """Write a field as it is; nothing where it is missing."""
    return lambda row: "" if row.get(name) is None else str(row[name])


def bounds(name: str, places: int, sign: bool = True, scale: float = 1.0) -> Callable[[Row], str]:
    """Write an interval."""

    def write(row: Row) -> str:
        if row.get(name) is None:
            return ""
        return " … ".join(f"{scale * end:{'+' if sign else ''}.{places}f}" for end in row[name])

    return write


def length(row: Row) -> str:
    """Tokens, in k where they are a multiple of 1024."""
    return "" if row.get("length") is None else short_length(row["length"])


def percent(name: str) -> Callable[[Row], str]:
    """Write a share as a percentage."""
    write = number(name, 1, 100.0)
    return lambda row: f"{write(row)} %" if write(row) else ""


def gates(row: Row) -> str:
    """Whether a task of ``eval.compare`` decides: on the method, or on what its definition leaves of the task."""
    decides = {None: "", True: "yes", False: "no"}[row["gates"]]
    return "by definition" if decides == "yes" and row.get("definition_verdict") else decides


def judged(name: str) -> Callable[[Row], str]:
    """Write a verdict of ``eval.compare``; that of a server that is as good says within what."""

    def write(row: Row) -> str:
        if row.get(name) != "same":
            return str(row.get(name) or "")
        return f"within {100 * NLL_MARGIN:.1f} %" if row["unit"] == "nats" else "within 1 pt"

    return write


def comparison_table(rows: Sequence[Row]) -> str:
    """The table of ``eval.compare``: scores of 1 at best; perplexity as nats per token, where less is better."""
    columns: list[Column] = [
        ("task", lambda row: f"{row['suite']}: {row['task']}"),
        ("length", length),
        ("n", text("n")),
        ("of", text("unit")),
        ("dense", number("dense", 3)),
        ("sparse", number("sparse", 3)),
        ("difference", number("diff", 3, sign=True)),
        ("95 %", bounds("diff_interval", 3)),
        ("read", percent("density")),
        ("rows dense", percent("dense_rows")),
        ("left out of prefill", percent("sparsity")),
        ("by definition", number(DEFINITION, 3)),
        ("true mass", number("true_mass", 3)),
        ("random", number(RANDOM, 3)),
        ("gates", gates),
        ("verdict", judged("verdict")),
        ("against the definition", judged("definition_verdict")),
    ]
    return table(rows, columns)


def _every(row: Row) -> str:
    said = {"dense": "dense", "off": "never", "bound": "only the scored step sparse"}
    return said.get(row["setting"], str(row["interval"]))


# An interval over fewer windows is hardly more than their values.
FEWEST_WINDOWS = 5


def _interval(row: Row) -> str:
    return bounds("diff_interval", 4)(row) if row["windows"] >= FEWEST_WINDOWS else ""


RECTIFICATION: list[Column] = [
    ("text", text("task")),
    ("ratio", text("ratio")),
    ("tokens between rectifications", _every),
    ("n", text("windows")),
    ("perplexity", number("ppl", 3)),
    ("nats over dense", number("diff", 4, sign=True)),
    ("95 %", _interval),
    ("won back", lambda row: f"{row['closing']:.0%}" if row.get("closing_interval") and row["drifts"] else ""),
    ("read", percent("density")),
]


def rectification(path: Path) -> str:
    """Perplexity against the rectification interval."""
    return table(ppl_summary.summarise(read_rows(path)), RECTIFICATION)


def drift(path: Path) -> str:
    """Divergence from the dense server over the length of the output."""
    columns: list[Column] = [
        ("text", text("task")),
        ("setting", text("arm")),
        ("position", text("position")),
        ("n", text("n")),
        ("KL, nats", number("kl", 5)),
        ("95 %", bounds("kl_interval", 5, sign=False)),
        ("same best token", number("agreement", 3)),
        ("read", percent("density")),
    ]
    return table(long_summary.summarise(read_rows(path)), columns)


def questions(path: Path) -> str:
    """The summary of a suite of questions."""
    rows = read_finished(path)
    items, counters = ([row for row in rows if row["kind"] == kind] for kind in ("item", "counters"))
    columns: list[Column] = [
        ("task", text("task")),
        ("length", length),
        ("server", text("arm")),
        ("n", text("n")),
        ("failed", lambda row: str(row["failed"] or "")),
        ("score", number("score", 3)),
        ("95 %", bounds("score_interval", 3, sign=False)),
        ("answer, tokens", number("tokens", 1)),
        ("read", percent("density")),
        ("difference", number("diff", 3, sign=True)),
        ("95 % of it", bounds("diff_interval", 3)),
        ("verdict", text("verdict")),
    ]
    return table(summary.summarise(items, counters), columns)
