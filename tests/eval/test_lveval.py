"""LV-Eval on stand-ins of its files: what is read of its configuration, and scores by keywords."""

import json
from pathlib import Path
from typing import Any

import pytest
from suites import TOKENS, suite_of

from eval import lveval
from eval.live import runner
from eval.live.counters import EvaluationError
from eval.live.suite import Case
from eval.lveval import Ignored, LVEvalSuite

IGNORED = Ignored(en=frozenset({"of", "in"}), zh=frozenset({"的", "在"}))
ROW = {"input": "Who?", "context": "Ann came.", "answers": ["Ann Lee", "Bob"], "answer_keywords": "Ann", "length": 2}
CONFIG = """
from metrics import one, two
raise RuntimeError("this file must not be run")
DATASET_MAXGEN = {"loogle_SD_mixup": 64, "factrecall_zh": 16}
DATASET_PROMPT = {"loogle_SD_mixup": "{context}|{input}", "factrecall_zh": "{context} 问 {input}"}
DATASET_METRIC = {"loogle_SD_mixup": qa_f1_score_with_gold_ans, "factrecall_zh": qa_f1_zh_score}
"""


def make(folder: Path, *arguments: str) -> LVEvalSuite:
    return suite_of(LVEvalSuite, "--data", str(folder), "--prompts", str(folder), *arguments)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.py").write_text(CONFIG, encoding="utf-8")
    (tmp_path / "metrics.py").write_text(
        "ABANDON_WORDS_EN = ['of', 'in']\nABANDON_WORDS_ZH = ['的', '在']\n", encoding="utf-8"
    )
    write(tmp_path / "loogle_SD_mixup_16k.jsonl", ROW, ROW | {"answer_keywords": None})
    write(tmp_path / "loogle_SD_mixup_256k.jsonl", ROW)
    (tmp_path / "factrecall_zh").mkdir()
    write(tmp_path / "factrecall_zh" / "factrecall_zh_16k.jsonl", ROW)
    return tmp_path


def write(path: Path, *rows: Any) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_cases_prompts_and_scores_follow_the_configuration(folder: Path) -> None:
    suite = make(folder, "--levels", "256k,16k", "--tasks", "loogle_SD_mixup")
    cases = suite.cases()
    assert cases == [
        Case("loogle_SD_mixup_16k", index=0),
        Case("loogle_SD_mixup_16k", index=1),
        Case("loogle_SD_mixup_256k", index=0),
    ]
    prompt = suite.build(cases[0])
    assert list(prompt.tokens) == TOKENS.chat([{"role": "user", "content": "Ann came.|Who?"}])
    assert prompt.max_new_tokens == 64
    # Only the first answer counts, and without a keyword nothing does; the second row has none.
    assert suite.score(cases[0], prompt, "Bob") == {"score": 0.0}
    assert suite.score(cases[0], prompt, "Lee") == {"score": 0.0}
    assert suite.score(cases[0], prompt, "Ann") == {"score": pytest.approx(2 / 3)}
    assert suite.score(cases[1], suite.build(cases[1]), "Lee") == {"score": pytest.approx(2 / 3)}


def test_data_may_lie_in_a_folder_for_each_task(folder: Path) -> None:
    suite = make(folder, "--levels", "16k", "--tasks", "factrecall_zh", "--lengths", "1k", "--no-chat")
    (case,) = suite.cases()
    assert case == Case("factrecall_zh_16k", 1024)
    prompt = suite.build(case)
    assert TOKENS.decode(prompt.tokens) == "Ann came. 问 Who?" and prompt.max_new_tokens == 16
    assert suite.score(case, prompt, "ann lee.") == {"score": 1.0}


