"""Synthetic tasks by the definitions of InfiniteBench (Zhang et al., 2024), of any length.

Their wording is this project's own and the sizes are counted in tokens, so that scores are not those of InfiniteBench.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from eval.live.tokens import Tokens
from eval.texts.haystacks import haystack, share
from eval.texts.text import FORMS, hide, random_uuid

SAMPLE = 64
LEAST_NUMBERS = 16
CALLS = (2, 4, 6, 8, 10)
ADDED = (-12, 17)
RANKS = ("largest", "second largest", "third largest", "smallest", "second smallest", "third smallest", "median")


@dataclass(frozen=True)
class Made:
    """A question: what stands before it, itself, its right answers and what else is kept of it."""

    context: str
    question: str
    answers: list[str]
    facts: dict[str, Any] = field(default_factory=dict)


Maker = Callable[[random.Random, int, float, int, Tokens], Made]
"""Gets random numbers, the filling, depth, index and tokenizer; the first draws do not depend on the filling."""


def passkey(rng: random.Random, filling: int, depth: float, index: int, tokens: Tokens) -> Made:
    """Five digits in noise."""
    key = "".join(rng.choices("0123456789", k=5))
    form = FORMS["passkey"]
    return Made(_hidden(form.record(value=key), filling, depth, tokens), form.question(), [key])


def number_string(rng: random.Random, filling: int, depth: float, index: int, tokens: Tokens) -> Made:
    """Ten digits in noise, five of them a repetition of their neighbour."""
    digits = rng.choices("0123456789", k=5)
    for _ in range(5):
        at = rng.randrange(len(digits))
        digits.insert(at, digits[at])
    key = "".join(digits)
    record = f"The digit string is {key}. Keep it in mind: {key} is the digit string."
    return Made(_hidden(record, filling, depth, tokens), "What is the digit string?", [key])


def _hidden(record: str, filling: int, depth: float, tokens: Tokens) -> str:
    noise = haystack("repeated", (), tokens).draw(random.Random(0), filling)
    return hide(noise, [record], [share(noise, depth)])


def kv_retrieval(rng: random.Random, filling: int, depth: float, index: int, tokens: Tokens) -> Made:
    """A JSON object of UUIDs, one value asked for."""
    key, value, seed = random_uuid(rng), random_uuid(rng), rng.random()

    def text(pairs: int) -> str:
        others = random.Random(seed)
        found = [(random_uuid(others), random_uuid(others)) for _ in range(pairs)]
        found.insert(round(depth * pairs), (key, value))
        return json.dumps(dict(found))

    return Made(padded(text, filling, tokens), FORMS["json"].question(key), [value])


def code_run(rng: random.Random, filling: int, depth: float, index: int, tokens: Tokens) -> Made:
    """Python functions that add a number to what another one returns, one call to be followed.

    There are as many functions on each level as can be; one of the first level is called, each calls any one of the
    next level, and those of the last level none. The number of levels goes with the index.
    """
    levels, argument, seed = CALLS[index % len(CALLS)], rng.randint(-10, 10), rng.random()
    context = padded(lambda more: functions(levels + more, levels, seed)[0], filling, tokens, "# ")
    _, (first, total) = functions(context.count("def func_"), levels, seed)
    question = f"What does func_{first}({argument}) return? Work it out, and end your answer with the number."
    return Made(context, question, [str(argument + total)], {"calls": levels})


def functions(count: int, levels: int, seed: float) -> tuple[str, tuple[int, int]]:
    """Source of `count` functions on so many levels, and the number of the one to call with what it adds in the end."""
    rng = random.Random(seed)
    numbers = rng.sample(range(1, 2 * count + 1), count)
    added = {number: rng.randint(*ADDED) for number in numbers}
    totals, sources, after = dict[int, int](), dict[int, str](), list[int]()
    for level in reversed(range(levels)):
        here = numbers[level::levels]
        for number in here:
            called = rng.choice(after) if after else None
            totals[number] = added[number] + (0 if called is None else totals[called])
            inner, sign = "x" if called is None else f"func_{called}(x)", "-" if added[number] < 0 else "+"
            term = f" {sign} {abs(added[number])}" if added[number] else ""
            sources[number] = f"def func_{number}(x):\n    return {inner}{term}\n"
        after = here
    first = rng.choice(after)
    return "\n".join(sources[number] for number in sorted(sources)), (first, totals[first])


def math_find(rng: random.Random, filling: int, depth: float, index: int, tokens: Tokens) -> Made:
    """A list of numbers from 0 to 99, the largest, smallest, next to it or the median asked for, by the index.

    The range is cut short at random where the answer is, so that the answer is not always the same.
    """
    rank, seed = RANKS[index % len(RANKS)], rng.random()
    low, high = 0, 99
    if "largest" in rank or (rank == "median" and rng.random() < 0.5):
        high = rng.randint(79, 99)
    else:
        low = rng.randint(0, 19)

    def text(more: int) -> str:
        values = random.Random(seed)
        return json.dumps([values.randint(low, high) for _ in range(LEAST_NUMBERS + more)])

    context = padded(text, filling, tokens)
    found = json.loads(context[context.index("[") :])
    return Made(context, f"What is the {rank} number in the list? Answer with the number alone.", [ranked(found, rank)])


def ranked(numbers: list[int], rank: str) -> str:
    """The asked number of a list; equal numbers count once, except in the median."""
    if rank == "median":
        ordered, half = sorted(numbers), len(numbers) // 2
        return f"{ordered[half] if len(numbers) % 2 else (ordered[half - 1] + ordered[half]) / 2:g}"
    place = 1 + ("second" in rank) + 2 * ("third" in rank)
    different = sorted(set(numbers), reverse="largest" in rank)
    return str(different[place - 1])


def math_calc(rng: random.Random, filling: int, depth: float, index: int, tokens: Tokens) -> Made:
    """A sum and difference of many numbers, all intermediate values between 0 and 99 asked for."""
    seed = rng.random()
    context = padded(lambda more: expression(2 + more, seed), filling, tokens)
    terms = context[context.rindex("\n") + 1 :].split()
    value, answers = int(terms[0]), []
    for sign, term in zip(terms[1::2], terms[2::2], strict=True):
        value += int(term) if sign == "+" else -int(term)
        answers.append(str(value))
    question = (
        "Write down the value after each operation, from left to right, separated by commas, and nothing else. "
        "For 2 + 5 - 1 that is: 7, 6"
    )
    return Made(context, question, answers)


def expression(count: int, seed: float) -> str:
    """A sum and difference of so many terms."""
    rng = random.Random(seed)
    value = rng.randint(0, 99)
    terms = [str(value)]
    for _ in range(count - 1):
        term = rng.randint(0, 99)
        if rng.random() > 0.5:
            term = term if value + term <= 99 else rng.randint(0, 99 - value)
            value += term
            terms.append(f"+ {term}")
        else:
            term = term if term <= value else rng.randint(0, value)
            value -= term
            terms.append(f"- {term}")
    return " ".join(terms)


def padded(text: Callable[[int], str], filling: int, tokens: Tokens, mark: str = "") -> str:
    """The text of as many parts as `filling` tokens have room for, after a line of noise of what is left.

    `text` makes a text of a number of optional parts; the line of noise begins with `mark`.
    """

    def size(parts: int) -> int:
        return len(tokens.encode(text(parts)))

    least = size(0)
    each = (size(SAMPLE) - least) / SAMPLE
    parts, over = int(filling / each), 0
    while parts > 0 and (over := size(parts) - least - filling) > 0:
        parts = max(0, parts - max(1, int(over / each)))
    left = filling + least - size(parts)
    noise = haystack("repeated", (), tokens).draw(random.Random(0), max(0, left))
    return f"{mark}{' '.join(noise)}\n{text(parts)}"


@dataclass(frozen=True)
class Task:
    """The definition of a task.

    Attributes:
        make: see `Maker`.
        intro: stands before the context.
        room: tokens of the answer, or their share of all tokens.
        has_place: whether the answer stands at a depth.
    """

    make: Maker
    intro: str
    room: int | float
    has_place: bool = False


_HIDDEN = "Something important is hidden in the text below, among much that is not. Remember it: I will ask for it."
TASKS: dict[str, Task] = {
    "gen_passkey": Task(passkey, _HIDDEN, 16, True),
    "gen_number_string": Task(number_string, _HIDDEN, 32, True),
    "gen_kv_retrieval": Task(kv_retrieval, "Look up a value in the JSON object below.", 64, True),
    "gen_code_run": Task(code_run, "Read the Python functions below.", 256),
    "gen_math_find": Task(math_find, "Read the list of numbers below.", 16),
    "gen_math_calc": Task(math_calc, "Calculate the expression below.", 0.6),
}
