"""RULER's tasks but those about documents: questions around a text of any length, and wordings that differ."""

from __future__ import annotations

import random
import string
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

from eval.live.tokens import Tokens
from eval.texts.haystacks import ExactHaystack, Make, Question, draw_apart, join_names, spaced
from eval.texts.text import NOISE, RULER_INTROS, hide, random_number, random_uuid, sentences, unique_keys

COMMON = 10
SHORT = 4096
CODED_LETTERS = 6
LEAST_UNCOMMON = 10
# Dots in the shortest text; from so many on the fourth most frequent word stands more often than the fifth.
FEWEST_CODED = 48
_LISTED = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?"
)
_MOST = "Answer: The top 10 words that appear most often in the list are:"
_CODED = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
    "appeared coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What "
    "are the three most frequently appeared words in the above coded text?"
)
_DECODED = "Answer: According to the coded text above, the three most frequently appeared words are:"


@dataclass(frozen=True)
class Wording:
    """Parts of a prompt that differ between RULER itself and lm-eval's version of it.

    Attributes:
        assigned: a word of the variable-tracking answer.
        own_lines: whether an assignment has a line of its own.
        after_example: text between the variable-tracking example and the question.
        word_example: whether the common-words task has an example.
        word_separator: before the answer prefix of the common-words task.
    """

    assigned: str
    own_lines: bool
    after_example: str
    word_example: bool
    word_separator: str

    def join_noise(self, lines: Sequence[str]) -> str:
        """A text of noise lines and assignments."""
        if self.own_lines:
            return "\n".join(lines)
        return " ".join(line if line.startswith("VAR") else line + "\n" for line in lines)


WORDINGS: dict[str, Wording] = {
    "lm-eval": Wording("assgined", False, "\n\n\n\n", False, "\n\n"),
    "nvidia": Wording("assigned", True, "\n\n", True, " "),
}


@cache
def words_of(*kinds: str) -> tuple[str, ...]:
    """The "noun", "adjective" and "verb" words of wonderwords, the list that RULER uses, sorted."""
    from wonderwords import RandomWord

    return tuple(sorted(set(RandomWord().filter(include_categories=list(kinds)))))


def adjective_noun(rng: random.Random) -> str:
    """A key such as "gullible-sideboard"."""
    return f"{rng.choice(words_of('adjective'))}-{rng.choice(words_of('noun'))}"


def common_words_question(rng: random.Random, length: int, wording: Wording, tokens: Tokens) -> Question:
    """A question for the ten words that a numbered list has most often; there are words for `length` tokens.

    From 4096 tokens on they stand 30 times each and the others three times; below, six times and once. There are at
    least ten others. Where wonderwords has too few, pairs of its words are further ones.
    """
    often, seldom = (6, 1) if length < SHORT else (30, 3)
    known = words_of("noun", "adjective", "verb")
    # An entry has at least three tokens: number, dot, word.
    count = COMMON + LEAST_UNCOMMON + length // (3 * seldom)
    words = rng.sample(known, min(count, len(known)))
    words += unique_keys(rng, count - len(words), adjective_noun)
    common, others = words[:COMMON], words[COMMON:]
    sizes = spaced(tokens, [f"1234. {word}" for word in others[LEAST_UNCOMMON:]])
    ends = [seldom * end for end in accumulate(sizes)]
    order, example = rng.random(), ""
    if wording.word_example:
        found = rng.sample(known, 20 if length < SHORT else 40)
        shown = _numbered(found[:COMMON], found[COMMON:], (3, 1) if length < SHORT else (10, 3), rng.random())
        example = f"{_LISTED.format(context=shown)} {_MOST} {_entries(found[:COMMON])}\n"

    def ask(filling: int) -> str:
        uncommon = others[: LEAST_UNCOMMON + bisect_right(ends, filling)]
        return example + _LISTED.format(context=_numbered(common, uncommon, (often, seldom), order))

    return Question(ask, _MOST, common, separator=wording.word_separator)


def _numbered(common: Sequence[str], others: Sequence[str], repeats: tuple[int, int], order: float) -> str:
    listed = [*common] * repeats[0] + [*others] * repeats[1]
    random.Random(order).shuffle(listed)
    return _entries(listed)


def _entries(words: Sequence[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def coded_words_question(rng: random.Random, length: int, tokens: Tokens) -> Question:
    """A question for the three most frequent words of random letters; the frequencies are those of a zeta distribution.

    Its exponent is 2. The most frequent word is noise, three dots. There are ``length // 50`` words, and at least five.
    """

    def coded(rng: random.Random) -> str:
        return "".join(rng.choices(string.ascii_lowercase, k=CODED_LETTERS))

    words = ["...", *unique_keys(rng, max(5, length // 50) - 1, coded)]
    # What int(n / zeta(2) * rank ** -2) gives for a growing n, one word after the other.
    ranks = range(1, len(words) + 1)
    sizes = spaced(tokens, words)
    most = FEWEST_CODED + int(1.2 * length / sum(size / k**2 for k, size in zip(ranks, sizes, strict=True)))
    grown = sorted((m * k**2, k) for k in ranks for m in range(1, most // k**2 + 1))
    least = bisect_right(grown, (FEWEST_CODED, len(words)))
    ends = list(accumulate(sizes[k - 1] for _, k in grown[least:]))
    order = rng.random()

    def ask(filling: int) -> str:
        text = [words[k - 1] for _, k in grown[: least + bisect_right(ends, filling)]]
        random.Random(order).shuffle(text)
        return _CODED.format(context=" ".join(text))

    return Question(ask, _DECODED, words[1:4])


# Percentages at which RULER puts needles into essays.
DEPTHS = tuple(round(100 * i / 39) for i in range(40))
SPARE_NEEDLES = 64
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
    "uuid": random_uuid,
}


def needle_question(
    task: NeedleTask, rng: random.Random, length: int, essays: ExactHaystack, tokens: Tokens
) -> Question:
    """A question for the values of some keys.

    There are needles to fill `length` tokens with. "essays" are filled with from their beginning, as RULER does.
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

    The place of a record is from 0 (the beginning) to below 1.
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
