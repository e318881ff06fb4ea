"""The table of a file of ``eval.bench_serving``, and its pictures: times per output token and of first tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from eval.live.counters import EvaluationError
from eval.live.record import read_finished
from eval.scores.pictures import rows_of, save
from eval.scores.tables import Column, bounds, number, percent, table, text
from eval.serving.first_token import TASK
from eval.serving.grid import DENSE
from eval.texts.lengths import short_length

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COMMAND = "eval.bench_serving"
SPARSE, LIMIT = "sparse", "limit"
QUALITY = {"left out": "sparsity", "attention mass kept": "recall"}

Row = Mapping[str, Any]


class Point(NamedTuple):
    """A time per output token at a context in tokens: the median of the runs and their range, or the limit; seconds."""

    context: int
    seconds: float
    low: float
    high: float


# Of each line its points, by context.
Lines = dict[str, list[Point]]


def curves(rows: Sequence[Row]) -> dict[int, Lines]:
    """The lines of each batch size: "dense", further dense servers by name, and "sparse".

    They are those of the ``summary`` rows of task "serving"; refused where no cell was measured on both servers.
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


def plot_times(
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
        cells: rows that `draw_below` draws, those of one batch size below its panel, in the colours of the servers.
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
            contexts, named = [point.context for point in points], {"color": colours[name], "label": name}
            times, bars = _bars([[1e3 * seconds for seconds in point[1:]] for point in points])
            if name == LIMIT:
                axes.plot(contexts, times, linestyle="--", marker="x", markersize=4, **named)
            else:
                axes.errorbar(contexts, times, yerr=bars, marker="o", capsize=3, **named)
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
    facts = next((row["facts"] for row in rows if row["kind"] == "server" and row["arm"] == SPARSE), {})
    config = (facts.get("sparse") or {}).get("config") or {}
    named = {"active_ratio": "active ratio", "theta1": "theta1", "rectify_interval": "tokens between rectifications"}
    figure.suptitle(_title(rows, [f"{text} {config[name]}" for name, text in named.items() if name in config]))
    return save(figure, stem)


def tokens_axis(axes: Axes, tokens: Sequence[int]) -> None:
    """A logarithmic horizontal axis with a tick at each power of two: 512, 1k, 2k."""
    powers = range(math.floor(math.log2(min(tokens))), math.ceil(math.log2(max(tokens))) + 1)
    axes.set_xscale("log", base=2)
    axes.set_xticks([2**power for power in powers], [f"{2**p // 1024}k" if p >= 10 else str(2**p) for p in powers])
    axes.minorticks_off()


def serving(path: Path) -> str:
    """Return the table of ``eval.bench_serving``: each server against the dense one."""

    def ratio(row: Row) -> str:
        return number("ttft_over_dense", 3)(row) or number("ttft_ratio", 3)(row) or number("ttft_median_ratio", 2)(row)

    columns: list[Column] = [
        ("server and cell", text("id")),
        ("TPOT, ms", number("decode_tpot", 2, 1e3)),
        ("dense, ms", number("dense_decode_tpot", 2, 1e3)),
        ("times faster", number("decode_tpot_ratio", 3)),
        ("throughput, times", number("output_throughput_ratio", 2)),
        ("first token, s", lambda row: number("ttft", 3)(row) or number("ttft_median", 3)(row)),
        ("of the runs", bounds("ttft_range", 3, sign=False)),
        ("dense, s", lambda row: number("dense_ttft", 3)(row) or number("dense_ttft_median", 3)(row)),
        ("of its runs", bounds("dense_ttft_range", 3, sign=False)),
        ("dense over sparse, of a hit sparse over dense", ratio),
        ("95 % interval of a hit's", bounds("ttft_over_dense_interval", 3, sign=False)),
        ("pages summarised again", text("recomputed")),
        ("read", percent("density")),
        ("rows dense", percent("dense_rows")),
        ("left out", percent("sparsity")),
        ("mass kept", number("recall", 3)),
        ("theta", lambda row: text("theta")(row) or text("theta1")(row)),
        ("active blocks", number("active_blocks", 0)),
        ("sparse layers", text("sparse_layers")),
    ]
    return table([row for row in read_finished(path) if row["kind"] == "summary"], columns)


def plot(rows: Sequence[Row], stem: Path) -> list[Path]:
    """Seconds to the first token of a cold prompt over its length, and times faster than dense.

    A line for each server and size of the prefill's chunks; bars are the range of the runs.
    """
    from matplotlib.figure import Figure

    cells = [row for row in rows if row["kind"] == "summary" and row["task"] == TASK]
    cells.sort(key=lambda row: row["context"])
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    times, ratios = figure.subplots(1, 2)
    sizes = list(dict.fromkeys(row["chunked_prefill_size"] for row in cells))
    for size, style in zip(sizes, ("-", "--", ":", "-.") * len(sizes), strict=False):
        mine = [row for row in cells if row["chunked_prefill_size"] == size]
        chunks = f", chunks of {short_length(size)}" if size else ""
        arms = list(dict.fromkeys(row["arm"] for row in mine))
        for place, arm in enumerate(arms):
            line = [row for row in mine if row["arm"] == arm]
            contexts = [row["context"] for row in line]
            named = {"color": f"C{place}", "linestyle": style, "marker": "o", "label": f"{arm}{chunks}"}
            # The row of every server holds the dense server's figures.
            of_dense = {**named, "color": "C7", "label": f"dense{chunks}"}
            for field, how in (*([] if place else [("dense_ttft", of_dense)]), ("ttft", named)):
                times.errorbar(contexts, *_bars([(row[field], *row[f"{field}_range"]) for row in line]), **how)
            ratios.plot(contexts, [row["ttft_ratio"] for row in line], **named)
    ratios.axhline(1, color="gray", linewidth=1)
    for axes, what in ((times, "time to first token, s"), (ratios, "times faster than dense")):
        tokens_axis(axes, [row["context"] for row in cells])
        axes.set(xlabel="prompt, tokens", ylabel=what)
        axes.legend()
    times.set_yscale("log")
    sparse = [row for row in cells if row.get("sparse_tokens")]
    values = {name: [row[field] for row in sparse if row.get(field) is not None] for name, field in QUALITY.items()}
    kept = [f"{name} {min(found):.2f} to {max(found):.2f}" for name, found in values.items() if found]
    figure.suptitle(_title(rows, kept))
    return save(figure, stem)


def _bars(points: Sequence[Sequence[float]]) -> tuple[list[float], tuple[list[float], list[float]]]:
    """Medians, and how far below and above them the range reaches, of points of a median and its range."""
    # The median of two runs lies between them but for rounding.
    below = [max(0.0, median - low) for median, low, _ in points]
    above = [max(0.0, high - median) for median, _, high in points]
    return [median for median, _, _ in points], (below, above)


def _title(rows: Sequence[Row], said: Sequence[str]) -> str:
    arguments = rows[0]["arguments"]
    model = arguments.get("shape") or Path(arguments["model_path"]).name
    return "\n".join(filter(None, (f"{model} on {rows[0]['device']}", ", ".join(said))))


def draw(path: Path, stem: Path, times: Callable[[Sequence[Row], Path], object] = plot_times) -> None:
    """Draw a file's time per token or first tokens as ``stem``; of both, the latter with the suffix ``-first-token``.

    Refused if another command wrote it, or there is neither.
    """
    rows = rows_of(path, COMMAND)
    tasks = {row["task"] for row in rows if row["kind"] == "summary"}
    if TASK in tasks:
        plot(rows, Path(f"{stem}-first-token") if "serving" in tasks else stem)
    # A file with nothing at all is refused there.
    if TASK not in tasks or "serving" in tasks:
        times(rows, stem)
