"""Requests and tokens a second of servers at one workload: table and picture of a file of ``bench_throughput``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.live.record import read_finished
from eval.scores.pictures import save
from eval.scores.tables import Column, number, percent, table, text
from eval.serving.grid import DENSE

COMMAND = "eval.lab.bench_throughput"
BEST = "best"

Row = Mapping[str, Any]


def best_batches(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Each server's batch with the most requests a second, beside the dense server's.

    Args:
        rows: of kind ``item``.

    Returns:
        For each server but the dense one, where both have rows: the row of its best batch, the dense server's figures
        with the prefix ``dense_``, and ``request_throughput_ratio`` and ``output_throughput_ratio``, its over theirs.
    """
    best: dict[str, Row] = {}
    for row in rows:
        if row["arm"] not in best or row["request_throughput"] > best[row["arm"]]["request_throughput"]:
            best[row["arm"]] = row
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
    """What servers work off, batch by batch."""
    rows = read_finished(path)
    ratios = {row["arm"]: row for row in rows if row["kind"] == "summary"}

    def ratio(row: Row) -> str:
        mine = ratios.get(row["arm"])
        return f"{mine['request_throughput_ratio']:.2f}" if mine and mine["batch"] == row["batch"] else ""

    columns: list[Column] = [
        ("server", text("arm")),
        ("at once", text("batch")),
        ("requests a second", number("request_throughput", 4)),
        ("tokens a second", number("output_throughput", 1)),
        ("first token, s", number("ttft_median", 2)),
        ("TPOT, ms", number("tpot_median", 2, 1e3)),
        ("read", percent("density")),
        ("KV held of a prompt, tokens", number("held_tokens", 0)),
        ("best, times the dense server's best", ratio),
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

    items = [row for row in rows if row["kind"] == "item"]
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for arm in dict.fromkeys(row["arm"] for row in items):
        line = sorted((row for row in items if row["arm"] == arm), key=lambda row: row["batch"])
        rates = [1 / row["tpot_median"] for row in line]
        axes.plot(rates, [row["output_throughput"] for row in line], marker="o", label=arm)
        for row, rate in zip(line, rates, strict=True):
            axes.annotate(str(row["batch"]), (rate, row["output_throughput"]), fontsize=7)
    axes.set_xlabel("tokens a second of one user (numbers: requests at once)")
    axes.set_ylabel("tokens a second of the server")
    axes.grid(alpha=0.3)
    axes.legend()
    return save(figure, stem)
