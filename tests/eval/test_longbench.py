"""LongBench on stand-ins of its files: prompts, truncation and scores, and what is said of wrong files."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from suites import TOKENS, suite_of

from eval.live.counters import EvaluationError
from eval.live.suite import Case, Prompt
from eval.longbench import METRICS, LongBenchSuite, choice
from eval.tasks import local_data, official_metrics

ROW = {"input": "Who?", "context": "Ann came.", "answers": ["Ann"], "length": 2, "all_classes": None, "_id": "r1"}
ROW_V2 = {"_id": "r1", "question": " Who? ", "context": " Ann. ", "answer": "B", "difficulty": "easy", "length": "long"}
ROW_V2 |= {f"choice_{letter}": f" {letter}{letter} " for letter in "ABCD"}


def make(tmp_path: Path, *arguments: str) -> LongBenchSuite:
    return suite_of(LongBenchSuite, "--data", str(tmp_path), "--prompts", str(tmp_path), *arguments)


def write(folder: Path, task: str, *rows: Any, template: str = "{context}|{input}", room: int = 7) -> None:
    (folder / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "dataset2prompt.json").write_text(json.dumps({task.removesuffix("_e"): template}))
    (folder / "dataset2maxlen.json").write_text(json.dumps({task.removesuffix("_e"): room}))


def score(tmp_path: Path, task: str, output: str, **fields: Any) -> dict[str, float]:
    write(tmp_path, task, ROW | fields)
    suite = make(tmp_path, "--version", "1", "--tasks", task)
    (case,) = suite.cases()
    return suite.score(case, suite.build(case), output)


def whole(prompt: Prompt) -> str:
    return TOKENS.decode(prompt.tokens)


@pytest.mark.parametrize(
    ("task", "output", "answers", "classes", "wanted"),
    [
        # Words eiffel tower in paris against eiffel tower: precision 1/2, recall 1.
        ("qasper", "The Eiffel Tower, in Paris.", ["no", "eiffel tower"], None, 2 / 3),
        ("triviaqa", "\n\nAnn\nQuestion: Bob", ["Ann"], None, 1.0),
        ("multifieldqa_zh", "北京大学。", ["北京大学"], None, 1.0),
        # The official list of punctuation has the closing mark alone, so that the opening one is a word.
        ("multifieldqa_zh", "《北京大学》", ["北京大学"], None, 2 / 3),
        # The longest common subsequence has three of five words.
        ("gov_report", "the cat sat", ["the cat sat on mat"], None, 2 * 0.6 / 1.6),
        ("gov_report", "...", ["the cat"], None, 0.0),
        ("samsum", "the cat sat\nand more", ["the cat sat on mat"], None, 2 * 0.6 / 1.6),
        ("dureader", "北京大学", ["北京大学"], None, 1.0),
        ("trec", "other animal\nor date", ["other animal"], ["animal", "other animal", "date"], 1.0),
        ("lsht", "other animal, date", ["other animal"], ["animal", "other animal", "date"], 0.5),
        # "animal" is passed over because "an" before it was dropped.
        ("trec", "animal house", ["animal house"], ["an", "animal", "animal house"], 0.5),
        ("trec", "date", ["other animal"], ["animal", "other animal", "date"], 0.0),
        ("passage_count", "3, maybe 4; no, 3", ["3"], None, 2 / 3),
        ("passage_retrieval_en", "Paragraph 12 or 1", ["Paragraph 12"], None, 0.5),
        ("passage_retrieval_zh", "段落12", ["段落12"], None, 1.0),
        ("passage_retrieval_zh", "", ["段落12"], None, 0.0),
        # Four of five characters are in both: 2 * 4 / 10. Then 2 * 2 / 6, rounded to percent.
        ("lcc", "\n```python\n# a comment\nx = 1\nx = 2", ["x = 2"], None, 0.8),
        ("repobench-p", "abc", ["abd"], None, 0.67),
    ],
)
def test_scores_are_the_official_ones(
    tmp_path: Path, task: str, output: str, answers: list[str], classes: list[str] | None, wanted: float
) -> None:
    found = score(tmp_path, task, output, answers=answers, all_classes=classes)
    assert found == {"score": pytest.approx(wanted, abs=1e-6)}


def test_every_task_of_version_1_has_a_metric() -> None:
    assert len(METRICS) == 21


def test_rouge_of_a_long_line_is_not_cut_off_by_recursion() -> None:
    words = " ".join(f"w{i}" for i in range(1500))
    assert official_metrics.rouge_l(f"x {words}", "x") == pytest.approx(2 / 1502, rel=1e-4)


@pytest.mark.parametrize(("length", "name"), [(3999, "0-4k"), (4000, "4-8k"), (8000, "8k+")])
def test_longbench_e_is_scored_by_length_too(tmp_path: Path, length: int, name: str) -> None:
    assert score(tmp_path, "qasper_e", "Ann", length=length) == {"score": 1.0, name: 1.0}


def test_the_prompt_is_the_template_in_the_chat_template(tmp_path: Path) -> None:
    write(tmp_path, "qasper", ROW, ROW | {"input": "When?"})
    suite = make(tmp_path, "--version", "1", "--tasks", "qasper")
    assert suite.cases() == [Case("qasper", index=0), Case("qasper", index=1)]
    prompt = suite.build(suite.cases()[1])
    assert list(prompt.tokens) == TOKENS.chat([{"role": "user", "content": "Ann came.|When?"}])
    assert prompt.max_new_tokens == 7 and prompt.answers == ["Ann"] and prompt.sampling == {"temperature": 0.0}
    assert prompt.facts["row"] == "r1"


@pytest.mark.parametrize("task", ["trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"])
def test_few_shot_and_code_tasks_are_raw(tmp_path: Path, task: str) -> None:
    write(tmp_path, task, ROW | {"all_classes": ["Ann"]})
    suite = make(tmp_path, "--version", "1", "--tasks", task)
    prompt = suite.build(suite.cases()[0])
    assert list(prompt.tokens) == TOKENS.encode("Ann came.|Who?")
    one_line = {"stop_token_ids": TOKENS.encode("\n"), "min_tokens": 1} if task == "samsum" else {}
    assert prompt.sampling == {"temperature": 0.0, **one_line}


@pytest.mark.parametrize("chat", [True, False])
def test_long_prompts_lose_their_middle(tmp_path: Path, chat: bool) -> None:
    context = " ".join(str(i) for i in range(1000))
    write(tmp_path, "qasper", ROW | {"context": context})
    arguments = ["--version", "1", "--tasks", "qasper", "--lengths", "512,256,100k", *([] if chat else ["--no-chat"])]
    suite = make(tmp_path, *arguments)
    cases = suite.cases()
    assert [case.length for case in cases] == [256, 512, 102400]
    for case in cases[:2]:
        assert case.length is not None
        prompt = suite.build(case)
        text = whole(prompt)
        assert case.length - 4 <= len(prompt.tokens) + prompt.max_new_tokens <= case.length
        # The last number of the first half and the first of the second may be cut.
        kept = text[text.index("0 1 2") : text.index("|Who?")].split()
        first = next(i for i, number in enumerate(kept) if number != str(i))
        assert kept[first + 2 :] == [str(i) for i in range(1000 - (len(kept) - first - 2), 1000)]
        # Half of the tokens each: the numbers at the beginning are shorter.
        halves = [len(TOKENS.encode(" ".join(part))) for part in (kept[:first], kept[first + 2 :])]
        assert abs(halves[0] - halves[1]) <= 16
    assert context in whole(suite.build(cases[2]))


def test_a_length_without_room_for_a_prompt_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "qasper", ROW | {"context": "a b c d " * 20}, room=60)
    suite = make(tmp_path, "--version", "1", "--tasks", "qasper", "--lengths", "64")
    with pytest.raises(EvaluationError, match="4 tokens are too few"):
        suite.build(suite.cases()[0])


def test_version_2_fills_its_template_and_is_scored_by_class(tmp_path: Path) -> None:
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "0shot.txt").write_text("<$DOC$> $Q$ $C_A$ $C_B$ $C_C$ $C_D$")
    (tmp_path / "data.json").write_text(json.dumps([ROW_V2, ROW_V2 | {"difficulty": "hard", "length": "short"}]))
    suite = make(tmp_path, "--version", "2")
    easy, hard = suite.cases()
    prompt = suite.build(easy)
    assert list(prompt.tokens) == TOKENS.chat([{"role": "user", "content": "<Ann.> Who? AA BB CC DD"}])
    assert prompt.max_new_tokens == 128
    assert suite.score(easy, prompt, "The correct answer is (B).") == {"score": 1.0, "easy": 1.0, "long": 1.0}
    assert suite.score(hard, prompt, "B") == {"score": 0.0, "hard": 0.0, "short": 0.0}
    assert len(make(tmp_path, "--version", "2", "--n", "1").cases()) == 1


@pytest.mark.parametrize(
    ("output", "letter"),
    [
        ("The correct answer is (C) since", "C"),
        ("**The correct answer is A**", "A"),
        ("The correct answer is B, not: The correct answer is (D)", "D"),
        ("the correct answer is (A)", None),
        ("(A)", None),
    ],
)
def test_the_letter_is_read_as_the_official_code_does(output: str, letter: str | None) -> None:
    assert choice(output) == letter


@pytest.mark.parametrize(
    ("arguments", "rows", "message"),
    [
        (["--tasks", "quasper"], [ROW], "--tasks quasper: allowed are narrativeqa, qasper"),
        (["--tasks", "hotpotqa"], [ROW], "dataset2prompt.json: for 'hotpotqa' it has None, wanted a str"),
        (["--tasks", "qasper_e"], [ROW], "has no qasper_e.jsonl or data/qasper_e.jsonl"),
        ([], [ROW], "dataset2prompt.json: for 'narrativeqa' it has None"),
        (["--tasks", "qasper"], [], "qasper.jsonl has no rows"),
        (["--tasks", "qasper"], [ROW, 3], "qasper.jsonl, line 2: wanted a JSON object, got int"),
        (["--tasks", "qasper"], [ROW, {"input": "x"}], "line 2: field 'context' is missing; there are input"),
        (["--tasks", "qasper"], [ROW | {"answers": []}], r"line 1: field 'answers' is \[\], wanted a list of texts"),
        (["--tasks", "qasper", "--n", "0"], [ROW], "--n: must be at least 1, got 0"),
        (["--tasks", "qasper", "--lengths", ""], [ROW], "--lengths: got none, allowed: one or more"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, arguments: list[str], rows: list[Any], message: str) -> None:
    write(tmp_path, "qasper", *rows)
    with pytest.raises(EvaluationError, match=message):
        make(tmp_path, "--version", "1", *arguments).cases()


def test_classes_are_wanted_where_they_are_needed(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="line 1: field 'all_classes' is None, wanted a list of texts"):
        score(tmp_path, "trec", "")


def test_an_unknown_field_of_a_template_is_named(tmp_path: Path) -> None:
    write(tmp_path, "qasper", ROW, template="{contxt}")
    with pytest.raises(EvaluationError, match="prompt of qasper: the template wants contxt; there are input, context"):
        make(tmp_path, "--version", "1", "--tasks", "qasper").cases()


def test_missing_folders_and_broken_files_are_named(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    LongBenchSuite.add_arguments(parser)
    with pytest.raises(EvaluationError, match="--prompts is missing: give the folder with LongBench/config"):
        LongBenchSuite(parser.parse_args(["--version", "1"]), TOKENS).cases()
    (tmp_path / "0shot.txt").write_text("$DOC$")
    with pytest.raises(EvaluationError, match=f"--data {tmp_path} has no data.json"):
        make(tmp_path, "--version", "2").cases()
    (tmp_path / "data.json").write_text("[1, 2")
    with pytest.raises(EvaluationError, match=r"data.json: not JSON in UTF-8"):
        make(tmp_path, "--version", "2").cases()
    (tmp_path / "data.json").write_text("[{}]")
    with pytest.raises(EvaluationError, match=r"data.json, row 1: field 'question' is missing"):
        make(tmp_path, "--version", "2").cases()


def test_rows_are_read_from_the_file_when_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": "é"}\n\n{"a": "b"}\n{"a": "c"}', encoding="utf-8")
    rows = local_data.Rows(path, {"a": local_data.TEXT}, limit=2)
    assert list(rows) == [{"a": "é"}, {"a": "b"}] and len(rows) == 2
