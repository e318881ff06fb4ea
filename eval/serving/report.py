"""The table of a file of ``eval.bench_serving``, and the picture of its first tokens: time over the prompt's length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.live.record import read_finished
from eval.scores.pictures import rows_of, save
from eval.scores.tables import Column, bounds, number, percent, table, text
from eval.serving import latency
from eval.serving.first_token import TASK
from eval.texts.lengths import short_length

QUALITY = {"left out": "sparsity", "attention mass kept": "recall"}

Row = Mapping[str, Any]


def serving(path: Path) -> str:
    """What ``eval.bench_serving`` found of each server beside the dense one."""

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
            if not place:
                # The row of every server holds the dense server's figures.
                times.errorbar(
                    contexts, *_bars(line, "dense_ttft"), **{**named, "color": "C7", "label": f"dense{chunks}"}
                )
            times.errorbar(contexts, *_bars(line, "ttft"), **named)
            ratios.plot(contexts, [row["ttft_ratio"] for row in line], **named)
    ratios.axhline(1, color="gray", linewidth=1)
    for axes, what in ((times, "time to first token, s"), (ratios, "times faster than dense")):
        latency.tokens_axis(axes, [row["context"] for row in cells])
        axes.set(xlabel="prompt, tokens", ylabel=what)
        axes.legend()
    times.set_yscale("log")
    figure.suptitle(_title(rows, cells))
    return save(figure, stem)


def _bars(line: Sequence[Row], name: str) -> tuple[list[float], tuple[list[float], list[float]]]:
    """Medians, and how far the range reaches below and above them."""
    medians = [row[name] for row in line]
    below = [median - row[f"{name}_range"][0] for median, row in zip(medians, line, strict=True)]
    above = [row[f"{name}_range"][1] - median for median, row in zip(medians, line, strict=True)]
    return medians, (below, above)


def _title(rows: Sequence[Row], cells: Sequence[Row]) -> str:
    header = rows[0]
    model = header["arguments"].get("shape") or Path(header["arguments"]["model_path"]).name
    sparse = [row for row in cells if row.get("sparse_tokens")]
    values = {name: [row[field] for row in sparse if row.get(field) is not None] for name, field in QUALITY.items()}
    kept = [f"{name} {min(found):.2f} to {max(found):.2f}" for name, found in values.items() if found]
    return "\n".join(filter(None, (f"{model} on {header['device']}", ", ".join(kept))))


def draw(path: Path, stem: Path, plot_times: Callable[[Sequence[Row], Path], list[Path]] = latency.plot) -> list[Path]:
    """What a file has: time per token or first tokens as ``stem``; of both, the latter with ``-first-token`` behind it.

    Raises:
        EvaluationError: it cannot be read, another command wrote it, or there is neither.
    """
    rows = rows_of(path, latency.COMMAND)
    tasks = {row["task"] for row in rows if row["kind"] == "summary"}
    if TASK not in tasks:
        # A file with nothing at all is refused there.
        return plot_times(rows, stem)
    if "serving" not in tasks:
        return plot(rows, stem)
    return [*plot(rows, Path(f"{stem}-first-token")), *plot_times(rows, stem)]
