"""The picture of a result file, by the command that wrote it."""

from __future__ import annotations

from pathlib import Path

from eval.lab.kernels import framework, prefill
from eval.lab.selection import recall_summary, theta_summary
from eval.lab.servers import throughput
from eval.lab.tables import crossover
from eval.live.record import command_name, read_rows
from eval.scores import heatmap, long_summary, ppl_summary
from eval.serving import latency, report

# What is drawn of a command's files: a summary of their rows, or the rows.
SUMMARISED = {"long_generation": long_summary, "recall": recall_summary, "theta": theta_summary}
PLOTTED = {command_name(module.COMMAND): module.plot for module in (framework, prefill, throughput)}


def draw(path: Path, stem: Path) -> None:
    """Draw a result file as PNG and SVG, if there is a picture of its kind.

    Args:
        path: the file.
        stem: path without a suffix.

    Raises:
        EvaluationError: it is no file of results, or there is nothing in it to draw.
    """
    if path.suffix == ".json":
        crossover.draw(path, stem)
        return
    rows = read_rows(path)
    command = command_name(rows[0].get("command")) if rows else None
    stem.parent.mkdir(parents=True, exist_ok=True)
    if command == "ppl_rectify":
        for suffix in ("png", "svg"):
            ppl_summary.plot(ppl_summary.summarise(rows), Path(f"{stem}.{suffix}"))
    elif command == command_name(latency.COMMAND):
        report.draw(path, stem)
    elif command in SUMMARISED:
        SUMMARISED[command].plot(SUMMARISED[command].summarise(rows), stem)
    elif command in PLOTTED:
        PLOTTED[command](rows, stem)
    elif command == "niah":
        items = [row for row in rows if row["kind"] == "item" and not row.get("failed")]
        for arm in dict.fromkeys(row["arm"] for row in items):
            heatmap.draw([row for row in items if row["arm"] == arm], f"{stem}-{arm}")
