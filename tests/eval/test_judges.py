"""Tests of calls of outside judges, of their failures, and of converting their files to our rows; no judge is run."""

import argparse
import importlib.metadata
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from eval import judges
from eval.live.arms import Arm
from eval.live.client import LiveServer
from eval.live.counters import EvaluationError
from eval.live.tokens import Tokens
from eval.scores.stats import mean_interval
from eval.scores.summary import summarise
from eval.tasks import judge_commands
from eval.tasks.judge_commands import (
    TASKS,
    Target,
    agreement,
    difference_interval,
    gsm8k_items,
    gsm8k_task,
    lm_eval_command,
    reach,
    read_samples,
    require_lm_eval,
    ruler_groups,
    ruler_items,
    run_judge,
    serving_command,
    serving_rows,
    unmatched,
)

MODEL = "eval/models/tiny-gqa"
# Loading a tokenizer takes longer than all tests here.
NO_TOKENS: Tokens = object.__new__(Tokens)


def items(task: str, scores: list[float], length: int = 4096, **more: Any) -> list[dict[str, Any]]:
    row = {"kind": "item", "arm": "base", "task": task, "length": length, "prompt_tokens": 4000, **more}
    return [{**row, "id": f"{task}/{length}/{i}", "scores": {"score": score}} for i, score in enumerate(scores)]


@pytest.fixture
def target() -> Target:
    arm = Arm("base", LiveServer("http://127.0.0.1:1"), "tiny", 40960, {}, False)
    return Target(arm, {"model_path": MODEL}, MODEL, NO_TOKENS)


def parse(*arguments: str) -> argparse.Namespace:
    return judges.parser().parse_args([*arguments, "--base-url", "http://host:1/", "--out", "x.jsonl"])


def after(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_agree_ends_with_status_1_where_scores_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def write(name: str, rows: list[dict[str, Any]]) -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in [{"kind": "header"}, *rows]))
        return str(path)

    ours = write("ours", [*items("vt", [1.0] * 10), *items("fwe", [1.0])])
    same, other = write("same", items("ruler_vt", [1.0] * 10)), write("other", items("ruler_vt", [0.9] * 10))
    assert judges.main(["agree", "--ours", ours, "--theirs", same]) == 0
    assert "only in one of the files: fwe 4096" in capsys.readouterr().err
    assert judges.main(["agree", "--ours", ours, "--theirs", other]) == 1
    assert "False" in capsys.readouterr().out
    assert judges.main(["agree", "--ours", ours, "--theirs", write("none", items("gsm8k", [1.0]))]) == 1
    assert "nothing to compare: ours has vt 4096, fwe 4096, theirs gsm8k 4096" in capsys.readouterr().err
    assert judges.main(["agree", "--ours", ours, "--theirs", str(tmp_path / "gone")]) == 1
    assert "cannot read" in capsys.readouterr().err


def test_cwe_is_left_out_where_it_would_be_empty() -> None:
    groups = ruler_groups(["ruler_cwe", "ruler_vt", "ruler_vt"], [8192, 4096, 8192])
    assert groups == [("ruler_vt", 4096), ("ruler_cwe", 8192), ("ruler_vt", 8192)]
    assert len(ruler_groups(TASKS, [4096])) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "vt"], "--tasks: got vt, allowed: niah_single_1"),
        (["--tasks", "niah_single_2"], "--tasks: got niah_single_2, allowed:"),
        (["--lengths", "1024"], "--lengths: got 1024, allowed: 4096, 8192"),
        (["--lengths", ""], "--lengths: got none"),
    ],
)
def test_wrong_tasks_and_lengths_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        judges.main(["ruler", "--base-url", "u", "--out", "x.jsonl", *arguments])
    assert message in capsys.readouterr().err
    with pytest.raises(EvaluationError, match="ruler_cwe needs --lengths of 8192 or more, got 4096"):
        ruler_groups(["ruler_cwe"], [4096])


