"""Requests that the server tests send."""

import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from eval import niah
from eval.live.record import read_rows
from launch.server import ServerProcess


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
    with ThreadPoolExecutor(at_once) as pool:
        return [answer["output_ids"] for answer in pool.map(lambda prompt: ask(server, prompt, tokens), prompts)]


def sparse_state(server: ServerProcess) -> dict[str, Any]:
    """The counters of a sparse server."""
    return server.server_info()["internal_states"][0]["sparse"]


def spent(server: ServerProcess, before: dict[str, Any]) -> dict[str, int]:
    """What was counted since."""
    after = sparse_state(server)
    return {name: after[name] - count for name, count in before.items() if type(count) is int}


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


def assert_nothing_leaked(server: ServerProcess) -> None:
    """Prove that SGLang's strict memory checks, on while busy and while idle, found every page where it belongs.

    They end the scheduler when they do not, so that it must still flush its cache and answer.
    """
    server.flush_cache()
    assert greedy(server, [[11, 12, 13]], tokens=2)[0]
    log = server.log()
    assert "leak" not in log.lower(), server.log_tail()
    found = "".join(part for part in re.split(r"(?=^\[20)", log, flags=re.M) if "freeze_gc" not in part)
    assert "Traceback" not in found, server.log_tail()


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
