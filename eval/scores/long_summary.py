"""Statistics and plot of ``eval.long_generation``, from the rows of its JSONL file alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eval.live.counters import EvaluationError
from eval.scores.pictures import save
from eval.scores.stats import Floats, interval, resamples
from eval.scores.summary import reading

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# A divergence of 0, as between equal kernels, has no place on a logarithmic axis.
FLOOR = 1e-7

Row = Mapping[str, Any]
# task, name of the setting, its ratio, its interval
Group = tuple[str, str, float | None, int | None]


def proven(rows: Sequence[Row]) -> list[Row]:
    """Rows of an earlier run without items whose setting was interrupted before its counters showed that it ran."""
    shown: set[tuple[str, str]] = set()
    kept = []
    for row in reversed(rows):
        group = row.get("arm", ""), row.get("task", "")
        if row["kind"] == "counters":
            shown.add(group)
        if row["kind"] != "item" or group in shown:
            kept.append(row)
    return kept[::-1]


def summarise(rows: Sequence[Row], seed: int = 0) -> list[dict[str, Any]]:
    """Judge every setting at every checkpoint.

    Args:
        rows: of the JSONL file: ``item`` rows with task, arm, ratio, interval, index, position and the scores kl and
            agreement; ``counters`` rows give the realised density. Of equal items the last counts.
        seed: of the bootstrap.

    Returns:
        One dict for each text, setting and position, in the order of the file: ``n`` prompts; ``kl`` (nats) and
        ``agreement`` with the 95 % intervals of their means, by a bootstrap over prompts; of a rectified setting
        ``kl_change``, its mean less the one that is never rectified at the same ratio, and of a sparse one
        ``agreement_change``, its mean less that of the noise, both with their paired 95 % intervals.

    Raises:
        EvaluationError: there are no items, or a setting lacks prompts that another one of its text has.
    """
    found: dict[Group, dict[int, dict[int, Row]]] = {}
    for row in rows:
        if row["kind"] == "item":
            group = row["task"], row["arm"], row["ratio"], row["interval"]
            found.setdefault(group, {}).setdefault(row["position"], {})[row["index"]] = row["scores"]
    if not found:
        raise EvaluationError("there are no items to judge")
    _require_same(found)
    summary = []
    for group, positions in found.items():
        task, name, ratio, every = group
        off = next((other for other in found if (other[0], other[2], other[3]) == (task, ratio, 0)), None)
        noise = next((other for other in found if (other[0], other[3]) == (task, None)), None)
        for position in sorted(positions):
            line = {"task": task, "arm": name, "ratio": ratio, "interval": every, "position": position}
            line["density"] = reading(_counters(rows, task, name))["density"]
            mine = positions[position]
            line |= _figures(mine, seed)
            if every and off:
                line |= _change("kl", mine, found[off][position], seed)
            if every is not None and noise:
                line |= _change("agreement", mine, found[noise][position], seed)
            summary.append(line)
    return summary


def _require_same(found: Mapping[Group, Mapping[int, Mapping[int, Row]]]) -> None:
    first: dict[str, Group] = {}
    for group, positions in found.items():
        mine, other = positions, found[first.setdefault(group[0], group)]
        if {p: set(rows) for p, rows in mine.items()} != {p: set(rows) for p, rows in other.items()}:
            sizes = [sum(map(len, part.values())) for part in (mine, other)]
            raise EvaluationError(
                f"{group[0]}: {group[1]} has {sizes[0]} items where {first[group[0]][1]} has {sizes[1]}, or other "
                "ones: the run was not finished"
            )


def _counters(rows: Sequence[Row], task: str, arm: str) -> list[Row]:
    return [row for row in rows if row["kind"] == "counters" and (row["task"], row["arm"]) == (task, arm)]


def _figures(mine: Mapping[int, Row], seed: int) -> dict[str, Any]:
    weights = resamples(len(mine), seed)
    figures: dict[str, Any] = {"n": len(mine)}
    for name in ("kl", "agreement"):
        values = _values(mine, name)
        figures |= {name: float(values.mean()), f"{name}_interval": interval(weights @ values)}
    return figures


def _change(name: str, mine: Mapping[int, Row], other: Mapping[int, Row], seed: int) -> dict[str, Any]:
    change = _values(mine, name) - _values(other, name)
    bounds = interval(resamples(len(mine), seed) @ change)
    return {f"{name}_change": float(change.mean()), f"{name}_change_interval": bounds}


def _values(items: Mapping[int, Row], name: str) -> Floats:
    return np.array([items[index][name] for index in sorted(items)])


def plot(summary: Sequence[Row], stem: Path) -> list[Path]:
    """Divergence (logarithmic) and agreement against the position in the output: a column for each text.

    Bands are the 95 % intervals.
    """
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(row["task"] for row in summary))
    figure = Figure(figsize=(6 * len(tasks), 7), layout="constrained")
    panels = figure.subplots(2, len(tasks), squeeze=False, sharex="col")
    for column, task in enumerate(tasks):
        mine = [row for row in summary if row["task"] == task]
        for axes, figure_name in zip(panels[:, column], ("kl", "agreement"), strict=True):
            _draw(axes, mine, figure_name)
        panels[0, column].set(title=task, ylabel="KL(dense, sparse), nats", yscale="log")
        panels[1, column].set(ylabel="same best token", xlabel="position in the output, tokens", xscale="log")
        ticks = sorted({row["position"] for row in mine})
        panels[1, column].set_xticks(ticks, [str(tick) for tick in ticks])
        panels[1, column].minorticks_off()
        panels[0, column].legend()
    return save(figure, stem)


def _draw(axes: Axes, rows: Sequence[Row], name: str) -> None:
    """A line with its band for each setting; dense noise is grey, a setting that is never rectified dashed."""
    lowest = FLOOR if name == "kl" else 0.0
    sparse = [arm for arm in dict.fromkeys(row["arm"] for row in rows) if arm != "noise"]
    for arm in dict.fromkeys(row["arm"] for row in rows):
        mine = [row for row in rows if row["arm"] == arm]
        colour = f"C{sparse.index(arm)}" if arm in sparse else "grey"
        places = [row["position"] for row in mine]
        bounds = np.array([row[f"{name}_interval"] for row in mine]).clip(min=lowest)
        style = "--" if mine[0]["interval"] == 0 else "-"
        label = {"noise": "dense again (noise)"}.get(arm, arm)
        axes.plot(
            places, np.clip([row[name] for row in mine], lowest, None), style, marker="o", color=colour, label=label
        )
        axes.fill_between(places, bounds[:, 0], bounds[:, 1], color=colour, alpha=0.2, linewidth=0)