def test_the_line_of_lm_eval(target: Target) -> None:
    args = parse("ruler", "--limit", "3", "--lengths", "4k", "--concurrency", "2")
    command = lm_eval_command(target, args, "niah_single_1", 4096, Path("out"))
    assert command[:6] == ["python", "-m", "lm_eval", "run", "--model", "local-completions"]
    model = json.loads(after(command, "--model_args"))
    assert model["base_url"] == "http://host:1/v1/completions" and model["tokenizer"] == MODEL
    assert (model["model"], model["max_length"], model["num_concurrent"]) == ("tiny", 40960, 2)
    assert model["tokenized_requests"] is False
    assert json.loads(after(command, "--metadata")) == {"max_seq_lengths": [4096]}
    assert after(command, "--limit") == "3" and "--log_samples" in command
    assert "--seed" not in command and "--gen_kwargs" not in command


def test_custom_params_go_with_every_request(target: Target) -> None:
    target.arm.options["custom_params"] = {"sparse": False}
    args = parse("gsm8k", "--data", "x", "--seed", "5")
    command = lm_eval_command(target, args, "gsm8k_local", None, Path("out"))
    assert json.loads(after(command, "--gen_kwargs")) == {"custom_params": {"sparse": False}}
    assert after(command, "--seed") == "5" and "--metadata" not in command
    command = serving_command(target, parse("serving", "--output-length", "7"), 64, Path("f"))
    sampling = json.loads(after(command, "--extra-request-body"))["sampling_params"]
    assert sampling == {
        "temperature": 0.0,
        "max_new_tokens": 7,
        "ignore_eos": True,
        "custom_params": {"sparse": False},
    }


def test_the_line_of_the_benchmark_client(target: Target) -> None:
    command = serving_command(target, parse("serving", "--prompts", "5"), 64, Path("f.jsonl"))
    assert command[:3] == ["python", "-m", "sglang.benchmark.serving"]
    found = [after(command, f"--{name}") for name in ("dataset-name", "random-input-len", "num-prompts", "output-file")]
    assert found == ["random-ids", "64", "5", "f.jsonl"]
    assert {"--flush-cache", "--tokenize-prompt", "--output-details"} <= set(command)
    assert "--extra-request-body" not in command


def test_gsm8k_is_the_official_task_with_local_files(tmp_path: Path) -> None:
    data = tmp_path / "test.jsonl"
    data.write_text('{"question": "How many?", "answer": "#### 2"}\n')
    task = gsm8k_task(data, None)
    assert task["include"].endswith("tasks/gsm8k/gsm8k.yaml") and task["fewshot_split"] == "test"
    assert task["dataset_kwargs"] == {"data_files": {"test": str(data)}}
    assert gsm8k_task(data, data)["fewshot_split"] == "train"
    with pytest.raises(EvaluationError, match="there is no file"):
        gsm8k_task(tmp_path / "gone", None)
    data.write_text('{"problem": "How many?"}\n')
    with pytest.raises(EvaluationError, match="line 1: field 'question' is missing"):
        gsm8k_task(data, None)


