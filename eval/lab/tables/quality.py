"""Tables and the chart of ``eval.lab.quality``: what each way to serve a checkpoint keeps of dense answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from eval.live.record import command_name, read_finished, result_files, summarised
from eval.scores import ppl_summary
from eval.scores.pictures import save
from eval.scores.stats import compare
from eval.scores.summary import by_prompt, reading
from eval.scores.tables import RECTIFICATION, Column, Row, length, number, percent, table, text
from eval.texts.lengths import short_length

DENSE = "dense"
# Below, a checkpoint does not do a task, and a loss says nothing.
LEAST = 0.3
# Of an arm's scores over all tasks.
MEAN = "mean"
# What an arm's name ends in where only the share of the pages is another one.
SHARE = re.compile(r"-0\.\d+$")

# What the suites are called; the chart is of the first.
SUITES = {"ruler": "RULER", "niah": "needles", "infinitebench": "InfiniteBench"}
# What no method can do, or would: behind all others.
CONTROLS = ("true_mass", "random_pages")
# ReSA's defaults: the share that it reads, and tokens between rectifications.
RATIO, INTERVAL = 0.1, 32

# Suite, length and task.
Place = tuple[str, int, str]


@dataclass
class Answers:
    """The answers of one checkpoint.

    Attributes:
        scores: by arm, and by suite, length and task: of each prompt.
        counts: by arm, and by suite and length: rows of the server's counters.
    """

    scores: dict[str, dict[Place, dict[str, float]]] = field(default_factory=dict)
    counts: dict[str, dict[tuple[str, int], list[Row]]] = field(default_factory=dict)

    def add(self, suite: str, arm: str, rows: Sequence[Row]) -> None:
        """Take what a file of a suite says of an arm, of the dense one beside it, and of others on the same server."""
        items = [row for row in rows if row["kind"] == "item" and not row.get("failed")]
        for told in dict.fromkeys(row["arm"] for row in items):
            mine = [row for row in items if row["arm"] == told]
            scores = self.scores.setdefault(_named(told, arm), {})
            for task, size in dict.fromkeys((row["task"], row["length"]) for row in mine):
                asked = (row for row in mine if (row["task"], row["length"]) == (task, size))
                scores[SUITES[suite], size, task] = by_prompt(asked)
        for row in rows:
            if row["kind"] == "counters" and row["arm"] != "compare":
                counts = self.counts.setdefault(_named(row["arm"], arm), {})
                counts.setdefault((SUITES[suite], row["length"]), []).append(row)

    def lines(self) -> list[dict[str, Any]]:
        """A line for each task and length that dense attention does, and one for the mean of each suite and length.

        Returns:
            ``suite``, ``length``, ``task``, ``n``, and by arm its score: where it was asked less, of the questions that
            it was asked, as is ``dense:ARM``. ``diff:ARM`` is the difference of the two, ``verdict:ARM`` that of
            `eval.scores.stats.compare`.
        """
        found: list[dict[str, Any]] = []
        dense = self.scores.get(DENSE, {})
        places = sorted((place for place, given in dense.items() if fmean(given.values()) >= LEAST), key=_of_suite)
        for suite, size in dict.fromkeys(place[:2] for place in places):
            lines = [self._line(place) for place in places if place[:2] == (suite, size)]
            mean: dict[str, Any] = {"suite": suite, "length": size, "task": MEAN, "n": None}
            for name in dict.fromkeys(name for line in lines for name in line if ":" in name or name in self.scores):
                values = [line.get(name) for line in lines]
                # A mean over other tasks than the next arm's would mislead.
                if all(isinstance(value, float) for value in values):
                    mean[name] = fmean(value for value in values if isinstance(value, float))
            mean |= {f"read:{arm}": self.read(arm, [(suite, size)]) for arm in self.counts}
            found += [*lines, mean]
        return found

    def _line(self, place: Place) -> dict[str, Any]:
        dense = self.scores[DENSE][place]
        line: dict[str, Any] = dict(zip(("suite", "length", "task"), place, strict=True))
        line |= {"n": len(dense), DENSE: fmean(dense.values())}
        for arm, given in self.scores.items():
            both = [prompt for prompt in given.get(place, {}) if prompt in dense]
            if arm == DENSE or not both:
                continue
            mine, theirs = [given[place][prompt] for prompt in both], [dense[prompt] for prompt in both]
            judged = compare(mine, theirs)
            line |= {arm: fmean(mine), f"dense:{arm}": fmean(theirs), f"diff:{arm}": judged["diff"]}
            line |= {f"verdict:{arm}": judged["verdict"], f"n:{arm}": len(both)}
        return line

    def read(self, arm: str, places: Iterable[tuple[str, int]]) -> float | None:
        """The share of the pages that an arm's decode attended to in suites at lengths."""
        return reading([row for place in places for row in self.counts.get(arm, {}).get(place, [])])["density"]


def _named(told: str, arm: str) -> str:
    """An arm as tables name it: a file calls its server "base"."""
    return {"base": arm, "compare": DENSE}.get(told, told)


def _of_suite(place: Place) -> tuple[int, int]:
    return list(SUITES.values()).index(place[0]), place[1]


