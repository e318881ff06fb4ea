"""The serving benchmark: what it starts and asks, and what it makes of answers; servers and client are stand-ins."""

from pathlib import Path
from typing import Any

import pytest
from serving_stubs import CONFIG, FakeServer, after, install_client, result

from eval import bench_serving, report
from eval.bench_serving import parse
from eval.live.client import Chunk
from eval.live.counters import COUNTED, EvaluationError
from eval.live.record import read_rows, this_machine
from eval.serving import first_token, measurement
from eval.serving.grid import Cell, server_flags, short_contexts, streams, summarise, unfit


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The lines of the client that were run."""
    return install_client(monkeypatch)


def run(tmp_path: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    out = tmp_path / "serving.jsonl"
    status = bench_serving.main(["--model-path", "m", "--contexts", "2k,32k", "--out", str(out), *arguments])
    return status, read_rows(out)


def kind(rows: list[dict[str, Any]], name: str, task: str = "serving") -> list[dict[str, Any]]:
    return [row for row in rows if row["kind"] == name and row.get("task", task) == task]


def test_the_grid_on_two_servers(commands: list[list[str]], tmp_path: Path) -> None:
    status, rows = run(tmp_path, "--batch", "1,4", "--prefix", "1k", "--hits", "3", "--server-args", "--page-size 16")
    assert status == 0
    assert [row["arm"] for row in rows if row["kind"] == "server"] == ["sparse", "dense"]
    assert [server.closed for server in FakeServer.started] == [True, True]
    assert rows[0].items() >= this_machine().items()
    assert rows[1]["command"].startswith("python --context-length 33152 --max-total-tokens 132608 ")
    items = kind(rows, "item")
    assert len(items) == 8 and len(commands) == 8
    assert [row["density"] for row in items] == [None, None, 0.1, 0.1, *[None] * 4]
    assert [row["dense_rows"] for row in items[:4]] == [1.0, 1.0, 0.0, 0.0]
    cells = kind(rows, "summary")
    assert [row["id"] for row in cells] == ["sparse/1x2k", "sparse/4x2k", "sparse/1x32k", "sparse/4x32k"]
    for row in cells:
        assert row["decode_tpot"] == pytest.approx(0.002) and row["decode_tpot_ratio"] == pytest.approx(2.0)
        assert row["output_throughput_ratio"] == row["ttft_p99_ratio"] == pytest.approx(2.0)
    (short,) = kind(rows, "summary", "short_contexts")
    assert short["decode_tpot_ratio"] == pytest.approx(2.0) and set(short["ratios"]) == {"1x2k", "4x2k"}
    assert short["dense_rows"] == 1.0
    (hits,) = kind(rows, "summary", "prefix_hit")
    assert hits["ttft_over_dense"] == pytest.approx(0.5) and hits["recomputed"] == 0 and hits["hits"] == 3
    assert hits["pages_summarised"] > 0
    shown = report.any_table(tmp_path / "serving.jsonl")
    assert "| sparse/4x32k | 2.00 | 4.00 | 2.000 |" in shown and "| sparse/prefix_hit |" in shown


def test_what_is_asked_of_the_client(commands: list[list[str]], tmp_path: Path) -> None:
    run(tmp_path, "--batch", "2", "--prefix", "0", "--runs", "2", "--warmup", "0", "--seed", "7")
    first, second, *_ = commands
    assert first[:3] == ["python", "-m", "sglang.benchmark.serving"]
    found = [after(first, f"--{name}") for name in ("num-prompts", "max-concurrency", "seed", "warmup-requests")]
    assert found == ["2", "2", "7", "0"]
    assert "--flush-cache" in first and "--flush-cache" not in second
    assert [after(line, "--base-url") for line in commands] == ["http://sparse"] * 4 + ["http://dense"] * 4


def test_what_is_asked_of_the_servers(
    commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = [
        "--server",
        "dense=--page-size 1",
        "--server",
        "fp8=--kv-cache-dtype fp8_e4m3",
        "--sparse-config",
        '{"a": 1}',
    ]
    monkeypatch.setitem(FakeServer.step, "fp8", 0.003)
    monkeypatch.setitem(FakeServer.pool, "fp8", 10**6)
    _, rows = run(tmp_path, "--batch", "1,4", "--prefix", "0", "--both", "--server-args", "--page-size 16", *extra)
    sparse, dense, fp8 = FakeServer.started
    assert sparse.flags[-4:] == ["--sparse-method", "resa", "--sparse-config", '{"a": 1}']
    assert dense.flags[-4:] == ["--page-size", "16", "--page-size", "1"]
    assert fp8.flags[-2:] == ["--kv-cache-dtype", "fp8_e4m3"] and not fp8.sparse
    # With all at once they take turns.
    assert [after(line, "--base-url")[7:] for line in commands[:4]] == ["sparse", "dense", "fp8", "sparse"]
    assert [row["arm"] for row in kind(rows, "summary")].count("fp8") == 4


def test_a_prefill_method_beside_a_decode_method(commands: list[list[str]], tmp_path: Path) -> None:
    both = ["--sparse-prefill-method", "anchor", "--sparse-prefill-config", '{"theta": 9}']
    status, rows = run(tmp_path, "--batch", "1", *both)
    assert status == 0
    sparse, _ = FakeServer.started
    assert sparse.flags[-4:] == ["--sparse-prefill-method", "anchor", "--sparse-prefill-config", '{"theta": 9}']
    assert after(sparse.flags, "--sparse-method") == "resa"
    short, long = kind(rows, "summary")
    assert short["sparsity"] == 0 and long["sparsity"] == pytest.approx(0.89)
    assert not kind(rows, "item", "prefix_hit") and len(kind(rows, "item", "first_token")) == 2 * 2 * 5


def test_a_cell_that_does_not_fit_is_skipped(
    commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(FakeServer.pool, "dense", 40_000)
    status, rows = run(tmp_path, "--batch", "1,4", "--prefix", "0", "--runs", "2")
    assert status == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("eval.bench_serving")]
    assert line == "eval.bench_serving: dense 4x32k is left out: needs 132608 tokens of KV, the server has 40000"
    assert [row["cell"] for row in rows if row["kind"] == "skipped"] == ["4x32k"]
    assert [row["id"] for row in kind(rows, "summary")] == ["sparse/1x2k", "sparse/4x2k", "sparse/1x32k"]


def test_a_cell_that_fails_does_not_hide_the_others(
    commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measurement, "dense_rows", lambda counts: 0.5)
    status, rows = run(tmp_path, "--batch", "1", "--prefix", "0")
    assert status == 1
    message = "sparse 1x32k is left out: 50% of the rows were decoded dense, allowed are 10%: start the sparse server"
    assert message in capsys.readouterr().err
    assert [row["id"] for row in kind(rows, "summary")] == ["sparse/1x2k"]


def test_a_server_that_does_not_start_is_one_line(
    commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeServer, "dies", "sparse")
    status, _ = run(tmp_path, "--batch", "1")
    assert status == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("eval.bench_serving: the sparse server did not start: sglang_sparse: error: no such method")
    monkeypatch.setattr(FakeServer, "dies", "")
    status, _ = run(tmp_path, "--batch", "1", "--output-length", "255")
    assert status == 1 and "--output-length: got 255, allowed: at least 256" in capsys.readouterr().err


def test_nothing_sparse_is_refused_but_where_the_limits_say_dense() -> None:
    counts = dict.fromkeys(COUNTED, 0) | {"decode_rows": 256, "dense_fallback_rows": 256}
    for cell in (Cell(2048, 16), Cell(8192, 1)):
        measurement.require_sparse_cell(cell, counts, CONFIG)
    with pytest.raises(EvaluationError, match="2x8k: nothing ran sparse"):
        measurement.require_sparse_cell(Cell(8192, 2), counts, CONFIG)
    sparse = {**counts, "sparse_layer_rows": 9, "pages_attended": 1, "pages_held": 9, "dense_fallback_rows": 8}
    measurement.require_sparse_cell(Cell(8192, 2), sparse, {**CONFIG, "rectify_interval": 0})
    with pytest.raises(EvaluationError, match="rectified nothing"):
        measurement.require_sparse_cell(Cell(8192, 2), sparse, CONFIG)


def test_fewer_runs_are_no_median() -> None:
    row = {"context": 1024, "arm": "sparse", "ttft": 1.0, **dict.fromkeys(first_token.SERVED)}
    dense = {**row, "arm": "dense"}
    assert first_token.summarise([row] * 4 + [dense] * 5) == []
    (found,) = first_token.summarise([row] * 5 + [dense] * 6)
    assert found["sparsity"] is None and first_token.below_crossover([found]) == []


def test_pictures(commands: list[list[str]], tmp_path: Path) -> None:
    run(tmp_path, "--batch", "1", "--prefix", "0", "--sparse-prefill-method", "anchor")
    assert report.main([str(tmp_path / "serving.jsonl"), "--out", str(tmp_path / "drawn")]) == 0
    drawn = {path.name: path for path in (tmp_path / "drawn").iterdir()}
    assert "time per output token, ms" in drawn["serving.svg"].read_text()
    assert "time to first token, s" in drawn["serving-first-token.svg"].read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model-path", "m", "--cold-runs", "4"], "--cold-runs must be at least 5, got 4"),
        (["--model-path", "m", "--batch", "0"], "--batch: must be at least 1, got 0"),
        (["--model-path", "m", "--contexts", "4m"], "'4m' is no length"),
        (["--model-path", "m", "--server", "fp8"], "must be NAME=ARGS, got 'fp8'"),
        (["--model-path", "m", "--runs", "0"], "--runs: must be at least 1, got 0"),
        (["--model-path", "m", "--batch", ","], "--batch: got none, allowed: one or more"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([*arguments, "--out", "x"])
    assert message in capsys.readouterr().err


def test_flags_follow_from_the_grid() -> None:
    args = parse(["--model-path", "m", "--contexts", "4k,256k", "--batch", "1,4", "--out", "x", "--prefix", "0"])
    flags = server_flags(args)
    assert int(after(flags, "--context-length")) >= 256 * 1024 + 256
    tokens = int(after(flags, "--max-total-tokens"))
    assert tokens >= 4 * (256 * 1024 + 256) and tokens % 64 == 0
    assert unfit({"max_total_num_tokens": tokens}, Cell(256 * 1024, 4).tokens(256)) is None
    assert after(flags, "--cuda-graph-max-bs-decode") == "4"
    # One more than are asked: see `batch_flags`.
    assert after(flags, "--max-running-requests") == "5"
    assert "--sleep-on-idle" not in flags
    args = parse(["--model-path", "m", "--contexts", "4k", "--batch", "1", "--out", "x", "--prefix", "128k"])
    assert int(after(server_flags(args), "--max-total-tokens")) > 128 * 1024
    assert int(after(server_flags(args), "--context-length")) > 128 * 1024
    args.both = True
    assert "--sleep-on-idle" in server_flags(args)


def test_streams_of_the_client_are_ours() -> None:
    one, two = streams(result(64, 2, 0.5, output_lens=[257, 256]))
    # The first chunk of the first answer had two tokens.
    assert (one.chunks[0], one.chunks[-1].tokens) == (Chunk(1.0, 2), 257)
    assert two.chunks[:2] == [Chunk(2.0, 1), Chunk(2.5, 2)]
    with pytest.raises(EvaluationError, match="a request failed: gone"):
        streams(result(64, 1, 0.5, errors=["Traceback\ngone\n"]))
    with pytest.raises(EvaluationError, match="a request failed: no text came"):
        streams(result(64, 1, 0.5, ttfts=[0.0]))
    with pytest.raises(EvaluationError, match="an answer has 200 tokens, asked for were 256"):
        streams(result(64, 1, 0.5, output_lens=[200]))


def item(arm: str, run: int, tpot: float, context: int = 4096, **more: Any) -> dict[str, Any]:
    names = ("ttft_median", "ttft_p99", "output_throughput", "request_throughput", "tpot_median", "tpot_p99")
    times = dict.fromkeys((*names, "itl_median", "itl_p99", "decode_itl_p50", "decode_itl_p99"), tpot * (1 + run))
    place = {"arm": arm, "context": context, "batch": 1, "run": run, "decode_tpot": tpot}
    return {**place, **times, "density": None, "dense_rows": None, **more}


def test_of_several_runs_the_first_and_the_median_count() -> None:
    runs = [item("sparse", i, tpot) for i, tpot in enumerate((1.0, 3.0, 2.0))]
    dense = [item("dense", i, 4.0) for i in range(3)]
    (row,) = summarise([*runs, *dense])
    assert row["runs"] == 3 and row["decode_tpot_ratio"] == 2.0 and row["decode_tpot_range"] == (1.0, 3.0)
    assert row["ttft_median_ratio"] == 4.0 and row["output_throughput_ratio"] == 0.25
    assert summarise(runs) == [] and summarise(dense) == []
    runs = [item("sparse", i, tpot, dense_rows=1.0) for i, tpot in enumerate((1.0, 3.0, 2.0))]
    others = [item("sparse", 0, 5.0, 8192, dense_rows=1.0), item("dense", 0, 4.0, 8192)]
    # However it was decoded; no server need measure longer contexts for this.
    others += [item("sparse", 0, 2.0, 6144, dense_rows=0.0), item("dense", 0, 4.0, 6144)]
    others += [item("sparse", 0, 9.0, 16384, dense_rows=1.0), item("dense", 0, 4.0, 16384)]
    (short,) = short_contexts(summarise([*runs, *dense, *others]))
    assert short["decode_tpot_ratio"] == 0.8 and short["cell"] == "sparse/1x8k" and short["dense_rows"] == 1.0
    assert short["ratios"] == {"1x4k": 2.0, "1x8k": 0.8, "1x6k": 2.0}
    assert short_contexts([]) == []


def test_servers_that_took_turns_have_an_interval_of_their_ratio() -> None:
    def measured(runs: int, in_turn: bool) -> dict[str, Any]:
        # The machine slows down; the sparse server is 2 % faster all the same, but for one run.
        pace = [1 + i / 10 for i in range(runs)]
        dense = [item("dense", i, tpot, in_turn=in_turn) for i, tpot in enumerate(pace)]
        mine = [item("sparse", i, tpot * (1.2 if i == 3 else 0.98), in_turn=in_turn) for i, tpot in enumerate(pace)]
        (row,) = summarise([*dense, *mine])
        return row

    low, high = measured(9, True)["decode_tpot_ratio_interval"]
    assert 0.8 < low <= 1 / 0.98 <= high < 1.2
    assert measured(4, True)["decode_tpot_ratio_interval"] is None
    assert measured(9, False)["decode_tpot_ratio_interval"] is None
    (short,) = short_contexts([measured(9, True)])
    assert short["decode_tpot_ratio_interval"] == (low, high)
