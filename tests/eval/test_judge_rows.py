"""What outside judges write, as our rows, and whether their scores agree with ours; on files in their layouts."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from eval.live.counters import EvaluationError
from eval.scores.stats import mean_interval
from eval.scores.summary import summarise
from eval.tasks.judge_rows import (
    agreement,
    difference_interval,
    gsm8k_items,
    read_samples,
    ruler_items,
    serving_rows,
    unmatched,
)


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


def items(task: str, scores: list[float], length: int = 4096, **more: Any) -> list[dict[str, Any]]:
    row = {"kind": "item", "arm": "base", "task": task, "length": length, "prompt_tokens": 4000, **more}
    return [{**row, "id": f"{task}/{length}/{i}", "scores": {"score": score}} for i, score in enumerate(scores)]


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
