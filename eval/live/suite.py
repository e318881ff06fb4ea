"""Sets of questions: cases that become prompts, and scores of a server's answers."""

from __future__ import annotations

import argparse
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from eval.live.tokens import Tokens


@dataclass(frozen=True)
class Case:
    """One question before its prompt is built.

    Attributes:
        task: such as "multikey"; figures are given for each task and length.
        length: tokens of prompt and answer together that are wanted; None where the data decide.
        depth: where the answer stands, from 0 (the beginning) to 1; None where it has no such place.
        index: tells cases apart that are otherwise equal.
    """

    task: str
    length: int | None = None
    depth: float | None = None
    index: int = 0

    @property
    def id(self) -> str:
        """Unique within a run."""
        parts = (self.task, self.length, None if self.depth is None else f"{self.depth:g}", self.index)
        return "/".join(str(part) for part in parts if part is not None)

    def rng(self, seed: int) -> random.Random:
        """Random numbers of this case alone: the same for a seed, whatever other cases there are."""
        return random.Random(f"{seed} {self.id}")

    def spare(self, seed: int) -> int:
        """Tokens that the prompt has less than its length allows: up to .4 % of it and 64, evenly.

        Were all prompts equally long, the question would stand at one place of a KV page in all of them, and that place
        alone can decide what sparse decode over pages finds. From 4,000 tokens on it takes every place in a page of 16,
        and from 16,000 on in one of 64.
        """
        return random.Random(f"spare {seed} {self.id}").randrange(max(1, min(64, (self.length or 0) // 250)))


@dataclass(frozen=True)
class Group:
    """Cases that are asked, in this order, before the next ones are, and whose counters are told apart from others'.

    All have this task and length, which are None of a group that is mixed.
    """

    cases: Sequence[Case]
    task: str | None = None
    length: int | None = None

    @property
    def label(self) -> str:
        """For messages."""
        return " ".join(str(part) for part in (self.task, self.length) if part is not None) or "mixed"


def groups_of(cases: Sequence[Case], mixed: int | None = None) -> list[Group]:
    """Cases by task and length, in the order in which they first come.

    If `mixed` is not None all are one group instead, in an order drawn by this seed: what a server has in a batch is
    then of several lengths.
    """
    if mixed is not None:
        return [Group(random.Random(mixed).sample(cases, len(cases)))]
    groups: dict[tuple[str, int | None], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.task, case.length), []).append(case)
    return [Group(found, *place) for place, found in groups.items()]


@dataclass(frozen=True)
class Prompt:
    """A prompt and its expected answer.

    Attributes:
        tokens: ids of the whole prompt, chat template included.
        answers: texts of a right answer; the suite decides the meaning of several.
        max_new_tokens: the answer's room.
        sampling: further fields of an OpenAI completion request; greedy by default.
        facts: kept with the result, such as the token at which the needle begins.
        before: ids of a turn that is asked before, so that the server has served it; its answer does not count.
        given: ids of the answer, where the server is to read it behind the prompt; its answer is then the likeliest
            token at each place of them. Empty where the server is to write one.
    """

    tokens: Sequence[int]
    answers: Sequence[str]
    max_new_tokens: int
    sampling: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    facts: Mapping[str, Any] = field(default_factory=dict)
    before: Sequence[int] = ()
    given: Sequence[int] = ()


class Suite(ABC):
    """Cases, prompts and scores of one command.

    A prompt is a function of the case, the seed and the tokenizer alone, and is built just before it is sent, in a
    thread: `build` must not change the suite.

    Args:
        args: the command line, see `add_arguments`.
        tokens: the tokenizer of the model under test.
    """

    command: ClassVar[str]
    """Such as ``eval.niah``."""

    def __init__(self, args: argparse.Namespace, tokens: Tokens) -> None:
        self.args = args
        self.tokens = tokens

    @classmethod
    @abstractmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Declare what the suite can be told beside what every command knows (see `eval.live.runner`).

        ``--seed`` is there already. The type of an argument checks its value, and `cases` what needs several
        arguments or a file.
        """

    @abstractmethod
    def cases(self) -> list[Case]:
        """All questions, the shortest first.

        A wrong argument or a missing file is refused by name, with what it was and what is allowed.
        """

    @abstractmethod
    def build(self, case: Case) -> Prompt:
        """The prompt of a case; refused if there is none, such as of a length that the question alone exceeds."""

    @abstractmethod
    def score(self, case: Case, prompt: Prompt, output: str) -> dict[str, float]:
        """Figures of one answer, from 0 to 1: ``score``, the official one of the task, and any further ones by name."""

    def plot(self, rows: Sequence[Mapping[str, Any]], path_stem: str) -> list[str]:
        """Draw pictures of the item rows of one server, where tables do not say it all, as SVG.

        `path_stem` is a path without a suffix.
        """
        return []
