"""Question forms, needles and haystacks: the texts that the tiny models are tested on and shown with.

A *form* is one way to hide a value in a long text and to ask for it. Chat forms are asked through a chat template, the
long text and the question in the user's turn; completion forms are raw prompts that the answer continues.

>>> form = FORMS["needle"]
>>> form.record("lantern-hill", value="4821937")
'One of the special magic numbers for lantern-hill is: 4821937.'
>>> form.question("lantern-hill")
'What is the special magic number for lantern-hill?'

Needle sentences, questions and answer prefixes named RULER follow the task texts of the RULER benchmark
(Hsieh et al., 2024).
"""

from __future__ import annotations

import lzma
import random
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from uuid import UUID

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
ASSISTANT = f"{IM_START}assistant\n"
WORDS_FILE = Path(__file__).with_name("words.txt")
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
RULER_INTROS = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards.",
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.",
)

_MAGIC = "One of the special magic numbers for {key} is: {value}."
_RULER_QUESTION = "What is the special magic number for {key} mentioned in the provided text?"
_RULER_PREFIX = "The special magic number for {key} mentioned in the provided text is"
_PASS_KEY = "The pass key is {value}. Remember it. {value} is the pass key."


@dataclass(frozen=True)
class Form:
    """One way to hide a value and to ask for it; templates use the fields key and value.

    It is asked through the chat template, or is a raw prompt that ends in the question.
    """

    name: str
    record_template: str
    question_template: str
    chat: bool = True

    def record(self, key: str = "", *, value: str) -> str:
        """Return the part of the text that says the value."""
        return self.record_template.format(key=key, value=value)

    def question(self, key: str = "") -> str:
        """Return the question; for a completion form the text that the answer continues."""
        return self.question_template.format(key=key)


_ALL = (
    Form("needle", _MAGIC, "What is the special magic number for {key}?"),
    Form("needle_ruler", _MAGIC, f"{_RULER_QUESTION} {_RULER_PREFIX}", chat=False),
    Form("passkey", _PASS_KEY, "What is the pass key?"),
    Form("json", '"{key}": "{value}",', 'What is the value of the key "{key}"?'),
)
FORMS: dict[str, Form] = {form.name: form for form in _ALL}


@cache
def words(split: str) -> tuple[str, ...]:
    """Words that keys are made of; "train" and "eval" share none.

    The file lists common words of the books that the tiny models were trained on; a checksum of the word decides its
    side.
    """
    if split not in ("train", "eval"):
        raise ValueError(f"unknown split of the word list: got {split!r}, allowed are 'train' and 'eval'")
    wanted = split == "eval"
    return tuple(w for w in WORDS_FILE.read_text().split() if (zlib.crc32(w.encode()) % 5 == 0) == wanted)


def random_key(rng: random.Random, n_words: int = 2) -> str:
    """A key such as "lantern-hill"."""
    return "-".join(rng.choice(words("eval")) for _ in range(n_words))


def random_number(rng: random.Random, digits: int = 7) -> str:
    """A number of exactly `digits` digits, the first not 0."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def random_uuid(rng: random.Random) -> str:
    """A UUID of version 4."""
    return str(UUID(int=rng.getrandbits(128), version=4))


def unique_keys(rng: random.Random, count: int, make: Callable[[random.Random], str]) -> list[str]:
    """`count` different keys made by `make`, in random order."""
    keys: dict[str, None] = {}
    while len(keys) < count:
        keys[make(rng)] = None
    return list(keys)


def read_book(path: Path) -> str:
    """Text of a ``.txt`` or ``.txt.xz`` file."""
    return lzma.open(path, "rt", encoding="utf-8").read() if path.suffix == ".xz" else path.read_text(encoding="utf-8")


def find_books(folder: Path) -> list[Path]:
    """The ``*.txt`` and ``*.txt.xz`` files of a folder, sorted by name."""
    if found := sorted([*folder.glob("*.txt"), *folder.glob("*.txt.xz")]):
        return found
    raise ValueError(f"no books: {folder} has neither *.txt nor *.txt.xz files")


def book_name(path: Path) -> str:
    """The name of a file without ``.txt`` or ``.txt.xz``."""
    return path.name.removesuffix(".xz").removesuffix(".txt")


def read_books(folder: Path) -> dict[str, str]:
    """Name -> text of the books of a folder, see `find_books`."""
    return {book_name(path): read_book(path) for path in find_books(folder)}


def sentences(text: str) -> list[str]:
    """Sentences of a text, each with single spaces only."""
    return [" ".join(part.split()) for part in re.split(r"(?<=[.!?;])\s+", text) if part.strip()]


class Haystack:
    """Sentences of a text, taken for 1.4 tokens a word, from which texts of a wanted length are drawn."""

    def __init__(self, text: str) -> None:
        self.sentences = sentences(text)
        self.sizes = [round(1.4 * len(s.split())) for s in self.sentences]

    def draw(self, rng: random.Random, budget: int) -> list[str]:
        """Consecutive sentences from a random place (the book is a ring) of at most `budget` tokens together."""
        i, left, taken = rng.randrange(len(self.sentences)), budget, []
        while self.sizes[i] <= left:
            taken.append(self.sentences[i])
            left -= max(1, self.sizes[i])
            i = (i + 1) % len(self.sentences)
        return taken


def hide(sentences: Sequence[str], records: Sequence[str], depths: Sequence[float]) -> str:
    """A text with records between its sentences.

    Each has a depth: where it goes, 0 (before the first sentence) to 1 (after the last one).
    """
    pieces, at = [], 0
    for depth, record in sorted(zip(depths, records, strict=True), key=lambda pair: pair[0]):
        upto = max(at, round(depth * len(sentences)))
        pieces += [*sentences[at:upto], record]
        at = upto
    return " ".join([*pieces, *sentences[at:]])


def prompt_text(form: Form, haystack: str, question: str) -> str:
    """The whole prompt as text: of a chat form by the tiny models' chat template, of a completion form raw."""
    text = f"{haystack}\n{question}"
    return f"{IM_START}user\n{text}{IM_END}\n{ASSISTANT}" if form.chat else text
