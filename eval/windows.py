"""Windows of books as token ids: the texts of the perplexity protocol."""

from __future__ import annotations

import lzma
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from eval.counters import EvaluationError

BOOK = Path(__file__).parent / "data" / "white-fang.txt.xz"
SCORED = 32
CUE = 8
PASSAGE_END = 0.8


@dataclass(frozen=True)
class Window:
    """Consecutive tokens of a book, with a repetition at the end if it has a depth.

    Attributes:
        book: where it is from.
        start: position of its first token in the book.
        tokens: ids.
        depth: where the repeated passage begins, as a share of the window.
    """

    book: str
    start: int
    tokens: tuple[int, ...]
    depth: float | None = None


def read_book(path: Path) -> str:
    """Text of a ``.txt`` or ``.txt.xz`` file."""
    return lzma.open(path, "rt", encoding="utf-8").read() if path.suffix == ".xz" else path.read_text(encoding="utf-8")


def make_windows(books: Mapping[str, Sequence[int]], length: int, count: int | None, seed: int) -> list[Window]:
    """Windows that do not overlap, in the order of the books.

    Args:
        books: name -> token ids.
        length: tokens of a window; what is left at the end of a book is not used.
        count: how many, drawn at random from all that there are; all of them if None.
        seed: of the draw.

    Raises:
        EvaluationError: the books hold fewer, or none.
    """
    found = [
        Window(name, start, tuple(ids[start : start + length]))
        for name, ids in books.items()
        for start in range(0, len(ids) - length + 1, length)
    ]
    wanted = count or len(found)
    if not 0 < wanted <= len(found):
        raise EvaluationError(
            f"{len(books)} book(s) of {sum(map(len, books.values()))} tokens hold {len(found)} windows of {length} "
            f"tokens, wanted {count or 'some'}: give more with --book, or lower --windows or --length"
        )
    chosen = sorted(random.Random(seed).sample(range(len(found)), wanted))
    return [found[i] for i in chosen]


def with_repetition(window: Window, prompt: int, seed: int) -> Window:
    """The window with its last ``CUE + SCORED`` tokens replaced by ones that stand earlier in it.

    The passage is ``SCORED`` tokens long. It begins anywhere, with equal chance, from token ``CUE`` on, and ends within
    the first 80 % of the window and within the prompt. The ``CUE`` tokens before it are repeated with it, so that its
    repetition can be recognised before the first scored token; they are not scored. All else stays natural text. With
    a suffix shorter than ``CUE + SCORED`` the first tokens of the cue belong to the prompt.

    Args:
        window: natural text.
        prompt: its first so many tokens are prefilled.
        seed: of the draw; each window of each book draws for itself.

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
