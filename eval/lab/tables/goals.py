"""The goals of speed, ``eval/lab/goals.json``, beside what the result files say of them.

A goal that is set for several shapes is several entries with one ``id``. ``row`` of an entry says which row counts: a
``summary`` row, so that unfinished runs do not, with these fields; what the row lacks is looked up among the
``arguments`` of the file's header and in the header itself. Where it names a ``target_sparsity``, the ``sparsity`` of
the row must be within two points of it; where it also names an ``active``, the target is one of active blocks, and
their share must be within a tenth of its own size, too (`near_active`). ``read`` is the field with the figure;
``search``, the share of an operation's time in which it finds the keys, is made of the times of its kernels, ``parts``
of the ``item`` row with the same ``id``.

Where several files have such a row, the newest file counts: the one whose header says the latest ``started`` (UTC, ISO
8601); files that do not say it are older than those that do, and among equals the last by name counts.

Where an entry has ``bounds``, a row without these fields does not count, and one beyond them is "out of bounds".

Where an entry has ``quality_from``, fields as those of ``row``, the quality of the newest row with these stands beside
its own, after "operation": what a server does with weights that mean nothing says nothing of its answers, and the same
operation over inputs of known structure does. Where nobody measured such a row, nothing is added.

A figure that is better than the ``limit`` of its goal, by more than noise (`LIMIT_TOLERANCE`), is "beyond the limit"
and reaches nothing: the limit is what the hardware allows, so the strongest dense peer was not found, or the
measurement is wrong or noise. Where a row has the 95 % interval of its figure (the same name and ``_interval``), all of
it must be beyond; if it is not, the worse end of the interval is judged.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eval.lab.kernels.prefill import with_search
from eval.lab.servers.server_facts import sglang_of
from eval.lab.structured.generator import near_target
from eval.live.counters import EvaluationError
from eval.live.record import command_name, read_rows, result_files
from eval.scores.tables import Column, table, text

# Share of a limit by which noise may exceed it.
LIMIT_TOLERANCE = 0.01
# How many times its floor SGLang's own kernel may take to leave nothing that could be gained.
NEAR_FLOOR = 1.3
GOALS = Path(__file__).parent.parent / "goals.json"
# How a figure is written, and whether more of it is better.
UNITS = {
    "ratio": ("{}x", True),
    "us": ("{} µs", False),
    "of dense": ("{} of dense", False),
    "pages": ("{} pages", False),
    "share": ("{} of its time", False),
}
QUALITY = {
    "relative_l2": "relative L2 {:.2g}",
    "dense_l2": "relative L2 to dense {:.2g}",
    "recall": "mass kept {:.3f}",
    "agreement": "same pages {:.1%}",
    "density": "read {:.1%}",
    "sparsity": "sparsity {:.1%}",
    "active_blocks": "active blocks {:.0f}",
    "dense_rows": "rows that ran dense {:.1%}",
    "overlap": "same tokens as float64 {:.3%}",
    "off_by": "off by {:.1e}",
    "native_overlap": "same tokens as native {:.3%}",
    "native_off_by": "off native's by {:.1e}",
    "native_over_floor": "native at {:.2f} of its floor",
    "ttft_over_dense_interval": "95 % interval {0[0]:.3f} … {0[1]:.3f}",
    "decode_tpot_ratio_interval": "95 % interval {0[0]:.3f} … {0[1]:.3f}",
}

# Of `QUALITY`: what is taken from the row that ``quality_from`` names.
OPERATION = ("recall", "dense_l2")
# Columns that the table of a few goals does without, and that of README.
FEW = ("id", "stretch", "result file")
FEWEST = (*FEW, "limit", "quality", "revision")


@dataclass(frozen=True)
class Goal:
    """One figure to reach.

    Attributes:
        id: as performance goals are called, such as "K1".
        part: which of its shapes or settings.
        what: is measured.
        unit: of `UNITS`: times faster than the strongest dense peer, or an upper bound: in microseconds, pages, times
            the dense peer's time, or a share of the operation's own.
        must: the figure to reach.
        stretch: a better one.
        limit: what the hardware allows.
        row: fields of the row of results.
        read: the field of the figure.
        quality: fields of `QUALITY` that belong beside it, if the row has them.
        bounds: least and most of fields that the row must have to count: beyond them it is "out of bounds", and its
            figure reaches nothing.
        near_floor: the figure to reach instead where the ``native_over_floor`` of the row is at most `NEAR_FLOOR`.
        quality_from: fields of the row of an operation whose quality (`OPERATION`) stands beside; none if empty.
    """

    id: str
    part: str
    what: str
    unit: str
    must: float
    stretch: float | None
    limit: float | None
    row: Mapping[str, Any]
    read: str
    quality: Sequence[str] = field(default=())
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    near_floor: float | None = None
    quality_from: Mapping[str, Any] = field(default_factory=dict)

    def of(self, row: Mapping[str, Any]) -> Goal:
        """The goal where a row is what was measured: with ``near_floor`` alone, where that is what counts."""
        native = row.get("native_over_floor")
        if self.near_floor is None or native is None or native > NEAR_FLOOR:
            return self
        return replace(self, must=self.near_floor, stretch=None)

    def verdict(self, figure: float, interval: Sequence[float] | None = None) -> str:
        """ "beyond the limit" (of more than `LIMIT_TOLERANCE`), "stretch", "must" or "missed".

        Args:
            figure: the one that was measured.
            interval: its 95 % interval, if there is one.
        """
        sign = 1 if UNITS[self.unit][1] else -1
        if self._beyond(figure):
            figure = min(interval or (figure,), key=lambda end: sign * end)
        if self._beyond(figure):
            return "beyond the limit"
        for name in ("stretch", "must"):
            bound = getattr(self, name)
            if bound is not None and sign * figure >= sign * bound:
                return name
        return "missed"

    def _beyond(self, figure: float) -> bool:
        sign = 1 if UNITS[self.unit][1] else -1
        return self.limit is not None and sign * (figure - self.limit) > LIMIT_TOLERANCE * self.limit

    def counts(self, row: Mapping[str, Any]) -> bool:
        """Whether a row is one of this goal."""
        needed = (self.read, *self.bounds)
        if any(row.get(name) != value for name, value in self.row.items()) or any(
            row.get(name) is None for name in needed
        ):
            return False
        target, found = self.row.get("target_sparsity"), row.get("sparsity")
        if target is None or found is None:
            return target is None
        return near_target(found, target, self.row.get("active"))

    def written(self, figure: float | None) -> str:
        """A figure with its unit; nothing for none."""
        return "" if figure is None else UNITS[self.unit][0].format(f"{figure:.4g}")


@dataclass(frozen=True)
class Results:
    """The summary of a result file: where it is, when it was made, and its rows, the header's fields among theirs."""

    path: Path
    started: str
    rows: list[dict[str, Any]]