@pytest.mark.parametrize(
    ("output", "answer", "keywords", "wanted"),
    [
        # One of five keywords is just enough, and F1 is 2 * 1 / (1 + 5).
        ("one", "one two three four five", "one two three four five", 1 / 3),
        ("one", "one two three four five", "one two three four five six", 0.0),
        # "of" and "in" are ignored as found keywords, but not in F1.
        ("of in", "of in one", "of in", 0.0),
        ("of in", "of in one", "", 0.8),
        ("of in", "of in one", "the", 0.8),
    ],
)
def test_english_answers_need_a_fifth_of_the_keywords(output: str, answer: str, keywords: str, wanted: float) -> None:
    assert lveval.f1_if_keywords(output, answer, keywords, IGNORED) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("output", "answer", "keywords", "wanted"),
    [
        # jieba's words: 北京 | 的 | 上海 | 广州.
        ("北京", "北京的上海", "北京", 0.5),
        ("上海", "北京的上海", "北京", 0.0),
        # Without keywords those of the answer: one of two is enough, one of three is not.
        ("北京", "北京上海", None, 2 / 3),
        ("北京", "北京的上海", None, 0.0),
        ("的", "的", None, 0.0),
    ],
)
def test_chinese_answers_need_two_fifths(output: str, answer: str, keywords: str | None, wanted: float) -> None:
    assert lveval.f1_zh_if_keywords(output, answer, keywords, IGNORED) == pytest.approx(wanted)


def test_rouge_leaves_ignored_words_out() -> None:
    # 北京 上海 against 北京 广州: one of two words in both.
    assert lveval.rouge_l_zh_kept("北京的上海", "北京在广州", None, IGNORED) == pytest.approx(0.5, abs=1e-6)
    assert lveval.rouge_l_zh_kept("的", "北京", None, IGNORED) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "loogle"], "--tasks loogle: allowed are loogle_SD_mixup, factrecall_zh"),
        (["--levels", "8k"], "--levels 8k: allowed are 16k, 32k, 64k, 128k, 256k"),
        (["--levels", "32k"], "has no loogle_SD_mixup_32k.jsonl or loogle_SD_mixup/loogle_SD_mixup_32k.jsonl"),
        (["--tasks", "factrecall_zh", "--levels", "256k"], "has no factrecall_zh_256k.jsonl or"),
    ],
)
def test_wrong_arguments_are_named(folder: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        make(folder, *arguments).cases()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("DATASET_METRIC", "METRIC", "config.py does not assign DATASET_METRIC; it assigns DATASET_MAXGEN"),
        (
            "qa_f1_score_with_gold_ans",
            "bleu",
            "config.py: the metric of loogle_SD_mixup is bleu, known are qa_f1_score",
        ),
        ("{context}|", "{text}|", "prompt of loogle_SD_mixup: the template wants text; there are input, context"),
        ('64, "f', '"x", "f', "config.py: DATASET_MAXGEN: for 'loogle_SD_mixup' it has 'x', wanted a int"),
        (
            "DATASET_PROMPT = {",
            "DATASET_PROMPT = {**x, ",
            "config.py: what it assigns to DATASET_PROMPT is not a literal",
        ),
        ("raise ", "raise raise ", "config.py: not a Python file"),
    ],
)
def test_an_unexpected_configuration_is_named(folder: Path, old: str, new: str, message: str) -> None:
    text = (folder / "config.py").read_text(encoding="utf-8")
    (folder / "config.py").write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(EvaluationError, match=message):
        make(folder, "--levels", "16k").cases()


def test_wrong_rows_are_named(folder: Path) -> None:
    path = folder / "loogle_SD_mixup_16k.jsonl"
    for row, message in (
        (ROW | {"answer_keywords": 3}, "line 2: field 'answer_keywords' is 3, wanted a text or null"),
        ({"input": "x", "context": "y"}, "line 2: field 'answers' is missing; there are input, context"),
    ):
        write(path, ROW, row)
        with pytest.raises(EvaluationError, match=message):
            make(folder, "--levels", "16k").cases()


def test_the_command_line_has_help() -> None:
    assert "--levels" in runner.parser_of(LVEvalSuite).format_help()
