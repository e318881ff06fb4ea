"""Stages of a training run: when one ends, what it may cost, and where a later run goes on. No tensors here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.lab.train.mixes import FULL, Mix

EVERY = 100
"""Steps between two looks at a stage's gate."""


@dataclass(frozen=True)
class Stage:
    """Steps at one length.

    Attributes:
        steps: upper limit of the steps.
        share: upper limit of the time, as a share of what is left of the budget.
        gate: the stage ends when the exact match of each of these forms passes `threshold`, but not before `at_least`
            steps; the mean of the last `looks` measurements counts.
        rate: learning rate at the start and at the end, relative to the full one.
        sparse: answer rows attend to selected blocks, at random lengths.
        required: if the gate stays shut, nothing that follows can be learned and the run ends.
    """

    name: str
    length: int
    steps: int
    share: float
    gate: tuple[str, ...] = ()
    at_least: int = 0
    mix: Mix = FULL
    rate: tuple[float, float] = (1.0, 1.0)
    sparse: bool = False
    threshold: float = 0.85
    looks: int = 1
    required: bool = False


def passed(stage: Stage, done: int, measured: Sequence[Mapping[str, float]]) -> bool:
    """Whether the gate is open after `done` steps with these exact matches by form, the newest last."""
    if not stage.gate or done < stage.at_least or len(measured) < stage.looks:
        return False
    last = measured[-stage.looks :]
    return all(sum(match[form] for match in last) / len(last) >= stage.threshold for form in stage.gate)


def progress(stage: Stage, done: int, steps: int, seconds: float, limit: float) -> float:
    """How much of a stage is over, 0 to 1: of its steps or of its time, whichever is nearer to its end."""
    return min(1.0, max(done / steps if steps else 1.0, seconds / limit if limit > 0 else 1.0))


def rate_at(stage: Stage, over: float) -> float:
    """Relative learning rate when `over` (0 to 1) of the stage is over."""
    low, high = stage.rate
    return low + (high - low) * over


def next_stage(stages: Sequence[Stage], lines: Sequence[Mapping[str, Any]]) -> int:
    """Where a run goes on: the first stage that has no line or whose last line says that its time ran out.

    The last stage never counts as done: its learning rate falls to zero, so it is what a run ends with.
    """
    ended = {line["stage"]: line["ended"] for line in lines if "stage" in line}
    for i, stage in enumerate(stages[:-1]):
        if ended.get(stage.name, "time") == "time":
            return i
    return len(stages) - 1