def read_goals(path: Path = GOALS) -> list[Goal]:
    """The goals, in the order of the file."""
    return [Goal(**entry) for entry in json.loads(path.read_text())]


def read_results(folder: Path, commands: Iterable[str], searched: Collection[str] = ()) -> list[Results]:
    """The result files that some commands wrote, newest first.

    Args:
        folder: of the files.
        commands: that wrote them.
        searched: those of them whose rows get a ``search``.

    Raises:
        EvaluationError: there is no such folder, or a file is no JSONL.
    """
    if not folder.is_dir():
        raise EvaluationError(f"{folder} is no folder of results")
    wanted, found = set(commands), []
    for path in result_files(folder).values():
        header, *rows = read_rows(path) or [{}]
        if (command := command_name(header.get("command"))) in wanted:
            shared = {**header, **header.get("arguments", {}), "command": command}
            summary = [{**shared, **row} for row in rows if row.get("kind") == "summary"]
            parts = {row.get("id"): row.get("parts") for row in rows if row.get("kind") == "item"}
            for row in summary if command in searched else ():
                row["search"] = with_search({"parts": parts.get(row.get("id"))}).get("search")
            found.append(Results(path, header.get("started", ""), summary))
    return sorted(found, key=lambda results: (results.started, results.path.name), reverse=True)


