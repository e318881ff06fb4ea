"""Generated tasks: length, place and answer; InfiniteBench's own files and scores."""

import json
import re
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from suites import TOKENS, suite_of

from eval.infinitebench import InfiniteBenchSuite
from eval.live.counters import EvaluationError
from eval.live.suite import Case, Prompt
from eval.tasks.infinitebench_tasks import CALLS, RANKS, TASKS, expression, ranked
from eval.tasks.official_metrics import SCORES, leading_share_after_first

ROW = {"id": 0, "context": "CONTEXT", "input": "INPUT", "answer": ["b"], "options": ["a", "b", "c", "d"]}
CODE_RUN = "Please give me the exact number of the return value of func_12(-4). Your response"
MATH_FIND = "You should answer with only one number, no other words. The second largest number of the list is: "
TEMPLATES = """
import nothing_that_there_is
yarn_mistral_templates = {
    "passkey": "{context}+{input}",
    "longbook_qa_eng": "{context}+{question}",
    "longbook_choice_eng": "{question}:{OPTION_A}{OPTION_B}{OPTION_C}{OPTION_D}",
    "code_run": "{func}/{func_call}/{context}",
    "math_find": "{prefix}/{context}/{input}",
    "math_calc": "{context}",
}
gpt4_templates = {"passkey": "chat {input}", "math_calc": "{context}"}
kimi_templates = {"passkey": "a" + "b"}
"""


def make(*arguments: str) -> InfiniteBenchSuite:
    return suite_of(InfiniteBenchSuite, *arguments)


def oracle(task: str, text: str) -> str:
    """Return a perfect reader's answer."""
    if task == "gen_passkey":
        (key,) = re.findall(r"The pass key is (\d{5})\.", text)
        return f"The pass key is {key}."
    if task == "gen_number_string":
        (key,) = re.findall(r"The digit string is (\d{10})\.", text)
        return key
    if task == "gen_kv_retrieval":
        pairs = json.loads(text[text.index("{") : text.index("}") + 1])
        return f'"{pairs[re.findall(r"key .([0-9a-f-]{36})", text)[0]]}"'
    if task == "gen_code_run":
        names: dict[str, Any] = {}
        exec(text[text.index("# ") : text.index("What does")].split("\nRemember this text.", maxsplit=1)[0], names)
        return f"The value is: {eval(re.findall(r'What does (.+) return', text)[0], names)}."
    if task == "gen_math_find":
        numbers, rank = (
            json.loads(text[text.index("[") : text.index("]") + 1]),
            re.findall("What is the (.+?) num", text),
        )
        return ranked(numbers, rank[0])
    return ", ".join(map(str, values_of(re.findall(r"\n(\d+(?: [+-] \d+)+)\n", text)[0].split())[1:]))


def values_of(terms: list[str]) -> list[int]:
    """The value of an expression after each term."""
    return list(accumulate(int(sign + term) for sign, term in zip(["+", *terms[1::2]], terms[::2], strict=True)))


def place(task: str, text: str, answer: str) -> float:
    """Return the place of an answer in a text, from 0 to 1."""
    if task == "gen_kv_retrieval":
        values = list(json.loads(text[text.index("{") : text.index("}") + 1]).values())
        return values.index(answer) / (len(values) - 1)
    record = text[text.index("The ", text.index(answer) - 20) : text.rindex(answer)]
    noise = text[text.index("\n\n") : text.rindex("\n\n")].split(record)
    return len(noise[0]) / sum(map(len, noise))