def test_a_missing_or_other_lm_eval_is_told_with_the_way_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_commands, "find_spec", lambda name: None if name == "wonderwords" else object())
    with pytest.raises(EvaluationError, match=r"wonderwords not installed: uv pip install \"lm-eval\[api,ruler\]==0"):
        require_lm_eval()
    monkeypatch.setattr(judge_commands, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.4.9")
    with pytest.raises(EvaluationError, match=r"lm-eval 0\.4\.9 is installed, the tasks wanted are those of 0\.4\.13"):
        require_lm_eval()


def test_a_judge_that_fails_is_told_by_its_last_line(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    program = "import os; print(os.environ['HF_HUB_OFFLINE']); raise SystemExit('no room\\n')"
    with pytest.raises(EvaluationError, match=r"ended with status 1: no room \(all of it: .*x\.log\)"):
        run_judge([sys.executable, "-c", program], tmp_path, log)
    assert log.read_text().splitlines()[1] == "1"


def test_sglangs_client_runs_as_a_fork_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "import os, sys\nprint(__name__, os.environ['HF_HUB_OFFLINE'], sys.argv[1:])\nsys.exit(len(sys.argv) - 2)\n"
    (tmp_path / "stand_in.py").write_text(lines)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(judge_commands, "CLIENT", "stand_in")
    log = tmp_path / "x.log"
    run_judge(["python", "-m", "stand_in", "once"], tmp_path, log)
    with pytest.raises(EvaluationError, match=r"stand_in ended with status 2: __main__ 1 \['a', 'b', 'c'\]"):
        run_judge(["python", "-m", "stand_in", "a", "b", "c"], tmp_path, log)
    assert log.read_text().splitlines()[:2] == ["$ python -m stand_in once", "__main__ 1 ['once']"]
    assert "HF_HUB_OFFLINE" not in os.environ


def transport(context: int, **info: Any) -> httpx.MockTransport:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "tiny", "max_model_len": context}]})
        return httpx.Response(200, json={"internal_states": [{}], **info})

    return httpx.MockTransport(answer)


def test_a_server_without_room_a_tokenizer_or_the_method_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_commands, "tokens", lambda path: NO_TOKENS)

    def ask(context: int, least: int, *arguments: str, **info: Any) -> Target:
        server = LiveServer("http://host:1")
        server._http = httpx.Client(base_url="http://host:1", transport=transport(context, **info))
        return reach(parse("serving", *arguments), server, least)

    assert ask(40960, 4608, model_path=MODEL).folder == MODEL
    with pytest.raises(EvaluationError, match="take up to 4608 tokens, the server's context is 4096"):
        ask(4096, 4608, model_path=MODEL)
    with pytest.raises(EvaluationError, match="give --tokenizer"):
        ask(40960, 4608)
    with pytest.raises(EvaluationError, match="the base server runs no sparse method, expected resa"):
        ask(40960, 4608, "--expect", "resa", model_path=MODEL)


