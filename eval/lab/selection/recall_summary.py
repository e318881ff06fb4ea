"""Statistics and plot of ``eval.lab.recall``, from the rows of its JSONL file alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from eval.lab.selection.recall_attention import SELECTORS
from eval.live.counters import EvaluationError
from eval.scores.pictures import save
from eval.scores.stats import Floats, interval, resamples

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

LOW = 5

Row = Mapping[str, Any]


def summarise(rows: Sequence[Row], seed: int = 0) -> list[dict[str, Any]]:
    """Judge every length, every layer of it and every query head of that.

    Args:
        rows: of the JSONL file: ``item`` rows with task, arm, length, index (of the prompt), layer, head, density, the
            mass kept at every query, and the scores. Of equal items the last counts.
        seed: of the bootstrap.

    Returns:
        One dict for each length, with ``layer`` and ``head`` None; each of its layers, with ``head`` None; and each of
        their heads. ``mass``, ``best`` and ``random`` are the mean shares of the attention mass that the method's, the
        best and a random selection keep, ``*_low`` their 5th percentiles over queries and prompts; ``share`` is mass by
        best; ``error``, ``best_error`` and ``random_error`` are the mean relative L2 distances of the attention output.
        mass, share and error have a 95 % interval, by a bootstrap over prompts; None where there is only one.

    Raises:
        EvaluationError: there are no items, or a prompt lacks heads that another one of its length has.
    """
    items = {row["id"]: row for row in rows if row["kind"] == "item"}
    if not items:
        raise EvaluationError("there are no items to judge")
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in items.values():
        head = row["task"], row["arm"], row["length"], row["layer"], row["head"]
        for place in ((*head[:3], None, None), (*head[:4], None), head):
            groups.setdefault(place, []).append(row)
    names = ("task", "arm", "length", "layer", "head")
    ordered = sorted(groups, key=lambda place: (place[0], place[2], *(-1 if p is None else p for p in place[3:])))
    return [dict(zip(names, place, strict=True)) | _figures(groups[place], seed) for place in ordered]


def _figures(rows: Sequence[Row], seed: int) -> dict[str, Any]:
    prompts: dict[int, list[Row]] = {}
    for row in rows:
        prompts.setdefault(row["index"], []).append(row)
    if len({len(part) for part in prompts.values()}) > 1:
        raise EvaluationError(f"the prompts have {[len(part) for part in prompts.values()]} items: unfinished run")

    def means(name: str) -> Floats:
        return np.array([fmean(row["scores"][name] for row in part) for part in prompts.values()])

    figures: dict[str, Any] = {"n": len(prompts), "density": fmean(row["density"] for row in rows)}
    mass = means("mass")
    weights = resamples(len(prompts), seed)
    several = len(prompts) > 1
    for name in SELECTORS:
        label = "mass" if name == "method" else name
        figures[label] = float(means(label).mean())
        figures[f"{label}_low"] = float(np.percentile(np.concatenate([row["kept"][name] for row in rows]), LOW))
    figures["mass_interval"] = interval(weights @ mass) if several else None
    best = means("best")
    figures["share"] = float(mass.mean() / best.mean())
    figures["share_interval"] = interval((weights @ mass) / (weights @ best)) if several else None
    for name in ("error", "best_error", "random_error"):
        figures[name] = float(means(name).mean())
    figures["error_interval"] = interval(weights @ means("error")) if several else None
    return figures


def plot(summary: Sequence[Row], stem: Path) -> list[Path]:
    """Heat maps of the attention mass kept, layers by query heads: a row for each length, a column for each selector.

    Args:
        summary: rows of `summarise`.
        stem: path without a suffix.

    Returns:
        The paths written.
    """
    from matplotlib.figure import Figure

    lengths = sorted({row["length"] for row in summary})
    heads = [row for row in summary if row["head"] is not None]
    layers = sorted({row["layer"] for row in heads})
    wide = 1 + max(row["head"] for row in heads)
    size = 3.2 + 0.16 * wide, 1.5 + 0.22 * len(layers)
    figure = Figure(figsize=(3 * size[0], len(lengths) * size[1]), layout="constrained")
    panels = figure.subplots(len(lengths), len(SELECTORS), squeeze=False, sharex=True, sharey=True)
    image = None
    for length, line in zip(lengths, panels, strict=True):
        mine = [row for row in summary if row["length"] == length]
        (whole,) = [row for row in mine if row["layer"] is None]
        for name, axes in zip(("mass", "best", "random"), line, strict=True):
            image = _panel(axes, [row for row in mine if row["head"] is not None], layers, wide, name)
            label = f"{whole['arm']}, {whole['density']:.1%} of the pages" if name == "mass" else f"{name} pages"
            axes.set_title(
                f"{length} tokens: {label}\nmean {whole[name]:.3f}, 5th percentile {whole[name + '_low']:.3f}"
            )
        line[0].set_ylabel("layer")
    for axes in panels[-1]:
        axes.set_xlabel("query head")
    assert image is not None
    figure.colorbar(image, ax=panels.ravel().tolist(), label="attention mass kept")
    return save(figure, stem)


def _panel(axes: Axes, rows: Sequence[Row], layers: Sequence[int], wide: int, name: str) -> AxesImage:
    values = np.full((len(layers), wide), np.nan)
    for row in rows:
        values[layers.index(row["layer"]), row["head"]] = row[name]
    step = -(-len(layers) // 12)
    axes.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    return axes.imshow(values, vmin=0, vmax=1, cmap="viridis", aspect="auto")
