"""Windows of books and the passages that they repeat."""

import lzma
from pathlib import Path

import pytest

from eval.live.counters import EvaluationError
from eval.texts.text import IM_END, IM_START, read_book
from eval.texts.windows import (
    BOOK,
    CUE,
    RECORDS,
    SCORED,
    make_windows,
    read_tokens,
    windows_anywhere,
    with_records,
    with_repetition,
)

BOOKS = {"one": list(range(1000)), "two": list(range(5000, 5350))}


def test_shipped_book_is_read(tmp_path: Path) -> None:
    assert "White Fang" in read_book(BOOK)
    (tmp_path / "a.txt").write_text("Plain text.")
    (tmp_path / "b.txt.xz").write_bytes(lzma.compress(b"Packed text."))
    assert [read_book(tmp_path / name) for name in ("a.txt", "b.txt.xz")] == ["Plain text.", "Packed text."]


def test_folders_are_all_their_books(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.txt").write_text(name * 3)
    (tmp_path / "other.md").write_text("none")
    found = read_tokens([BOOK, tmp_path], lambda text: [len(text)])
    assert list(found) == ["white-fang", "a", "b"] and found["a"] == found["b"] == [3]


def test_books_are_told_apart_by_their_whole_names(tmp_path: Path) -> None:
    for name in ("moby.1.txt", "moby.2.txt", "moby.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "moby.2.txt.xz").write_bytes(lzma.compress(b"other"))
    first, second, third, packed = (tmp_path / f"moby{end}" for end in (".1.txt", ".2.txt", ".txt", ".2.txt.xz"))
    found = read_tokens([third, second, first], lambda text: [len(text)])
    assert found == {"moby": [8], "moby.2": [10], "moby.1": [10]}
    for books in ([second, packed], [tmp_path], [first, tmp_path]):
        with pytest.raises(EvaluationError, match="--book: two files have the same name, ") as refused:
            read_tokens(books, lambda text: [len(text)])
        same = (first, first) if books[0] == first else (second, packed)
        assert str(refused.value).endswith(f"{same[0]} and {same[1]}")


def test_windows_do_not_overlap() -> None:
    windows = make_windows(BOOKS, 100, None, seed=0)
    assert [(window.book, window.start) for window in windows] == [
        *(("one", start) for start in range(0, 1000, 100)),
        *(("two", start) for start in (0, 100, 200)),
    ]
    assert all(list(w.tokens) == BOOKS[w.book][w.start : w.start + 100] and w.depth is None for w in windows)


def test_windows_that_overlap_begin_a_stride_apart() -> None:
    windows = make_windows(BOOKS, 300, None, seed=0, stride=50)
    starts = [("one", start) for start in range(0, 701, 50)] + [("two", start) for start in (0, 50)]
    assert [(window.book, window.start) for window in windows] == starts
    assert all(list(w.tokens) == BOOKS[w.book][w.start : w.start + 300] for w in windows)


def test_windows_are_drawn_by_seed() -> None:
    drawn = make_windows(BOOKS, 100, 5, seed=1)
    assert drawn == make_windows(BOOKS, 100, 5, seed=1) != make_windows(BOOKS, 100, 5, seed=2)
    assert len({(window.book, window.start) for window in drawn}) == 5


@pytest.mark.parametrize(("length", "count"), [(100, 14), (2000, None)])
def test_too_few_windows_are_refused(length: int, count: int | None) -> None:
    with pytest.raises(EvaluationError, match="give more with --book"):
        make_windows(BOOKS, length, count, seed=0)


def test_windows_begin_anywhere() -> None:
    windows = windows_anywhere(BOOKS, 300, 400, seed=1)
    assert windows == windows_anywhere(BOOKS, 300, 400, seed=1) != windows_anywhere(BOOKS, 300, 400, seed=2)
    assert all(list(w.tokens) == BOOKS[w.book][w.start : w.start + 300] and len(w.tokens) == 300 for w in windows)
    assert windows_anywhere(BOOKS, 300, 7, seed=1) == windows[:7]
    # As many of a book as it has places.
    assert 10 < sum(window.book == "two" for window in windows) < 60
    assert max(window.start for window in windows) > 650
    assert {window.book for window in windows_anywhere(BOOKS, 400, 50, seed=1)} == {"one"}
    with pytest.raises(EvaluationError, match=r"none of 2 book\(s\) has 1001 tokens"):
        windows_anywhere(BOOKS, 1001, 1, seed=0)


@pytest.mark.parametrize("suffix", [32, 33, 40, 64, 200])
def test_the_tail_repeats_an_earlier_passage(suffix: int) -> None:
    starts = set()
    for seed in range(300):
        (window,) = make_windows({"book": list(range(400))}, 400, 1, seed=0)
        repeated = with_repetition(window, 400 - suffix, seed)
        tail = CUE + SCORED
        # The tokens of this book are their own positions.
        first = repeated.tokens[-SCORED]
        assert repeated.tokens[:-tail] == window.tokens[:-tail]
        assert repeated.tokens[-tail:] == tuple(range(first - CUE, first + SCORED))
        assert repeated.depth == first / 400
        assert first >= CUE and first + SCORED <= min(320, 400 - suffix, 400 - tail)
        starts.add(first)
    assert min(starts) < 30 and max(starts) > min(320, 400 - suffix) - SCORED - 30


def test_the_passage_is_drawn_for_each_window_by_seed() -> None:
    windows = make_windows({"book": list(range(4000))}, 400, None, seed=0)
    repeated = [with_repetition(window, 300, seed=5) for window in windows]
    assert repeated == [with_repetition(window, 300, seed=5) for window in windows]
    assert len({window.depth for window in repeated}) > 5
    assert repeated != [with_repetition(window, 300, seed=6) for window in windows]


def test_a_window_without_room_is_refused() -> None:
    (window,) = make_windows({"book": list(range(100))}, 100, 1, seed=0)
    assert with_repetition(window, CUE + SCORED, seed=0).depth == CUE / 100
    with pytest.raises(EvaluationError, match="no room"):
        with_repetition(window, CUE + SCORED - 1, seed=0)


def test_records_stand_in_the_suffix_and_one_is_asked_for() -> None:
    def encode(text: str) -> list[int]:
        return [-ord(letter) for letter in text]

    (window,) = make_windows({"book": list(range(1, 2001))}, 2000, 1, seed=0)
    told = with_records(window, 1200, 3, encode)
    assert told == with_records(window, 1200, 3, encode) != with_records(window, 1200, 4, encode)
    assert len(told.tokens) == 2000 and told.depth is not None and 0.6 <= told.depth < 1
    book = [token for token in told.tokens if token > 0]
    assert book == list(range(1, len(book) + 1))
    suffix = "".join(chr(-token) if token < 0 else "#" for token in told.tokens[1200:])
    assert suffix.count("One of the special magic numbers for ") == RECORDS
    question, _, answer = suffix.removesuffix(IM_END).partition(IM_END)
    key = question.rpartition("What is the special magic number for ")[2].removesuffix("?")
    assert f"numbers for {key} is: {answer.partition(chr(10) + IM_START)[2].partition(chr(10))[2]}." in suffix
    scored = "".join(chr(-token) for token in told.tokens[-told.scored :])
    assert scored == answer.partition(IM_START)[2].partition("\n")[2] + IM_END and len(scored) == 7 + len(IM_END)
    with pytest.raises(EvaluationError, match="no room for 8 records"):
        with_records(window, 1900, 3, encode)


def test_records_stand_apart_from_the_question() -> None:
    def encode(text: str) -> list[int]:
        return [-ord(letter) for letter in text]

    (window,) = make_windows({"book": list(range(1, 2001))}, 2000, 1, seed=0)
    nearest = set()
    for seed in range(20):
        told = with_records(window, 200, seed, encode, apart=900)
        question = "".join(chr(-token) if token < 0 else "#" for token in told.tokens).rpartition(".#")[2]
        # What stands behind the last record is book, and then the end of the turn.
        nearest.add(len(question) - len(question.lstrip("#")) + 1)
        assert len(told.tokens) == 2000
    assert min(nearest) >= 900 and len(nearest) > 1
    with pytest.raises(EvaluationError, match="no room for 8 records and a question, 1500 tokens apart"):
        with_records(window, 200, 3, encode, apart=1500)
