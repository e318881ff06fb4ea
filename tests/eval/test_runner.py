"""The runner against a small OpenAI-compatible server that fails on demand; real servers are in tests/server."""

import argparse
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from eval import client, runner
from eval.counters import COUNTED, EvaluationError
from eval.record import read_rows
from eval.suite import Case, Prompt, Suite

TOKENIZER = str(Path(__file__).parent.parent.parent / "eval" / "models" / "tiny-gqa")


class Sums(Suite):
    """Asks for the last token; even cases come out right if the server answers it."""

    command: ClassVar[str] = "eval.sums"

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--n", type=int, default=4)
        parser.add_argument("--size", type=int, default=20)

    def cases(self) -> list[Case]:
        return [Case("last", self.args.size, None, i) for i in range(self.args.n)]

    def build(self, case: Case) -> Prompt:
        number = case.rng(self.args.seed).randrange(1000, 2000)
        return Prompt([*[7] * (self.args.size - 5), number], [str(number)], 4)

    def score(self, case: Case, prompt: Prompt, output: str) -> dict[str, float]:
        return {"score": float(output == prompt.answers[0]), "digits": float(output.isdigit())}


class Server(ThreadingHTTPServer):
    """Answers the last token of a prompt, plus `error`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []
        self.busy = 0
        self.dies_after = 10**9
        self.error = 0
        self.info: dict[str, Any] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, body: Any, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.answer({"data": [{"id": "tiny", "max_model_len": 100}]})
        elif self.path == "/server_info" and self.server.info:
            self.answer(self.server.info)
        else:
            self.answer({"error": "no such page"}, 404)

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        if len(server.asked) >= server.dies_after:
            self.close_connection = True
            return
        if server.busy:
            server.busy -= 1
            self.answer({"error": "busy"}, 503)
            return
        server.asked.append(request)
        if server.info:
            state = server.info["internal_states"][0]["sparse"]
            state["decode_rows"] += 1
        prompt = request["prompt"]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 1}
        text = str(prompt[-1] + server.error)
        self.answer({"choices": [{"text": text, "finish_reason": "stop"}], "usage": usage})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    found = Server()
    threading.Thread(target=found.serve_forever, daemon=True).start()
    original = client.post
    monkeypatch.setattr("eval.completions.post", lambda c, p, r: original(c, p, r, pause=0.01))
    yield found
    found.shutdown()


def command(server: Server, out: Path, *more: str) -> list[str]:
    return ["--base-url", server.url, "--tokenizer", TOKENIZER, "--out", str(out), "--revision", "r", *more]


def test_any_openai_server_is_scored(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.busy = 2
    assert runner.main(Sums, command(server, tmp_path / "run.jsonl", "--custom-params", '{"sparse": false}')) == 0
    rows = read_rows(tmp_path / "run.jsonl")
    assert [row["kind"] for row in rows] == ["header", *["item"] * 4, "summary"]
    summary = rows[-1]
    assert summary["score"] == summary["digits"] == 1.0 and summary["n"] == 4 and summary["density"] is None
    assert all(request["custom_params"] == {"sparse": False} for request in server.asked)
    assert server.asked[0]["model"] == "tiny" and server.asked[0]["temperature"] == 0.0
    item = rows[1]
    assert item["prompt_tokens"] == 16 and item["completion_tokens"] == 1 and item["output"] in item["answers"]
    assert "1.0" in capsys.readouterr().out


def test_two_servers_are_compared_question_by_question(server: Server, tmp_path: Path) -> None:
    other = Server()
    threading.Thread(target=other.serve_forever, daemon=True).start()
    server.error = 1
    more = ("--compare-url", other.url, "--expect", "any", "--n", "50")
    assert runner.main(Sums, command(server, tmp_path / "run.jsonl", *more)) == 0
    other.shutdown()
    base, compare = [row for row in read_rows(tmp_path / "run.jsonl") if row["kind"] == "summary"]
    assert (base["arm"], base["score"], base["verdict"], base["lost"]) == ("base", 0.0, "worse", 50)
    assert (compare["arm"], compare["score"]) == ("compare", 1.0) and "verdict" not in compare


def test_a_server_that_dies_loses_nothing(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run.jsonl"
    server.dies_after = 3
    assert runner.main(Sums, command(server, out, "--n", "8", "--concurrency", "1")) == 1
    assert "the same command goes on with it" in capsys.readouterr().err
    kept = [row["id"] for row in read_rows(out) if row["kind"] == "item"]
    assert len(kept) == 3
    out.write_text(out.read_text()[:-30])
    server.dies_after = 10**9
    asked = len(server.asked)
    assert runner.main(Sums, command(server, out, "--n", "8", "--concurrency", "1")) == 0
    assert len(server.asked) - asked == 6
    assert read_rows(out)[-1]["n"] == 8
    # A finished run asks nothing again.
    assert runner.main(Sums, command(server, out, "--n", "8")) == 0 and len(server.asked) == asked + 6
    assert [row["kind"] for row in read_rows(out)].count("summary") == 1


def test_prompts_that_do_not_fit_fail_alone_and_void_the_run(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runner.main(Sums, command(server, tmp_path / "a.jsonl", "--size", "101")) == 1
    assert "a length of 101 tokens is wanted, the base server's context is 100" in capsys.readouterr().err
    assert not (tmp_path / "a.jsonl").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--model", "huge"), "--model huge: http.* has tiny"),
        (("--tokenizer", "/nowhere"), "no tokenizer at '/nowhere'"),
        (("--expect", "resa"), "the base server runs no sparse method, expected resa"),
        (("--base-url", "http://127.0.0.1:9"), "no server answers at http://127.0.0.1:9"),
    ],
)
def test_errors_are_one_line(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], message: str
) -> None:
    assert runner.main(Sums, [*command(server, tmp_path / "run.jsonl"), *more]) == 1
    error = capsys.readouterr().err
    assert re.search(message, error) and "Traceback" not in error


def test_a_method_must_be_confirmed_and_must_run(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"method": "resa", "config": {}, **dict.fromkeys(COUNTED, 0)}
    server.info = {"version": "1", "internal_states": [{"sparse": state}]}
    assert runner.main(Sums, command(server, tmp_path / "a.jsonl", "--expect", "dsa")) == 1
    assert "the base server runs resa, expected dsa" in capsys.readouterr().err
    assert runner.main(Sums, command(server, tmp_path / "b.jsonl")) == 1
    assert "nothing of it was decoded sparse" in capsys.readouterr().err
    # Nor is it proven by asking again.
    assert runner.main(Sums, command(server, tmp_path / "b.jsonl")) == 1
    assert runner.main(Sums, command(server, tmp_path / "c.jsonl", "--expect", "any")) == 0
    rows = read_rows(tmp_path / "c.jsonl")
    assert [row["counters"]["decode_rows"] for row in rows if row["kind"] == "counters"] == [4]


def test_a_compared_server_needs_a_method(server: Server) -> None:
    with pytest.raises(EvaluationError, match="runs no sparse method, expected a sparse method"):
        runner.require_method("auto", {}, compared=True)
    runner.require_method("auto", {}, compared=False)
    runner.require_method("dense", {"sparse": None}, compared=True)
