"""One table from the result files of several commands: what each task says about a sparse server beside a dense one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from eval.live.counters import EvaluationError
from eval.live.record import command_name, read_finished, result_files
from eval.scores.stats import compare, verdict
from eval.scores.summary import by_prompt, reading

# A task where a dense server is often wrong, or a random choice of pages often right, cannot tell methods apart.
GATE_DENSE = 0.95
GATE_RANDOM = 0.2
RANDOM = "random_pages"
# Controls that tell whose a loss is: ReSA's score by its definition, and the best choice of as many pages.
DEFINITION, TRUE_MASS = "definition", "true_mass"
# The rounding of a difference of two means is less than this.
POINT = 0.01 + 1e-9
# Of the share of pages read.
BUDGET_TOLERANCE = 0.05
# Half a percent of perplexity, in nats.
NLL_MARGIN = 0.005

Row = Mapping[str, Any]


def read_folder(folder: Path, suites: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The lines of the result files of `eval.compare`, see `lines_of_questions` and its neighbours; refused if none.

    A file ``SUITE.jsonl`` has the two servers, ``SUITE--CONTROL.jsonl`` the same questions put to a control; either may
    be compressed, as ``.jsonl.xz``.
    """
    found = []
    files = result_files(folder)
    for suite, path in files.items():
        if "--" in suite or suite == "compare" or (suites is not None and suite not in suites):
            continue
        others = {name.split("--")[1]: other for name, other in files.items() if name.startswith(f"{suite}--")}
        controls = {name: read_finished(other) for name, other in others.items()}
        rows = read_finished(path)
        makers = {"ppl_rectify": lines_of_perplexity, "long_generation": lines_of_drift}
        make = makers.get(command_name(rows[0].get("command")), lines_of_questions)
        found += [{"suite": suite, **line} for line in make(rows, controls)]
    if not found:
        raise EvaluationError(f"{folder} has no results of a comparison")
    return found


def lines_of_questions(rows: Sequence[Row], controls: Mapping[str, Sequence[Row]]) -> list[dict[str, Any]]:
    """A line for each task and length of a run over two servers; `controls` are the rows of others, by name.

    Returns:
        ``task``, ``length``, ``n``; ``dense``, ``sparse`` and each control, their mean scores; ``diff``,
        ``diff_interval`` and ``verdict`` of the paired comparison (see `eval.scores.stats.compare`); ``density`` that
        the sparse server read; ``gates``: whether the task can tell methods apart at this length, None without the
        control that chooses at random. Where the method loses more than a point by its definition, and the best choice
        of as many pages does not, ``definition_verdict``: that of the sparse server paired with the definition. The two
        controls differ in the score alone, so that the loss is then the score's.

    Raises:
        EvaluationError: a control had other questions, or the one that chooses at random had none of a task.
    """
    found = []
    for place in dict.fromkeys(_place(row) for row in rows if row["kind"] == "item" and row["arm"] == "compare"):
        base, dense = _scores(rows, "base", place), _scores(rows, "compare", place)
        both = [prompt for prompt in dense if prompt in base]
        if not both:
            raise EvaluationError(f"{place[0]}: the two servers had no question in common: the run was not finished")
        mine, theirs = [base[prompt] for prompt in both], [dense[prompt] for prompt in both]
        line: dict[str, Any] = {"task": place[0], "length": place[1], "n": len(both), "unit": "score"}
        line |= {"dense": fmean(theirs), "sparse": fmean(mine), **compare(mine, theirs)}
        line |= reading(_counters(rows, place))
        definition: list[float] = []
        for name, other in controls.items():
            scores = _scores(other, "base", place)
            if not scores and name != RANDOM:
                continue
            missing = sum(prompt not in scores for prompt in both)
            if missing:
                raise EvaluationError(f"the control {name} was not asked {missing} of the questions of {place[0]}")
            _require_same_budget(name, place, line["density"], reading(_counters(other, place))["density"])
            answers = [scores[prompt] for prompt in both]
            line[name] = fmean(answers)
            definition = answers if name == DEFINITION else definition
        if _lost_by_score(line):
            line["definition_verdict"] = compare(mine, definition)["verdict"]
        line["gates"] = None if RANDOM not in line else line["dense"] >= GATE_DENSE and line[RANDOM] < GATE_RANDOM
        found.append(line)
    return found


