"""Options of single requests from the client's side: types, what is posted, and what is not imported."""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from refusals import refused

from sglang_sparse import frontend
from sglang_sparse.config.request_options import FORCED_TOKENS, LOSSLESS, SPARSE
from sglang_sparse.methods import registry

PAGE = Path(__file__).parents[2] / "sglang_sparse" / "docs" / "requests.md"


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
        one: dict[str, Any] = {"text": " four", "meta_info": {"prompt_tokens": 3}}
        if isinstance(request["text"], list):
            # Choices, whose log-probabilities are asked for.
            one["meta_info"] |= {"input_token_logprobs": [[-1.0, 7, " no"]], "output_token_logprobs": []}
        answer = json.dumps([one] * len(request["text"]) if isinstance(request["text"], list) else one)
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


def test_it_knows_what_a_request_may_ask_for_and_its_page_says_it() -> None:
    methods = (*registry.loaded_decode_methods().values(), *registry.loaded_prefill_methods().values())
    fields = {field for method in methods for field in method.config_class.request_fields}
    assert set(frontend.FIELDS) == fields | {SPARSE, LOSSLESS, FORCED_TOKENS} == set(get_type_hints(frontend.Options))
    phases = {field for method in methods for field in method.config_class.phase_fields}
    assert {field for field in frontend.FIELDS if frontend.FIELDS[field][0]({"decode": 1})} == phases
    assert re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.M) == list(frontend.FIELDS)


def test_only_what_is_given_is_sent() -> None:
    assert frontend.options() == {}
    assert frontend.options(active_ratio=0.05) == {"active_ratio": 0.05}
    everything = frontend.options(active_ratio=1, rectify_interval=0, sparse=False)
    assert everything == {"active_ratio": 1, "rectify_interval": 0, "sparse": False}
    assert frontend.options(topk=8, theta=None) == {"topk": 8}


def test_a_wrong_type_is_refused_before_the_server_is_asked() -> None:
    with refused("active_ratio", "a tenth"):
        frontend.sparse_endpoint("http://127.0.0.1:1", active_ratio="a tenth")


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


def test_a_fork_and_a_generation_have_options_of_their_own(recorder: Recorder) -> None:
    import sglang as sgl

    @sgl.function
    def twice(s: Any) -> None:
        s += "Q:" + sgl.gen("first")
        frontend.set_options(s, topk=8)
        s += sgl.gen("second")
        own, dense = s.fork(2)
        frontend.set_options(dense, sparse=False)
        own += sgl.gen("own")
        own.sync()
        (grandchild,) = dense.fork(1)
        grandchild += sgl.gen("dense")
        grandchild.sync()
        frontend.set_options(s)
        s += sgl.gen("last")

    twice.run(backend=frontend.sparse_endpoint(recorder.url, active_ratio=0.5)).sync()
    every = {"active_ratio": 0.5}
    posted = [request["sampling_params"]["custom_params"] for request in recorder.posted]
    # The third caches what the forks share.
    assert posted == [every, *[{"topk": 8}] * 3, {"sparse": False}, every]
    assert recorder.posted[2]["sampling_params"]["max_new_tokens"] == 0


def test_options_of_a_state_need_an_endpoint_that_carries_them(recorder: Recorder) -> None:
    import sglang as sgl

    @sgl.function
    def dense(s: Any) -> None:
        frontend.set_options(s, sparse=False)

    with refused("backend", "RuntimeEndpoint"):
        dense.run(backend=sgl.RuntimeEndpoint(recorder.url))


def test_what_only_prefills_is_prefilled_as_asked(recorder: Recorder) -> None:
    """KV of one exact_prefix is not that of another; what is decided beforehand is no matter of a prompt."""
    import sglang as sgl

    @sgl.function
    def choose(s: Any) -> None:
        s += "Q:" + sgl.select("answer", ["yes", "no"])

    endpoint = frontend.sparse_endpoint(recorder.url, exact_prefix=True, forced_tokens=[1])
    endpoint.cache_prefix("text")
    assert choose.run(backend=endpoint)["answer"] == "yes"
    posted = [request["sampling_params"] for request in recorder.posted]
    assert len(posted) == 3 and {params["max_new_tokens"] for params in posted} == {0}
    assert all(params["custom_params"] == {"exact_prefix": True} for params in posted)


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
