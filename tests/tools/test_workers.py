"""``sglang_sparse.check --workers``: servers that agree, servers that differ, and what is no sparse server."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from openai_stub import Server as Stub

from sglang_sparse.check import main
from sglang_sparse.config.digest import digest, fields_of, published
from sglang_sparse.config.settings import build

Start = Callable[..., str]


def sparse(*methods: Any) -> dict[str, Any]:
    """Return the state that a server publishes of its methods, among its counters."""
    settings = build(*methods)
    state = published(settings)
    return {**state, "digest": digest(fields_of(state, settings.config.page_size)), "decode_rows": 7}


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a stub with these internal states, or without an answer; returns its address."""
    stubs: list[Stub] = []

    def started(*states: dict[str, Any]) -> str:
        stubs.append(Stub())
        stubs[-1].info = {"page_size": 16, "internal_states": list(states)} if states else None
        threading.Thread(target=stubs[-1].serve_forever, args=(0.02,), daemon=True).start()
        return stubs[-1].url

    yield started
    for stub in stubs:
        stub.shutdown()
        stub.server_close()


def test_workers_that_agree(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    state = sparse("resa", {})
    urls = [start({"sparse": state}), start({"sparse": {**state, "decode_rows": 9}}) + "/"]
    assert main(["--workers", *urls]) == 0
    assert capsys.readouterr().out == f"2 workers agree (digest {state['digest']})\n"
    assert main(["--workers", urls[0]]) == 0


def test_fields_that_differ_are_named(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    states = [sparse("resa", {"active_ratio": ratio}, "anchor", {"theta": 4.0}) for ratio in (0.1, 0.3)]
    one, two = start({"sparse": states[0]}), start({"sparse": states[1]})
    assert main(["--workers", one, two, one]) == 1
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == "workers differ:"
    digests = [state["digest"] for state in states]
    assert lines == [
        f"  --sparse-config active_ratio: 0.1 ({one}); 0.3 ({two})",
        f'  digest: "{digests[0]}" ({one}); "{digests[1]}" ({two})',
    ]


def test_replicas_of_one_worker_are_compared(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    url = start({"sparse": sparse("resa", {})}, {"sparse": sparse("resa", {"min_pages": 3})})
    assert main(["--workers", url]) == 1
    assert f"--sparse-config min_pages: 16 ({url} replica 0); 3 ({url} replica 1)" in capsys.readouterr().out


def test_what_is_no_sparse_worker(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    good, closed = start({"sparse": sparse("resa", {})}), Stub()
    closed.server_close()
    for url, said in {
        start({}): "publishes no digest of a sparse method; allowed: servers of this version of the plugin",
        closed.url: "got no /server_info of SGLang (ConnectionError); allowed: the address of an SGLang server",
        start(): "(404 Client Error: Not Found",
        "127.0.0.1:30000": "(InvalidSchema)",
    }.items():
        assert main(["--workers", good, url]) == 2
        message = capsys.readouterr().err
        assert message.startswith(f"--workers {url}: got ") and said in message and message.count("\n") == 1
    assert main(["--workers"]) == 2
    assert "type --workers http://HOST:PORT" in capsys.readouterr().err