def _lost_by_score(line: Row) -> bool:
    if DEFINITION not in line or TRUE_MASS not in line:
        return False
    return line["dense"] - line[DEFINITION] > POINT >= line["dense"] - line[TRUE_MASS]


def lines_of_perplexity(rows: Sequence[Row], controls: Mapping[str, Sequence[Row]]) -> list[dict[str, Any]]:
    """A line for each text and setting of ``eval.ppl_rectify``: log-perplexity, lower is better.

    What is never rectified has a line only where nothing is, here and in `lines_of_drift`; a control has the figure of
    the same text and setting.
    """
    summary = [row for row in rows if row["kind"] == "summary"]
    dense = {row["task"]: row["nll"] for row in summary if row["setting"] == "dense"}
    found = []
    for row in summary:
        if row["setting"] in ("off", "rectified") and _is_own(row, summary):
            low, high = row["diff_interval"]
            line = {"task": _setting(row), "length": row["length"]}
            line |= {"n": row["windows"], "unit": "nats", "dense": dense[row["task"]], "sparse": row["nll"]}
            line |= {"diff": row["diff"], "diff_interval": (low, high), "verdict": verdict((-high, -low), NLL_MARGIN)}
            line |= _of_controls(row, controls, ("task", "setting", "ratio", "interval"), "nll")
            found.append(line | {"density": row["density"], "gates": None})
    return found


def lines_of_drift(rows: Sequence[Row], controls: Mapping[str, Sequence[Row]]) -> list[dict[str, Any]]:
    """A line for each text and setting of ``eval.long_generation``: top-1 agreement at the last checkpoint.

    ``dense`` is the agreement of the dense server with itself.
    """
    summary = [row for row in rows if row["kind"] == "summary"]
    found = []
    for task in dict.fromkeys(row["task"] for row in summary):
        last = max(row["position"] for row in summary if row["task"] == task)
        mine = [row for row in summary if row["task"] == task and row["position"] == last]
        noise = next(row for row in mine if row["interval"] is None)
        for row in mine:
            if row["interval"] is not None and _is_own(row, mine):
                bounds = row["agreement_change_interval"]
                line = {"task": _setting(row), "length": last, "n": row["n"]}
                line |= {"unit": "agreement", "dense": noise["agreement"], "sparse": row["agreement"]}
                line |= {"diff": row["agreement_change"], "diff_interval": bounds, "verdict": verdict(bounds)}
                line |= _of_controls(row, controls, ("task", "ratio", "interval", "position"), "agreement")
                found.append(line | {"density": row["density"], "gates": None})
    return found


def _of_controls(
    row: Row, controls: Mapping[str, Sequence[Row]], place: Sequence[str], figure: str
) -> dict[str, float]:
    found = {}
    for name, rows in controls.items():
        for other in rows:
            if other["kind"] == "summary" and all(other[key] == row[key] for key in place):
                found[name] = other[figure]
    return found


def _is_own(row: Row, rows: Sequence[Row]) -> bool:
    """Whether a setting rectifies, or none of its text and ratio does."""
    others = [other for other in rows if (other["task"], other["ratio"]) == (row["task"], row["ratio"])]
    return bool(row["interval"]) or not any(other["interval"] for other in others)


def _setting(row: Row) -> str:
    # Without a ratio of its own a setting has the server's, which the header tells.
    ratio = "" if row["ratio"] is None else f", ratio {row['ratio']:g}"
    return f"{row['task']}{ratio}, f = {row['interval'] or 'never'}"


def _place(row: Row) -> tuple[str, int | None]:
    return row["task"], row["length"]


def _scores(rows: Sequence[Row], arm: str, place: tuple[str, int | None]) -> dict[str, float]:
    mine = [row for row in rows if row["kind"] == "item" and row["arm"] == arm and _place(row) == place]
    # Of equal items the last counts: a failed one was asked again.
    return by_prompt({row["id"]: row for row in mine}.values())


def _counters(rows: Sequence[Row], place: tuple[str, int | None]) -> list[Row]:
    return [row for row in rows if row["kind"] == "counters" and row["arm"] == "base" and _place(row) == place]


def _require_same_budget(name: str, place: tuple[str, int | None], mine: float | None, other: float | None) -> None:
    if mine is not None and other is not None and abs(other - mine) > BUDGET_TOLERANCE * mine:
        raise EvaluationError(
            f"the control {name} read {other:.1%} of the pages in {place[0]} where the method read {mine:.1%}: start "
            "it with the same active_ratio and min_pages"
        )
