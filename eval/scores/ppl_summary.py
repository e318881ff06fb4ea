"""Statistics and plot of ``eval.ppl_rectify``, from the rows of its JSONL file alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from eval.live.counters import EvaluationError
from eval.scores.pictures import write
from eval.scores.stats import Floats, Interval, interval, resamples, standard_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DRIFT_IN_ERRORS = 5.0


class Cell(NamedTuple):
    """The text and the settings of a perplexity.

    Attributes:
        task: the text: "book", "repeat" or "records".
        setting: "dense", "off" (never rectified), "rectified" or "bound" (only the scored step is sparse).
        ratio: share of the pages attended to; None for dense.
        interval: tokens between rectifications, 0 for off; None for dense and bound.
    """

    task: str
    setting: str
    ratio: float | None = None
    interval: int | None = None


def drifts(off: Floats, bound: Floats) -> bool:
    """Whether decoding without rectification is worse than its bound by five standard errors of the paired difference.

    Both are mean negative log-likelihoods ``[windows]``; of the bound only the scored step is sparse.
    """
    lost = off - bound
    return bool(lost.mean() > 0 and lost.mean() >= DRIFT_IN_ERRORS * standard_error(lost))


def closing_fraction(
    off: Floats, rectified: Floats, bound: Floats, weights: Floats
) -> tuple[float | None, Interval | None]:
    """Compute the share of the loss without rectification (`off`) that a rectified setting wins back: 1 is all of it.

    All are negative log-likelihoods ``[windows]``, `bound` where only the scored step is sparse; `weights` of
    `resamples`.

    Returns:
        ``(off - rectified) / (off - bound)`` of the means, and its paired bootstrap 95 % interval. None for the first
        if nothing was lost, None for the second if a resample lost nothing: the ratio has no bounds then.
    """
    won, lost = off - rectified, off - bound
    resampled = weights @ lost
    value = float(won.mean() / lost.mean()) if lost.mean() else None
    return value, interval((weights @ won) / resampled) if resampled.min() > 0 else None


def summarise(rows: Sequence[dict[str, Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Judge every setting.

    Args:
        rows: of the JSONL file: ``item`` rows with task (the text), setting, ratio, interval, window and the score nll
            (nats per token); ``counters`` rows, if any, give the realised density.
        seed: of the bootstrap.

    Returns:
        One dict for each text and setting, in the order of the file: ppl, nll and its standard error; ``diff``, the
        paired difference of nll to dense with its 95 % interval; for sparse settings ``closing`` with its 95 %
        interval, and ``drifts``, which belongs to the text and the ratio.

    Raises:
        EvaluationError: a setting lacks windows that the dense setting of its text has, or that one is missing.
    """
    values: dict[Cell, dict[int, float]] = {}
    densities: dict[Cell, float | None] = {}
    for row in rows:
        if row["kind"] == "item":
            values.setdefault(cell_of(row), {})[row["window"]] = row["scores"]["nll"]
        elif row["kind"] == "counters":
            densities[cell_of(row)] = row["density"]
    nlls: dict[Cell, Floats] = {}
    for cell, found in values.items():
        dense = values.get(Cell(cell.task, "dense"), {})
        if found.keys() != dense.keys():
            raise EvaluationError(f"{cell} has {len(found)} windows where dense has {len(dense)}, or other ones")
        nlls[cell] = np.array([found[i] for i in sorted(found)])
    weights = {size: resamples(size, seed) for size in {len(nll) for nll in nlls.values()}}
    return [
        {**cell._asdict(), **_judge(nlls, cell, weights[len(nlls[cell])])}
        | ({"density": densities[cell]} if cell in densities else {})
        for cell in nlls
    ]


def cell_of(row: dict[str, Any]) -> Cell:
    """Return the cell of an ``item`` or ``counters`` row."""
    return Cell(row["task"], row["setting"], row["ratio"], row["interval"])


def _judge(nlls: dict[Cell, Floats], cell: Cell, weights: Floats) -> dict[str, Any]:
    nll = nlls[cell]
    to_dense = nll - nlls[Cell(cell.task, "dense")]
    row: dict[str, Any] = {
        "windows": len(nll),
        "ppl": math.exp(nll.mean()),
        "nll": float(nll.mean()),
        "nll_error": standard_error(nll),
        "diff": float(to_dense.mean()),
        "diff_interval": interval(weights @ to_dense),
    }
    off = nlls.get(Cell(cell.task, "off", cell.ratio, 0))
    bound = nlls.get(Cell(cell.task, "bound", cell.ratio))
    if off is not None and bound is not None:
        row["drifts"] = drifts(off, bound)
        if cell.setting == "rectified":
            row["closing"], row["closing_interval"] = closing_fraction(off, nll, bound, weights)
    return row


def plot(summary: Sequence[dict[str, Any]], path: Path) -> None:
    """Perplexity against the rectification interval: a panel for each text, a line for each ratio.

    The solid grey line is dense decode, a dotted one the bound of its ratio. Bars are the 95 % interval of the paired
    difference to dense: how hard the texts are is not in them.
    """
    from matplotlib.figure import Figure

    texts = list(dict.fromkeys(row["task"] for row in summary))
    intervals = sorted({row["interval"] for row in summary if row["setting"] == "rectified"})
    labels = [*map(str, intervals), "never"]
    figure = Figure(figsize=(6 * len(texts), 4.5), layout="constrained")
    for axes, text in zip(figure.subplots(1, len(texts), squeeze=False)[0], texts, strict=True):
        mine = [row for row in summary if row["task"] == text]
        axes.set(title=text, xlabel="tokens between rectifications", ylabel="perplexity")
        axes.set_xticks(range(len(labels)), labels)
        for row in mine:
            if row["setting"] == "dense":
                axes.axhline(row["ppl"], color="grey", label="dense")
        for number, ratio in enumerate(dict.fromkeys(row["ratio"] for row in mine if row["ratio"] is not None)):
            _draw_ratio(axes, [row for row in mine if row["ratio"] == ratio], intervals, f"C{number}")
        axes.legend()
    write(figure, path)


def _draw_ratio(axes: Axes, rows: Sequence[dict[str, Any]], intervals: Sequence[int], colour: str) -> None:
    """The line and the bound of the ``rows`` of one text and ratio."""
    drawn = sorted((row for row in rows if row["interval"] is not None), key=lambda row: row["interval"] or math.inf)
    places = [intervals.index(row["interval"]) if row["interval"] else len(intervals) for row in drawn]
    ppls, bars = [row["ppl"] for row in drawn], np.array([_bar(row) for row in drawn]).T
    label = f"ratio {rows[0]['ratio']}"
    axes.errorbar(places, ppls, yerr=bars, color=colour, marker="o", capsize=3, label=label)
    for row in rows:
        if row["setting"] == "bound":
            axes.axhline(row["ppl"], color=colour, linestyle=":", label=f"bound, {label}")


def _bar(row: dict[str, Any]) -> tuple[float, float]:
    low, high = row["diff_interval"]
    # The percentiles of a few windows need not lie around their mean.
    below, above = 1 - math.exp(low - row["diff"]), math.exp(high - row["diff"]) - 1
    return row["ppl"] * max(below, 0.0), row["ppl"] * max(above, 0.0)
