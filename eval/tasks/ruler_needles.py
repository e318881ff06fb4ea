"""RULER's needle and variable-tracking tasks: questions around a text of any length."""

from __future__ import annotations

import random
import string
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from eval.live.tokens import Tokens
from eval.tasks.ruler_words import Wording, adjective_noun
from eval.texts.haystacks import ExactHaystack, Make, Question, draw_apart, join_names, spaced
from eval.texts.text import NOISE, RULER_INTROS, hide, random_number, sentences, unique_keys

# Percentages at which RULER puts needles into essays.
DEPTHS = tuple(round(100 * i / 39) for i in range(40))
SPARE_NEEDLES = 64
SHORT = 4096
HOPS = 4
EXAMPLE_TOKENS = 500
EXAMPLE_ROOM = 30
_TRACK = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {value} in the text above."
)
_TRACKED = (
    "Answer: According to the chain(s) of variable assignment in the text above, {count} variables are {assigned} the "
    "value {value}, they are:"
)


@dataclass(frozen=True)
class NeedleTask:
    """One needle task.

    Attributes:
        haystack: "noise" (one line of five sentences again and again), "needles" or "essays".
        key, value: what they are made of: "word", "number" or "uuid".
        keys: needles of different keys.
        values: needles of each key.
        asked: how many keys are asked for.
    """

    haystack: str
    key: str = "word"
    value: str = "number"
    keys: int = 1
    values: int = 1
    asked: int = 1


NEEDLE_TASKS: dict[str, NeedleTask] = {
    "niah_single_1": NeedleTask("noise"),
    "niah_single_2": NeedleTask("essays"),
    "niah_single_3": NeedleTask("essays", value="uuid"),
    "niah_multikey_1": NeedleTask("essays", keys=4),
    "niah_multikey_2": NeedleTask("needles"),
    "niah_multikey_3": NeedleTask("needles", key="uuid", value="uuid"),
    "niah_multivalue": NeedleTask("essays", values=4),
    "niah_multiquery": NeedleTask("essays", keys=4, asked=4),
}
_MAKE: dict[str, Make] = {
    "word": adjective_noun,
    "number": random_number,
    "uuid": lambda rng: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
}


def needle_question(
    task: NeedleTask, rng: random.Random, length: int, essays: ExactHaystack, tokens: Tokens
) -> Question:
    """A question for the values of some keys.

    Args:
        task: which.
        rng: draws keys, values and places.
        length: tokens for which there must be needles to fill the text with.
        essays: filled with from its beginning, as RULER does, and used by "essays" only.
        tokens: the tokenizer.
    """
    parts = (task.keys, _MAKE[task.key]), (task.keys * task.values, _MAKE[task.value])
    keys, values = draw_apart(rng, *parts, essays if task.haystack == "essays" else ())
    owners = [key for key in keys for _ in range(task.values)]
    records = [_record(task, key, value) for key, value in zip(owners, values, strict=True)]
    order = rng.sample(range(task.keys), task.asked)
    asked = [keys[i] for i in order]
    answers = [value for key in asked for owner, value in zip(owners, values, strict=True) if owner == key]
    rng.shuffle(records)
    depths, places = sorted(rng.sample(DEPTHS, len(records))), [rng.random() for _ in records]
    pool = _needles(task, rng, length, (*keys, *values), tokens) if task.haystack == "needles" else None

    def context(filling: int) -> str:
        if task.haystack == "essays":
            return hide(essays.take(0, filling), records, [depth / 100 for depth in depths])
        lines = pool.take(0, filling) if pool else []
        # Few needles do not add up to a length.
        if not pool or filling < SHORT:
            lines += noise_lines(filling - sum(spaced(tokens, lines, "\n")), tokens)
        return "\n".join(among(lines, records, places))

    one = len(answers) == 1
    kind = task.value if one else f"{task.value}s"
    intro = RULER_INTROS[0 if one else 1].replace("number", task.value)
    what = f"special magic {kind} for {join_names(asked)} mentioned in the provided text"
    question = f"What {'is' if one else 'are all'} the {what}?"
    return Question(
        lambda filling: f"{intro}\n{context(filling)}\n{question}", f"The {what} {'is' if one else 'are'}", answers
    )


