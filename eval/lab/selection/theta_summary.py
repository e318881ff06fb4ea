"""Statistics and plot of ``eval.lab.theta``, from the rows of its JSONL file alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import numpy as np

from eval.live.counters import EvaluationError
from eval.live.record import read_finished
from eval.scores.pictures import save
from eval.scores.tables import length, number, percent, table, text

Row = Mapping[str, Any]
VISIBLE = 0.005
# Shares of the pairs left out at which the two comparisons are set side by side.
SHARES = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9)
SHARED = ("sparsity", "recall", "oracle", "random", "window", "always")
# By whom planted keys are found.
PLANTED = ("anchor", "random", "window")
LABELS = {True: "with anchor", False: "without anchor"}


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Average over prompts, layers and query heads.

    Args:
        rows: of the JSONL file: ``item`` rows with task, length, layer, anchor, theta, and by head sparsity, recall
            and, in later files, oracle, random, window and always. Of equal items the last counts.

    Returns:
        One dict for each task, length, comparison and threshold: these shares, means of all heads, and of the recall
        of single heads the lowest, ``recall_low``, and the 5th percentile, ``recall_p5``.

    Raises:
        EvaluationError: there are no items.
    """
    items = {row["id"]: row for row in rows if row["kind"] == "item"}
    if not items:
        raise EvaluationError("there are no items to judge")
    names = ("task", "length", "anchor", "theta")
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in items.values():
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return [
        {
            **dict(zip(names, place, strict=True)),
            **{name: fmean(share for row in found for share in row[name]) for name in SHARED if name in found[0]},
            "recall_low": min(share for row in found for share in row["recall"]),
            "recall_p5": float(np.quantile([share for row in found for share in row["recall"]], 0.05)),
        }
        for place, found in sorted(groups.items(), key=lambda group: (*group[0][:2], not group[0][2], group[0][3]))
    ]


def visible(summary: Sequence[Row]) -> list[Row]:
    """The rows of `summarise` at every whole threshold that changes anything."""
    rows: list[Row] = []
    for row in summary:
        last = rows[-1] if rows else {}
        same = all(last.get(name) == row[name] for name in ("task", "length", "anchor"))
        changed = not same or max(abs(last[name] - row[name]) for name in ("sparsity", "recall")) > VISIBLE
        if changed and float(row["theta"]).is_integer():
            rows.append(row)
    return rows


def theta(paths: Sequence[Path]) -> str:
    """Sparsity and recall of files of ``eval.lab.theta``, at every whole threshold that changes them."""
    found = [row for path in paths for row in visible(summarise(read_finished(path)))]
    rows = [{**row, "score": LABELS[row["anchor"]], "threshold": f"{row['theta']:g}"} for row in found]
    columns = [
        ("input", text("task")),
        ("length", length),
        ("compared", text("score")),
        ("θ", text("threshold")),
        ("left out", percent("sparsity")),
        ("mass kept", number("recall", 3)),
        ("worst head", number("recall_low", 3)),
    ]
    return table(rows, columns)


def bounds(paths: Sequence[Path]) -> str:
    """What the keys that are found keep beside the best and random ones, of files of ``theta`` that have these."""
    found = [row for path in paths for row in visible(summarise(read_finished(path))) if row["anchor"]]
    rows = [{**row, "threshold": f"{row['theta']:g}", "of_oracle": row["recall"] / row["oracle"]} for row in found]
    columns = [
        ("input", text("task")),
        ("length", length),
        ("θ", text("threshold")),
        ("left out", percent("sparsity")),
        ("mass kept", number("recall", 3)),
        ("5 % of the heads keep less than", number("recall_p5", 3)),
        ("by the best keys", number("oracle", 3)),
        ("by random keys", number("random", 3)),
        ("of the best's", percent("of_oracle")),
    ]
    return table(rows, columns)


def selectors(paths: Sequence[Path]) -> str:
    """Of the mass of keys that may be left out, what is kept by as many keys of each selector, by files with these."""
    rows = []
    for row in (row for path in paths for row in visible(summarise(read_finished(path))) if row["anchor"]):
        optional = 1 - row["always"]
        kept = {name: (row[name] - row["always"]) / optional for name in ("recall", "oracle", "random", "window")}
        rows.append({**row, **kept, "threshold": f"{row['theta']:g}", "optional": optional})
    columns = [
        ("input", text("task")),
        ("length", length),
        ("θ", text("threshold")),
        ("left out", percent("sparsity")),
        ("mass of keys that may be left out", number("optional", 3)),
        ("kept of it", percent("recall")),
        ("by the best keys", percent("oracle")),
        ("by random keys", percent("random")),
        ("by the newest keys", percent("window")),
    ]
    return table(rows, columns)


