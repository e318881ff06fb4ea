"""Mathematics: file formats, sampling, and answers judged right and wrong."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from suites import TOKENS, suite_of

from eval.live.counters import EvaluationError
from eval.live.suite import Case
from eval.math import INSTRUCTION, MathSuite, judge, question_and_answer

GSM8K = {"question": "Tom has 1000 nuts and finds 500. How many?", "answer": "1000+500=1500 nuts.\n#### 1,500"}
AIME = {"ID": "2024-I-0", "Problem": "What is 3 x 11?", "Solution": "It is so.", "Answer": 33}
MATH = {"problem": "Halve 1.", "level": "Level 1", "solution": "We get $x$, so \\boxed{\\frac{1}{2}}."}
MATH_500 = {"problem": "Halve 1.", "solution": "none", "answer": "\\frac{1}{2}"}


def make(*arguments: str) -> MathSuite:
    return suite_of(MathSuite, *arguments)


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_name_hides_nothing() -> None:
    assert math.sqrt(4) == 2


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        (GSM8K, "1,500"),
        (AIME, "33"),
        (MATH, MATH["solution"]),
        (MATH_500, "\\frac{1}{2}"),
        ({"question": "q", "answer": 0, "solution": None}, "0"),
        ({"question": "q", "answer": None, "solution": "#### 5"}, "5"),
        ({"question": "q", "answer": "$x^2$"}, "x^2"),
    ],
)
def test_the_usual_files_are_understood(row: dict[str, Any], answer: str) -> None:
    assert question_and_answer(row, "x") == (row.get("Problem") or row.get("problem") or row["question"], answer)


@pytest.mark.parametrize(
    ("row", "output", "right", "found"),
    [
        (GSM8K, "So there are \\boxed{1500} nuts.", True, True),
        (GSM8K, "The final answer is 1,500.", True, True),
        (GSM8K, "First 1500, then \\boxed{1400}", False, True),
        (GSM8K, "", False, False),
        (AIME, "\\boxed{033}", True, True),
        (AIME, "\\boxed{3 \\cdot 11}", True, True),
        (AIME, "\\boxed{-33}", False, True),
        (MATH, "\\boxed{0.5}", True, True),
        (MATH, "$\\frac12$", True, True),
        (MATH_500, "We have $x = 7$, so \\boxed{\\dfrac{1}{2}}.", True, True),
        (MATH_500, "\\boxed{2}", False, True),
        ({"problem": "?", "answer": "\\text{(C)}"}, "\\boxed{C}", True, True),
        ({"problem": "?", "answer": "(1, 2)"}, "\\boxed{(2,1)}", False, True),
    ],
)
def test_answers_are_judged_by_their_value(row: dict[str, Any], output: str, right: bool, found: bool) -> None:
    assert judge(question_and_answer(row, "x")[1], output) == (right, found)


def test_samples_of_a_question_differ_in_their_seed_alone(tmp_path: Path) -> None:
    files = [write(tmp_path / "gsm8k.jsonl", GSM8K, GSM8K | {"answer": "#### 7"}), write(tmp_path / "aime.jsonl", AIME)]
    suite = make("--data", *files, "--samples", "3", "--max-tokens", "99", "--temperature", "1", "--top-p", "0.9")
    cases = suite.cases()
    assert cases == [*(Case("gsm8k", index=i) for i in range(6)), *(Case("aime", index=i) for i in range(3))]
    prompts = [suite.build(case) for case in cases]
    assert prompts == [suite.build(case) for case in cases]
    content = f"{GSM8K['question']}\n\n{INSTRUCTION}"
    assert list(prompts[0].tokens) == TOKENS.chat([{"role": "user", "content": content}])
    assert [p.facts["question"] for p in prompts] == [0, 0, 0, 1, 1, 1, 0, 0, 0]
    assert [p.facts["sample"] for p in prompts] == [0, 1, 2] * 3
    assert [p.answers for p in prompts[::3]] == [["1,500"], ["7"], ["33"]]
    assert {p.max_new_tokens for p in prompts} == {99}
    assert {(p.sampling["temperature"], p.sampling["top_p"]) for p in prompts} == {(1.0, 0.9)}
    assert len({p.sampling["seed"] for p in prompts}) == 9
    assert suite.score(cases[0], prompts[0], "\\boxed{1500}") == {"score": 1.0, "answered": 1.0}
    other = make("--data", *files, "--samples", "3", "--seed", "1")
    other.cases()
    assert other.build(cases[0]).sampling["seed"] != prompts[0].sampling["seed"]


def test_greedy_needs_no_seed_and_prompts_may_be_raw(tmp_path: Path) -> None:
    suite = make("--data", write(tmp_path / "a.jsonl", AIME, AIME), "--temperature", "0", "--no-chat", "--n", "1")
    (case,) = suite.cases()
    prompt = suite.build(case)
    assert prompt.sampling == {"temperature": 0.0}
    assert TOKENS.decode(prompt.tokens) == f"What is 3 x 11?\n\n{INSTRUCTION}"


@pytest.mark.parametrize(
    ("rows", "arguments", "message"),
    [
        ([], [], "a.jsonl has no rows"),
        ([AIME, {"question": "q"}], [], "a.jsonl, line 2: field 'answer' or 'solution' is missing; there are question"),
        ([{"answer": 3}], [], "line 1: field 'problem' or 'question' is missing; there are answer"),
        ([{"question": "q", "answer": [3]}], [], r"line 1: field 'answer' is \[3\], wanted a text or a number"),
        ([{"question": " ", "answer": 3}], [], "line 1: field 'question' is ' ', wanted a text or a number"),
        ([{"problem": "q", "solution": "x"}], [], r"line 1: field 'solution' has no \\boxed answer"),
        ([AIME], ["--samples", "0"], "--samples: must be at least 1, got 0"),
        ([AIME], ["--samples", "2", "--temperature", "0"], "--samples 2 are all the same with --temperature 0"),
        ([AIME], ["--top-p", "0"], "--top-p 0.0: allowed are"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, rows: list[Any], arguments: list[str], message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        make("--data", write(tmp_path / "a.jsonl", *rows), *arguments).cases()


def test_files_must_be_there_and_have_different_names(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"there is no file .*b.jsonl"):
        make("--data", str(tmp_path / "b.jsonl")).cases()
    (tmp_path / "other").mkdir()
    files = [write(folder / "a.jsonl", AIME) for folder in (tmp_path, tmp_path / "other")]
    with pytest.raises(EvaluationError, match=r"other/a.jsonl: there is a task a already"):
        make("--data", *files).cases()
