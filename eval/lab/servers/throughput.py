"""Requests and tokens a second of servers at one workload: table and picture of a file of ``bench_throughput``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.live.record import read_finished
from eval.scores.pictures import save
from eval.scores.tables import Column, number, percent, table, text
from eval.serving.grid import DENSE

COMMAND = "eval.lab.bench_throughput"
BEST = "best"

Row = Mapping[str, Any]


def best_rows(rows: Sequence[Row], figure: str) -> dict[str, Row]:
    """The row of each server that has most of a figure, the first of equal ones."""
    best: dict[str, Row] = {}
    for row in rows:
        if row["arm"] not in best or row[figure] > best[row["arm"]][figure]:
            best[row["arm"]] = row
    return best


def ratio_cell(rows: Sequence[Row], load: str, figure: str) -> Callable[[Row], str]:
    """A column: a server's ratio in the row of the load that its summary is of.

    Args:
        rows: of the file.
        load: the field that says which load a row is of.
        figure: of the summary.
    """
    ratios = {row["arm"]: row for row in rows if row["kind"] == "summary"}

    def cell(row: Row) -> str:
        mine = ratios.get(row["arm"])
        return f"{mine[figure]:.2f}" if mine and mine[load] == row[load] else ""

    return cell


def lines(rows: Sequence[Row], load: str) -> dict[str, list[Row]]:
    """The rows of kind ``item`` of each server, by ascending load."""
    items = sorted((row for row in rows if row["kind"] == "item"), key=lambda row: row[load])
    arms = dict.fromkeys(row["arm"] for row in rows if row["kind"] == "item")
    return {arm: [row for row in items if row["arm"] == arm] for arm in arms}


def best_batches(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Each server's batch with the most requests a second, beside the dense server's.

    Args:
        rows: of kind ``item``.

    Returns:
        For each server but the dense one, where both have rows: the row of its best batch, the dense server's figures
        with the prefix ``dense_``, and ``request_throughput_ratio`` and ``output_throughput_ratio``, its over theirs.
    """
    best = best_rows(rows, "request_throughput")
    dense = best.pop(DENSE, None)
    if dense is None:
        return []
    found = []
    for arm, row in best.items():
        beside = {f"dense_{name}": dense[name] for name in ("batch", "request_throughput", "output_throughput")}
        beside |= {f"dense_{name}": value for name, value in dense.items() if name.startswith("served_")}
        ratios = {f"{name}_ratio": row[name] / dense[name] for name in ("request_throughput", "output_throughput")}
        found.append({**row, "id": f"{arm}/{BEST}", "task": BEST, **beside, **ratios})
    return found


def throughput(path: Path) -> str:
    """Return the table of the servers' throughput, batch by batch."""
    rows = read_finished(path)
    columns: list[Column] = [
        ("server", text("arm")),
        ("at once", text("batch")),
        ("requests a second", number("request_throughput", 4)),
        ("tokens a second", number("output_throughput", 1)),
        ("first token, s", number("ttft_median", 2)),
        ("TPOT, ms", number("tpot_median", 2, 1e3)),
        ("read", percent("density")),
        ("KV held of a prompt, tokens", number("held_tokens", 0)),
        ("best, times the dense server's best", ratio_cell(rows, "batch", "request_throughput_ratio")),
    ]
    return table([row for row in rows if row["kind"] == "item"], columns)


def plot(rows: Sequence[Row], stem: Path) -> list[Path]:
    """Tokens a second of the server over those of a user, a line a server, a point a batch.

    Args:
        rows: of the file.
        stem: path without a suffix.

    Returns:
        The paths written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for arm, line in lines(rows, "batch").items():
        rates = [1 / row["tpot_median"] for row in line]
        axes.plot(rates, [row["output_throughput"] for row in line], marker="o", label=arm)
        for row, rate in zip(line, rates, strict=True):
            axes.annotate(str(row["batch"]), (rate, row["output_throughput"]), fontsize=7)
    axes.set_xlabel("tokens a second of one user (numbers: requests at once)")
    axes.set_ylabel("tokens a second of the server")
    axes.grid(alpha=0.3)
    axes.legend()
    return save(figure, stem)