@settings(max_examples=30, deadline=None)
@given(
    task=st.sampled_from(sorted(TASKS)),
    length=st.sampled_from([768, 1000, 1024, 2048, 3333]),
    depth=st.sampled_from([0.0, 0.4, 1.0]),
    index=st.integers(0, 8),
    form=st.sampled_from([[], ["--no-chat"], ["--form", "second_turn"]]),
)
def test_generated_prompts_fill_their_length_and_can_be_answered(
    task: str, length: int, depth: float, index: int, form: list[str]
) -> None:
    if task == "gen_code_run":
        length *= 2
    suite = make(*form)
    case = Case(task, length, depth if TASKS[task].has_place else None, index)
    prompt = suite.build(case)
    assert 0.99 * length <= len(prompt.tokens) + prompt.max_new_tokens <= length
    text = TOKENS.decode(prompt.tokens)
    output = oracle(task, text)
    assert len(TOKENS.encode(output)) <= prompt.max_new_tokens
    assert suite.score(case, prompt, output) == {"score": 1.0}
    assert suite.score(case, prompt, "7777777") == {"score": 0.0}
    assert suite.build(case) == prompt
    before = TOKENS.decode(prompt.before)
    assert bool(before) == ("second_turn" in form)
    if before:
        known = before[: before.index("\nRemember this text.")]
        assert text.startswith(known) and "?" not in known and len(text) - len(known) < 400
    elif case.depth is not None:
        assert place(task, text, prompt.answers[0]) == pytest.approx(depth, abs=0.06)


def test_another_seed_or_index_makes_another_question() -> None:
    for task in TASKS:
        suite = make()
        built = {tuple(suite.build(Case(task, 2048, None, i)).tokens) for i in range(3)}
        other = make("--seed", "1").build(Case(task, 2048, None, 0))
        assert len(built | {tuple(other.tokens)}) == 4


def test_cases_are_spread_over_depths_calls_and_ranks() -> None:
    suite = make("--lengths", "8k,2k", "--n", "2", "--depths", "0,100", "--tasks", "gen_code_run,gen_passkey")
    cases = suite.cases()
    assert [case.length for case in cases] == sorted(case.length or 0 for case in cases)
    assert [(c.depth, c.index) for c in cases[:4]] == [(None, i) for i in range(4)]
    assert [(c.depth, c.index) for c in cases[4:8]] == [(0.0, 0), (0.0, 1), (1.0, 0), (1.0, 1)]
    assert len(cases) == 16 and len({case.id for case in cases}) == 16
    assert {suite.build(Case("gen_code_run", 2048, None, i)).facts["calls"] for i in range(5)} == set(CALLS)
    asked = [TOKENS.decode(suite.build(Case("gen_math_find", 512, None, i)).tokens) for i in range(7)]
    assert all(f"What is the {rank} number" in text for rank, text in zip(RANKS, asked, strict=True))
    assert {case.task for case in make().cases()} == set(TASKS)


def test_number_strings_have_five_doubled_digits() -> None:
    for i in range(20):
        (key,) = make().build(Case("gen_number_string", 256, 0.0, i)).answers
        assert len(key) == 10 and sum(a == b for a, b in pairwise(key)) >= 5


def test_ranks_and_expressions() -> None:
    numbers = [5, 9, 9, 1, 1, 7]
    assert [ranked(numbers, rank) for rank in RANKS] == ["9", "7", "5", "1", "5", "7", "6"]
    assert ranked([1, 4], "median") == "2.5" and ranked([3, 1, 2], "median") == "2"
    terms = expression(500, 0.5).split()
    values = values_of(terms)
    assert len(values) == 500 and min(values) >= 0 and max(values) <= 99


