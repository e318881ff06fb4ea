"""Needles in a haystack by depth and length: ``python -m eval.niah --base-url URL --out FILE.jsonl``.

A needle is one sentence, ``One of the special magic numbers for lantern-hill is: 4821937.``, that stands at a given
depth of a long text; the question after the text asks for its number. Tasks:

====================  ==============================================================================
single                one needle
multikey              four needles of different keys, one of them asked for
multikey_hard         the whole text consists of needles, one of them asked for
multivalue            four needles of one key, all four numbers asked for
multiquery            four needles of different keys, all four numbers asked for
====================  ==============================================================================

The depth is that of the needle asked for, in multivalue and multiquery of the first one; the others stand anywhere.
Needle, question and answer prefix are those of RULER (Hsieh et al., 2024). What differs: the depths form a grid instead
of being drawn, keys are two words of the project's own list, the text of books is from any place of a novel rather
than the beginning of Paul Graham's essays, there is no introduction before the text, and a number counts only as a
whole and if it is the first one of seven digits. RULER's own rule is given beside it as ``contains``; for the RULER
tasks themselves see `eval.ruler`.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from eval.live import runner
from eval.live.client import list_of, percent, positive
from eval.live.counters import EvaluationError
from eval.live.suite import Case, Prompt, Suite
from eval.live.tokens import Tokens, fit
from eval.scores.pictures import heatmap
from eval.texts import haystacks
from eval.texts.haystacks import ExactHaystack
from eval.texts.text import FORMS, hide, random_key, random_number, unique_keys

PREFILLED = "prefilled"
# A number that is part of a longer one is not the number.
NUMBER = re.compile(r"(?<!\d)\d{7}(?!\d)")
SPARE_NEEDLES = 64
_ALL_QUESTION = "What are all the special magic numbers for {keys}"
_ALL_PREFIX = "The special magic numbers for {keys} mentioned in the provided text are"


@dataclass(frozen=True)
class Task:
    """The needles of a task: keys asked for, values of each, keys not asked for, and whether needles fill the text."""

    asked: int = 1
    values: int = 1
    others: int = 0
    fills: bool = False
    answer_tokens: int = 64


TASKS: dict[str, Task] = {
    "single": Task(),
    "multikey": Task(others=3),
    "multikey_hard": Task(fills=True),
    "multivalue": Task(values=4, answer_tokens=128),
    "multiquery": Task(asked=4, answer_tokens=128),
}


@dataclass(frozen=True)
class Needles:
    """The needles of a prompt: the keys asked for and their values, sentences and their depths (0 to 1).

    The first sentence belongs to the first key.
    """

    keys: list[str]
    values: list[str]
    records: list[str]
    depths: list[float]


class NeedleSuite(Suite):
    """See the module."""

    command = "eval.niah"
    names: ClassVar[tuple[str, ...]] = tuple(TASKS)
    forms: ClassVar[tuple[str, ...]] = ("chat", "ruler", "second_turn", PREFILLED)

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """See `Suite.add_arguments`."""
        haystacks.add_arguments(parser, cls.names, "1k,2k,4k,8k", 10)
        parser.add_argument("--depths", type=list_of(percent, some=True), default="0,25,50,75,100", help="in percent")
        parser.add_argument("--haystack", default="books", choices=haystacks.KINDS, help="the text around the needles")
        parser.add_argument(
            "--form",
            default="chat",
            choices=cls.forms,
            help="chat: asked in the user's turn; ruler: a raw prompt that ends in RULER's answer prefix; second_turn: "
            "the user's first turn has the text, which the server answers without the question, the second one asks; "
            "prefilled, of needles alone: as chat, but the answer stands behind the question, and the likeliest token "
            "at each of its places is scored: all of that is prefill's, which only begins a number that decode writes",
        )
        parser.add_argument(
            "--answer-tokens",
            type=positive,
            help="room for the answer; 64 by default, 128 where four numbers are asked for",
        )

    def cases(self) -> list[Case]:
        """See `Suite.cases`; a case for each length, task, depth and index, which `add_arguments` has checked."""
        args = self.args
        if args.form == PREFILLED and (several := [task for task in args.tasks if _answers(TASKS[task]) > 1]):
            raise EvaluationError(
                f"--form {PREFILLED}: --tasks {','.join(several)} have several answers; allowed are those of one"
            )
        self._haystack()
        return [
            Case(task, length, depth / 100, index)
            for length in sorted(set(args.lengths))
            for task in dict.fromkeys(args.tasks)
            for depth in dict.fromkeys(args.depths)
            for index in range(args.n)
        ]

    def build(self, case: Case) -> Prompt:
        """See `Suite.build`; ``facts["needle_token"]`` is the place of the first asked needle in the prompt."""
        assert case.length is not None and case.depth is not None
        task = TASKS[case.task]
        room = self.args.answer_tokens or task.answer_tokens
        rng = case.rng(self.args.seed)
        parts = None if task.fills else self._haystack()
        needles = draw_needles(task, rng, case.depth, parts)
        parts = parts or needle_haystack(needles, rng, case.length, self.tokens)
        start = rng.random()

        texts: dict[int, str] = {}

        def make(filling: int) -> list[int]:
            taken = parts.draw(random.Random(start), filling)
            text = hide(taken, needles.records, [haystacks.share(taken, depth) for depth in needles.depths])
            prompt = self._ask(text, needles.keys, task)
            texts.setdefault(len(prompt), text)
            return prompt

        prompt = fit(make, case.length - room, case.spare(self.args.seed))
        place = self._place(prompt, texts[len(prompt)], needles.records[0])
        facts = {"needle_token": place, "keys": needles.keys}
        kind = "needles" if task.fills else self.args.haystack
        facts |= {"haystack": kind, "form": self.args.form}
        given = self.tokens.encode(needles.values[0]) if self.args.form == PREFILLED else []
        before = self._before(texts[len(prompt)])
        return Prompt(prompt, needles.values, room, facts=facts, before=before, given=given)

    def score(self, case: Case, prompt: Prompt, output: str) -> dict[str, float]:
        """Exact match of the first number of seven digits, or the share of the asked numbers that are among them.

        Returns:
            ``score``; ``contains``, the share of the answers that occur in the output as RULER counts it; where more
            than one is asked for, ``all``: whether all are among the numbers.
        """
        found, answers = NUMBER.findall(output), prompt.answers
        contains = sum(answer in output for answer in answers) / len(answers)
        if len(answers) == 1:
            return {"score": float(found[:1] == list(answers)), "contains": contains}
        right = len(set(answers) & set(found)) / len(answers)
        return {"score": right, "contains": contains, "all": float(right == 1)}

    def plot(self, rows: Sequence[Mapping[str, Any]], path_stem: str) -> list[str]:
        """A heat map of depth and length for each task, see `eval.scores.pictures`."""
        return heatmap(rows, path_stem)

    def _haystack(self) -> ExactHaystack:
        return haystacks.haystack(self.args.haystack, tuple(self.args.book), self.tokens)

    def _ask(self, haystack: str, keys: Sequence[str], task: Task) -> list[int]:
        """The whole prompt: the text, and what is asked after it."""
        if _answers(task) == 1:
            question = FORMS["needle_ruler" if self.args.form == "ruler" else "needle"].question(keys[0])
        else:
            names = haystacks.join_names(keys)
            question = _ALL_QUESTION.format(keys=names)
            tail = f" mentioned in the provided text? {_ALL_PREFIX.format(keys=names)}"
            question += tail if self.args.form == "ruler" else "?"
        if self.args.form == "second_turn":
            return self.tokens.second_turn(haystack, question)
        return self._encode(f"{haystack}\n{question}")

    def _before(self, haystack: str) -> list[int]:
        """The first turn of two; empty where there is one."""
        return self.tokens.first_turn(haystack) if self.args.form == "second_turn" else []

    def _encode(self, text: str) -> list[int]:
        return self.tokens.prompt(text, self.args.form != "ruler")

    def _place(self, prompt: Sequence[int], haystack: str, record: str) -> int:
        """The token at which a record begins."""
        before = haystack[: haystack.index(record)].rstrip()
        # Both prompts are the same up to the record, whatever the template puts around them.
        pairs = enumerate(zip(prompt, [*self._encode(before), -1], strict=False))
        return next(i for i, (a, b) in pairs if a != b)


def _answers(task: Task) -> int:
    return task.asked * task.values


def draw_needles(task: Task, rng: random.Random, depth: float, haystack: ExactHaystack | None) -> Needles:
    """Needles whose keys and values stand nowhere in the haystack, nor in each other."""
    parts = (task.asked + task.others, random_key), (task.asked * task.values + task.others, random_number)
    keys, values = haystacks.draw_apart(rng, *parts, haystack or ())
    owners = [key for key in keys[: task.asked] for _ in range(task.values)] + keys[task.asked :]
    records = [FORMS["needle"].record(key, value=value) for key, value in zip(owners, values, strict=True)]
    depths = [depth, *(rng.random() for _ in records[1:])]
    return Needles(keys[: task.asked], values[: task.asked * task.values], records, depths)


def needle_haystack(needles: Needles, rng: random.Random, length: int, tokens: Tokens) -> ExactHaystack:
    """Enough needles to fill `length` tokens; their keys of one to three words differ from each other and the asked.

    The sizes differ so that they can be chosen to add up to a length.
    """

    def key(rng: random.Random) -> str:
        return random_key(rng, rng.randint(1, 3))

    least = min(tokens.sizes([FORMS["needle"].record("a", value="1000000")]))
    (asked,), (value,) = needles.keys, needles.values
    keys = unique_keys(rng, length // least + SPARE_NEEDLES, key)
    keys = [found for found in keys if asked not in found and found not in asked]
    numbers = [number for number in unique_keys(rng, len(keys) + 1, random_number) if number != value]
    records = [FORMS["needle"].record(k, value=v) for k, v in zip(keys, numbers, strict=False)]
    return ExactHaystack(records, lambda parts: haystacks.spaced(tokens, parts))


main = partial(runner.main, NeedleSuite)

if __name__ == "__main__":
    sys.exit(main())