def measured(goal: Goal, results: Iterable[Results]) -> tuple[dict[str, Any], Path] | None:
    """The row of a goal and its file, None where nobody measured it.

    Args:
        goal: which.
        results: newest first.

    Raises:
        EvaluationError: a file has two such rows.
    """
    for file in results:
        rows = [row for row in file.rows if goal.counts(row)]
        if len(rows) > 1:
            raise EvaluationError(f"{file.path} has {len(rows)} rows for goal {goal.id} ({goal.part}): one must count")
        if rows:
            return rows[0], file.path
    return None


def operation(goal: Goal, results: Iterable[Results]) -> dict[str, Any] | None:
    """The row that ``quality_from`` of a goal names, None where it names none or nobody measured it.

    Args:
        goal: which.
        results: newest first.

    Raises:
        EvaluationError: a file has two such rows.
    """
    if not goal.quality_from:
        return None
    found = measured(replace(goal, row=goal.quality_from, read=OPERATION[0], bounds={}), results)
    return None if found is None else found[0]


def _qualities(names: Iterable[str], row: Mapping[str, Any]) -> str:
    return ", ".join(QUALITY[name].format(row[name]) for name in names if row.get(name) is not None)


def line(
    goal: Goal, found: tuple[dict[str, Any], Path] | None, beside: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """The cells of a goal.

    Args:
        goal: which.
        found: its row and the file of it, if it was measured.
        beside: the row of its `operation`, if there is one.
    """
    goal = goal if found is None else goal.of(found[0])
    cells = {"id": goal.id, "what": f"{goal.what}: {goal.part}", "verdict": "not measured"}
    bounds = {name: goal.written(getattr(goal, name)) for name in ("must", "stretch", "limit")}
    at_most = "" if UNITS[goal.unit][1] else "≤ "
    cells |= {name: at_most + bound for name, bound in bounds.items() if bound}
    if found is None:
        return cells
    row, path = found
    quality = [_qualities(goal.quality, row)] + ([f"operation: {_qualities(OPERATION, beside)}"] if beside else [])
    within = all(least <= row[name] <= most for name, (least, most) in goal.bounds.items())
    verdict = goal.verdict(row[goal.read], row.get(f"{goal.read}_interval")) if within else "out of bounds"
    cells |= {"measured": goal.written(row[goal.read]), "verdict": verdict}
    return cells | {
        "quality": "; ".join(filter(None, quality)),
        "revision": row.get("revision") or "",
        "sglang": sglang_of(row),
        "file": path.name,
    }


def goals_table(
    folder: Path, path: Path = GOALS, ids: Collection[str] | None = None, left_out: Collection[str] = FEW
) -> str:
    """The goals as Markdown, a line each.

    Args:
        folder: with the result files.
        path: of the goals.
        ids: of goals, or "id: part" of single ones; these alone, in fewer columns.
        left_out: the columns that are left out then.

    Raises:
        EvaluationError: see `read_results` and `measured`.
    """
    goals = [goal for goal in read_goals(path) if ids is None or {goal.id, f"{goal.id}: {goal.part}"} & {*ids}]
    commands = {row["command"] for goal in goals for row in (goal.row, goal.quality_from) if row}
    results = read_results(folder, commands, {goal.row["command"] for goal in goals if goal.read == "search"})
    lines = [line(goal, measured(goal, results), operation(goal, results)) for goal in goals]
    columns: list[Column] = [
        ("id", text("id")),
        ("goal", text("what")),
        ("measured", text("measured")),
        ("must", text("must")),
        ("stretch", text("stretch")),
        ("limit", text("limit")),
        ("reached", text("verdict")),
        ("quality", text("quality")),
        ("revision", text("revision")),
        ("SGLang", text("sglang")),
        ("result file", text("file")),
    ]
    if ids is None:
        return table(lines, columns)
    return table(lines, [column for column in columns if column[0] not in left_out])