def test_a_server_that_is_down_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["serving", "--base-url", "http://127.0.0.1:9", "--out", str(tmp_path / "x.jsonl")]
    assert judges.main(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("eval.judges: no server answers at http://127.0.0.1:9")


def test_the_exact_lines_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        judges.main(["ruler", "--help"])
    text = capsys.readouterr().out
    assert "python -m lm_eval run --model local-completions" in text
    assert "python -m sglang.benchmark.serving" in text and 'uv pip install "lm-eval[api,ruler]==0.4.13"' in text


def sizes(texts):
    return [len(text.split()) for text in texts]


def sample(index: int, length: int, output: str, outputs: list[str], score: float) -> dict[str, Any]:
    """As lm-eval 0.4.13 writes one of RULER."""
    return {
        "doc_id": index,
        "doc": {"index": index, "outputs": outputs, "length": length - 9, "max_length": length, "gen_prefix": "It is"},
        "target": str(outputs),
        "arguments": {"gen_args_0": {"arg_0": f"some long text {index} It is", "arg_1": {"until": []}}},
        "resps": [[output]],
        "filtered_resps": [output],
        "filter": "none",
        "metrics": [str(length)],
        "4096": -1.0,
        str(length): score,
    }


def question(index: int, name: str, match: float) -> dict[str, Any]:
    """As lm-eval 0.4.13 writes one of GSM8K, once for each filter."""
    return {
        "doc_id": index,
        "doc": {"question": "How many?", "answer": "1 + 1\n#### 2"},
        "target": "1 + 1\n#### 2",
        "arguments": {"gen_args_0": {"arg_0": f"Question: How many? {index}\nAnswer:", "arg_1": {}}},
        "resps": [[" so it is 2"]],
        "filtered_resps": ["2" if match else "[invalid]"],
        "filter": name,
        "metrics": ["exact_match"],
        "exact_match": match,
    }


def served(**changes: Any) -> dict[str, Any]:
    """As SGLang 0.5.17's client writes the result of three requests."""
    result = {
        "random_input_len": 64,
        "random_output_len": 3,
        "duration": 2.0,
        "request_throughput": 1.5,
        "input_throughput": 96.0,
        "output_throughput": 4.5,
        "concurrency": 1.9,
        "cache_report": {"total_cached_tokens": 0},
        "input_lens": [64, 64, 64],
        "output_lens": [3, 3, 1],
        "ttfts": [0.5, 0.7, 0.6],
        "itls": [[0.1, 0.3], [0.2, 0.2], []],
        "errors": ["", "", ""],
    }
    for number, name in enumerate(("ttft", "tpot", "itl", "e2e_latency"), 1):
        result |= {f"{statistic}_{name}_ms": 100.0 * number for statistic in ("mean", "median", "p99")}
    return result | changes


def test_samples_of_a_task_are_found_wherever_lm_eval_puts_them(tmp_path: Path) -> None:
    folder = tmp_path / "eval__models__tiny"
    folder.mkdir()
    # lm-eval does not escape this separator, which ends a line for str.splitlines.
    rows = [sample(0, 4096, "a\u2028b", ["a"], 1.0), sample(1, 4096, "b", ["c"], 0.0)]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / "samples_ruler_vt_2026-01-01T00-00-00.0.jsonl").write_text(text, encoding="utf-8")
    (folder / "samples_niah_single_1_2026-01-01T00-00-00.0.jsonl").write_text("{}\n")
    assert read_samples(tmp_path, "ruler_vt") == rows
    with pytest.raises(EvaluationError, match="no samples of ruler_fwe"):
        read_samples(tmp_path, "ruler_fwe")


def test_ruler_items_have_the_score_of_their_own_length() -> None:
    samples = [sample(0, 8192, " 4430567.", ["4430567"], 1.0), sample(1, 8192, "no idea", ["a", "b"], 0.5)]
    first, second = ruler_items("niah_single_1", 8192, samples, sizes)
    assert first["id"] == "niah_single_1/8192/0"
    assert first["scores"] == {"score": 1.0} and second["scores"] == {"score": 0.5}
    assert (first["prompt_tokens"], second["completion_tokens"]) == (6, 2)
    assert first["output"] == " 4430567." and second["answers"] == ["a", "b"]
    assert len(first["prompt_sha"]) == 16 and first["prompt_sha"] != second["prompt_sha"]
    (row,) = summarise([first, second], [])
    assert (row["task"], row["length"], row["n"], row["score"]) == ("niah_single_1", 8192, 2, 0.75)


def test_samples_with_nothing_to_find_or_of_another_length_are_refused() -> None:
    with pytest.raises(EvaluationError, match="1 of 2 samples of 8192 tokens have nothing to find"):
        ruler_items("ruler_cwe", 8192, [sample(0, 8192, "", ["a"], 0.0), sample(1, 8192, "", [], 0.0)], sizes)
    with pytest.raises(EvaluationError, match="not those of 4096 tokens"):
        ruler_items("ruler_vt", 4096, [sample(0, 8192, "", ["a"], 0.0)], sizes)


def test_gsm8k_items_have_both_matches_and_one_row_a_question() -> None:
    strict, flexible = "strict-match", "flexible-extract"
    samples = [
        question(1, strict, 0.0),
        question(0, strict, 1.0),
        question(1, flexible, 1.0),
        question(0, flexible, 1.0),
    ]
    rows = gsm8k_items(samples, sizes)
    assert [row["id"] for row in rows] == ["gsm8k/0", "gsm8k/1"]
    assert [row["scores"] for row in rows] == [{"score": 1.0, "flexible": 1.0}, {"score": 0.0, "flexible": 1.0}]
    assert rows[0]["answers"] == ["2"] and rows[0]["output"] == " so it is 2"