def planted(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Which share of planted keys is found.

    Args:
        rows: of the JSONL file: ``planted`` rows; of equal ones the last counts.

    Returns:
        One dict for each task, length and threshold: ``n``, the planted keys of all heads and prompts for one number of
        queries; for each of these numbers its share that AnchorAttention finds, ``anchor`` and the number; and
        ``random`` and ``window``, the shares that others find, whatever the queries.

    Raises:
        EvaluationError: there are not as many planted keys for each number of queries.
    """
    kept = {row["id"]: row for row in rows if row["kind"] == "planted"}
    groups: dict[tuple[str, int, float], list[Row]] = {}
    for row in kept.values():
        groups.setdefault((row["task"], row["length"], row["theta"]), []).append(row)
    found = []
    for (task, size, limit), mine in sorted(groups.items()):
        line: dict[str, Any] = {"task": task, "length": size, "theta": limit}
        for queries in sorted({row["queries"] for row in mine}):
            same = [row for row in mine if row["queries"] == queries]
            count = sum(row["keys"] * len(row["anchor"]) for row in same)
            if line.setdefault("n", count) != count:
                raise EvaluationError(
                    f"{task}, {size}: {line['n']} keys are planted for some queries, {count} for others"
                )
            line[f"anchor {queries}"] = fmean(share for row in same for share in row["anchor"])
        others = {name: fmean(share for row in mine for share in row[name]) for name in ("random", "window")}
        found.append({**line, **others})
    return found


def planted_keys(paths: Sequence[Path]) -> str:
    """A line for each threshold of files with planted keys, see `planted`."""
    rows = [{**row, "threshold": f"{row['theta']:g}"} for path in paths for row in planted(read_finished(path))]
    counts = sorted({int(name.split()[1]) for row in rows for name in row if name.startswith("anchor ")}, reverse=True)
    columns = [
        ("input", text("task")),
        ("length", length),
        ("θ", text("threshold")),
        ("planted keys", text("n")),
        *((f"found, {count} queries", percent(f"anchor {count}")) for count in counts),
        ("by random keys", percent("random")),
        ("by the newest keys", percent("window")),
    ]
    return table(rows, columns)


def at_equal_sparsity(summary: Sequence[Row], shares: Sequence[float] = SHARES) -> list[dict[str, Any]]:
    """The recall of both comparisons where they leave out as much, on straight lines between their thresholds.

    Args:
        summary: rows of `summarise`.
        shares: of the pairs left out; those that a comparison does not reach are passed over.

    Returns:
        One dict for each task, length and share: ``sparsity``, ``recall`` with the anchor, and ``recall_without``.
    """
    found = []
    for task, size in dict.fromkeys((row["task"], row["length"]) for row in summary):
        lines: dict[bool, dict[float, float]] = {True: {}, False: {}}
        for row in summary:
            if (row["task"], row["length"]) == (task, size):
                line, place = lines[row["anchor"]], row["sparsity"]
                line[place] = max(row["recall"], line.get(place, 0.0))
        low, high = max(map(min, lines.values())), min(map(max, lines.values()))
        for share in shares:
            if low <= share <= high:
                recall, without = (
                    float(np.interp(share, sorted(line), [line[place] for place in sorted(line)]))
                    for line in lines.values()
                )
                place = {"task": task, "length": size, "sparsity": share}
                found.append({**place, "recall": recall, "recall_without": without})
    return found


def equal(paths: Sequence[Path]) -> str:
    """What both comparisons keep where they leave out as much."""
    rows = [row for path in paths for row in at_equal_sparsity(summarise(read_finished(path)))]
    columns = [
        ("input", text("task")),
        ("length", length),
        ("left out", percent("sparsity")),
        ("mass kept with anchor", number("recall", 3)),
        ("without", number("recall_without", 3)),
    ]
    return table(rows, columns)


def spread(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """How far apart anchors are.

    Args:
        rows: of the JSONL file: ``anchors`` rows; of equal ones the last counts.

    Returns:
        One dict for each task and length: the ``mean`` over all query heads of all layers, ``heads``, the standard
        deviation of their means, and ``blocks``, that of a head's blocks of queries, mean over heads.
    """
    kept = {row["id"]: row for row in rows if row["kind"] == "anchors"}
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in kept.values():
        groups.setdefault((row["task"], row["length"]), []).append(row)
    found = []
    for (task, size), layers in groups.items():
        means, deviations = ([value for row in layers for value in row[name]] for name in ("mean", "deviation"))
        place = {"task": task, "length": size, "n_heads": len(means)}
        found.append({**place, "mean": fmean(means), "heads": pstdev(means), "blocks": fmean(deviations)})
    return found


def anchors(paths: Sequence[Path]) -> str:
    """How far apart anchors are, of files of ``eval.lab.theta``."""
    columns = [
        ("input", text("task")),
        ("length", length),
        ("heads", text("n_heads")),
        ("mean anchor", number("mean", 1)),
        ("deviation between heads", number("heads", 2)),
        ("deviation between a head's blocks", number("blocks", 2)),
    ]
    return table([row for path in paths for row in spread(read_finished(path))], columns)


def plot(summary: Sequence[Row], stem: Path) -> list[Path]:
    """Recall over sparsity, a line with the anchor and one without, a panel for each task and length.

    Args:
        summary: rows of `summarise`.
        stem: path without a suffix.

    Returns:
        The paths written.
    """
    from matplotlib.figure import Figure

    places = list(dict.fromkeys((row["task"], row["length"]) for row in summary))
    figure = Figure(figsize=(4.5 * len(places), 3.5), layout="constrained")
    panels = figure.subplots(1, len(places), squeeze=False, sharey=True)[0]
    for (task, size), axes in zip(places, panels, strict=True):
        for anchor, label in LABELS.items():
            line = [row for row in summary if (row["task"], row["length"], row["anchor"]) == (task, size, anchor)]
            axes.plot([row["sparsity"] for row in line], [row["recall"] for row in line], marker=".", label=label)
            for row in visible(line):
                axes.annotate(f"{row['theta']:g}", (row["sparsity"], row["recall"]), fontsize=7)
        axes.set_title(f"{task}, {size} tokens (numbers: θ)")
        axes.set_xlabel("sparsity: pairs left out")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("attention mass kept")
    panels[0].legend()
    return save(figure, stem)
