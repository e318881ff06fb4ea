"""Needle prompts: length, depth, what is in them, and a scorer that can fail."""

import random
import re
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from suites import TOKENS, suite_of

from eval.live.counters import EvaluationError
from eval.live.suite import Case, Prompt
from eval.niah import TASKS, NeedleSuite
from eval.scores.pictures import heatmap
from eval.texts import haystacks

NEEDLE = re.compile(r"One of the special magic numbers for ([a-z-]+) is: (\d{7})\.")


def make(*arguments: str) -> NeedleSuite:
    return suite_of(NeedleSuite, *arguments)


def oracle(prompt: Prompt) -> str:
    """Return a perfect reader's answer: every number of each key that the question names."""
    text = TOKENS.decode(prompt.tokens)
    question = text[text.rindex("What ") :].split("?")[0]
    asked = set(re.findall(r"[a-z]+-[a-z]+", question))
    return " and ".join(value for key, value in NEEDLE.findall(text) if key in asked) + "."


@settings(max_examples=30)
@given(
    task=st.sampled_from(sorted(TASKS)),
    length=st.sampled_from([512, 1024, 1500, 4096, 8192]),
    depth=st.sampled_from([0.0, 0.3, 1.0]),
    kind=st.sampled_from(haystacks.KINDS),
    form=st.sampled_from(["chat", "ruler", "second_turn", "prefilled"]),
    seed=st.integers(0, 10**6),
)
def test_prompts(task: str, length: int, depth: float, kind: str, form: str, seed: int) -> None:
    suite = make("--haystack", kind, "--form", form, "--seed", str(seed))
    case = Case(task, length, depth, 3)
    prompt = suite.build(case)
    text = TOKENS.decode(prompt.tokens)

    whole = len(prompt.tokens) + prompt.max_new_tokens
    assert length - max(8, 0.005 * length) <= whole <= length
    assert all(text.count(value) == 1 for value in prompt.answers)
    found = Counter(key for key, _ in NEEDLE.findall(text))
    asked = prompt.facts["keys"]
    assert all(found[key] == TASKS[task].values for key in asked)
    # In the needles, in the question, and in the answer prefix.
    repeats = TASKS[task].values + (2 if form == "ruler" else 1)
    assert all(text.count(key) == repeats for key in asked)

    # The first of two turns has the text and does not say what is asked.
    before = TOKENS.decode(prompt.before)
    assert bool(before) == (form == "second_turn")
    if before:
        text_end = before.index("\nRemember this text.")
        assert text.startswith(before[:text_end]) and text.rindex("What ") > text_end
        assert all(before.count(key) == TASKS[task].values for key in asked)

    # The answer stands behind the prompt, not in it.
    assert TOKENS.decode(prompt.given) == (prompt.answers[0] if form == "prefilled" else "")

    needle = NEEDLE.match(TOKENS.decode(prompt.tokens[prompt.facts["needle_token"] :]).lstrip())
    assert needle is not None and needle.groups() == (asked[0], prompt.answers[0])
    assert suite.score(case, prompt, oracle(prompt)) == {
        "score": 1.0,
        "contains": 1.0,
        **({"all": 1.0} if len(prompt.answers) > 1 else {}),
    }


def test_a_prompt_depends_on_its_case_and_seed_alone() -> None:
    case = Case("multikey", 1024, 0.5, 1)
    prompt, again = make().build(case), make("--n", "7", "--lengths", "2k").build(case)
    assert prompt == again
    assert prompt.tokens != make("--seed", "1").build(case).tokens
    assert prompt.tokens != make().build(Case("multikey", 1024, 0.5, 2)).tokens


@pytest.mark.parametrize("kind", haystacks.KINDS)
def test_depth_is_where_the_needle_stands(kind: str) -> None:
    suite = make("--haystack", kind)
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
        prompt = suite.build(Case("single", 8192, depth))
        assert prompt.facts["needle_token"] / len(prompt.tokens) == pytest.approx(depth, abs=0.02)


def test_needles_lie_across_page_edges() -> None:
    suite = make()
    starts = [suite.build(Case("single", 600, 0.5, i)).facts["needle_token"] % 16 for i in range(60)]
    assert len(set(starts)) > 10


