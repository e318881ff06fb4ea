"""RocketKV that compacts, on real servers: the answers of visibility, while the prompts' memory is free for others."""

import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_requests import ask, assert_nothing_leaked, greedy, sparse_state

from launch.server import ServerProcess

MODEL = Path(__file__).parent.parent.parent / "eval" / "models" / "tiny-gqa"
PAGE, WINDOW, BUDGET, TOPK, CHUNK = 16, 32, 256, 16, 128
FLAGS = ("--dtype", "float32", "--context-length", "10240", "--decode-log-interval", "1")
CONFIG: dict[str, object] = {"prompt_budget": BUDGET, "topk": TOPK, "dense_fallback": "never"}
COMPACT = {**CONFIG, "eviction": "compact"}
TOKENS = 24
# A prompt of about the budget frees nothing: what it keeps takes as many pages.
SHORTEST = BUDGET + 2 * PAGE


def kept(server: ServerProcess) -> dict[str, int]:
    """What became of prompts so far."""
    return sparse_state(server)["kept"]


def since(server: ServerProcess, before: dict[str, int]) -> dict[str, int]:
    return {name: count - before[name] for name, count in kept(server).items()}


def private_tokens(prefilled: int, prompt: int) -> int:
    """Tokens of the pages that a request of this prompt holds after prefill, as methods.md has it."""
    first_visible = (prompt - WINDOW) // 4
    boundary, end = first_visible * 4, prefilled // PAGE * PAGE
    start = (boundary - (BUDGET - WINDOW)) // PAGE * PAGE
    return end - start


def used(log: str) -> list[int]:
    """KV tokens that requests held at each decode step, by SGLang's own count: the pool without what can be evicted."""
    return [int(count) for count in re.findall(r"Decode batch.*?#token: (\d+)", log)]


@pytest.fixture(scope="module")
def some() -> list[list[int]]:
    """Random prompts at and around the ends of budget, blocks, pages and chunks."""
    rng = random.Random(5)
    lengths = (40, BUDGET, BUDGET + 1, 288, 300, 511, 544, 549, 700, 1023, 1504)
    return [[rng.randrange(10, 4000) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def expected(serve, some) -> list[list[int]]:
    """What visibility answers."""
    with serve(MODEL, *FLAGS, "--chunked-prefill-size", str(CHUNK), method="rocketkv", config=CONFIG) as server:
        return greedy(server, some, TOKENS)


@pytest.fixture(scope="module")
def server(serve) -> Iterator[ServerProcess]:
    flags = ("--chunked-prefill-size", str(CHUNK), "--max-total-tokens", "16384")
    with serve(MODEL, *FLAGS, *flags, method="rocketkv", config=COMPACT) as server:
        yield server


def test_the_answers_are_those_of_visibility(server, some, expected) -> None:
    """Cold and in chunks, with a cached prefix, and eight at once."""
    before = kept(server)
    assert greedy(server, some, TOKENS) == expected
    assert greedy(server, some, TOKENS) == expected
    assert greedy(server, [*some, *some], TOKENS, at_once=8) == [*expected, *expected]
    long = [prompt for prompt in some if len(prompt) >= SHORTEST]
    found = since(server, before)
    assert found["compacted"] == 4 * len(long) and found["compact_waits"] == 0
    freed = sum(len(prompt) // PAGE * PAGE - private_tokens(len(prompt), len(prompt)) for prompt in long)
    assert found["freed_tokens"] == 4 * freed
    assert_nothing_leaked(server)
