"""Requests a second that servers answer in time: table and picture of a file of ``bench_goodput``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.lab.servers.throughput import BEST, best_rows, lines, ratio_cell
from eval.live.counters import EvaluationError
from eval.live.record import read_finished
from eval.scores.pictures import save
from eval.scores.tables import Column, number, percent, table, text

COMMAND = "eval.lab.bench_goodput"

Row = Mapping[str, Any]


def best_rates(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The best goodput of each sparse server, beside that of the best dense one.

    Args:
        rows: of kind ``item``.

    Returns:
        For each sparse server the row of its best rate, with ``peer``, the dense server, ``peer_rate``,
        ``peer_goodput`` and ``goodput_ratio``.

    Raises:
        EvaluationError: the dense servers answered nothing in time, or the best one most at its highest rate.
    """
    best = best_rows(rows, "goodput")
    dense = [row for row in best.values() if not row["sparse"]]
    peer = max(dense, key=lambda row: row["goodput"])
    if not peer["goodput"]:
        raise EvaluationError("no dense server answered anything in time: allow more time")
    if peer["rate"] == max(row["rate"] for row in rows if row["arm"] == peer["arm"]):
        raise EvaluationError(f"{peer['arm']} is best at its highest rate, and may do more: add higher rates")
    beside = {"peer": peer["arm"], "peer_rate": peer["rate"], "peer_goodput": peer["goodput"]}
    return [
        {**row, "id": f"{arm}/{BEST}", "task": BEST, **beside, "goodput_ratio": row["goodput"] / peer["goodput"]}
        for arm, row in best.items()
        if row["sparse"]
    ]


def goodput(path: Path) -> str:
    """Return the table of the servers' goodput, rate by rate."""
    rows = read_finished(path)

    def host(part: str) -> Callable[[Row], str]:
        def figure(row: Row) -> str:
            kinds = [kind for kind in row.get("host_times", {}) if kind.startswith("decode")]
            most = max(kinds, key=lambda kind: int(kind.split()[1]), default=None)
            return "{:.0f}, p99 {:.0f}".format(*row["host_times"][most][part]) if most else ""

        return figure

    columns: list[Column] = [
        ("server", text("arm")),
        ("requests a second, sent", number("rate", 2)),
        ("of them in time", number("goodput", 3)),
        ("share in time", percent("slo_attainment")),
        ("first token in time", percent("within_ttft")),
        ("TPOT in time", percent("within_tpot")),
        ("first token, s", number("ttft_median", 2)),
        ("p99", number("ttft_p99", 2)),
        ("TPOT, ms", number("tpot_median", 1, 1e3)),
        ("p99", number("tpot_p99", 1, 1e3)),
        ("rows that ran dense", percent("dense_rows")),
        ("host in hooks, µs a step of most rows", host("all")),
        ("of it planning", host("planning")),
        ("best, times the best dense server's", ratio_cell(rows, "rate", "goodput_ratio")),
    ]
    return table([row for row in rows if row["kind"] == "item"], columns)


def plot(rows: Sequence[Row], stem: Path) -> list[Path]:
    """Goodput over the rate at which requests come, a line a server.

    Args:
        rows: of the file.
        stem: path without a suffix.

    Returns:
        The paths written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for arm, line in lines(rows, "rate").items():
        axes.plot([row["rate"] for row in line], [row["goodput"] for row in line], marker="o", label=arm)
    axes.axline((0, 0), slope=1, color="grey", linestyle=":", label="all in time")
    axes.set(xlabel="requests a second, sent", ylabel="requests a second, of them in time", xlim=0, ylim=0)
    axes.grid(alpha=0.3)
    axes.legend()
    return save(figure, stem)