def test_a_hard_haystack_is_needles_only() -> None:
    text = TOKENS.decode(make("--form", "ruler").build(Case("multikey_hard", 4096, 0.5)).tokens)
    assert NEEDLE.sub("", text.split("\nWhat")[0]).strip(" ") == ""
    keys = [key for key, _ in NEEDLE.findall(text)]
    assert len(keys) > 100 and len(set(keys)) == len(keys)


def test_guessing_scores_nothing() -> None:
    suite, rng = make(), random.Random(0)
    for task in TASKS:
        case = Case(task, 1024, 0.5)
        prompt = suite.build(case)
        guesses = [" ".join(str(rng.randrange(10**6, 10**7)) for _ in range(4)) for _ in range(20)]
        assert all(not any(suite.score(case, prompt, guess).values()) for guess in [*guesses, "", "I do not know."])


def test_scores() -> None:
    suite, one, four = make(), Case("single", 1024, 0.0), Case("multivalue", 1024, 0.0)
    prompt = Prompt([], ["1234567"], 64)
    assert suite.score(one, prompt, " 1234567.") == {"score": 1, "contains": 1}
    assert suite.score(one, prompt, "7654321 or 1234567") == {"score": 0, "contains": 1}
    assert suite.score(one, prompt, "12345678") == {"score": 0, "contains": 1}
    prompt = Prompt([], ["1234567", "2345678", "3456789", "4567890"], 128)
    assert suite.score(four, prompt, "2345678, 1234567 and 1111111") == {"score": 0.5, "contains": 0.5, "all": 0}


def test_a_prompt_of_128k_is_quick() -> None:
    suite, case = make(), Case("multikey", 131072, 0.5)
    suite.cases()
    began = time.process_time()
    prompt = suite.build(case)
    assert time.process_time() - began < 2
    assert 0.995 * 131072 <= len(prompt.tokens) + prompt.max_new_tokens <= 131072


def test_books_of_ones_own(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("An owl hooted. " * 3 + "word " * 3000 + ". The moon rose slowly.")
    prompt = make("--book", str(book)).build(Case("single", 1024, 0.5))
    assert "An owl hooted." in TOKENS.decode(prompt.tokens)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "single,mono"], "--tasks: got mono, allowed: single, multikey"),
        (["--depths", "50,120"], "--depths: must be a percentage from 0 to 100, got 120"),
        (["--haystack", "straw"], r"--haystack: invalid choice: 'straw' \(choose from .*books.*noise.*repeated"),
        (["--form", "letter"], r"--form: invalid choice: 'letter' \(choose from .*chat.*ruler.*second_turn.*prefilled"),
        (["--form", "prefilled", "--tasks", "single,multivalue"], "--tasks multivalue have several answers"),
        (["--n", "0"], "--n: must be at least 1, got 0"),
        (["--lengths", ","], "--lengths: got none, allowed: one or more"),
        (["--answer-tokens", "0"], "--answer-tokens: must be at least 1, got 0"),
        (["--book", "/nowhere.txt"], "--book /nowhere.txt: not a readable"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        make(*arguments).cases()


def test_wrong_lengths() -> None:
    with pytest.raises(EvaluationError, match="'4m' is no length: allowed are positive integers such as 4096 or 4k"):
        make("--lengths", "4k,4m")
    with pytest.raises(EvaluationError, match="no room for its question"):
        make().build(Case("multivalue", 160, 0.5))


def test_cases_come_shortest_first() -> None:
    cases = make("--lengths", "2k,512", "--tasks", "single,multikey", "--depths", "0,12.5", "--n", "2").cases()
    assert [case.length for case in cases] == [512] * 8 + [2048] * 8
    assert cases[2] == Case("single", 512, 0.125, 0) and len({case.id for case in cases}) == 16


def test_heat_map(tmp_path: Path) -> None:
    cases = make("--lengths", "1k,8k", "--tasks", "single,multikey", "--depths", "0,100", "--n", "2").cases()
    rows = [
        {"task": case.task, "length": case.length, "depth": case.depth, "scores": {"score": float(case.index)}}
        for case in cases[:-2]
    ]
    paths = heatmap(rows, str(tmp_path / "map"))
    assert [Path(path).suffix for path in paths] == [".svg"]
    assert all(Path(path).stat().st_size > 1000 for path in paths)
    assert heatmap([], str(tmp_path / "none")) == []
