"""Question forms, needles and haystacks: the texts that the tiny models are trained on, tested on and shown with.

A *form* is one way to hide a value in a long text and to ask for it. Its answer is a function of the question, so that
an output is checked by comparing strings. Chat forms are asked through a chat template, the long text and the question
in the user's turn; completion forms are raw prompts that the answer continues.

>>> form = FORMS["needle"]
>>> form.record("lantern-hill", value="4821937")
'One of the special magic numbers for lantern-hill is: 4821937.'
>>> form.question("lantern-hill"), form.answer("lantern-hill", value="4821937")
('What is the special magic number for lantern-hill?', '4821937')

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

_MAGIC = "One of the special magic numbers for {key0} is: {value}."
_RULER_QUESTION = "What is the special magic number for {key0} mentioned in the provided text?"
_RULER_PREFIX = "The special magic number for {key0} mentioned in the provided text is"
_PASS_KEY = "The pass key is {value}. Remember it. {value} is the pass key."


@dataclass(frozen=True)
class Form:
    """One way to hide a value and to ask for it; templates use the fields key0, key1, ... and value.

    Attributes:
        last_record: the record that holds the value.
        question_template, answer_template: ``{rest}`` in the answer stands for the names after the first of a chain.
        chat: asked through the chat template; otherwise a raw prompt that ends in the question.
        link: for chains only: the record that points from one name to the next.
        keys: what the keys are made of: "words", "digits" or "none".
    """

    name: str
    last_record: str
    question_template: str
    answer_template: str
    chat: bool = True
    link: str = ""
    keys: str = "words"

    def record_templates(self, hops: int = 1) -> list[str]:
        """The `hops` records of one chain, in reading order."""
        if hops > 1 and not self.link:
            raise ValueError(f"form {self.name!r} has no chains: got hops={hops}, allowed is 1")
        links = [self.link.format(key=f"{{key{i}}}", next=f"{{key{i + 1}}}") for i in range(hops - 1)]
        return [*links, self.last_record.replace("{key0}", f"{{key{hops - 1}}}")]

    def answer_for_hops(self, hops: int = 1) -> str:
        """Template of the answer to a chain of `hops` records; it names every variable on the way."""
        return self.answer_template.replace("{rest}", "".join(f" = VAR {{key{i}}}" for i in range(1, hops)))

    def records(self, *keys: str, value: str) -> list[str]:
        """The records of the chain keys[0] -> keys[1] -> ... -> value as text, in reading order."""
        fields = {f"key{i}": key for i, key in enumerate(keys)}
        return [template.format(value=value, **fields) for template in self.record_templates(max(1, len(keys)))]

    def record(self, *keys: str, value: str) -> str:
        """The only record of a form without chains."""
        (text,) = self.records(*keys, value=value)
        return text

    def question(self, key: str = "") -> str:
        """What is asked; for a completion form the text that the answer continues."""
        return self.question_template.format(key0=key)

    def answer(self, *keys: str, value: str) -> str:
        """What a right answer says, without the end-of-turn token."""
        fields = {f"key{i}": key for i, key in enumerate(keys)}
        return self.answer_for_hops(max(1, len(keys))).format(value=value, **fields)


_VAR, _VAR_LINK, _VAR_PATH = "VAR {key0} = {value}", "VAR {key} = VAR {next}", "{rest} = {value}"
_BOXED = "What is the special magic number for {key0}? Put your final answer within \\boxed{{}}."
_ALL = (
    Form("needle", _MAGIC, "What is the special magic number for {key0}?", "{value}"),
    Form("needle_sentence", _MAGIC, _RULER_QUESTION, _RULER_PREFIX + " {value}."),
    Form("needle_ruler", _MAGIC, f"{_RULER_QUESTION} {_RULER_PREFIX}", " {value}.", chat=False),
    Form("needle_boxed", _MAGIC, _BOXED, "\\boxed{{{value}}}"),
    Form("passkey", _PASS_KEY, "What is the pass key?", "{value}", keys="none"),
    Form("passkey_completion", _PASS_KEY, "What is the pass key? The pass key is", " {value}.", False, keys="none"),
    Form("var", _VAR, "What is the value of VAR {key0}?", "VAR {key0}" + _VAR_PATH, link=_VAR_LINK),
    Form("var_completion", _VAR, "VAR {key0}", _VAR_PATH, chat=False, link=_VAR_LINK),
    Form("json", '"{key0}": "{value}",', 'What is the value of the key "{key0}"?', "{value}", keys="digits"),
    Form("json_completion", '"{key0}": "{value}",', '"{key0}":', ' "{value}",', chat=False, keys="digits"),
    Form("records", "{key0} = {value};", "{key0} =", " {value};", chat=False),
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


def random_key(rng: random.Random, n_words: int = 2, split: str = "eval") -> str:
    """A key such as "lantern-hill"."""
    return "-".join(rng.choice(words(split)) for _ in range(n_words))


def random_number(rng: random.Random, digits: int = 7) -> str:
    """A number of exactly `digits` digits, the first not 0."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def unique_keys(rng: random.Random, count: int, make: Callable[[random.Random], str]) -> list[str]:
    """`count` different keys made by `make`, in random order."""
    keys: dict[str, None] = {}
    while len(keys) < count:
        keys[make(rng)] = None
    return list(keys)


