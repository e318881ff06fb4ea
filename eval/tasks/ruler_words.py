"""RULER's common-words and frequent-words tasks, the words they and its needles use, and wordings that differ."""

from __future__ import annotations

import random
import string
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from eval.live.tokens import Tokens
from eval.texts.haystacks import Question, spaced
from eval.texts.text import unique_keys

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
    """What differs between RULER's own prompts and those that lm-eval makes of them.

    Attributes:
        assigned: a word of the variable-tracking answer.
        own_lines: whether an assignment has a line of its own.
        after_example: what stands between the variable-tracking example and the question.
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
