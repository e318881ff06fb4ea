"""Dense peers of the decode benchmark: measured on servers that stand in, read from files, and in a table."""

import json
import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import openai_stub
import pytest
from decode_peer_files import FACTS, ROW, peer_file

from eval.lab import bench_decode
from eval.lab.servers import server_facts
from eval.lab.servers.decode import decode, memory
from eval.lab.servers.decode_peers import read_peers
from eval.live.counters import COUNTED, EvaluationError
from eval.live.record import PACKAGES, read_rows, versions

OWN = {"server": FACTS, "batch": 1, "context": 64}


class Handler(openai_stub.Handler):
    """Streams as many tokens as asked for, and counts as the arm should."""

    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.asked.append(body)
        if body.get("token_ids_logprob"):
            return self.answer({"error": "valid range is [0, 100)"}, 400)
        if not body.get("stream"):
            return self.answer({"meta_info": {"finish_reason": {"type": "length"}}})
        total = body["sampling_params"]["max_new_tokens"]
        server.count(body["sampling_params"]["custom_params"], total)
        self.send_response(200)
        self.end_headers()
        for tokens in range(1, total + 1):
            reason = {"type": "length"} if tokens == total else None
            meta = {"finish_reason": reason, "completion_tokens": tokens, "cached_tokens": server.cached}
            self.wfile.write(b"data: " + json.dumps({"meta_info": meta}).encode() + b"\n\n")
            # Several times as long as is asserted: a busy reader takes the first tokens late.
            time.sleep(0.02)
        self.close_connection = True


