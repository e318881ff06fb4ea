"""Options of single requests from the client's side: types, what is posted, and what is not imported."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sglang_sparse import frontend


class Recorder(ThreadingHTTPServer):
    """Answers like a server of SGLang and remembers what was posted to ``/generate``."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.posted: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Recorder

    def do_GET(self) -> None:
        assert self.path == "/get_model_info"
        self._answer(json.dumps({"model_path": "some/model"}))

    def do_POST(self) -> None:
        assert self.path == "/generate"
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.posted.append(request)
        self.server.keys.add(self.headers["Authorization"])
        answer = json.dumps({"text": " four", "meta_info": {"prompt_tokens": 3}})
        self._answer(f"data: {answer}\n\ndata: [DONE]\n\n" if request.get("stream") else answer)

    def _answer(self, body: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with Recorder() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_imports_neither_torch_nor_sglang() -> None:
    code = "import sys, sglang_sparse.frontend; print(*sorted({'torch', 'sglang', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_only_what_is_given_is_sent() -> None:
    assert frontend.options() == {}
    assert frontend.options(active_ratio=0.05) == {"active_ratio": 0.05}
    everything = frontend.options(active_ratio=1, rectify_interval=0, sparse=False)
    assert everything == {"active_ratio": 1, "rectify_interval": 0, "sparse": False}


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("active_ratio", "0.1", "a number"),
        ("active_ratio", True, "a number"),
        ("rectify_interval", 32.0, "an integer"),
        ("rectify_interval", False, "an integer"),
        ("sparse", 0, "True or False"),
        ("sparse", "no", "True or False"),
    ],
)
def test_wrong_types_name_the_field(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError) as caught:
        frontend.options(**{field: value})
    assert str(caught.value) == f"{field}: got {value!r}, allowed: {allowed}"


def test_a_wrong_type_is_refused_before_the_server_is_asked() -> None:
    with pytest.raises(ValueError, match="active_ratio"):
        frontend.sparse_endpoint("http://127.0.0.1:1", active_ratio="a tenth")  # pyright: ignore[reportArgumentType]


def program() -> Any:
    import sglang as sgl

    @sgl.function
    def answer(s: Any, question: str) -> None:
        s += f"Q: {question} A:"
        s += sgl.gen("answer", max_tokens=7, temperature=0.25, stop="\n")
        s += sgl.gen("number", dtype=int)

    return answer


def test_a_program_posts_the_options(recorder: Recorder) -> None:
    endpoint = frontend.sparse_endpoint(recorder.url, active_ratio=0.05, rectify_interval=16, api_key="secret")
    state = program().run(question="2 + 2?", backend=endpoint)
    assert state["answer"] == " four" and state["number"] == " four"
    first, second = [request["sampling_params"] for request in recorder.posted]
    assert first["custom_params"] == second["custom_params"] == {"active_ratio": 0.05, "rectify_interval": 16}
    assert (first["max_new_tokens"], first["temperature"], first["stop"]) == (7, 0.25, "\n")
    assert second["regex"] and second["max_new_tokens"] == 128
    assert recorder.keys == {"Bearer secret"}


def test_streams_batches_and_forks_do_too(recorder: Recorder) -> None:
    import sglang as sgl

    endpoint = frontend.sparse_endpoint(recorder.url, sparse=False)
    streamed = program().run(question="2 + 2?", backend=endpoint, stream=True)
    assert "".join(streamed.text_iter("answer")) == " four"
    streamed.sync()
    for state in program().run_batch([{"question": "a"}, {"question": "b"}], backend=endpoint):
        state.sync()

    @sgl.function
    def forking(s: Any) -> None:
        for branch in s.fork(2):
            branch += sgl.gen("answer")
            assert branch["answer"]

    forking.run(backend=endpoint)
    assert [request["sampling_params"]["custom_params"] for request in recorder.posted] == [{"sparse": False}] * 8


def test_two_endpoints_and_a_stock_one_do_not_mix(recorder: Recorder) -> None:
    import sglang as sgl

    endpoints = [
        frontend.sparse_endpoint(recorder.url, active_ratio=0.05),
        frontend.sparse_endpoint(recorder.url, active_ratio=0.5),
        sgl.RuntimeEndpoint(recorder.url),
    ]
    for endpoint in endpoints:
        program().run(question="2 + 2?", backend=endpoint).sync()
    posted = [request["sampling_params"].get("custom_params") for request in recorder.posted[::2]]
    assert posted == [{"active_ratio": 0.05}, {"active_ratio": 0.5}, None]
