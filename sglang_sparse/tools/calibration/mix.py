"""The default prompts of a RoBSA calibration: made up, in the domains and proportions of the paper's table 8.

The package has no texts, so all is made from templates and small word lists, the same for the same seed everywhere:
dialogue, knowledge questions, code and maths of some hundred tokens, as their data sets have, and long contexts with
something to be found in them. Generated prose is poorer than what people write. Who serves texts of one kind should
calibrate on these (``--data``).
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from sglang_sparse.tools.calibration.capture import CalibrationError

Message = dict[str, str]

LONG = "long context"
# Table 8: SmolTalk, MMLU, HumanEval, GSM8K and RULER, of 100 prompts.
SHARES = {"dialogue": 10, "knowledge": 20, "code": 20, "maths": 20, LONG: 30}
# Tokens of a prompt that are left for its template and its question.
SPARE = 96


def _words(text: str, separator: str | None = None) -> list[str]:
    return text.split(separator)


def _pairs(text: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in text.split())


NAMES = _words("Ada Bruno Chen Dalia Emre Farah Goran Hana Ivan Jorge Kofi Leila Mara Nils Olga Priya Rosa Sami Tomas")
PLACES = _words("harbour library station market garden museum bridge workshop orchard school theatre kitchen")
ADJECTIVES = _words("worn quiet narrow bright heavy plain green wooden distant rusty broken tall")
NOUNS = _words("clock letter boat ladder map engine basket lantern bicycle table river window coat fence")
VERBS = _words("repaired found sold painted described lost borrowed carried watched measured forgot moved")
TIMES = _words("in the morning|after the rain|before winter|on Tuesday|late at night|a year ago|during the fair", "|")
CONNECTIVES = _words("Because of this,|Even so,|Meanwhile,|Some weeks later,|As far as anybody knows,|So", "|")
FACTS = {
    "the capital of {}": _pairs(
        "France=Paris Japan=Tokyo Kenya=Nairobi Peru=Lima Norway=Oslo Egypt=Cairo Canada=Ottawa Greece=Athens"
    ),
    "the chemical symbol of {}": _pairs("iron=Fe gold=Au silver=Ag lead=Pb tin=Sn copper=Cu sodium=Na mercury=Hg"),
    "the field that studies {}": _pairs(
        "fungi=mycology earthquakes=seismology insects=entomology ageing=gerontology weather=meteorology cells=cytology"
    ),
}


@dataclass(frozen=True)
class MixPrompt:
    """A prompt of the mix.

    Attributes:
        kind: of `SHARES`.
        messages: as the OpenAI API takes them.
        length: tokens that it may have; None: its kind is short by nature.
    """

    kind: str
    messages: list[Message]
    length: int | None = None


def mix(n: int, lengths: Sequence[int], seed: int, count: Callable[[str], int]) -> list[MixPrompt]:
    """``n`` prompts, as near to the shares of the paper as can be.

    Args:
        n: how many.
        lengths: tokens that the long ones have at most, in turn.
        seed: of everything.
        count: how many tokens a text has.

    Raises:
        CalibrationError: a length leaves no room.
    """
    short = {"dialogue": _dialogue, "knowledge": _knowledge, "code": _code, "maths": _maths}
    numbers = shares(n)
    found = [
        MixPrompt(kind, make(random.Random(f"{seed} {kind} {i}")))
        for kind, make in short.items()
        for i in range(numbers[kind])
    ]
    return found + long_mix(numbers[LONG], lengths, seed, count)


def long_mix(n: int, lengths: Sequence[int], seed: int, count: Callable[[str], int]) -> list[MixPrompt]:
    """``n`` of the long ones alone; see `mix`."""
    if lengths[0] < 2 * SPARE:
        message = f"--lengths {lengths[0]}: the default mix needs at least {2 * SPARE} tokens"
        raise CalibrationError(message, field="--lengths", got=lengths[0])
    found, makers = [], (_pass_key, _json, _variables, _functions)
    for i in range(n):
        length = lengths[i % len(lengths)]
        text = makers[i % len(makers)](random.Random(f"{seed} {LONG} {i}"), Room(length - SPARE, count))
        found.append(MixPrompt(LONG, [_user(text)], length))
    return found


def shares(n: int) -> dict[str, int]:
    """Return the number of prompts of each kind, rounded to a total of ``n``."""
    ends = [round(n * end / sum(SHARES.values())) for end in accumulate(SHARES.values())]
    return {kind: end - start for kind, start, end in zip(SHARES, [0, *ends[:-1]], ends, strict=True)}


@dataclass(frozen=True)
class Room:
    """Return the part of a text that fits."""

    tokens: int
    count: Callable[[str], int]

    def fill(self, piece: Callable[[], str]) -> list[str]:
        """As many pieces as fit, one at least."""
        pieces, used = [], 0
        while not pieces or used <= self.tokens:
            pieces.append(piece())
            # The space or line break behind it too.
            used += self.count(pieces[-1]) + 1
        return pieces[: max(1, len(pieces) - 1)]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _thing(rng: random.Random) -> str:
    return f"the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"


def _sentence(rng: random.Random) -> str:
    one, other = rng.sample(NAMES, 2)
    verb, thing, place, time = rng.choice(VERBS), _thing(rng), rng.choice(PLACES), rng.choice(TIMES)
    text = rng.choice(
        [
            f"{one} {verb} {thing} near the {place} {time}.",
            f"{rng.choice(CONNECTIVES)} {one} {verb} {thing}, and {other} {rng.choice(VERBS)} {_thing(rng)}.",
            f"Nobody at the {place} knew who {verb} {thing}, although {other} had asked {time}.",
            f"It was {other} who told {one} that {thing} was behind the {place}, worth {rng.randint(2, 90)} coins.",
        ]
    )
    return text[0].upper() + text[1:]


def _prose(rng: random.Random, sentences: int) -> str:
    return " ".join(_sentence(rng) for _ in range(sentences))


def _digits(rng: random.Random, n: int) -> str:
    return "".join(rng.choices(string.digits, k=n))


def _dialogue(rng: random.Random) -> list[Message]:
    topic = rng.choice(NOUNS)
    questions = [
        f"Hello! I would like to write a short story about a {rng.choice(ADJECTIVES)} {topic}. Can you begin it?",
        f"I like that. What happens to the {topic} after that, and who is {rng.choice(NAMES)}?",
        f"Please make it livelier and mention the {rng.choice(PLACES)}.",
        f"Now sum up the story of the {topic} in two sentences.",
    ]
    found = []
    for question in questions[: rng.randint(2, 4)]:
        found += [_user(question), {"role": "assistant", "content": _prose(rng, rng.randint(3, 8))}]
    return found[:-1]


def _knowledge(rng: random.Random) -> list[Message]:
    lines = ["Choose the right answer to each question."]
    for last in (False, False, False, True):
        question, answers = rng.choice(list(FACTS.items()))
        about, right = rng.choice(list(answers.items()))
        wrong = rng.sample([answer for answer in answers.values() if answer != right], 3)
        options = rng.sample([right, *wrong], 4)
        lines += ["", f"Question: What is {question.format(about)}?"]
        lines += [f"{letter}. {option}" for letter, option in zip("ABCD", options, strict=True)]
        lines.append("Answer:" if last else f"Answer: {'ABCD'[options.index(right)]}")
    return [_user("\n".join(lines))]


def _code(rng: random.Random) -> list[Message]:
    noun, adjective = rng.choice(NOUNS), rng.choice(ADJECTIVES)
    limit, factor = rng.randint(2, 50), rng.randint(2, 9)
    values = [rng.randint(1, 99) for _ in range(rng.randint(4, 8))]
    what, body = rng.choice(
        [
            (f"the sum of all values above {limit}", [x for x in values if x > limit]),
            (f"the sum of all values, each times {factor}", [x * factor for x in values]),
            (f"the sum of the values at every place that {factor} divides", values[::factor]),
        ]
    )
    text = (
        f"from collections.abc import Sequence\n\n\ndef {adjective}_{noun}(values: Sequence[int]) -> int:\n"
        f'    """Return {what}; 0 for none.\n\n    >>> {adjective}_{noun}({values})\n    {sum(body)}\n'
        f'    >>> {adjective}_{noun}([])\n    0\n    """\n'
    )
    return [_user(f"Complete this function. Answer with its code alone.\n\n```python\n{text}```")]