@pytest.mark.parametrize(
    ("task", "answers", "output", "wanted"),
    [
        ("passkey", ["12345"], "The key is 12345, not 9.", 1),
        ("passkey", ["12345"], "9 or 12345", 0),
        ("number_string", ["0012"], "no", 0),
        ("kv_retrieval", ["a-b"], '{"x": "a-b"}', 1),
        ("kv_retrieval", ["a-b"], "a-bc", 0),
        ("longdialogue_qa_eng", ["ANN"], "I say: Ann.", 1),
        ("longdialogue_qa_eng", ["ANN"], "Anna", 0),
        ("code_run", ["-3"], "The return value is: -3.", 1),
        ("code_run", ["-3"], "-3 it is", 0),
        ("code_run", ["-3"], "", 0),
        ("math_find", ["37"], "It is 37, or 38", 1),
        ("math_find", ["37"], "37.5", 0),
        ("math_find", ["37.5"], "37.5", 1),
        ("math_calc", ["4", "8", "3"], "[4, 8, 5, 3]", 2 / 3),
        ("math_calc", ["4", "8", "3"], "4 8 3 9", 1),
        ("math_calc", ["4", "8", "3"], "none", 0),
        ("math_calc", ["4", "0"], "04 00", 1),
        ("math_calc", ["4", "8"], "4 " + "8" * 5000, 0.5),
        ("code_run", ["4"], "4" * 5000, 0),
        ("code_debug", ["f_x", "B"], "B. f_x", 1),
        ("code_debug", ["f_x", "B"], "The answer is: Option B", 1),
        ("code_debug", ["f_x", "B"], "the correct option is:\n'f_x'", 1),
        ("code_debug", ["f_x", "B"], "The answer is:", 0),
        ("code_debug", ["f_x", "B"], "I think B", 0),
        ("longbook_choice_eng", ["Ann", "B"], "B", 1),
        ("longbook_choice_eng", ["Ann", "B"], "Ann", 0),
        ("longbook_choice_eng", ["nobody", "B"], "nobody", 1),
        ("longbook_choice_eng", ["Ann", "B"], "the answer is: B", 1),
        ("longbook_choice_eng", ["Ann", "B"], "the answer is C, not B", 0),
        ("longbook_choice_eng", ["Ann", "B"], "it must be B", 1),
        ("longbook_choice_eng", ["Ann", "B"], "", 0),
        # One word of two against one of one; then a text and another.
        ("longbook_qa_eng", ["Bob", "Ann"], "Ann, the Queen", 2 / 3),
        # Characters: three of four and of three.
        ("longbook_qa_chn", ["北京人"], "北京人。在", 6 / 7),
        # Each line of the summary by itself: five words of seven are found, all that was said is right.
        ("longbook_sum_eng", ["x", "the cat sat\non the mat now"], "on the\nthe cat sat", 10 / 12),
    ],
)
def test_scores_are_the_official_ones(task: str, answers: list[str], output: str, wanted: float) -> None:
    assert SCORES[task](answers, output) == pytest.approx(wanted)


def test_answers_to_gpt4_templates_begin_with_the_first_term() -> None:
    assert leading_share_after_first(["4", "8"], "[1, 4, 9]") == 0.5
    assert leading_share_after_first(["4", "8"], "") == 0
    prompt, case = Prompt([1], ["4", "8"], 1), Case("math_calc")
    assert make("--templates", "gpt4").score(case, prompt, "1, 4, 8") == {"score": 1}
    assert make().score(case, prompt, "1, 4, 8") == {"score": 0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "prompt.py").write_text(TEMPLATES)
    return tmp_path


def official(folder: Path, task: str, row: dict[str, Any], *arguments: str) -> tuple[InfiniteBenchSuite, Case, Prompt]:
    (folder / f"{task}.jsonl").write_text(json.dumps(row) + "\n")
    suite = make("--data", str(folder), "--prompts", str(folder), "--tasks", task, *arguments)
    (case,) = suite.cases()
    return suite, case, suite.build(case)