def read_answers(paths: Iterable[Path]) -> dict[str, Answers]:
    """The finished files of questions by checkpoint, the last part of its name; what else is there is passed over."""
    found: dict[str, Answers] = {}
    for path in paths:
        header, *rows = read_finished(path)
        suite = command_name(header.get("command"))
        if suite in SUITES and header.get("label"):
            found.setdefault(_model(header), Answers()).add(suite, header["label"], rows)
    return found


def _model(header: Row) -> str:
    return str(header["servers"]["base"]["model_path"]).rstrip("/").split("/")[-1]


def read_folder(folder: Path) -> dict[str, Answers]:
    """See `read_answers`; what is not finished is passed over."""
    return read_answers(path for path in result_files(folder).values() if summarised(path))


def quality_tables(folder: Path) -> list[str]:
    """For each checkpoint a table: the score of dense attention, and what each arm's differs from it, in points."""
    return [f"{model}:\n\n{quality_table(answers)}" for model, answers in read_folder(folder).items()]


def quality_table(answers: Answers) -> str:
    """A line for each task and length; a difference that is certain is bold, and one of fewer questions says so."""

    def difference(row: Row, arm: str) -> str:
        diff, judged, read = (row.get(f"{name}:{arm}") for name in ("diff", "verdict", "read"))
        if diff is None:
            return ""
        shown = f"{100 * diff:+.1f}"
        shown = f"**{shown}**" if judged in ("worse", "better") else shown
        fewer = f" (n {row[f'n:{arm}']})" if row["n"] and row[f"n:{arm}"] < row["n"] else ""
        return shown + fewer + (f", {read:.0%} read" if read is not None else "")

    columns: list[Column] = [("suite", text("suite")), ("length", length), ("task", text("task")), ("n", text("n"))]
    columns += [(DENSE, lambda row: f"{100 * row[DENSE]:.1f}")]
    arms = sorted((arm for arm in answers.scores if arm != DENSE), key=lambda arm: (arm in CONTROLS, arm))
    columns += [(arm, partial(difference, arm=arm)) for arm in arms]
    return table(answers.lines(), columns)


def perplexities(folder: Path) -> str:
    """For each checkpoint and length a table: against the share at the default interval, and the other way round."""
    found = []
    for path in sorted(folder.glob("*-resa-ppl*"), key=lambda path: path.name.split(".")):
        header, *rows = read_finished(path)
        kept = [
            row
            for row in ppl_summary.summarise(rows)
            if row["setting"] == "dense" or row["ratio"] == RATIO or row["interval"] == INTERVAL
        ]
        size = short_length(header["arguments"]["length"])
        found.append(f"{_model(header)}, {size}:\n\n{table(kept, RECTIFICATION)}")
    return "\n\n".join(found)


def thetas(paths: Iterable[Path]) -> str:
    """Return the table of AnchorAttention with one theta in all layers, from files of ``sglang_sparse.calibrate``."""
    rows = []
    for path in paths:
        found = json.loads(path.read_text())["calibration"]
        rows += [{"model": Path(found["model"]).name, **row} for row in found["same_theta_in_all_layers"]]
    columns: list[Column] = [("model", text("model")), ("length", length), ("theta", number("theta", 0))]
    columns += [("recall", number("recall", 3)), ("keys left out", percent("sparsity"))]
    return table(rows, columns)


def plot(answers: Answers, stem: Path) -> None:
    """Draw the score kept over the share read: a line for each way to serve, through its shares.

    Args:
        answers: of one checkpoint.
        stem: path without a suffix.
    """
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    points = kept_over_read(answers)
    for way in dict.fromkeys(SHARE.sub("", arm) for arm in points):
        mine = sorted(point for arm, point in points.items() if SHARE.sub("", arm) == way)
        axes.plot(*zip(*((100 * read, 100 * kept) for read, kept in mine), strict=True), marker="o", label=way)
    axes.axhline(100, color="grey", linewidth=0.8)
    axes.set(xlabel="pages read in decode, %", ylabel="score kept in RULER, % of dense")
    axes.legend()
    save(figure, stem)


def kept_over_read(answers: Answers) -> dict[str, tuple[float, float]]:
    """Of each arm the share of the pages that it read, and its mean score in RULER over dense attention's.

    The lengths are those that all arms were asked; where there is none, those of each arm.
    """
    means = [line for line in answers.lines() if line["task"] == MEAN and line["suite"] == SUITES["ruler"]]
    # Random pages keep so little that all others would be one point; a sparse prefill's loss is not decode's.
    arms = [arm for arm in answers.counts if arm != "random_pages" and "anchor" not in arm]
    arms = [arm for arm in arms if any(arm in line for line in means)]
    shared = [line for line in means if all(arm in line for arm in arms)] or means
    points = {}
    for arm in arms:
        mine = [line for line in shared if arm in line]
        read = answers.read(arm, [(line["suite"], line["length"]) for line in mine])
        if mine and read is not None:
            points[arm] = read, fmean(line[arm] / line[f"dense:{arm}"] for line in mine)
    return points