def _maths(rng: random.Random) -> list[Message]:
    one, other = rng.sample(NAMES, 2)
    noun, boxes, each, given, price = rng.choice(NOUNS), *(rng.randint(3, 40) for _ in range(4))
    story = (
        f"{one} has {boxes} boxes with {each} {noun}s in each. {one} gives {given} {noun}s to {other}, who already had "
        f"{price}, and sells the rest for {price} coins apiece."
    )
    question = rng.choice(
        [
            f"How many coins does {one} get?",
            f"How many {noun}s does {other} have now?",
            f"How many more {noun}s than {other} did {one} have at first?",
        ]
    )
    return [_user(f"{story} {question} Think step by step and give the final number in the last line.")]


def _pass_key(rng: random.Random, room: Room) -> str:
    sentences = room.fill(lambda: _sentence(rng))
    names = rng.sample(NAMES, 3)
    for name in names:
        sentences.insert(rng.randrange(len(sentences) + 1), f"The pass key of {name} is {_digits(rng, 6)}.")
    return f"{' '.join(sentences)}\n\nWhat is the pass key of {names[-1]}?"


def _json(rng: random.Random, room: Room) -> str:
    records: dict[str, str] = {}

    def record() -> str:
        key, value = f"{rng.getrandbits(64):016x}", f"{rng.getrandbits(64):016x}"
        records[key] = value
        return f'"{key}": "{value}",'

    lines = room.fill(record)
    key = rng.choice(list(records)[: len(lines)])
    return f'JSON data:\n{{\n{chr(10).join(lines)}\n}}\n\nWhat is the value of the key "{key}"?'


def _variables(rng: random.Random, room: Room) -> str:
    sentences = room.fill(lambda: _sentence(rng))
    names = ["".join(rng.choices(string.ascii_uppercase, k=5)) for _ in range(4)]
    value = _digits(rng, 5)
    before = [value, *(f"VAR {name}" for name in names[:-1])]
    links = [f"VAR {name} = {what}." for name, what in zip(names, before, strict=True)]
    places = sorted(rng.sample(range(len(sentences) + len(links)), len(links)))
    for place, link in zip(places, links, strict=True):
        sentences.insert(place, link)
    return f"{' '.join(sentences)}\n\nWhich variables have the value {value}? Name all of them."


def _functions(rng: random.Random, room: Room) -> str:
    names: list[int] = []

    def function() -> str:
        names.append(rng.randrange(10000))
        call = f"func_{rng.choice(names[:-1])}(x)" if len(names) > 1 and rng.random() < 0.7 else "x"
        return f"def func_{names[-1]}(x): return {call} {rng.choice('+-')} {rng.randint(1, 9)}\n"

    lines = room.fill(function)
    asked = names[rng.randrange(len(lines))]
    return f"```python\n{chr(10).join(lines)}```\n\nWhat does func_{asked}({rng.randint(1, 9)}) return?"