def _record(task: NeedleTask, key: str, value: str) -> str:
    return f"One of the special magic {task.value}s for {key} is: {value}."


def _needles(task: NeedleTask, rng: random.Random, length: int, taken: Sequence[str], tokens: Tokens) -> ExactHaystack:
    """Needles that fill `length` tokens; none has a key or value of those `taken`."""
    (least,) = tokens.sizes([_record(task, "a", "1" if task.value == "number" else _MAKE[task.value](rng))])
    count = length // least + SPARE_NEEDLES
    drawn = zip(unique_keys(rng, count, _MAKE[task.key]), unique_keys(rng, count, _MAKE[task.value]), strict=True)
    records = [_record(task, key, value) for key, value in drawn]
    records = [record for record in records if not any(text in record for text in taken)]
    return ExactHaystack(records, lambda parts: spaced(tokens, parts, "\n"))


def noise_lines(filling: int, tokens: Tokens) -> list[str]:
    """RULER's noise line as often as `filling` tokens allow, and as many of its sentences as the rest allows."""
    count, rest = divmod(filling, spaced(tokens, [NOISE], "\n")[0])
    last: list[str] = []
    for part, size in zip(sentences(NOISE), spaced(tokens, sentences(NOISE)), strict=True):
        rest -= size
        if rest < 0:
            break
        last.append(part)
    return [NOISE] * count + ([" ".join(last)] if last else [])


def among(lines: Sequence[str], records: Sequence[str], places: Sequence[float]) -> list[str]:
    """Lines with records before some of them, at most one before each where there are enough.

    Args:
        lines: the text.
        records: what is put in.
        places: of each record, 0 (the beginning) to below 1.
    """
    whole, free = list(lines), max(0, len(lines) - len(records) + 1)
    order = sorted(range(len(records)), key=places.__getitem__)
    for before, i in enumerate(order):
        whole.insert(int(places[i] * free) + 2 * before, records[i])
    return whole


def track_question(rng: random.Random, wording: Wording, tokens: Tokens) -> Question:
    """A question for the variables of one chain of four assignments, after a worked example with short names."""
    values = unique_keys(rng, 2, lambda rng: random_number(rng, 5))
    names = unique_keys(rng, HOPS + 1, lambda rng: "".join(rng.choices(string.ascii_uppercase, k=5)))
    short = unique_keys(rng, HOPS + 1, lambda rng: "".join(rng.choices(string.ascii_uppercase, k=3)))
    places, example_places = ([rng.random() for _ in names] for _ in range(2))

    def text(names: Sequence[str], value: str, lines: Sequence[str], places: Sequence[float]) -> str:
        links = [f"VAR {name} = VAR {before} " for before, name in pairwise(names)]
        whole = among(lines, [f"VAR {names[0]} = {value}", *links], sorted(places))
        return _TRACK.format(context=wording.join_noise(whole), value=value)

    def answer(value: str) -> str:
        return _TRACKED.format(count=HOPS + 1, assigned=wording.assigned, value=value)

    example, count = "", 5
    while True:
        lines = [NOISE] * count
        # The two spaces before the names are RULER's.
        made = f"{text(short, values[1], lines, example_places)} {answer(values[1])}  {' '.join(short)}"
        if example and tokens.sizes([made])[0] > EXAMPLE_TOKENS - EXAMPLE_ROOM:
            break
        example, count = made, count + 5
    example += wording.after_example

    def ask(filling: int) -> str:
        return example + text(names, values[0], noise_lines(filling, tokens), places)

    return Question(ask, answer(values[0]), names)
