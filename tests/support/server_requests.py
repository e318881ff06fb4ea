"""Requests that the server tests send."""

import random
import re
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from httpx import HTTPStatusError

from eval import niah
from eval.live.record import read_rows
from launch.server import ServerProcess

RANKS = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")
# Requests are retracted again and again.
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}


def plugin(folder: Path, name: str, *body: str) -> dict[str, str]:
    """Write a plugin of SGLang that changes a server; returns the variables that have a server load it."""
    (about := folder / f"{name}-1.dist-info").mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {name}:register\n")
    (folder / f"{name}.py").write_text("\n    ".join(["def register():", *body]) + "\n")
    return {"PYTHONPATH": str(folder)}


def ask(
    server: ServerProcess,
    prompt: list[int],
    tokens: int = 8,
    options: dict[str, Any] | None = None,
    rid: str | None = None,
    ignore_eos: bool = True,
) -> dict[str, Any]:
    """Have ``tokens`` tokens generated, whatever they are, and return the answer.

    SGLang keeps room for all of them where the end of the text is ignored, and for a part where it is put off.
    """
    goes_on = {"ignore_eos": True} if ignore_eos else {"min_new_tokens": tokens}
    params = {"max_new_tokens": tokens, "temperature": 0.0, "custom_params": options, **goes_on}
    return server.generate(input_ids=prompt, sampling_params=params, rid=rid)


def greedy(server: ServerProcess, prompts: list[list[int]], tokens: int = 24, at_once: int = 1) -> list[list[int]]:
    """Send prompts, ``at_once`` of them at a time, and return the output ids."""
    return [answer["output_ids"] for answer in ask_all(server, prompts, tokens, at_once=at_once)]


def ask_all(
    server: ServerProcess,
    prompts: list[list[int]],
    tokens: int = 8,
    options: dict[str, Any] | None = None,
    at_once: int = 8,
) -> list[dict[str, Any]]:
    """The answers to prompts, ``at_once`` of them at a time."""
    with ThreadPoolExecutor(at_once) as pool:
        return [*pool.map(lambda prompt: ask(server, prompt, tokens, options), prompts)]


def cold(
    server: ServerProcess, prompts: list[list[int]], tokens: int = 8, options: dict[str, Any] | None = None
) -> list[list[int]]:
    """The output ids of prompts of which nothing is cached."""
    found = []
    for prompt in prompts:
        server.flush_cache()
        found.append(ask(server, prompt, tokens, options)["output_ids"])
    return found


def random_prompts(seed: int, lengths: Iterable[int], tokens: int = 4000) -> list[list[int]]:
    """Prompts of token ids from 10 up to ``tokens``."""
    rng = random.Random(seed)
    return [[rng.randrange(10, tokens) for _ in range(length)] for length in lengths]


def prompts_that_part(seed: int, shared: int, parts: list[tuple[int, int]]) -> list[list[int]]:
    """Prompts that share their first ``shared`` tokens, of each part so many more, and then have some of their own."""
    rng = random.Random(seed)
    first = [rng.randrange(10, 1000) for _ in range(shared + max(kept for kept, _ in parts))]
    return [first[: shared + kept] + [rng.randrange(10, 1000) for _ in range(more)] for kept, more in parts]


def asked_of(server: ServerProcess, rank: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send all that is generated to one rank of attention."""
    monkeypatch.setattr(server, "generate", partial(server.generate, data_parallel_rank=rank))


def sparse_state(server: ServerProcess) -> dict[str, Any]:
    """The counters of a sparse server."""
    return server.server_info()["internal_states"][0]["sparse"]


def spent(server: ServerProcess, before: dict[str, Any]) -> dict[str, int]:
    """Return the counts since ``before``."""
    after = sparse_state(server)
    return {name: after[name] - count for name, count in before.items() if type(count) is int}


def by_part(server: ServerProcess, before: Sequence[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    """Return the counts of each part under rules by layer, of kept prompts too, since ``before`` if given."""
    found = [
        {name: count for name, count in {**part, **part.get("kept", {})}.items() if type(count) is int}
        for part in sparse_state(server)["parts"]
    ]
    for part, earlier in zip(found, before or [], strict=bool(before)):
        part.update({name: part[name] - earlier[name] for name in part})
    return found


def find_needles(server: ServerProcess, folder: Path, length: str = "2k") -> list[dict[str, Any]]:
    """Ask for three single needles and three multi-key ones, all of which must be found; returns the summary."""
    arguments = ["--base-url", server.url, "--out", str(folder / "niah.jsonl"), "--concurrency", "4"]
    asked = ["--tasks", "single,multikey", "--lengths", length, "--n", "1", "--depths", "0,50,100"]
    assert niah.main([*arguments, *asked]) == 0
    lines = [row for row in read_rows(folder / "niah.jsonl") if row["kind"] == "summary"]
    assert [line["score"] for line in lines] == [1.0, 1.0]
    return lines


def forced(server: ServerProcess, prompt: list[int], tokens: list[int], **options: Any) -> dict[str, Any]:
    """The answer of a request that is made to generate these tokens, with its log-probabilities."""
    params = {"max_new_tokens": len(tokens), "temperature": 0.0, "ignore_eos": True}
    params["custom_params"] = {**options, "forced_tokens": tokens}
    return server.generate(input_ids=prompt, sampling_params=params, return_logprob=True)


def logprobs(answer: dict[str, Any]) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def off(answer: dict[str, Any], expected: list[float]) -> float:
    """The largest difference between an answer's log-probabilities and others."""
    return max(abs(found - other) for found, other in zip(logprobs(answer), expected, strict=True))


def assert_agrees(
    server: ServerProcess,
    likely: Callable[[list[int], list[int]], list[float]],
    prompt: list[int],
    tokens: list[int],
    lost: int,
) -> None:
    """Assert that answers are as ``likely`` as another implementation says: dense ones, and those of all pages.

    Those of some pages are not, but what they leave in the prefix cache for the next turn is, but for ``lost`` tokens.
    """
    for options in ({"sparse": False}, {"active_ratio": 1.0, "rectify_interval": 0}):
        assert off(forced(server, prompt, tokens, **options), likely(prompt, tokens)) < 1e-4
    # Or the next turn would find what these left.
    server.flush_cache()
    assert off(forced(server, prompt, tokens), likely(prompt, tokens)) > 1e-2
    follow_up = [*prompt, *tokens, *range(20, 29)]
    second = forced(server, follow_up, tokens[:20], sparse=False)
    assert second["meta_info"]["cached_tokens"] > len(prompt) + len(tokens) - lost
    assert off(second, likely(follow_up, tokens[:20])) < 1e-4


def read_logprobs(answer: dict[str, Any]) -> list[float]:
    """Of a prompt's tokens but the first one that was asked for."""
    return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]


