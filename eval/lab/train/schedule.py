"""Stages of a training run: their batches, when one ends, what it may cost, and where a later run goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

EVERY = 100
"""Steps between two looks at a stage's gate."""


@dataclass(frozen=True)
class Mix:
    """What the batches of a stage are made of.

    Attributes:
        forms: weights of the forms.
        book_share: share of the groups that are plain text.
        text_weight: weight of the text's loss beside the answers'.
        key_sizes: numbers of words in a key; json_digits: smallest and largest number of digits in a key.
        digits: numbers of digits in a value; passkeys and variables have their own.
        hops: numbers of records in a chain.
    """

    forms: dict[str, float]
    book_share: float
    text_weight: float
    key_sizes: tuple[int, ...] = (1, 2, 2, 3)
    digits: tuple[int, ...] = (5, 7, 7, 8)
    short_digits: tuple[int, ...] = (5, 5, 7)
    json_digits: tuple[int, int] = (5, 8)
    hops: tuple[int, ...] = (1, 2, 2, 2, 3)


# Lookup by words appears first, and only then in reasonable time, on short forms with many questions a row.
SHORT = Mix(
    forms={"records": 0.5, "var_completion": 0.1, "needle_ruler": 0.2, "needle_sentence": 0.1, "json_completion": 0.1},
    book_share=0.05,
    text_weight=0.1,
    key_sizes=(1, 1, 2),
    digits=(3, 4, 5),
    short_digits=(3, 4, 5),
    json_digits=(3, 4),
)
# Looking up a name, where the other forms have numbers, is a second skill to be learned apart.
LINKS = replace(
    SHORT,
    forms={"var_completion": 0.6, "var": 0.15, "records": 0.1, "needle": 0.1, "json_completion": 0.05},
    short_digits=(3,),
)
FULL = Mix(
    forms={
        "needle": 0.22,
        "needle_sentence": 0.06,
        "needle_ruler": 0.12,
        "needle_boxed": 0.05,
        "passkey": 0.05,
        "passkey_completion": 0.03,
        "var": 0.14,
        "var_completion": 0.06,
        "json": 0.09,
        "json_completion": 0.06,
        "records": 0.12,
    },
    book_share=0.15,
    text_weight=0.5,
)


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
