"""Tables and the chart of ``eval.lab.quality``: what each way to serve a checkpoint keeps of dense answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean

from eval.figures.report_tables import Column, Row, length, table, text
from eval.figures.stats import compare
from eval.figures.summary import by_prompt, reading
from eval.live.record import read_finished, result_files, summarised

DENSE = "dense"
# Below, a checkpoint does not do a task, and a loss says nothing.
LEAST = 0.3
# Of an arm's scores over all tasks.
MEAN = "mean"

Place = tuple[str, int]


@dataclass
class Answers:
    """What one checkpoint answered.

    Attributes:
        scores: by arm, and by task and length: of each prompt.
        counts: likewise, rows of the server's counters.
    """

    scores: dict[str, dict[Place, dict[str, float]]] = field(default_factory=dict)
    counts: dict[str, list[Row]] = field(default_factory=dict)

    def add(self, arm: str, rows: Sequence[Row]) -> None:
        """Take what one file says of an arm, of the dense one beside it, and of others on the same server."""
        items = [row for row in rows if row["kind"] == "item" and not row.get("failed")]
        for told in dict.fromkeys(row["arm"] for row in items):
            mine = [row for row in items if row["arm"] == told]
            scores = self.scores.setdefault(_named(told, arm), {})
            for place in dict.fromkeys((row["task"], row["length"]) for row in mine):
                scores[place] = by_prompt(row for row in mine if (row["task"], row["length"]) == place)
        for row in rows:
            if row["kind"] == "counters" and row["arm"] != "compare":
                self.counts.setdefault(_named(row["arm"], arm), []).append(row)

    def lines(self) -> list[dict[str, object]]:
        """A line for each task and length that dense attention does, and one for the mean of each length.

        Returns:
            ``task``, ``length``, ``n``, and by arm its score: where it was asked less, of the questions that it was
            asked, as is ``dense:ARM``. ``diff:ARM`` is the difference of the two, ``verdict:ARM`` that of
            `eval.figures.stats.compare`.
        """
        found: list[dict[str, object]] = []
        dense = self.scores.get(DENSE, {})
        places = sorted((place for place, given in dense.items() if fmean(given.values()) >= LEAST), key=_by_length)
        for size in dict.fromkeys(size for _, size in places):
            lines = [self._line(place) for place in places if place[1] == size]
            mean: dict[str, object] = {"task": MEAN, "length": size, "n": None}
            for name in dict.fromkeys(name for line in lines for name in line if ":" in name or name in self.scores):
                values = [line.get(name) for line in lines]
                # A mean over other tasks than the next arm's would mislead.
                if all(isinstance(value, float) for value in values):
                    mean[name] = fmean(value for value in values if isinstance(value, float))
            found += [*lines, mean]
        return found

    def _line(self, place: Place) -> dict[str, object]:
        dense = self.scores[DENSE][place]
        line: dict[str, object] = {"task": place[0], "length": place[1], "n": len(dense), DENSE: fmean(dense.values())}
        for arm, given in self.scores.items():
            both = [prompt for prompt in given.get(place, {}) if prompt in dense]
            if arm == DENSE or not both:
                continue
            mine, theirs = [given[place][prompt] for prompt in both], [dense[prompt] for prompt in both]
            judged = compare(mine, theirs)
            line |= {arm: fmean(mine), f"dense:{arm}": fmean(theirs), f"diff:{arm}": judged["diff"]}
            line |= {f"verdict:{arm}": judged["verdict"], f"n:{arm}": len(both)}
        return line

    def read(self, arm: str) -> float | None:
        """The share of the pages that an arm's decode attended to."""
        return reading(self.counts.get(arm, []))["density"]


def _named(told: str, arm: str) -> str:
    """An arm as tables name it: a file calls its server "base"."""
    return {"base": arm, "compare": DENSE}.get(told, told)


def _by_length(place: Place) -> int:
    return place[1]


def read_answers(paths: Iterable[Path]) -> dict[str, Answers]:
    """The finished files of questions by checkpoint, the last part of its name; what else is there is passed over."""
    found: dict[str, Answers] = {}
    for path in paths:
        header, *rows = read_finished(path)
        if header.get("command") in ("eval.ruler", "eval.niah", "eval.infinitebench") and header.get("label"):
            model = header["servers"]["base"]["model_path"].rstrip("/").split("/")[-1]
            found.setdefault(model, Answers()).add(header["label"], rows)
    return found


def quality_tables(folder: Path) -> list[str]:
    """For each checkpoint a table: the score of dense attention, and what each arm's differs from it, in points."""
    return [f"{model}:\n\n{quality_table(answers)}" for model, answers in read_answers(_finished(folder)).items()]


def _finished(folder: Path) -> list[Path]:
    return [path for path in result_files(folder).values() if summarised(path)]


def quality_table(answers: Answers) -> str:
    """A line for each task and length; a difference that is certain is bold."""

    def difference(row: Row, arm: str) -> str:
        diff, judged = row.get(f"diff:{arm}"), row.get(f"verdict:{arm}")
        if diff is None:
            return ""
        shown = f"{100 * diff:+.1f}"
        return f"**{shown}**" if judged in ("worse", "better") else shown

    def title(arm: str) -> str:
        read = answers.read(arm)
        return arm if read is None else f"{arm} ({read:.0%} read)"

    columns: list[Column] = [("task", text("task")), ("length", length), ("n", text("n"))]
    columns += [(DENSE, lambda row: f"{100 * row[DENSE]:.1f}")]
    columns += [(title(arm), partial(difference, arm=arm)) for arm in answers.scores if arm != DENSE]
    return table(answers.lines(), columns)


def kept_over_read(answers: Answers) -> Mapping[str, tuple[float, float]]:
    """Of each arm the share of the pages that it read, and its mean score over dense attention's, over all lengths."""
    points = {}
    means = [line for line in answers.lines() if line["task"] == MEAN]
    for arm in answers.scores:
        pairs = [(line.get(arm), line.get(f"dense:{arm}")) for line in means]
        read, whole = answers.read(arm), [pair for pair in pairs if pair[0] is not None]
        if arm != DENSE and read is not None and whole:
            points[arm] = read, fmean(mine / theirs for mine, theirs in whole)  # type: ignore[operator]
    return points