def test_serving_rows_are_in_seconds() -> None:
    rows, summary = serving_rows(served())
    assert [row["ttft"] for row in rows] == [0.5, 0.7, 0.6]
    assert rows[0]["tpot"] == pytest.approx(0.2) and rows[2]["tpot"] is None
    assert rows[0]["id"] == "serving/64/0" and rows[0]["completion_tokens"] == 3
    assert (summary["ttft_mean"], summary["tpot_p99"], summary["itl_median"]) == (0.1, 0.2, 0.3)
    assert (summary["seconds_p99"], summary["output_throughput"], summary["failed"]) == (0.4, 4.5, 0)


def test_requests_that_failed_or_brought_no_text_are_told() -> None:
    errors = ["", "Traceback\nConnectionError: gone\n", ""]
    rows, summary = serving_rows(served(errors=errors, ttfts=[0.5, 0.0, 0.0]))
    assert [row.get("failed") for row in rows] == [None, "ConnectionError: gone", "no text came"]
    assert "ttft" not in rows[1] and summary["failed"] == 2


def test_the_interval_of_a_difference_is_newcombes() -> None:
    # Newcombe (1998), table II, contrast (a): 56/70 and 48/80, method 10.
    mine, theirs = [1.0] * 56 + [0.0] * 14, [1.0] * 48 + [0.0] * 32
    low, high = difference_interval(mine, theirs)
    assert (low, high) == (pytest.approx(0.0524, abs=1e-4), pytest.approx(0.3339, abs=1e-4))
    assert difference_interval(theirs, mine) == pytest.approx((-high, -low))


def test_the_interval_of_a_difference_covers_the_truth() -> None:
    rng = random.Random(0)

    def draw(share: float) -> list[float]:
        return [float(rng.random() < share) for _ in range(60)]

    intervals = [difference_interval(draw(0.9), draw(0.8)) for _ in range(400)]
    assert sum(low <= 0.1 <= high for low, high in intervals) / 400 >= 0.93
    low, high = difference_interval([1.0] * 60, [1.0] * 60)
    assert -low == high == pytest.approx(1 - mean_interval([1.0] * 60)[0])


def test_agreement_matches_tasks_by_their_own_names() -> None:
    ours = [*items("vt", [1.0] * 49 + [0.0]), *items("niah_single_1", [1.0] * 50), *items("cwe", [0.5] * 4, 8192)]
    theirs = [*items("ruler_vt", [1.0] * 50), *items("niah_single_1", [1.0] * 48 + [0.25] * 2, prompt_tokens=2000)]
    vt, single = agreement([{"kind": "header"}, *ours], theirs)
    assert (vt["task"], vt["n_ours"], vt["n_theirs"]) == ("vt", 50, 50)
    assert vt["points"] == pytest.approx(-2.0) and vt["agrees"]
    assert single["points"] == pytest.approx(3.0) and not single["agrees"]
    assert single["points_interval"][0] < 3.0 < single["points_interval"][1]
    assert (single["tokens_ours"], single["tokens_theirs"]) == (4000, 2000)
    assert unmatched(ours, theirs) == ["cwe 8192"]


def test_agreement_counts_failures_as_wrong_and_the_server_under_judgement_alone() -> None:
    failed = {**items("vt", [1.0])[0], "failed": "refused"}
    asked_again = items("vt", [1.0])
    other = items("vt", [0.0] * 5, arm="compare")
    assert agreement([failed, *other], items("ruler_vt", [1.0]))[0]["ours"] == 0.0
    (row,) = agreement([failed, *asked_again, *other], items("ruler_vt", [1.0]))
    assert (row["ours"], row["n_ours"]) == (1.0, 1)
