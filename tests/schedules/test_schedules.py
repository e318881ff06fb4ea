"""Hundreds of random schedules on the real scheduler; thousands with ``-m soak``."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from forked_server import Forked

pytestmark = pytest.mark.long

RUN = Path(__file__).with_name("run.py")
WORKERS = min(2, len(os.sched_getaffinity(0)))


def run(out: Path, *flags: str) -> list[dict[str, Any]]:
    """Run the command in a process of its own, forked from one that has imported SGLang; returns its rows."""
    log = out.with_suffix(".log")
    status = Forked([str(RUN), "--out", str(out), *flags], dict(os.environ), str(log)).wait(600.0)
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    failures = [failure for row in rows if row["kind"] == "block" for failure in row["failures"]]
    report = "\n".join(f"{failure['message']}\nreplay: {failure['replay']}" for failure in failures)
    assert status == 0, report or log.read_text()[-4000:]
    return rows


def assert_passed(reached: dict[str, Any], schedules: int, names: Sequence[str] = ()) -> None:
    """Assert of a summary that all schedules passed, and that they came to all that is named."""
    assert (reached["schedules"], reached["mismatches"], reached["leaks"], reached["errors"]) == (schedules, 0, 0, 0)
    assert [name for name in names if reached[name] == 0] == []


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("schedules") / "rows.jsonl"
    flags = ["--schedules", "240", "--block", "30", "--steps", "3", "--slots", "80", "--vary", "all", "--self-test"]
    return run(out, *flags, "--workers", str(WORKERS))


def test_every_page_is_exact_and_none_is_lost_in_240_schedules(rows) -> None:
    blocks, summary = [row for row in rows if row["kind"] == "block"], rows[-1]
    assert sum(row["schedules"] for row in blocks if row["options"]["overlap"]) == 120
    assert_passed(summary, 240)


def test_the_schedules_reach_what_they_are_for(rows) -> None:
    reached = rows[-1]
    names = ["aborts", "retractions", "full_pools", "evictions", "flushes"]
    names += ["cached_tokens", "rectified_tokens", "finish_tokens", "divided", "mixed_rows"]
    assert_passed(reached, 240, names)


@pytest.mark.parametrize(
    ("sabotage", "kind"),
    [
        ("guard", "mismatch"),
        ("summary", "mismatch"),
        ("rectified", "mismatch"),
        ("leak", "leak"),
        ("groups", "mismatch"),
        ("match", "mismatch"),
        ("keys", "mismatch"),
        ("pairs", "mismatch"),
        ("mixed", "mismatch"),
        ("tail", "mismatch"),
        ("copies", "mismatch"),
        ("unseen", "mismatch"),
        ("insert", "leak or mismatch"),
        ("dense", "mismatch"),
        ("drafts", "mismatch"),
        ("arrivals", "mismatch"),
        ("transfers", "mismatch"),
        ("turns", "mismatch"),
    ],
)
def test_a_broken_product_is_noticed(rows, sabotage, kind) -> None:
    (row,) = [row for row in rows if row["kind"] == "sabotage" and row["sabotage"] == sabotage]
    failure, *_ = row["failures"]
    assert failure["type"] in kind.split(" or ")


def assert_compacted(rows: list[dict[str, Any]], schedules: int, compared: int) -> None:
    """The schedules passed, and reached what compaction has to do with."""
    reached = rows[-1]
    names = ["compacted", "retractions", "evictions", "made_room", "aborts", "cached_tokens"]
    assert_passed(reached, schedules, names)
    # Some in each schedule, or nearly.
    answered = [row for row in rows if row["kind"] == "block" and row["answers_compared"]]
    assert sum(row["schedules"] for row in answered) == compared
    assert reached["answers_compared"] > 4 * compared and reached["tokens_compared"] > 10 * compared
    assert reached["prompts_evicted"] > compared // 4


def test_100_schedules_whose_requests_let_go_of_their_prompts_answer_as_with_all_the_memory(tmp_path) -> None:
    """And 20 more, in which what runs dense depends on what is in the batch."""
    flags = ["--schedules", "120", "--block", "20", "--steps", "4", "--vary", "compact", "--workers", str(WORKERS)]
    assert_compacted(run(tmp_path / "rows.jsonl", *flags), 120, 100)


def test_skipped_blocks_leave_every_page_as_a_cold_run_has_it(tmp_path) -> None:
    flags = ["--schedules", "32", "--block", "8", "--steps", "6", "--vary", "skip", "--workers", str(WORKERS)]
    reached = run(tmp_path / "rows.jsonl", *flags)[-1]
    names = ["skipped", "skipped_in_prefill", "retractions", "evictions", "aborts", "cached_tokens", "mixed_rows"]
    assert_passed(reached, 32, names)


def test_parts_by_layer_leave_every_page_as_a_cold_run_has_it(tmp_path) -> None:
    flags = ["--schedules", "30", "--block", "6", "--steps", "5", "--vary", "parts", "--workers", str(WORKERS)]
    reached = run(tmp_path / "rows.jsonl", *flags)[-1]
    names = ["rectified_tokens", "finish_tokens", "retractions", "evictions", "aborts", "cached_tokens"]
    assert_passed(reached, 30, names)


def assert_lossless(rows: list[dict[str, Any]], schedules: int) -> None:
    """The schedules passed, and drafts were wrong, dropped and taken up again."""
    reached = rows[-1]
    names = ["accepted", "retractions", "evictions", "aborts", "cached_tokens", "answers_compared"]
    assert_passed(reached, schedules, names)
    assert reached["accepted"] < 0.8 * reached["drafted"]


def test_drafts_leave_answers_and_pages_as_dense_steps_have_them(tmp_path) -> None:
    flags = ["--schedules", "12", "--block", "2", "--steps", "4", "--vary", "drafts", "--workers", str(WORKERS)]
    assert_lossless(run(tmp_path / "rows.jsonl", *flags), 12)


def test_drafters_of_sglang_leave_answers_and_pages_as_sparse_prefill_alone_has_them(tmp_path) -> None:
    flags = ["--schedules", "24", "--block", "6", "--steps", "6", "--vary", "drafters", "--workers", str(WORKERS)]
    rows = run(tmp_path / "rows.jsonl", *flags)
    assert_lossless(rows, 24)
    assert rows[-1]["mixed_rows"] > 0


def test_what_sparse_verifications_share_is_exact(tmp_path) -> None:
    flags = ["--schedules", "16", "--block", "4", "--steps", "6", "--vary", "verifiers", "--workers", str(WORKERS)]
    reached = run(tmp_path / "rows.jsonl", *flags)[-1]
    names = ["accepted", "rectified_tokens", "finish_tokens", "retractions", "evictions", "aborts", "cached_tokens"]
    assert_passed(reached, 16, names)


def assert_returned(rows: list[dict[str, Any]], schedules: int) -> None:
    """The schedules passed, with prompts that left the KV pool and came back."""
    names = ["arrived_pages", "retractions", "evictions", "made_room", "aborts", "cached_tokens", "answers_compared"]
    assert_passed(rows[-1], schedules, names)


def test_prompts_return_from_host_memory_as_they_were(tmp_path) -> None:
    flags = ["--schedules", "36", "--block", "6", "--steps", "6", "--vary", "host", "--workers", str(WORKERS)]
    assert_returned(run(tmp_path / "rows.jsonl", *flags), 36)


def assert_transferred(rows: list[dict[str, Any]], schedules: int) -> None:
    """The schedules passed, with prompts of elsewhere, prefixes of this server, and requests that were taken back."""
    names = ["arrived_pages", "retractions", "full_pools", "evictions", "made_room", "aborts"]
    names += ["cached_tokens", "rectified_tokens", "finish_tokens"]
    assert_passed(rows[-1], schedules, names)


def test_prompts_that_another_server_prefilled_are_as_a_cold_run_has_them(tmp_path) -> None:
    flags = ["--schedules", "20", "--block", "4", "--steps", "8", "--vary", "pairs", "--workers", str(WORKERS)]
    assert_transferred(run(tmp_path / "rows.jsonl", *flags), 20)


def assert_continued(rows: list[dict[str, Any]], schedules: int) -> None:
    """The schedules passed, with turns behind what their sessions kept."""
    names = ["turns", "retractions", "evictions", "aborts", "cached_tokens", "rectified_tokens", "answers_compared"]
    assert_passed(rows[-1], schedules, names)


def test_turns_of_sessions_go_on_behind_exact_kv(tmp_path) -> None:
    flags = ["--schedules", "10", "--block", "2", "--steps", "6", "--vary", "sessions", "--workers", str(WORKERS)]
    assert_continued(run(tmp_path / "rows.jsonl", *flags), 10)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    ("family", "check"),
    [
        ("sessions", assert_continued),
        ("pairs", assert_transferred),
        ("host", assert_returned),
        ("drafts", assert_lossless),
    ],
)
def test_two_thousand_schedules(tmp_path, family: str, check: Callable[[list[dict[str, Any]], int], None]) -> None:
    flags = ["--schedules", "2000", "--block", "50", "--vary", family, "--workers", str(len(os.sched_getaffinity(0)))]
    check(run(tmp_path / "soak.jsonl", *flags), 2000)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_a_thousand_schedules_of_drafters(tmp_path) -> None:
    flags = [
        "--schedules",
        "1000",
        "--block",
        "50",
        "--vary",
        "drafters",
        "--workers",
        str(len(os.sched_getaffinity(0))),
    ]
    assert_lossless(run(tmp_path / "soak.jsonl", *flags), 1000)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_six_hundred_schedules_of_compaction(tmp_path) -> None:
    flags = ["--schedules", "600", "--block", "50", "--vary", "compact", "--workers", str(len(os.sched_getaffinity(0)))]
    assert_compacted(run(tmp_path / "soak.jsonl", *flags), 600, 500)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_ten_thousand_schedules(tmp_path) -> None:
    rows = run(
        tmp_path / "soak.jsonl", "--schedules", "10000", "--vary", "all", "--workers", str(len(os.sched_getaffinity(0)))
    )
    assert rows[-1]["schedules"] == 10000
