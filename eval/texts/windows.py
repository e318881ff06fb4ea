"""Windows of books as token ids: the texts of the perplexity protocol."""

from __future__ import annotations

import argparse
import lzma
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from eval.live.client import list_of, positive
from eval.live.counters import EvaluationError
from eval.texts.text import (
    FORMS,
    IM_END,
    book_name,
    find_books,
    prompt_text,
    random_key,
    random_number,
    read_book,
    unique_keys,
)

BOOK = Path(__file__).parent.parent / "data" / "white-fang.txt.xz"
SCORED = 32
CUE = 8
PASSAGE_END = 0.8
RECORDS = 8
TEXTS = ("book", "repeat", "records")


@dataclass(frozen=True)
class Window:
    """Consecutive tokens of a book, with something at its end that was said before if it has a depth.

    Attributes:
        book: where it is from.
        start: position of its first token in the book.
        tokens: ids.
        depth: where the repeated passage or the asked record begins, as a share of the window.
        scored: how many tokens at its end perplexity is taken of.
    """

    book: str
    start: int
    tokens: tuple[int, ...]
    depth: float | None = None
    scored: int = SCORED


def add_arguments(parser: argparse.ArgumentParser, length: int, concurrency: int, kind: str) -> None:
    """Declare what a command that measures windows of books can be told of them, with its defaults."""
    parser.add_argument(
        "--book", type=Path, action="append", help=f"text or folder of texts; repeat for more (default: {BOOK.name})"
    )
    parser.add_argument("--kind", type=list_of(str, TEXTS), default=kind, help=f"of {', '.join(TEXTS)}")
    parser.add_argument("--length", type=int, default=length, help="tokens of a window")
    parser.add_argument("--windows", type=positive, help="how many (default: all that the books hold)")
    parser.add_argument("--concurrency", type=positive, default=concurrency, help="windows in flight")
    parser.add_argument("--seed", type=int, default=0, help="of the windows, the passages and the bootstrap")


def read_tokens(books: Sequence[str | Path] | None, encode: Callable[[str], Sequence[int]]) -> dict[str, Sequence[int]]:
    """The token ids of each book, or of all of a folder, by its name; without any, of the book of this project.

    Refused if two have the same name, or one is not readable.
    """
    return {name: encode(book_text(path)) for name, path in book_files(books or [BOOK]).items()}


def book_files(books: Sequence[str | Path]) -> dict[str, Path]:
    """The file of each book, or of all of a folder, by its name; refused if two have the same."""
    files: dict[str, Path] = {}
    for book in map(Path, books):
        for path in find_books(book) if book.is_dir() else [book]:
            if other := files.get(book_name(path)):
                raise EvaluationError(f"--book: two files have the same name, {other} and {path}")
            files[book_name(path)] = path
    return files


def require_books(parser: argparse.ArgumentParser, books: Sequence[str | Path] | None) -> None:
    """End the command if `book_files` refuses the books that it was given."""
    try:
        book_files(books or [])
    except (EvaluationError, ValueError) as error:
        parser.error(str(error))


def book_text(path: str | Path, option: str = "--book") -> str:
    """Text of a file that an option names; refused if it cannot be read or has no words."""
    try:
        text = read_book(Path(path))
    except (OSError, UnicodeDecodeError, lzma.LZMAError, EOFError) as error:
        raise EvaluationError(f"{option} {path}: not a readable .txt or .txt.xz file ({error})") from error
    if not re.search(r"\w", text):
        raise EvaluationError(f"{option} {path}: the file has no words")
    return text


def make_windows(
    books: Mapping[str, Sequence[int]], length: int, count: int | None, seed: int, stride: int | None = None
) -> list[Window]:
    """Windows in the order of the books.

    Args:
        books: name -> token ids.
        length: tokens of a window; what is left at the end of a book is not used.
        count: how many, drawn at random from all that there are; all of them if None.
        seed: of the draw.
        stride: tokens from the begin of one to that of the next; `length` if None, so that they do not overlap.

    Raises:
        EvaluationError: the books hold fewer, or none.
    """
    found = [
        Window(name, start, tuple(ids[start : start + length]))
        for name, ids in books.items()
        for start in range(0, len(ids) - length + 1, stride or length)
    ]
    wanted = count or len(found)
    if not 0 < wanted <= len(found):
        raise EvaluationError(
            f"{len(books)} book(s) of {sum(map(len, books.values()))} tokens hold {len(found)} windows of {length} "
            f"tokens, wanted {count or 'some'}: give more with --book, or lower --windows or --length"
        )
    chosen = sorted(random.Random(seed).sample(range(len(found)), wanted))
    return [found[i] for i in chosen]