def read_book(path: Path) -> str:
    """Text of a ``.txt`` or ``.txt.xz`` file."""
    return lzma.open(path, "rt", encoding="utf-8").read() if path.suffix == ".xz" else path.read_text(encoding="utf-8")


def read_books(folder: Path) -> dict[str, str]:
    """Name -> text of the ``*.txt`` and ``*.txt.xz`` files of a folder, sorted by name."""
    found = sorted([*folder.glob("*.txt"), *folder.glob("*.txt.xz")])
    if not found:
        raise ValueError(f"no books: {folder} has neither *.txt nor *.txt.xz files")
    return {path.name.split(".")[0]: read_book(path) for path in found}


def sentences(text: str) -> list[str]:
    """Sentences of a text, each with single spaces only."""
    return [" ".join(part.split()) for part in re.split(r"(?<=[.!?;])\s+", text) if part.strip()]


class Haystack:
    """Sentences with their sizes in tokens, from which texts of a wanted length are drawn.

    Args:
        text: the book.
        count: sizes of sentences in tokens; by default the number of words times 1.4.
    """

    def __init__(self, text: str, count: Callable[[list[str]], list[int]] | None = None) -> None:
        self.sentences = sentences(text)
        self.sizes = count(self.sentences) if count else [round(1.4 * len(s.split())) for s in self.sentences]

    def draw(self, rng: random.Random, budget: int) -> list[str]:
        """Consecutive sentences from a random place (the book is a ring) of at most `budget` tokens together."""
        i, left, taken = rng.randrange(len(self.sentences)), budget, []
        while self.sizes[i] <= left:
            taken.append(self.sentences[i])
            left -= max(1, self.sizes[i])
            i = (i + 1) % len(self.sentences)
        return taken


def hide(sentences: Sequence[str], records: Sequence[str], depths: Sequence[float], joiner: str = " ") -> str:
    """A text with records between its sentences.

    Args:
        depths: where each record goes, 0 (before the first sentence) to 1 (after the last one).
        joiner: what stands around a record; a line break gives each its own line.
    """
    if len(records) != len(depths):
        raise ValueError(f"each record needs a depth: got {len(records)} records and {len(depths)} depths")
    order = sorted(range(len(records)), key=lambda i: depths[i])
    pieces, at = [], 0
    for i in order:
        upto = round(depths[i] * len(sentences))
        if upto > at:
            pieces.append(" ".join(sentences[at:upto]))
        pieces.append(records[i])
        at = max(at, upto)
    if at < len(sentences):
        pieces.append(" ".join(sentences[at:]))
    return joiner.join(pieces)


def messages(haystack: str, turns: Sequence[tuple[str, str]], question: str) -> list[dict[str, str]]:
    """Chat messages: earlier (question, answer) turns and the open question; the first turn carries the haystack."""
    asked = [*(q for q, _ in turns), question]
    asked[0] = f"{haystack}\n{asked[0]}"
    chat = []
    for i, content in enumerate(asked):
        chat.append({"role": "user", "content": content})
        if i < len(turns):
            chat.append({"role": "assistant", "content": turns[i][1]})
    return chat


def chat_text(chat: Sequence[dict[str, str]]) -> str:
    """What the chat template makes of messages, up to where the answer begins."""
    return "".join(f"{IM_START}{m['role']}\n{m['content']}{IM_END}\n" for m in chat) + ASSISTANT


def prompt_text(form: Form, haystack: str, question: str, turns: Sequence[tuple[str, str]] = ()) -> str:
    """The whole prompt as text: of a chat form through the template, of a completion form raw."""
    if form.chat:
        return chat_text(messages(haystack, turns, question))
    return "\n".join([haystack, *(q + a + IM_END for q, a in turns), question])


def exact_match(output: str, answer: str) -> bool:
    """Whether an output is the answer, spaces around both apart."""
    return output.strip() == answer.strip()
