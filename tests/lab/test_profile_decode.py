"""The command that profiles a decode step: its orders to a server that stands in, its files, and what it refuses."""

import asyncio
import gzip
import json
import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import httpx
import openai_stub
import pytest
from profile_traces import event, replays, with_passes, write

from eval.lab import documents, profile_decode
from eval.lab.servers import server_facts
from eval.live.counters import COUNTED, EvaluationError
from eval.live.record import read_rows

CPU_ONLY = {"traceEvents": [event("aten::mm", 0, 1, 1, cat="cpu_op")]}
NO_GRAPH = {"traceEvents": [event("mm", i, 1, i) for i in range(20)]}


# Named, because a compressed file holds the time at which it was made.
@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(gzip.compress(b'{"traceEvents": []}'), "holds no GPU kernels", id="empty"),
        pytest.param(gzip.compress(json.dumps(CPU_ONLY).encode()), "no GPU kern", id="CPU alone"),
        pytest.param(gzip.compress(b'{"traceEvents": ['), "no whole trace", id="cut JSON"),
        pytest.param(gzip.compress(b"{}" * 1000)[:20], "no whole trace", id="cut file"),
        pytest.param(b"nothing", "no whole trace", id="no gzip"),
        pytest.param(gzip.compress(json.dumps(NO_GRAPH).encode()), "CUDA graph", id="no graph"),
    ],
)
def test_bad_traces(content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.trace.json.gz").write_bytes(content)
    assert profile_decode.main(["--from", str(tmp_path / "x.trace.json.gz")]) == 1
    shown = capsys.readouterr()
    assert message in shown.err and shown.err.count("\n") == 1 and not shown.out


def test_other_files_to_print_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.jsonl").write_text('{"kind": "header", "command": "eval.niah"}\n{"kind": "summary"}\n')
    for name, message in (("x.jsonl", "no file of eval.lab.profile_decode"), ("none.json.gz", "No such file")):
        assert profile_decode.main(["--from", str(tmp_path / name)]) == 1
        assert message in capsys.readouterr().err


class Handler(openai_stub.Handler):
    """Streams as many tokens as asked for, to both requests of a batch at once as a server's steps do.

    Writes its trace after the steps that it has, or when told to stop.
    """

    def do_GET(self) -> None:
        if self.path == "/v1/models" or self.server.info is not None:
            return super().do_GET()
        return self.answer({"error": "no such page"}, 404)

    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        server.asked.append({"path": self.path, **body})
        if self.path == "/start_profile":
            if server.refusal:
                return self.answer({"error": "what?"}, server.refusal)
            server.order = body
            if body["num_steps"] < server.replays:
                server.write_trace()
        elif self.path == "/stop_profile":
            if server.order is None:
                return self.answer({"error": "Profiling is not in progress"}, 500)
            server.write_trace()
        elif body.get("token_ids_logprob"):
            return self.answer({"error": "valid range is [0, 100)"}, 400)
        elif body.get("stream"):
            return self.stream(body["sampling_params"])
        return self.answer({"meta_info": {"finish_reason": {"type": "length"}}})

    def stream(self, sampling: dict[str, Any]) -> None:
        server = self.server
        assert isinstance(server, Server)
        state = (server.info or {})["internal_states"][0].get("sparse")
        total = sampling["max_new_tokens"]
        if state:
            state["rectified_tokens"] += total * bool(sampling["custom_params"].get("rectify_interval"))
            state["sparse_layer_rows"] += total
            state["pages_attended"] += total
            state["pages_held"] += 10 * total
        self.send_response(200)
        self.end_headers()
        for tokens in range(1, total + 1):
            reason = {"type": "length"} if tokens == total else None
            meta = {"finish_reason": reason, "completion_tokens": tokens, "cached_tokens": 64}
            server.step.wait()
            self.wfile.write(b"data: " + json.dumps({"meta_info": meta}).encode() + b"\n\n")
            time.sleep(0.005)
        self.close_connection = True


class Server(openai_stub.Server):
    """A CUDA server, as far as it says."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.RequestHandlerClass = Handler
        self.info = {"version": "0.5.23", "device": "cuda", "page_size": 16, "max_total_num_tokens": 10_000}
        self.info["disable_radix_cache"] = False
        self.info["internal_states"] = [{"sparse": dict.fromkeys(COUNTED, 0)} if sparse else {}]
        self.step = Barrier(2, timeout=60)
        self.order: dict[str, Any] | None = None
        self.refusal = 0
        self.replays = 30
        self.elsewhere = False
        self.trace: list[dict[str, Any]] = []

    def write_trace(self) -> None:
        order, self.order = self.order, None
        if order is not None and not self.elsewhere:
            name = f"{order['profile_prefix']}-{order['profile_id']}-TP-0.trace.json.gz"
            write(Path(order["output_dir"]) / name, self.trace or replays(self.replays))


@pytest.fixture(params=[False])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    found = Server(sparse=request.param)
    Thread(target=ThreadingHTTPServer.serve_forever, args=(found, 0.02), daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


def asked_of(server: Server, out: Path, *more: str) -> int:
    shape = ["--batch", "2", "--context", "64", "--tokens", "120", "--steps", "8"]
    return profile_decode.main(["--base-url", server.url, "--out", str(out), *shape, *more])


@pytest.mark.parametrize("server", [False, True], indirect=True, ids=["stock", "sparse"])
def test_profile_of_a_server(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_facts, "listener", lambda port: ["python", "-m", "sglang.launch_server"])
    monkeypatch.setattr(server_facts, "gpus", lambda: "NVIDIA L4")
    sparse = server.info is not None and "sparse" in server.info["internal_states"][0]
    if server.info and sparse:
        server.info["internal_states"][0]["sparse"] |= {"device": "NVIDIA H200", "versions": {"torch": "1"}}
    out = tmp_path / "after.jsonl"
    assert asked_of(server, out, "--label", "x", *(["--arm", "sparse"] if sparse else [])) == 0
    printed = capsys.readouterr().out.strip()
    header, *rows = read_rows(out)
    assert header["command"] == "eval.lab.profile_decode" and header["arguments"]["context"] == 64
    assert header["server"]["version"] == "0.5.23" and header["arguments"]["label"] == "x"
    told = ("NVIDIA H200", "the server") if sparse else ("NVIDIA L4", "this machine")
    assert (header["device"], header["told_by"]) == told and "torch" in header["versions"]
    assert header["server_command"] == "python -m sglang.launch_server"
    step = rows[-1]
    assert step["part"] == "step" and step["us"] == 150 and step["steps"] == 8 and step["tpot_us"] > 1000
    assert step.get("density") == (0.1 if sparse else None) and (tmp_path / step["trace"]).is_file()
    order = next(body for body in server.asked if body["path"] == "/start_profile")
    assert order["num_steps"] == 12 and order["activities"] == ["GPU"] and order["output_dir"] == str(tmp_path)
    streams = [body for body in server.asked if body.get("stream")]
    assert len(streams) == 4 and streams[0]["sampling_params"]["custom_params"] == (
        {"rectify_interval": 0} if sparse else {}
    )
    # The same from the rows, from the report and from the trace.
    assert profile_decode.main(["--from", str(out)]) == 0 and capsys.readouterr().out.strip() == printed
    assert documents.main([str(out)]) == 0 and printed in capsys.readouterr().out
    assert profile_decode.main(["--from", str(tmp_path / step["trace"]), "--steps", "8"]) == 0
    assert capsys.readouterr().out.strip() == printed


@pytest.mark.parametrize("server", [True], indirect=True)
@pytest.mark.parametrize("at_hand", [True, False])
def test_passes_of_a_server(server: Server, at_hand: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = {"num_attention_heads": 8, "hidden_size": 256, "head_dim": 64, "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert server.info is not None
    server.info["model_path"] = str(tmp_path) if at_hand else "some/model"
    server.trace, out = with_passes(), tmp_path / "pass.jsonl"
    assert asked_of(server, out, "--arm", "rectified", "--interval", "20", "--steps", "2") == 0
    header, *rows = read_rows(out)
    assert header["arguments"]["interval"] == 20 and header["arguments"]["steps"] == 2
    found = {row["part"]: row for row in rows if row["kind"] == "summary"}
    # Four operations for each of two times 20 queries, about 124 keys and 512 dimensions in four layers, in 300 us.
    tflops = 4 * 40 * 124 * 512 * 4 / 300 / 1e6
    assert found["attention"].get("tflops") == (pytest.approx(tflops) if at_hand else None)
    assert found["step"]["us"] == 370 and found["step"]["steps"] == 2
    assert ("| attention (0 TFLOP/s) | 300.0 |" in capsys.readouterr().out) == at_hand
    orders = [body for body in server.asked if body["path"] == "/start_profile"]
    assert [order["num_steps"] for order in orders] == [44]
    streams = [body["sampling_params"]["custom_params"] for body in server.asked if body.get("stream")]
    assert streams == [{"rectify_interval": 20}] * 4


def test_profiler_is_stopped_after_too_few_steps(server: Server, tmp_path: Path) -> None:
    assert asked_of(server, tmp_path / "x.jsonl", "--steps", "26") == 0
    assert [body["path"] for body in server.asked].count("/stop_profile") == 1


def test_too_few_steps(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.replays = 4
    assert asked_of(server, tmp_path / "x.jsonl") == 1
    assert "holds 3 whole decode steps that are alike, wanted 8" in capsys.readouterr().err


def test_no_trace(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.elsewhere = True
    assert asked_of(server, tmp_path / "x.jsonl") == 1
    assert "the server writes it on its own machine" in capsys.readouterr().err


def test_servers_that_do_not_profile(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.refusal = 404
    assert asked_of(server, tmp_path / "x.jsonl") == 1
    assert "the server does not profile: /start_profile answers 404" in capsys.readouterr().err
    assert asked_of(server, tmp_path / "x.jsonl", "--arm", "sparse") == 1
    assert "runs no sparse method: it has --arm dense alone" in capsys.readouterr().err
    assert server.info is not None
    server.info["device"] = "cpu"
    assert asked_of(server, tmp_path / "x.jsonl") == 1
    assert "runs on cpu: only CUDA servers" in capsys.readouterr().err
    server.info = None
    assert asked_of(server, tmp_path / "x.jsonl") == 1
    assert "is no SGLang server" in capsys.readouterr().err
    server.shutdown()
    server.server_close()
    assert asked_of(server, tmp_path / "x.jsonl") == 1
    shown = capsys.readouterr().err
    assert "no server answers at" in shown and shown.count("\n") == 1


def test_a_refused_request_ends_the_profile() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(400, text="too long"))

    async def ask() -> None:
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            await profile_decode.stream(client, {}, asyncio.Event().set)

    with pytest.raises(EvaluationError, match="refused a request: 400"):
        asyncio.run(ask())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "one of the arguments --base-url --from is required"),
        (["--base-url", "http://x"], "--base-url needs --out"),
        (["--from", "x", "--batch", "0"], "--batch must be at least 1, got 0"),
        (["--from", "x", "--tokens", "79"], "--tokens must be at least 80 for 20 traced steps, got 79"),
        (["--from", "x", "--arm", "rectified", "--tokens", "135"], "must be at least 136 for 68 traced steps, got 135"),
        (["--from", "x", "--active-ratio", ".1"], "--active-ratio is of --arm sparse and rectified"),
        (["--from", "x", "--interval", "0"], "--interval must be at least 1, got 0"),
    ],
)
def test_command_line(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        profile_decode.parse(given)
    assert message in capsys.readouterr().err
