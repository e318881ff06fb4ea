"""Prefix hits of the serving benchmark: whose turn it is, the interval of their ratio; servers are stand-ins."""

from pathlib import Path
from typing import Any

import pytest
from serving_stubs import FakeServer, install_client

from eval import bench_serving, report
from eval.live.record import read_rows
from eval.serving.first_token import summarise_hits

K = 1024


@pytest.fixture(autouse=True)
def servers(monkeypatch: pytest.MonkeyPatch) -> None:
    install_client(monkeypatch)
    monkeypatch.setattr(FakeServer, "step", {"sparse": 0.004, "dense": 0.004, "fp8": 0.002})
    monkeypatch.setattr(FakeServer, "ttft", {name: [1.0] for name in FakeServer.step})
    monkeypatch.setattr(FakeServer, "pool", dict.fromkeys(FakeServer.step, 10**6))


def run(folder: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    grid = ["--model-path", "m", "--contexts", "32k", "--batch", "1", "--server-args", "--page-size 16"]
    out = folder / "serving.jsonl"
    status = bench_serving.main([*grid, "--out", str(out), *arguments])
    return status, [row for row in read_rows(out) if row.get("task") == "prefix_hit"]


def test_servers_that_are_up_at_once_take_turns(tmp_path: Path) -> None:
    status, (sparse, dense, summary) = run(tmp_path, "--both", "--prefix", "1k", "--tail", "16", "--hits", "5")
    assert status == 0
    # The first fills the cache, the second does not count.
    assert [name for name, _ in FakeServer.order] == ["sparse", "dense"] * (2 + 5)
    prompts = [prompt for _, prompt in FakeServer.order]
    assert prompts[::2] == prompts[1::2] and len({tuple(prompt) for prompt in prompts}) == 2 + 5
    assert all(prompt[:K] == prompts[0][:K] and len(prompt) == K + 16 for prompt in prompts)
    assert summary["hits"] == 5 and summary["recomputed"] == 0 and summary["pages_summarised"] == 5 * 2
    for row, times in ((sparse, summary["ttfts"]), (dense, summary["dense_ttfts"])):
        assert row["in_turn"] and row["ttft"] == times and len(times) == 5


def test_without_both_they_follow_one_another(tmp_path: Path) -> None:
    _, rows = run(tmp_path, "--prefix", "1k", "--hits", "3")
    assert [name for name, _ in FakeServer.order] == ["sparse"] * (2 + 3) + ["dense"] * (2 + 3)
    assert [row.get("in_turn") for row in rows] == [False, False, None]
    assert rows[-1]["ttft_over_dense"] == pytest.approx(1.0) and rows[-1]["ttft_over_dense_interval"] is None


def test_what_the_machine_does_meanwhile_befalls_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # By the end of all hits they take twice as long.
    monkeypatch.setattr(FakeServer, "drift", 0.04 / 130)
    _, (*_, row) = run(tmp_path, "--both", "--hits", "60")
    low, high = row["ttft_over_dense_interval"]
    assert low <= row["ttft_over_dense"] <= high
    assert row["ttft_over_dense"] == pytest.approx(1.0, abs=0.01) and 0.98 < low < high < 1.01
    assert row["ttft_range"][1] > 1.7 * row["ttft_range"][0]
    (shown,) = [line for line in report.any_table(tmp_path / "serving.jsonl").splitlines() if "prefix" in line]
    assert f"| {row['ttft_over_dense']:.3f} | {low:.3f} … {high:.3f} |" in shown
    monkeypatch.setattr(FakeServer, "order", [])
    _, (*_, row) = run(tmp_path, "--hits", "60")
    assert row["ttft_over_dense"] < 0.8


def test_a_server_that_fails_does_not_hide_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeServer, "forgets", "sparse")
    arguments = ("--both", "--prefix", "1k", "--hits", "3", "--server", "fp8=--kv-cache-dtype fp8_e4m3")
    status, rows = run(tmp_path, *arguments)
    message = "sparse prefix_hit is left out: of prompts of 1088 tokens up to 1088 were not cached"
    assert status == 1 and message in capsys.readouterr().err
    assert [row["arm"] for row in rows] == ["dense", "fp8", "fp8"]
    assert rows[-1]["ttft_over_dense_interval"] == pytest.approx([0.5, 0.5]) and rows[-1]["recomputed"] is None


def item(arm: str, ttft: list[float], in_turn: bool = True) -> dict[str, Any]:
    row = {"task": "prefix_hit", "arm": arm, "context": 128 * K, "hits": len(ttft), "ttft": ttft, "in_turn": in_turn}
    return row | {"pages_summarised": 4, "recomputed": 0}


def test_an_interval_needs_pairs() -> None:
    mine, theirs = [1.0, 2.0, 4.0, 3.0], [2.0, 4.0, 8.0, 6.0]
    (row,) = summarise_hits([item("sparse", mine), item("dense", theirs)])
    # Every pair says the same, however far apart the pairs are.
    assert row["ttft_over_dense"] == 0.5 and row["ttft_over_dense_interval"] == (0.5, 0.5)
    (row,) = summarise_hits([item("sparse", mine, in_turn=False), item("dense", theirs, in_turn=False)])
    assert row["ttft_over_dense"] == 0.5 and row["ttft_over_dense_interval"] is None
    (row,) = summarise_hits([item("sparse", [1.0]), item("dense", [2.0])])
    assert row["ttft_over_dense"] == 0.5 and row["ttft_over_dense_interval"] is None
    assert summarise_hits([item("sparse", mine)]) == summarise_hits([]) == []