def windows_anywhere(books: Mapping[str, Sequence[int]], length: int, count: int, seed: int) -> list[Window]:
    """Windows that may overlap, for texts of which nothing of the book is judged.

    Each begins anywhere in any of the books (name -> token ids) that are long enough, with equal chance. A larger
    `count` begins with the same windows. Refused where no book is long enough.
    """
    places = {name: len(ids) - length + 1 for name, ids in books.items() if len(ids) >= length}
    if not places:
        raise EvaluationError(
            f"none of {len(books)} book(s) has {length} tokens: give more with --book, or lower --length"
        )
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        (name,) = rng.choices(list(places), list(places.values()))
        start = rng.randrange(places[name])
        found.append(Window(name, start, tuple(books[name][start : start + length])))
    return found


def with_repetition(window: Window, prompt: int, seed: int) -> Window:
    """The window with its last ``CUE + SCORED`` tokens replaced by ones that stand earlier in it.

    The passage is ``SCORED`` tokens long. It begins anywhere, with equal chance, from token ``CUE`` on, and ends within
    the first 80 % of the window and within the prompt, its first `prompt` tokens. The ``CUE`` tokens before it are
    repeated with it, so that its repetition can be recognised before the first scored token; they are not scored. All
    else stays natural text. With a suffix shorter than ``CUE + SCORED`` the first tokens of the cue belong to the
    prompt. Each window of each book draws for itself.

    Raises:
        EvaluationError: no passage fits.
    """
    size = len(window.tokens)
    last = min(int(PASSAGE_END * size), prompt, size - CUE - SCORED) - SCORED
    if last < CUE:
        raise EvaluationError(f"a window of {size} tokens with a prompt of {prompt} has no room for a passage")
    start = random.Random(f"{seed} {window.book} {window.start}").randint(CUE, last)
    tail = window.tokens[start - CUE : start + SCORED]
    return replace(window, tokens=window.tokens[: -len(tail)] + tail, depth=start / size)


def with_records(
    window: Window, prompt: int, seed: int, encode: Callable[[str], Sequence[int]], apart: int = 0
) -> Window:
    """The window as a chat: numbers are told in its suffix, and at its end one of them is asked for and answered.

    ``RECORDS`` records of the form "needle" stand anywhere between the tokens of the suffix, so that all of them are
    decoded and none is prefilled; the answer alone is scored, its end of turn included. Where a model looks numbers up,
    this text needs the keys and values that decode itself has written.

    Args:
        window: natural text, of which the first tokens are kept.
        prompt: its first so many tokens are prefilled.
        seed: of the draw; each window of each book draws for itself.
        encode: text -> token ids.
        apart: tokens before the question in which no record stands.

    Raises:
        EvaluationError: the suffix has no room for the records and the question.
    """
    rng = random.Random(f"{seed} {window.book} {window.start}")
    form = FORMS["needle"]
    numbers = {key: random_number(rng) for key in unique_keys(rng, RECORDS, random_key)}
    asked = rng.choice(list(numbers))
    opening, _, closing = prompt_text(form, "\0", form.question(asked)).partition("\0")
    before, answer = encode(opening), encode(numbers[asked] + IM_END)
    after = [*encode(closing), *answer]
    records = [encode(" " + form.record(key, value=value)) for key, value in numbers.items()]
    size = len(window.tokens)
    room = size - prompt - len(after) - sum(map(len, records))
    if room < apart or len(before) > prompt:
        further = f", {apart} tokens apart" if apart else ""
        raise EvaluationError(
            f"a suffix of {size - prompt} tokens has no room for {RECORDS} records and a question{further}"
        )
    book = iter(window.tokens)
    tokens = [*before, *(next(book) for _ in range(prompt - len(before)))]
    depth = 0.0
    cuts = sorted(rng.randint(0, room - apart) for _ in records)
    for key, record, first, last in zip(numbers, records, [0, *cuts], cuts, strict=False):
        tokens += [next(book) for _ in range(last - first)]
        if key == asked:
            depth = len(tokens) / size
        tokens += record
    tokens += [next(book) for _ in range(room - cuts[-1])]
    return replace(window, tokens=(*tokens, *after), depth=depth, scored=len(answer))
