"""Time per output token over the context, from a file of ``eval.bench_serving``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from eval.live.counters import EvaluationError
from eval.scores.pictures import save
from eval.serving.grid import DENSE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COMMAND = "eval.bench_serving"
SPARSE, LIMIT = "sparse", "limit"

Row = Mapping[str, Any]


class Point(NamedTuple):
    """A time per output token.

    Attributes:
        context: tokens of each prompt.
        seconds: the median of the runs, or the limit.
        low, high: range of the runs, in seconds; of the limit both are ``seconds``.
    """

    context: int
    seconds: float
    low: float
    high: float


# Of each line its points, by context.
Lines = dict[str, list[Point]]


def curves(rows: Sequence[Row]) -> dict[int, Lines]:
    """The lines of each batch size: "dense", further dense servers by name, and "sparse".

    Args:
        rows: of the file: header, ``server`` rows, and ``summary`` rows of task "serving" (seconds).

    Raises:
        EvaluationError: no cell was measured on both servers.
    """
    cells = [row for row in rows if row["kind"] == "summary" and row["task"] == "serving"]
    if not cells:
        raise EvaluationError("there are no cells to draw: the run was refused or interrupted, or nothing fitted")
    names = dict.fromkeys([DENSE, *(row["arm"] for row in cells if row["arm"] != SPARSE), SPARSE])
    found: dict[int, Lines] = {}
    for batch in sorted({row["batch"] for row in cells}):
        mine = [row for row in cells if row["batch"] == batch]
        lines = {name: _points([row for row in mine if name in (DENSE, row["arm"])], name) for name in names}
        found[batch] = {name: points for name, points in lines.items() if points}
    return found


def _points(cells: Sequence[Row], name: str) -> list[Point]:
    field = "dense_decode_tpot" if name == DENSE else "decode_tpot"
    # The row of every server holds the dense server's figures.
    return sorted({Point(row["context"], row[field], *row[f"{field}_range"]) for row in cells})


def plot(
    rows: Sequence[Row],
    stem: Path,
    panels: Mapping[int, Lines] | None = None,
    cells: Sequence[Row] = (),
    draw_below: Callable[[Axes, Sequence[Row], Mapping[str, str]], None] | None = None,
) -> list[Path]:
    """Milliseconds per output token over the context, a panel for each batch size; bars are the range of the runs.

    Args:
        rows: see `curves`.
        stem: path without a suffix.
        panels: lines by batch size; by default those of `curves`. A line called `LIMIT` is dashed.
        cells: those of the rows that `draw_below` draws.
        draw_below: draws cells of one batch size below its panel, with the colours of the servers.
    """
    from matplotlib.figure import Figure

    panels = curves(rows) if panels is None else panels
    others = dict.fromkeys(name for lines in panels.values() for name in lines if name not in (DENSE, SPARSE, LIMIT))
    colours = {DENSE: "C7", SPARSE: "C0", LIMIT: "black"} | {name: f"C{1 + i}" for i, name in enumerate(others)}
    lower = {batch: [row for row in cells if row["batch"] == batch] for batch in panels if cells}
    figure = Figure(figsize=(5 * len(panels), 8.4 if lower else 4.2), layout="constrained")
    grid = figure.subplots(2 if lower else 1, len(panels), squeeze=False)
    for axes, (batch, lines) in zip(grid[0], panels.items(), strict=True):
        for name, points in lines.items():
            contexts, times, low, high = zip(*points, strict=True)
            times = [1e3 * seconds for seconds in times]
            if name == LIMIT:
                axes.plot(contexts, times, color=colours[name], linestyle="--", marker="x", markersize=4, label=name)
                continue
            # The median of two runs lies between them but for rounding.
            below = [max(0.0, time - 1e3 * least) for time, least in zip(times, low, strict=True)]
            above = [max(0.0, 1e3 * most - time) for time, most in zip(times, high, strict=True)]
            axes.errorbar(contexts, times, yerr=(below, above), color=colours[name], marker="o", capsize=3, label=name)
        tokens_axis(axes, [point.context for points in lines.values() for point in points])
        axes.set(title=f"batch {batch}", xlabel="context, tokens", ylabel="time per output token, ms")
        axes.set_ylim(bottom=0)
        axes.legend()
    for axes, (batch, mine) in zip(grid[-1], lower.items(), strict=False):
        axes.set_visible(bool(mine))
        if mine and draw_below:
            draw_below(axes, mine, colours)
            tokens_axis(axes, [row["context"] for row in mine])
            axes.set(title=f"batch {batch}", xlabel="context, tokens")
    figure.suptitle(_title(rows))
    return save(figure, stem)


def tokens_axis(axes: Axes, tokens: Sequence[int]) -> None:
    """A logarithmic horizontal axis with a tick at each power of two: 512, 1k, 2k."""
    powers = range(math.floor(math.log2(min(tokens))), math.ceil(math.log2(max(tokens))) + 1)
    axes.set_xscale("log", base=2)
    axes.set_xticks([2**power for power in powers], [f"{2**p // 1024}k" if p >= 10 else str(2**p) for p in powers])
    axes.minorticks_off()


def _title(rows: Sequence[Row]) -> str:
    arguments = rows[0]["arguments"]
    model = arguments.get("shape") or Path(arguments["model_path"]).name
    facts = next((row["facts"] for row in rows if row["kind"] == "server" and row["arm"] == SPARSE), {})
    state = facts.get("sparse") or {}
    named = {"active_ratio": "active ratio", "theta1": "theta1", "rectify_interval": "tokens between rectifications"}
    config = [f"{text} {state['config'][name]}" for name, text in named.items() if name in state.get("config", {})]
    return "\n".join(filter(None, (f"{model} on {rows[0]['device']}", ", ".join(config))))
