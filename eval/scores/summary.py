"""The summary of a suite's run, from the rows of its JSONL file alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from eval.live.counters import read_shares, sum_of
from eval.scores.stats import compare, mean_interval

Row = Mapping[str, Any]


def summarise(items: Sequence[Row], counters: Sequence[Row]) -> list[dict[str, Any]]:
    """Judge every task and length, by rows of kind ``item``, of which a failed one counts as wrong, and ``counters``.

    Returns:
        One dict for each task, length and arm, in the order of the items: ``n`` questions and ``failed`` answers;
        ``score`` with its 95 % interval; the means of any further scores; ``tokens``, the mean length of the answers;
        what the server read (see `reading`). The base arm of a run with two servers has the figures of
        `eval.scores.stats.compare` too: paired, over the questions that both were asked.
    """
    groups: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in items:
        groups.setdefault((row["task"], row["length"], row["arm"]), {})[row["id"]] = row
    found = []
    for (task, length, arm), rows in groups.items():
        line = {"task": task, "length": length, "arm": arm, **_figures(list(rows.values()))}
        line |= reading([c for c in counters if (c["task"], c["length"], c["arm"]) == (task, length, arm)])
        theirs = groups.get((task, length, "compare"))
        if arm == "base" and theirs:
            mine, other = by_prompt(rows.values()), by_prompt(theirs.values())
            both = [prompt for prompt in mine if prompt in other]
            line |= compare([mine[prompt] for prompt in both], [other[prompt] for prompt in both])
        found.append(line)
    return found


def score(row: Row, name: str = "score") -> float:
    """A figure of an item; 0 where it failed."""
    return float(row["scores"][name]) if not row.get("failed") else 0.0


def _figures(rows: list[Row]) -> dict[str, Any]:
    whole = [row for row in rows if not row.get("failed")]
    scores = list(by_prompt(rows).values())
    figures: dict[str, Any] = {"n": len(scores), "failed": len(rows) - len(whole)}
    figures |= {"score": fmean(scores), "score_interval": mean_interval(scores)}
    further = dict.fromkeys(name for row in whole for name in row["scores"] if name != "score")
    # Some tasks score a subset of their questions by a further name, such as those of one difficulty.
    figures |= {name: fmean(score(row, name) for row in whole if name in row["scores"]) for name in further}
    figures["tokens"] = fmean(row["completion_tokens"] for row in whole) if whole else None
    return figures


def by_prompt(rows: Iterable[Row]) -> dict[str, float]:
    """The score of each question, by its prompt: several answers to one prompt, such as samples, are averaged.

    Their questions are what is independent, and a question of the same name with another prompt is another one.
    """
    scores: dict[str, list[float]] = {}
    for row in rows:
        # A prompt that could not be built has no checksum.
        scores.setdefault(row.get("prompt_sha", row["id"]), []).append(score(row))
    return {prompt: fmean(found) for prompt, found in scores.items()}


def reading(rows: Sequence[Row]) -> dict[str, float | None]:
    """Compute the shares that a sparse server read, over ``counters`` rows; None where nobody counted.

    Returns:
        ``density``: the share of the held pages that sparse rows attended to. ``dense_rows``: the share of the decoded
        rows that ran dense, which are not in it. ``sparsity``: the share of the query-key pairs that prefill left out,
        only where a prefill method counts.
    """
    return read_shares(sum_of(row["counters"] for row in rows))
