"""Requests a second of several servers, each at its best batch; servers and client are stand-ins."""

import json
from pathlib import Path
from typing import Any

import pytest
from generated_stubs import goals_of, install_in_turn
from serving_stubs import FakeServer, after, result, running

from eval.lab import bench_throughput, documents
from eval.lab.bench_throughput import parse
from eval.lab.servers import in_turn
from eval.lab.tables import files
from eval.live.record import read_rows, this_machine

SPARSE = ["--server", 'compact=--sparse-method rocketkv --sparse-config \'{"eviction": "compact"}\'']
# KV tokens of a prompt that a request holds which has let go of it.
HELD = 2096
# Requests a second by server and batch: the dense one is best at 16.
RATES = {"dense": {8: 0.1, 16: 0.125, 32: 0.1}} | {key: {8: 0.15, 16: 0.25, 32: 0.375} for key in ("compact", "other")}


@pytest.fixture(autouse=True)
def servers(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    found: list[list[str]] = []

    def run_judge(command: list[str], scratch: Path, log: Path) -> None:
        found.append(command)
        server, batch = running(command), int(after(command, "--num-prompts"))
        server.count_decode(int(after(command, "--random-input-len")), batch * 256)
        server.kept["compacted"] += batch
        server.kept["freed_tokens"] += batch * (32768 - HELD)
        rate = RATES[server.name][batch]
        more = {"request_throughput": rate, "output_throughput": 256 * rate, "duration": batch / rate}
        Path(after(command, "--output-file")).write_text(json.dumps(result(32768, batch, 0.01 * batch, **more)))

    monkeypatch.setattr(FakeServer, "step", dict.fromkeys(RATES, 0.01))
    monkeypatch.setattr(FakeServer, "pool", dict.fromkeys(RATES, 10**6))
    install_in_turn(monkeypatch, run_judge)
    return found


def run(folder: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    out = folder / "throughput.jsonl"
    line = ["--shape", "qwen3-8b", "--out", str(out), "--output-length", "256", "--batch", "8,16,32", *arguments]
    return bench_throughput.main(line), read_rows(out) if out.exists() else []


def test_each_server_at_its_best_batch(tmp_path: Path, servers: list[list[str]]) -> None:
    status, rows = run(tmp_path, *SPARSE, "--server-args", "--page-size 16 --attention-backend fa3")
    server = ["server", "item", "item", "item"]
    assert status == 0 and [row["kind"] for row in rows] == ["header", *server, *server, "summary"]
    assert rows[0].items() >= this_machine().items()
    best = rows[-1]
    assert (best["arm"], best["task"], best["batch"], best["dense_batch"]) == ("compact", "best", 32, 16)
    assert best["request_throughput_ratio"] == best["output_throughput_ratio"] == 3.0
    assert best["dense_served_attention_backend"] == "fa3" and best["density"] == 0.1
    items = [row for row in rows if row["kind"] == "item"]
    assert [row.get("held_tokens") for row in items] == [None] * 3 + [HELD] * 3
    assert [row["kept"]["compacted"] for row in items[3:]] == [8, 16, 32], "each row has its own"
    dense, sparse = FakeServer.started
    assert not dense.sparse and sparse.sparse and dense.closed and sparse.closed
    for server in (dense, sparse):
        # SGLang sizes the pool itself: how many requests run at once is what a method changes.
        assert "--max-total-tokens" not in server.flags and after(server.flags, "--max-running-requests") == "33"
        assert after(server.flags, "--context-length") == str(32768 + 256 + 128)
    for command, batch in zip(servers, [8, 16, 32] * 2, strict=True):
        assert after(command, "--max-concurrency") == str(batch) and "--flush-cache" in command
    lines = files.any_table(tmp_path / "throughput.jsonl").splitlines()
    assert lines[-1].startswith("| compact | 32 | 0.3750 |") and lines[-1].endswith(f"| {HELD} | 3.00 |")
    assert documents.main([str(tmp_path / "throughput.jsonl"), "--out", str(tmp_path / "pictures")]) == 0
    assert (tmp_path / "pictures" / "throughput.svg").exists()


def test_a_server_may_have_batches_of_its_own(tmp_path: Path, servers: list[list[str]]) -> None:
    status, rows = run(tmp_path, *SPARSE, "--batch-of", "compact=16,32", "--batch-of", "dense=8")
    assert status == 0 and [(row["arm"], row["batch"]) for row in rows if row["kind"] == "item"] == [
        ("dense", 8),
        ("compact", 16),
        ("compact", 32),
    ]
    assert [after(server.flags, "--cuda-graph-max-bs-decode") for server in FakeServer.started] == ["8", "32"]
    assert (rows[-1]["batch"], rows[-1]["dense_batch"]) == (32, 8)
    assert rows[0]["arguments"]["batch_of"] == {"compact": [16, 32], "dense": [8]}


def test_an_interrupted_run_goes_on(tmp_path: Path, servers: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    real, left = in_turn.run_judge, [4]

    def cut(*arguments: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        real(*arguments)

    monkeypatch.setattr(in_turn, "run_judge", cut)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, *SPARSE)
    monkeypatch.setattr(in_turn, "run_judge", real)
    status, rows = run(tmp_path, *SPARSE)
    asked = [(after(command, "--base-url"), after(command, "--num-prompts")) for command in servers]
    assert status == 0 and len(set(asked)) == len(asked) == 6
    assert [server.name for server in FakeServer.started] == ["dense", "compact", "compact"]
    assert (rows[-1]["batch"], rows[-1]["request_throughput_ratio"]) == (32, 3.0)
    # A run that came to its end is made anew.
    run(tmp_path, *SPARSE)
    assert len(servers) == 12


def test_a_run_in_parts(tmp_path: Path, servers: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two servers the second is not measured; what is measured of the first one needs no further server."""
    two = [*SPARSE, "--server", "other=--sparse-method resa"]
    assert run(tmp_path, *two, "--only", "compact")[0] == 0 and len(servers) == 6
    path = tmp_path / "throughput.jsonl"
    # As one that was cut off behind its last measurement leaves it.
    rows = [row for row in read_rows(path) if row["kind"] != "summary"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, rows = run(tmp_path, *two, "--only", "compact")
    assert status == 0 and len(servers) == 6
    assert [(row["arm"], row["batch"]) for row in rows if row["kind"] == "summary"] == [("compact", 32)]
    # The second one goes on with a file that has a summary of the first.
    status, rows = run(tmp_path, *two, "--only", "other")
    assert status == 0 and len(servers) == 9
    assert {row["arm"] for row in rows if row["kind"] == "summary"} == {"compact", "other"}


def test_it_is_goal_e4(tmp_path: Path) -> None:
    run(tmp_path, *SPARSE, "--server-args", "--page-size 16 --attention-backend fa3")
    path = tmp_path / "throughput.jsonl"

    def measured(**asked: Any) -> dict[str, list[str]]:
        header, *rows = read_rows(path)
        changed = {**header, "arguments": header["arguments"] | {"output_length": 4096} | asked}
        (tmp_path / "goals").mkdir(exist_ok=True)
        (tmp_path / "goals" / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (changed, *rows)))
        return goals_of(tmp_path / "goals", "E4")

    assert measured() == {"compact": ["3x", "must", "read 10.0%"]}
    assert measured(input_length=8192) == measured(shape="qwen3-1.7b") == {}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"errors": ["", "Traceback\nno room"]}, "1 of 8 requests failed, the first: no room"),
        ({"output_lens": [256, 9]}, "an answer has 9 tokens, asked for were 256"),
    ],
)
def test_a_batch_that_is_not_served_ends_its_server(
    changes: dict[str, list[Any]],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(command: list[str], scratch: Path, log: Path) -> None:
        batch = int(after(command, "--num-prompts"))
        # The others are as they should be.
        wrong = {name: [*values, *result(1, batch, 1.0)[name][2:]] for name, values in changes.items()}
        Path(after(command, "--output-file")).write_text(json.dumps(result(32768, batch, 0.01, **wrong)))

    monkeypatch.setattr(in_turn, "run_judge", broken)
    status, rows = run(tmp_path, *SPARSE)
    assert status == 1 and [row["kind"] for row in rows] == ["header", "server", "skipped", "server", "skipped"]
    assert rows[2]["reason"] == said and "nothing was measured on a dense and another server" in capsys.readouterr().err


def test_rows_that_ran_dense_are_refused(tmp_path: Path) -> None:
    status, rows = run(tmp_path, *SPARSE, "--input-length", "2k")
    (skipped,) = [row for row in rows if row["kind"] == "skipped"]
    assert status == 1 and "100% of the rows were decoded dense" in skipped["reason"]


def test_a_method_that_the_server_does_not_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _ = run(tmp_path, "--server", "compact=--sparse-free 1")
    said = "the compact server runs dense, although its flags ask for a method"
    assert status == 1 and said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--server must name servers, each once and none of them dense"),
        (["--server", "dense=--page-size 16"], "none of them dense"),
        ([*SPARSE, *SPARSE], "each once"),
        ([*SPARSE, "--batch", "8,4"], "--batch must be ascending numbers above 0, got [8, 4]"),
        ([*SPARSE, "--batch-of", "compact=0"], "--batch-of compact must be ascending numbers above 0, got [0]"),
        ([*SPARSE, "--only", "other"], "--only other: there is no such server; allowed: compact"),
        ([*SPARSE, "--batch-of", "other=8"], "--batch-of other: there is no such server; allowed: dense, compact"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--shape", "qwen3-8b", "--out", "x", *arguments])
    assert message in capsys.readouterr().err
