"""Two servers behind SGLang's router, as the page on operations starts them."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from server_requests import sparse_state

from launch.server import ServerProcess, free_port

SMG = shutil.which("smg")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(torch.cuda.is_available(), reason="of the CPU platform"),
    pytest.mark.skipif(SMG is None, reason="needs the router: pip install smg, and its folder in PATH"),
]
MODEL = Path("eval/models/tiny-gqa")
FLAGS = ("--max-total-tokens", "16384", "--context-length", "2048", "--dtype", "float32")
RESA: dict[str, Any] = {"active_ratio": 0.2, "min_pages": 2, "dense_fallback": "never"}
TOKENS = 6


@contextmanager
def router(log: Path, *workers: str) -> Iterator[httpx.Client]:
    """A router that has found its workers."""
    port = free_port()
    command = [str(SMG), "launch", "--worker-urls", *workers, "--policy", "cache_aware", "--port", str(port)]
    command += ["--host", "127.0.0.1", "--prometheus-port", str(free_port())]
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as process:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0, trust_env=False) as client:
                deadline = time.monotonic() + 60.0
                while _found(client) < len(workers):
                    assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                    time.sleep(0.2)
                yield client
        finally:
            process.kill()


def _found(client: httpx.Client) -> int:
    try:
        return client.get("/workers").json().get("total", 0)
    except httpx.TransportError:
        return 0


def ask(client: httpx.Client, text: str, **options: Any) -> httpx.Response:
    params = {"max_new_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, "custom_params": options or None}
    return client.post("/generate", json={"text": text, "sampling_params": params})


def long_text(word: str) -> str:
    return " ".join(f"{word}{number}" for number in range(60))


def rows(workers: list[ServerProcess], name: str = "decode_rows") -> list[int]:
    return [sparse_state(worker)[name] for worker in workers]


@pytest.fixture(scope="module")
def workers(serve) -> Iterator[list[ServerProcess]]:
    with serve(MODEL, *FLAGS, config=RESA) as one, serve(MODEL, *FLAGS, config=RESA) as other:
        yield [one, other]


@pytest.fixture(scope="module")
def client(workers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    log = tmp_path_factory.mktemp("router") / "router.log"
    with router(log, *(worker.url for worker in workers)) as found:
        yield found


def test_options_of_requests_come_through(client, workers) -> None:
    before = sum(rows(workers, "dense_fallback_rows"))
    assert ask(client, long_text("one"), sparse=False).status_code == 200
    chat = {"model": str(MODEL), "messages": [{"role": "user", "content": long_text("two")}], "max_tokens": TOKENS}
    chat |= {"ignore_eos": True, "custom_params": {"sparse": False}}
    assert client.post("/v1/chat/completions", json=chat).status_code == 200
    assert sum(rows(workers, "dense_fallback_rows")) - before == 2 * (TOKENS - 1)
    refused = ask(client, long_text("one"), active_ratio=7)
    assert refused.status_code == 400 and "active_ratio: got 7" in refused.text


def test_prompts_go_where_their_prefix_is_cached(client, workers) -> None:
    texts, before = [], rows(workers)
    # A word of its own for each, until either worker has some.
    for word in (f"word{letter}" for letter in "abcdefghijklmnopqrst"):
        texts.append(long_text(word))
        assert ask(client, texts[-1]).status_code == 200
        if len(texts) >= 6 and all(now > earlier for now, earlier in zip(rows(workers), before, strict=True)):
            break
    else:
        pytest.fail(f"one worker got all: {rows(workers)}")
    # Backwards, as taking turns would send each to the other worker.
    for text in reversed(texts):
        counts = ask(client, f"{text} and so on").json()["meta_info"]
        assert counts["cached_tokens"] > 0.9 * counts["prompt_tokens"] - 32
