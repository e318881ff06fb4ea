"""Prompts of variable tracking: chains, depths, forms, and a scorer that can fail."""

import re
from collections import Counter

import pytest
from suites import TOKENS, suite_of

from eval.lab.variables import CHAINS, SPLITS, VariableSuite
from eval.live.counters import EvaluationError
from eval.live.suite import Case, Prompt
from eval.texts.text import words

ASSIGNED = re.compile(r"^VAR ([a-z-]+) = (?:VAR ([a-z-]+)|(\d{5}))$", re.M)


def make(*arguments: str) -> VariableSuite:
    return suite_of(VariableSuite, *arguments)


def oracle(prompt: Prompt) -> str:
    """What a perfect reader says: it follows the chain of the variable that the question names."""
    text = TOKENS.decode(prompt.tokens)
    assigned = {key: other or value for key, other, value in ASSIGNED.findall(text)}
    (key,) = prompt.facts["keys"]
    return f"VAR {key} = VAR {assigned[key]} = {assigned[assigned[key]]}"


@pytest.mark.parametrize("task", SPLITS)
@pytest.mark.parametrize("form", ["chat", "ruler", "second_turn"])
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_prompts(task: str, form: str, depth: float) -> None:
    suite, length = make("--form", form), 4096
    for index in range(3):
        case = Case(task, length, depth, index)
        prompt = suite.build(case)
        text = TOKENS.decode(prompt.tokens)
        assert length - max(8, 0.005 * length) <= len(prompt.tokens) + prompt.max_new_tokens <= length
        links = [(key, other) for key, other, _ in ASSIGNED.findall(text) if other]
        assert len(links) == CHAINS and len({key for pair in links for key in pair}) == 2 * CHAINS
        (key,), (value,) = prompt.facts["keys"], prompt.answers
        # In its line and in the question.
        assert text.count(key) == 2 and text.count(value) == 1
        assert all(word in words(SPLITS[task]) for word in key.split("-"))
        line = TOKENS.decode(prompt.tokens[prompt.facts["needle_token"] :]).lstrip()
        assert line.startswith(f"VAR {key} = VAR ")
        assert abs(prompt.facts["needle_token"] / len(prompt.tokens) - depth) < 0.1
        before = TOKENS.decode(prompt.before)
        assert before.count(key) == (form == "second_turn")
        assert suite.score(case, prompt, oracle(prompt)) == {"score": 1.0, "contains": 1.0}


def test_the_value_of_another_chain_is_wrong() -> None:
    suite, case = make(), Case("variables", 1024, 0.5, 0)
    prompt = suite.build(case)
    (value,) = prompt.answers
    others = [number for _, _, number in ASSIGNED.findall(TOKENS.decode(prompt.tokens)) if number not in ("", value)]
    assert len(others) == CHAINS - 1
    assert suite.score(case, prompt, others[0])["score"] == 0
    assert suite.score(case, prompt, f"{others[0]} or {value}") == {"score": 0.0, "contains": 1.0}
    assert suite.score(case, prompt, f"{value}1") == {"score": 0.0, "contains": 1.0}
    assert suite.score(case, prompt, "")["score"] == 0


def test_cases_are_of_its_own_tasks() -> None:
    counts = Counter(case.task for case in make("--lengths", "1k", "--n", "2").cases())
    assert counts == dict.fromkeys(("variables", "variables_known"), 10)
    with pytest.raises(EvaluationError, match="--tasks single: allowed are variables, variables_known"):
        make("--tasks", "single").cases()
    with pytest.raises(EvaluationError, match="--form prefilled: allowed are chat, ruler, second_turn"):
        make("--form", "prefilled").cases()
