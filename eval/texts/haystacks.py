"""Haystacks that fill a prompt to the token, places in them, and what the commands that use them are told by."""

from __future__ import annotations

import argparse
import random
import re
from bisect import bisect_right
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import cache

from eval.live.client import list_of, positive
from eval.live.counters import EvaluationError
from eval.live.tokens import Tokens
from eval.texts.lengths import length
from eval.texts.text import NOISE, sentences, unique_keys, words
from eval.texts.windows import BOOK, book_text

KINDS = ("books", "noise", "repeated")

Make = Callable[[random.Random], str]


class ExactHaystack:
    """Sentences from which texts are drawn that have the wanted size in tokens, not just at most that.

    The parts may be other than sentences; `count` gives their sizes in tokens, with what stands between two of them.
    """

    def __init__(self, parts: Sequence[str], count: Callable[[Sequence[str]], list[int]]) -> None:
        self.sentences = list(parts)
        self.sizes = [max(1, size) for size in count(parts)]
        self._by_size = sorted(range(len(parts)), key=self.sizes.__getitem__)
        self._sorted = [self.sizes[i] for i in self._by_size]
        self._text = "\n".join(self.sentences)

    def __contains__(self, text: str) -> bool:
        """Whether a text stands anywhere in it."""
        return text in self._text

    def draw(self, rng: random.Random, budget: int) -> list[str]:
        """`take` from a random place."""
        return self.take(rng.randrange(len(self.sentences)), budget)

    def take(self, start: int, budget: int) -> list[str]:
        """Consecutive sentences from number `start` on (the book is a ring), filled up to `budget` tokens.

        A sentence too long for what is left is passed over, and some sentences are exchanged for longer ones from
        elsewhere where that brings the sum closer to the budget.
        """
        i, left, passed, taken = start, budget, 0, []
        while left >= self._sorted[0] and passed < len(self.sentences):
            passed += 1
            if self.sizes[i] <= left:
                taken.append(i)
                left -= self.sizes[i]
                passed = 0
            i = (i + 1) % len(self.sentences)
        self._exchange(taken, left)
        return [self.sentences[i] for i in taken]

    def _exchange(self, taken: list[int], left: int) -> None:
        used = set(taken)
        for at in reversed(range(len(taken))):
            if not left:
                return
            size = self.sizes[taken[at]]
            place = bisect_right(self._sorted, size + left) - 1
            while self._sorted[place] > size and self._by_size[place] in used:
                place -= 1
            gain = self._sorted[place] - size
            if gain > 0:
                taken[at] = self._by_size[place]
                used.add(taken[at])
                left -= gain


@dataclass(frozen=True)
class Question:
    """A question about a text whose length is free.

    Attributes:
        ask: text and question, by the tokens of the text that are free; about so many.
        prefix: text that the answer continues.
        answers: see `eval.live.suite.Prompt`.
        separator: between the question and the prefix in a raw prompt.
    """

    ask: Callable[[int], str]
    prefix: str
    answers: Sequence[str]
    separator: str = " "


def spaced(tokens: Tokens, parts: Sequence[str], separator: str = " ") -> list[int]:
    """Sizes of parts of a text, each with the separator before it."""
    return tokens.sizes([separator + part for part in parts]) if parts else []


@cache
def haystack(kind: str, books: tuple[str, ...], tokens: Tokens) -> ExactHaystack:
    """The haystack of a kind, made once for a tokenizer.

    Args:
        kind: "books" (sentences of the books, one after another), "noise" (as many random words in the place of each
            sentence, none of them in a key) or "repeated" (the five noise sentences of RULER).
        books: files, ``.txt`` or ``.txt.xz``; the held-out book of this project if empty.

    Raises:
        EvaluationError: a file cannot be read or has no words.
    """
    if kind == "repeated":
        parts = sentences(NOISE)
    else:
        texts = [book_text(book) for book in books or (str(BOOK),)]
        parts = [part for text in texts for part in sentences(text) if re.search(r"\w", part)]
    if kind == "noise":
        rng, choice = random.Random(0), words("train")
        parts = [" ".join(rng.choices(choice, k=len(part.split()))) for part in parts]
    return ExactHaystack(parts, lambda found: spaced(tokens, found))


def draw_apart(
    rng: random.Random, keys: tuple[int, Make], values: tuple[int, Make], haystack: Container[str]
) -> tuple[list[str], list[str]]:
    """So many keys and values, made by a function each, that stand nowhere in the haystack, nor in each other."""
    while True:
        found = [unique_keys(rng, *part) for part in (keys, values)]
        every = [*found[0], *found[1]]
        apart = not any(a in b for a in every for b in every if a is not b)
        if apart and not any(text in haystack for text in every):
            return found[0], found[1]


def join_names(names: Sequence[str]) -> str:
    """Such as "a, b, and c"."""
    return f"{', '.join(names[:-1])}, and {names[-1]}" if len(names) > 1 else names[0]


def share(parts: Sequence[str], depth: float) -> float:
    """The share of the parts after which `depth` of their text is over, for `eval.texts.text.hide`.

    The depth is from 0 to 1, measured in characters.
    """
    wanted, passed = depth * sum(map(len, parts)), 0
    for i, part in enumerate(parts):
        if passed + len(part) / 2 > wanted:
            return i / len(parts)
        passed += len(part)
    return 1.0


def add_arguments(
    parser: argparse.ArgumentParser, tasks: Sequence[str], lengths: str, n: int, without_files: Sequence[str] = ()
) -> None:
    """``--tasks``, ``--lengths``, ``--n`` and ``--book``; by default the tasks are those `without_files`."""
    parser.add_argument(
        "--tasks", type=list_of(str, tasks), default=",".join(without_files or tasks), help="comma-separated"
    )
    parser.add_argument(
        "--lengths",
        type=list_of(length, some=True),
        default=lengths,
        help="tokens of prompt and answer together, k = 1024",
    )
    parser.add_argument("--n", type=positive, default=n, help="questions of each task and cell")
    parser.add_argument(
        "--book", action="append", default=[], help="text file of the books haystack instead of our own; repeatable"
    )


def chosen(wanted: Sequence[str] | None, allowed: Sequence[str]) -> list[str]:
    """The ``--tasks`` wanted, each once, or all of them; refuses unknown ones and an empty list."""
    if wanted is None:
        return list(allowed)
    unknown = [name for name in wanted if name not in allowed]
    if unknown or not wanted:
        raise EvaluationError(f"--tasks {','.join(unknown)}: allowed are {', '.join(allowed)}")
    return list(dict.fromkeys(wanted))