@pytest.mark.parametrize(
    ("task", "changes", "text", "answers", "room"),
    [
        ("passkey", {"answer": "123"}, "CONTEXT+INPUT", ["123"], 6),
        ("longbook_qa_eng", {}, "CONTEXT+INPUT", ["b"], 40),
        ("longbook_choice_eng", {}, "INPUT:abcd", ["b", "B"], 40),
        ("code_run", {"input": CODE_RUN, "answer": -7}, "func_12/func_12(-4)/CONTEXT", ["-7"], 5),
        (
            "math_find",
            {"input": MATH_FIND, "answer": [37]},
            f"What is the second largest number in the following list?/CONTEXT/{MATH_FIND}",
            ["37"],
            3,
        ),
        ("math_calc", {"answer": [[1, 2]]}, "CONTEXT", ["1", "2"], 30000),
    ],
)
def test_official_rows_are_asked_as_open_models_are(
    folder: Path, task: str, changes: dict[str, Any], text: str, answers: list[str], room: int
) -> None:
    _, _, prompt = official(folder, task, ROW | changes)
    assert list(prompt.tokens) == TOKENS.encode(text)
    assert (prompt.answers, prompt.max_new_tokens) == (answers, room)


def test_other_templates_go_through_the_chat_template(folder: Path) -> None:
    suite, case, prompt = official(folder, "passkey", ROW | {"answer": "12"}, "--templates", "gpt4", "--n", "3")
    assert list(prompt.tokens) == TOKENS.chat([{"role": "user", "content": "chat INPUT"}])
    assert prompt.max_new_tokens == 1024 and suite.score(case, prompt, "12!") == {"score": 1.0}


def test_long_books_lose_their_middle(folder: Path) -> None:
    book = " ".join(str(i) for i in range(500))
    row = ROW | {"context": book}
    _, _, prompt = official(folder, "longbook_qa_eng", row, "--lengths", "256")
    text = TOKENS.decode(prompt.tokens)
    assert 250 <= len(prompt.tokens) + 40 <= 256 and text.startswith("0 1 2") and text.endswith("498 499+INPUT")


def test_what_is_wrong_is_named(folder: Path) -> None:
    def message(*arguments: str) -> str:
        with pytest.raises(EvaluationError) as caught:
            make(*arguments).cases()
        return str(caught.value)

    data, both = ["--data", str(folder)], ["--data", str(folder), "--prompts", str(folder)]
    assert "--tasks gen_passky: allowed are gen_passkey" in message("--tasks", "gen_passky")
    assert "--depths: must be a percentage from 0 to 100, got 101" in message("--depths", "101")
    turns = ("--form", "second_turn")
    assert "--form: invalid choice: 'letter' (choose from" in message("--form", "letter")
    assert "--form second_turn has turns of a chat; allowed without --no-chat" in message(*turns, "--no-chat")
    assert "--tasks passkey are not generated; allowed: gen_ tasks" in message(*turns, *data, "--tasks", "passkey")
    assert "--prompts is missing" in message(*data, "--tasks", "passkey")
    assert f"--data {folder} has no passkey.jsonl" in message(*both)
    assert "does not assign yi_templates" in message(*both, "--templates", "yi")
    assert "kimi_templates is not a literal" in message(*both, "--templates", "kimi")
    assert "for 'kv_retrieval' it has None" in message(*both, "--tasks", "kv_retrieval")
    for task, row, said in (
        ("passkey", {"context": "x", "input": "y"}, "line 1: field 'answer' is missing; there are context, input"),
        ("passkey", ROW | {"answer": []}, "line 1: field 'answer' is [], wanted a text, a number or a list of them"),
        ("longbook_choice_eng", ROW | {"options": ["a"]}, "field 'options' is ['a'], wanted a list of four texts"),
        ("longbook_choice_eng", ROW | {"answer": ["z"]}, "line 1: the answer 'z' is none of the options"),
        ("code_run", ROW, "code_run: the question 'INPUT' has nothing like (func_"),
    ):
        (folder / f"{task}.jsonl").write_text(json.dumps(row))
        assert said in message(*both, "--tasks", task)


def test_a_length_without_room_is_refused() -> None:
    with pytest.raises(EvaluationError, match="has no room for its question"):
        make().build(Case("gen_code_run", 512, None, 4))