def prompt_logprobs(
    server: ServerProcess, prompt: list[int], options: dict[str, Any] | None = None, start: int = 0
) -> list[float]:
    params = {"max_new_tokens": 1, "temperature": 0.0, "custom_params": options}
    return read_logprobs(
        server.generate(input_ids=prompt, sampling_params=params, return_logprob=True, logprob_start_len=start)
    )


def assert_refused(server: ServerProcess, options: dict[str, Any], said: str) -> None:
    """Assert that a request with these options is status 400, for a reason that has ``said`` in it."""
    with pytest.raises(HTTPStatusError) as caught:
        ask(server, [5, 6, 7], options=options)
    assert caught.value.response.status_code == 400 and said in str(caught.value)


def assert_abort_leaks_nothing(server: ServerProcess, **prompt: Any) -> None:
    """Leave the stream of an answer of 400 tokens at its first one."""
    request = {**prompt, "stream": True, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
    before = sparse_state(server)["decode_rows"]
    with server.client.stream("POST", "/generate", json=request) as stream:
        next(stream.iter_lines())
    assert_nothing_leaked(server)
    assert sparse_state(server)["decode_rows"] < before + 200


def sparse_steps(answers: list[dict[str, Any]], sparse: list[list[float]], dense: list[list[float]]) -> tuple[int, int]:
    """Steps whose log-probability tells sparse attention from dense, and those of them that ran sparse.

    Each must be the log-probability of one of the two.
    """
    told = ran_sparse = 0
    for answer, *expected in zip(answers, sparse, dense, strict=True):
        for found, one, other in zip(logprobs(answer), *expected, strict=True):
            assert min(abs(found - one), abs(found - other)) < 1e-3
            told += abs(one - other) > 0.02
            ran_sparse += abs(one - other) > 0.02 and abs(found - one) < 1e-3
    return told, ran_sparse


def settled_log(server: ServerProcess) -> str:
    """Return a server's log without its own call of ``/freeze_gc``, which may come before it listens."""
    return "".join(part for part in re.split(r"(?=^\[20)", server.log(), flags=re.M) if "freeze_gc" not in part)


def assert_nothing_leaked(server: ServerProcess) -> None:
    """Prove that SGLang's strict memory checks, on while busy and while idle, found every page where it belongs.

    They end the scheduler when they do not, so that it must still flush its cache and answer.
    """
    server.flush_cache()
    assert greedy(server, [[11, 12, 13]], tokens=2)[0]
    assert_no_error(server)


def assert_no_error(server: ServerProcess) -> None:
    """Look for leaks and tracebacks in a server's log."""
    assert "leak" not in server.log().lower(), server.log_tail()
    assert "Traceback" not in settled_log(server), server.log_tail()


def proven_pages(server: ServerProcess) -> int:
    """Pages of the radix tree that a server with ``check_exactness`` has proven exact so far."""
    return sum(map(int, re.findall(r"(\d+) pages of the radix tree equal their recomputation", server.log())))


def assert_exact(server: ServerProcess, tokens: int = 64) -> None:
    """Give a server with ``check_exactness`` something new to check, and wait until it has proven its whole tree.

    It ends when a page is not exact. ``tokens`` of a new prompt are at least four pages that can be shared.
    """
    rng = random.Random()
    before = proven_pages(server)
    greedy(server, [[rng.randrange(10, 1000) for _ in range(tokens)]], tokens=2)
    deadline = time.monotonic() + 120.0
    while proven_pages(server) < before + 4:
        assert time.monotonic() < deadline, server.log_tail()
        time.sleep(0.2)