class Server(openai_stub.Server):
    """A server of SGLang, as far as it says."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.RequestHandlerClass = Handler
        state = {"sparse": {**dict.fromkeys(COUNTED, 0), "config": {}}} if sparse else {}
        self.info = {"version": "0.5.23", "device": "cpu", "page_size": 16, "max_total_num_tokens": 10_000, **FACTS}
        self.info |= {"disable_radix_cache": False, "internal_states": [state]}
        self.info["attention_backend"] = "fa3" if sparse else "flashinfer"
        self.cached = 64
        self.ignores_dense = False

    @property
    def state(self) -> dict[str, Any] | None:
        return self.info["internal_states"][0].get("sparse") if self.info else None

    def count(self, params: dict[str, Any], tokens: int) -> None:
        if self.state is None:
            return
        self.state["decode_rows"] += tokens
        if params.get("sparse") is False and not self.ignores_dense:
            self.state["dense_fallback_rows"] += tokens
            return
        self.state["sparse_layer_rows"] += tokens
        self.state["pages_attended"] += tokens
        self.state["pages_held"] += 10 * tokens
        self.state["rectified_tokens"] += tokens if params.get("rectify_interval") else 0


@pytest.fixture(params=[False])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    found = Server(sparse=request.param)
    Thread(target=ThreadingHTTPServer.serve_forever, args=(found, 0.02), daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


def asked_of(server: Server, out: Path, *more: str) -> int:
    shape = ["--shape", "x", "--batch", "1", "--context", "64", "--tokens", "64", "--interval", "1", "--rounds", "1"]
    return bench_decode.main(["--base-url", server.url, "--out", str(out), *shape, *more])


@pytest.mark.parametrize("server", [False, True], indirect=True, ids=["stock", "sparse"])
def test_dense_alone(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_facts, "listener", lambda port: ["/usr/bin/python", "-m", "sglang.launch_server"])
    out = tmp_path / "dense.jsonl"
    assert server.info is not None
    if server.state is not None:
        server.state.update({"device": "NVIDIA H200", "versions": {"torch": "1"}})
    server.info |= {"decode_attention_backend": "flashinfer", "attention_backend": None}
    assert asked_of(server, out, "--dense-only") == 0
    header, *rows = read_rows(out)
    assert header["command"] == "eval.lab.bench_decode" and header["dense_only"] is True and header["short"] == 0
    assert header["server"]["decode_backend"] == "flashinfer"
    runs_on = {name: header[name] for name in ("device", "versions", "told_by", "server_command")}
    told = {"device": "NVIDIA H200", "versions": {"torch": "1"}, "told_by": "the server"}
    told = told if server.state else {"device": "cpu", "versions": versions(PACKAGES), "told_by": "this machine"}
    assert runs_on == told | {"server_command": "python -m sglang.launch_server"}
    streamed = [body for body in server.asked if body.get("stream")]
    assert [len(body["input_ids"]) for body in streamed] == [64, 64]
    sparse = server.state is not None
    assert streamed[-1]["sampling_params"]["custom_params"] == ({"sparse": False} if sparse else {})
    (measured,) = [row for row in rows if row["kind"] == "round"]
    assert measured["counters"].get("dense_fallback_rows") == (64 if sparse else None)
    (row,) = [row for row in rows if row["kind"] == "summary"]
    assert row["arm"] == "dense" and row["dense"] == "flashinfer" and row["dense_ratio"] == 1 and row["tpot"] > 0.004
    # It is a peer of the server that it was measured on.
    (peer,) = read_peers([out], OWN)
    assert (peer.backend, peer.file, peer.rounds) == ("flashinfer", "dense.jsonl", 1)
    assert peer.tpot == row["tpot"] and list(peer.tpot_range) == row["tpot_range"]


@pytest.mark.parametrize("server", [True], indirect=True)
def test_counters_must_show_the_dense_arm(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.ignores_dense = True
    assert asked_of(server, tmp_path / "x.jsonl", "--dense-only") == 1
    assert "attended to 4 of 40 pages although the requests said `sparse: false`" in capsys.readouterr().err


def test_what_is_refused_of_a_stock_server(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "x.jsonl"
    assert asked_of(server, out, "--short", "0") == 1
    assert "does not run a sparse method" in capsys.readouterr().err
    server.cached = 31
    assert asked_of(server, out, "--dense-only") == 1
    assert "dense: of prompts of 64 tokens [31] came from the cache" in capsys.readouterr().err
    assert not any(row["kind"] == "summary" for row in read_rows(out))
    assert asked_of(server, out, "--dense-only", "--context", "9713") == 1
    assert "a batch of 1 x 9713 needs 10001 tokens of KV, the server has 10000" in capsys.readouterr().err
    server.info = None
    assert asked_of(server, out, "--dense-only") == 1
    assert "is no SGLang server (no /server_info)" in capsys.readouterr().err


@pytest.mark.parametrize("server", [True], indirect=True)
def test_ratios_are_against_the_strongest(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "all.jsonl"
    slow = peer_file(tmp_path / "slow.jsonl", {**ROW, "tpot": 1e9}, server={**FACTS, "attention_backend": "triton"})
    fast = peer_file(tmp_path / "fast.jsonl", {**ROW, "tpot": 1e-9})
    assert asked_of(server, out, "--short", "16", "--peer", str(slow), "--peer", str(fast)) == 0
    header, *rows = read_rows(out)
    assert header["dense_only"] is False and header["peers"] == ["slow.jsonl", "fast.jsonl"]
    summary = [row for row in rows if row["kind"] == "summary"]
    assert [row["arm"] for row in summary] == ["dense", "peer", "peer", "dense_short", "sparse", "rectified"]
    assert [row["backend"] for row in summary if row["arm"] == "peer"] == ["triton", "flashinfer"]
    assert {row.get("dense") for row in summary} == {"flashinfer (peer)", None}
    assert summary[-1]["dense_ratio"] == pytest.approx(1e-9 / summary[-1]["tpot"])
    assert asked_of(server, out, "--short", "16", "--peer", str(slow)) == 0
    assert read_rows(out)[-1]["dense"] == "fa3"
    assert asked_of(server, out, "--peer", str(peer_file(tmp_path / "other.jsonl", ROW, batch=2)), "--short", "0") == 1
    assert read_rows(out)[-1]["dense"] == "fa3", "a peer is refused before the file is written anew"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"command": "eval.niah"}, "is no file of eval.lab.bench_decode --dense-only"),
        ({"dense_only": False}, "is no file of eval.lab.bench_decode --dense-only"),
        ({"batch": 6}, "is of something else: batch is 6, wanted 1"),
        ({"context": 32}, "is of something else: context is 32, wanted 64"),
        ({"server": {**FACTS, "model_path": "x/qwen3-1.7b"}}, "model is qwen3-1.7b, wanted qwen3-8b"),
        ({"server": {**FACTS, "kv_cache_dtype": "fp8_e4m3"}}, "kv_cache_dtype is fp8_e4m3, wanted auto"),
        ({"device": "NVIDIA H100"}, "device is NVIDIA H100, wanted NVIDIA H200"),
    ],
)
def test_other_peers_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = peer_file(tmp_path / "peer.jsonl", ROW, **changes)
    with pytest.raises(EvaluationError, match=message):
        read_peers([path], {**OWN, "device": "NVIDIA H200"})


def test_files_that_are_no_peers(tmp_path: Path) -> None:
    unfinished = peer_file(tmp_path / "unfinished.jsonl", {**ROW, "kind": "round"})
    with pytest.raises(EvaluationError, match=r"unfinished\.jsonl has no summary: its run was refused or interrupted"):
        read_peers([unfinished], OWN)
    with pytest.raises(EvaluationError, match=r"cannot read .*none\.jsonl"):
        read_peers([tmp_path / "none.jsonl"], OWN)
    (tmp_path / "rows.jsonl").write_text('{"note": 1}\n')
    with pytest.raises(EvaluationError, match=r"is no file of eval\.lab\.bench_decode --dense-only"):
        read_peers([tmp_path / "rows.jsonl"], OWN)
    # The model goes by the name of its folder, wherever that is.
    moved = peer_file(tmp_path / "moved.jsonl", ROW, server={**FACTS, "model_path": "/elsewhere/qwen3-8b/"})
    assert read_peers([moved], {**OWN, "device": "NVIDIA H200"})[0].backend == "unknown", "nor does it say its device"


def test_the_table_says_whose_dense_decode_it_is(tmp_path: Path) -> None:
    old = {"kind": "header", "command": "eval.lab.bench_decode", "server": {"attention_backend": "fa3"}}
    row = {"kind": "summary", "shape": "1x1", "tpot": 0.04, "tpot_range": [0.03, 0.05], "dense_ratio": 1.0}
    rectified = {**row, "arm": "rectified", "tpot": 0.01, "dense_ratio": 4.0, "density": 0.1}
    first = [old, {**row, "arm": "dense"}, {**row, "arm": "dense_short"}, rectified]
    named = {"dense": "flashinfer (peer)", "shape": "2x1"}
    second = [
        {**old, "server": {"attention_backend": None, "decode_backend": "triton"}},
        {**row, **named, "arm": "dense", "dense_ratio": 0.75},
        {**row, **named, "arm": "peer", "backend": "flashinfer", "tpot": 0.03},
        {**rectified, **named, "dense_ratio": 3.0},
    ]
    for name, rows in (("a", first), ("b", second)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert decode(tmp_path / "a", tmp_path / "b").splitlines() == [
        "| shape | decode | TPOT, ms | of the rounds | times faster | than dense | read |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| 1x1 | dense, fa3 | 40.00 | 30.00 … 50.00 | 1.00 | fa3 |  |",
        "| 1x1 | sparse, rectified | 10.00 | 30.00 … 50.00 | 4.00 | fa3 | 10.0 % |",
        "| 2x1 | dense, triton | 40.00 | 30.00 … 50.00 | 0.75 | flashinfer (peer) |  |",
        "| 2x1 | dense, flashinfer | 30.00 | 30.00 … 50.00 | 1.00 | flashinfer (peer) |  |",
        "| 2x1 | sparse, rectified | 10.00 | 30.00 … 50.00 | 3.00 | flashinfer (peer) | 10.0 % |",
    ]


def test_a_cache_of_another_type_stands_beside_and_is_no_peer(tmp_path: Path) -> None:
    server = {"attention_backend": "fa3", "model_path": "x/qwen3-8b"}
    row = {"kind": "summary", "shape": "1x64", "tpot": 0.04, "tpot_range": [0.04, 0.04], "dense_ratio": 1.0}
    header = {"kind": "header", "command": "eval.lab.bench_decode", "server": server, "batch": 1, "context": 64}
    sparse = {**row, "arm": "rectified", "tpot": 0.01, "dense_ratio": 4.0, "dense": "fa3"}
    rows = (header, {**row, "arm": "dense", "dense": "fa3"}, sparse)
    (tmp_path / "own").write_text("".join(json.dumps(row) + "\n" for row in rows))
    facts = {**FACTS, "decode_backend": "flashinfer", "kv_cache_dtype": "fp8_e4m3"}
    beside = [peer_file(tmp_path / "fp8", {**ROW, "tpot": 0.025}, server=facts)]
    # Of another context, and of another model.
    beside.append(peer_file(tmp_path / "long", ROW, server=facts, context=65))
    beside.append(peer_file(tmp_path / "other", ROW, server={**facts, "model_path": "qwen3-1.7b"}))
    assert decode(tmp_path / "own", beside=beside).splitlines()[2:] == [
        "| 1x64 | dense, fa3 | 40.00 | 40.00 … 40.00 | 1.00 | fa3 |",
        "| 1x64 | sparse, rectified | 10.00 | 40.00 … 40.00 | 4.00 | fa3 |",
        "| 1x64 | dense, flashinfer, fp8_e4m3 KV | 25.00 | 20.00 … 40.00 | 1.60 | fa3 |",
    ]


def test_what_servers_said_of_their_memory(tmp_path: Path) -> None:
    held = {"aux_bytes_accounted": 2**30, "aux_bytes_measured": 1.01 * 2**30, "allocator": {"peak_bytes": 200}}
    arms = {"dense": (10.0, 12.0, 11.0), "sparse": (11.0, 11.0, 9.0), "rectified": (20.0, 20.0, 21.0)}
    rounds = [
        {"kind": "round", "arm": arm, "allocations_per_step": made, "peak_bytes": 202}
        for arm, each in arms.items()
        for made in each
    ]
    header = {"kind": "header", "shape": "a", "revision": "r", "server": {"sparse": held}}
    new, old = tmp_path / "new.jsonl", tmp_path / "old.jsonl"
    for path, rows in ((new, rounds), (old, [{**row, "peak_bytes": None} for row in rounds])):
        lines = [header, *rows, {"kind": "summary"}]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    *_, line = memory(new, old).splitlines()
    assert line == "| a | 1.00 | 1.000% | 1.000% | 11.0 | 11.0 | 20.0 | r |"
