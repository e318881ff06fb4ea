"""Requests a second that servers answer in time, each at its best rate; servers and client are stand-ins."""

import json
from pathlib import Path
from typing import Any

import pytest
from generated_stubs import install_in_turn
from serving_stubs import FakeServer, after, result, running

from eval.lab import bench_goodput, documents
from eval.lab.bench_goodput import parse
from eval.lab.tables import files
from eval.live.record import read_rows

RESA = ["--server", "resa=--sparse-method resa"]
PEER = ["--server", "flashinfer=--attention-backend flashinfer"]
# Shares in time by server and rate: the best dense server is the second one, at 2 requests a second.
SHARES = {
    "dense": {1.0: 1.0, 2.0: 0.4, 4.0: 0.1},
    "flashinfer": {1.0: 1.0, 2.0: 0.75, 4.0: 0.25},
    "resa": {1.0: 1.0, 2.0: 1.0, 4.0: 0.75},
}


@pytest.fixture(autouse=True)
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    found: list[list[str]] = []

    def run_judge(command: list[str], scratch: Path, log: Path) -> None:
        found.append(command)
        server, rate = running(command), float(after(command, "--request-rate"))
        server.count_decode(1000 if rate == 1 else 65536, 256)
        share = SHARES[server.name][rate]
        in_time = {"slo_attainment": share} | {"slo_attainment_by_metric": {"ttft": share, "tpot": 1.0}}
        requests = int(after(command, "--num-prompts"))
        Path(after(command, "--output-file")).write_text(json.dumps(result(65536, requests, 0.01, **in_time)))

    monkeypatch.setattr(FakeServer, "pool", dict.fromkeys(SHARES, 10**6))
    install_in_turn(monkeypatch, run_judge)
    return found


def run(folder: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    out = folder / "goodput.jsonl"
    line = ["--shape", "qwen3-8b", "--out", str(out), "--rates", "1,2,4", *arguments]
    return bench_goodput.main(line), read_rows(out) if out.exists() else []


def test_the_best_rate_beside_the_best_dense_server(tmp_path: Path, commands: list[list[str]]) -> None:
    status, rows = run(tmp_path, *PEER, *RESA, "--limits", "ttft:5000,tpot:30", "--server-args", "--page-size 16")
    assert status == 0 and [row["kind"] for row in rows] == [
        "header",
        *["server", "item", "item", "item"] * 3,
        "summary",
    ]
    best = rows[-1]
    assert (best["arm"], best["peer"], best["peer_rate"], best["rate"]) == ("resa", "flashinfer", 2.0, 4.0)
    assert best["goodput_ratio"] == 2.0 and best["within_ttft"] == 0.75
    items = [row for row in rows if row["kind"] == "item"]
    # Short requests run dense by the server's choice: they are counted, not refused.
    assert [row.get("dense_rows") for row in items] == [None] * 6 + [1.0, 0.0, 0.0]
    for server in FakeServer.started:
        assert after(server.flags, "--context-length") == str(131072 + 1024 + 128) and "--max-total" not in server.flags
    assert {(after(line, "--gsp-system-prompt-len"), after(line, "--gsp-prompts-per-group")) for line in commands} == {
        ("65536", "8")
    }
    assert all(line[line.index("--goodput") + 1 :][:2] == ["ttft:5000", "tpot:30"] for line in commands)
    lines = files.any_table(tmp_path / "goodput.jsonl").splitlines()
    assert lines[-1].startswith("| resa | 4.00 | 3.000 | 75.0 % |") and lines[-1].endswith("| 2.00 |")
    assert documents.main([str(tmp_path / "goodput.jsonl"), "--out", str(tmp_path / "pictures")]) == 0
    assert (tmp_path / "pictures" / "goodput.svg").exists()


def test_a_run_in_parts_waits_for_its_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, rows = run(tmp_path, *PEER, *RESA, "--only", "resa")
    assert status == 1 and rows[-1]["kind"] == "item"
    assert "no ratio yet, flashinfer/1, flashinfer/2, flashinfer/4 not measured" in capsys.readouterr().err
    status, rows = run(tmp_path, *PEER, *RESA, "--only", "flashinfer")
    assert status == 0 and (rows[-1]["arm"], rows[-1]["peer"]) == ("resa", "flashinfer")
    assert [server.name for server in FakeServer.started] == ["dense", "resa", "flashinfer"]


def test_a_server_may_have_rates_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, rows = run(tmp_path, *RESA, "--rates-of", "dense=1,2")
    assert status == 0 and [row["rate"] for row in rows if row["kind"] == "item"] == [1.0, 2.0, 1.0, 2.0, 4.0]
    assert (rows[-1]["peer_rate"], rows[-1]["goodput_ratio"]) == (1.0, 3.0)
    (tmp_path / "goodput.jsonl").unlink()
    assert run(tmp_path, *RESA, "--rates-of", "dense=1")[0] == 1
    assert "dense is best at its highest rate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ((0.0, 0.0, 0.0), "no dense server answered anything in time: allow more time"),
        ((1.0, 1.0, 1.0), "dense is best at its highest rate, and may do more: add higher rates"),
    ],
)
def test_without_a_peak_there_is_no_ratio(
    shares: tuple[float, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(SHARES, "dense", dict(zip((1.0, 2.0, 4.0), shares, strict=True)))
    status, rows = run(tmp_path, *RESA)
    assert status == 1 and not [row for row in rows if row["kind"] == "summary"]
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (PEER, "--server must name a sparse server"),
        ([*RESA, "--rates", "2,1"], "--rates must be ascending numbers above 0, got [2.0, 1.0]"),
        ([*RESA, "--rates-of", "other=1"], "--rates-of other: there is no such server; allowed: dense, resa"),
        ([*RESA, "--requests", "10", "--groups", "4"], "--requests must be a multiple of --groups (4), got 10"),
        ([*RESA, "--structured", '{"prefill": "skip"}'], "--structured: prefill is a part of the load, leave it out"),
        ([*RESA, "--structured", '{"sink": 1}'], "--structured: got {'sink': 1}"),
        ([*RESA, "--limits", "itl:3"], "got itl:3, allowed: ttft, tpot, e2el, each with milliseconds above 0"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--shape", "qwen3-8b", "--out", "x", *arguments])
    assert message in capsys.readouterr().err
