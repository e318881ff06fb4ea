"""The demo's questions about sources, which answers are right, and its command line; the servers are `.ci/run`'s."""

import re

import pytest

from launch import demo

MODEL = str(demo.MODEL)


@pytest.mark.parametrize("length", [8000, 14000])
def test_sources_are_asked_for_constants_that_stand_in_them_once(length: int) -> None:
    text, questions = demo.read_code(length, MODEL)
    assert len({question.text for question in questions}) == 3
    for question in questions:
        name = re.findall(r"`(\w+) = `", question.text)[0]
        assert text.count(f"\n{name} = ") == 1 and question.in_words
        assert re.search(rf'^{name} = "?{re.escape(question.truth)}"?$', text, re.MULTILINE)


@pytest.mark.parametrize(
    ("question", "answer", "right"),
    [
        (demo.Question("?", "96", in_words=True), "It is 96.", True),
        (demo.Question("?", "96", in_words=True), "The constant is `96`", True),
        (demo.Question("?", "96", in_words=True), "1965", False),
        (demo.Question("?", "96", in_words=True), "0.96", False),
        (demo.Question("?", "--data/--prompts", in_words=True), 'The value is "--data/--prompts".', True),
        (demo.Question("?", "8056020"), " 8056020 ", True),
        (demo.Question("?", "8056020"), "80560201", False),
        (demo.Question("?", "8056020"), "It is 8056020.", False),
    ],
)
def test_which_answers_are_right(question: demo.Question, answer: str, right: bool) -> None:
    assert question.right(answer) == right


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--tokens", "100"], "--tokens: got 100, allowed: 8000 to 14000"),
        (["--model-path", "/nowhere/at/all"], "--model-path: got '/nowhere/at/all', allowed: a checkpoint's folder"),
    ],
)
def test_bad_arguments_are_named(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        demo.main(given)
    assert message in capsys.readouterr().err
