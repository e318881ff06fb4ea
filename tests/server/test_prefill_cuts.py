"""A prompt that is aborted or retracted while a pass has cut one of its groups: what the group handed on is gone."""

import random
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from server_requests import assert_nothing_leaked, sparse_state

from launch.server import ServerProcess

pytestmark = pytest.mark.long

# No chunk of the prompt ends where a group does, and most groups are cut several times.
BLOCK, GROUP, CHUNK, LENGTH = 32, 512, 80, 2000
# Leaves out some keys, not all.
SPARSE = {"block_size": BLOCK, "step": GROUP // BLOCK, "dense_tail": 0, "theta": 0.5, "crossover_tokens": GROUP}
COUNTS = ("sparse_tokens", "dense_tokens", "pairs_attended", "pairs_causal")
RID = "disturbed"
ATTEMPTS = 5


@pytest.fixture(scope="module")
def server(serve, checkpoint) -> Iterator[ServerProcess]:
    with serve(
        checkpoint, "--chunked-prefill-size", str(CHUNK), prefill={**SPARSE, "share_partial_groups": True}
    ) as up:
        yield up


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    rng = random.Random(13)
    return [rng.randrange(10, 1000) for _ in range(LENGTH)]


def answer(server: ServerProcess, prompt: list[int], start: int = 0) -> dict[str, Any]:
    """With log-probabilities of the prompt from ``start`` on, up to which a cached prefix is used."""
    params = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    return server.generate(
        input_ids=prompt, sampling_params=params, return_logprob=True, logprob_start_len=start, rid=RID
    )


def logprobs(found: dict[str, Any]) -> list[float]:
    """Of the prompt but its first token, and of what was generated."""
    meta = found["meta_info"]
    return [entry[0] for entry in [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]]


def counts(server: ServerProcess) -> dict[str, int]:
    state = sparse_state(server)["prefill"]
    return {name: state[name] for name in COUNTS}


def since(server: ServerProcess, before: dict[str, int]) -> dict[str, int]:
    return {name: count - before[name] for name, count in counts(server).items()}


def post(server: ServerProcess, path: str, **body: Any) -> None:
    server.client.post(path, json=body).raise_for_status()


@contextmanager
def paused(
    server: ServerProcess, prompt: list[int], start: int = 0
) -> Iterator[tuple[Future[dict[str, Any]], int, dict[str, int]]]:
    """Ask, and hold the server between two passes over the prompt, within a sparse group.

    Gives the answer to come, how much of the prompt is prefilled, and what was counted before. On a busy host the
    prompt may be through before the server is held; then it is asked again.
    """
    with ThreadPoolExecutor(1) as pool:
        for _ in range(ATTEMPTS):
            server.flush_cache()
            before, deadline = counts(server), time.monotonic() + 60
            running = pool.submit(answer, server, prompt, start)
            while since(server, before)["sparse_tokens"] <= CHUNK:
                assert time.monotonic() < deadline, server.log_tail()
            post(server, "/pause_generation", mode="in_place")
            try:
                done = since(server, before)
                end = done["sparse_tokens"] + done["dense_tokens"]
                if end < LENGTH:
                    assert end > GROUP + CHUNK and end % CHUNK == 0 and end % GROUP
                    yield running, end, before
                    return
            finally:
                post(server, "/continue_generation")
            running.result()
    pytest.fail(f"the prompt was through before the server was held, {ATTEMPTS} times")


@pytest.fixture(scope="module")
def alone(server, prompt) -> tuple[list[float], dict[str, int]]:
    """Log-probabilities of the prompt, and what was counted, where nothing came between."""
    server.flush_cache()
    before = counts(server)
    found = logprobs(answer(server, prompt))
    counted = since(server, before)
    assert counted["sparse_tokens"] == LENGTH - GROUP and counted["pairs_attended"] < 0.9 * counted["pairs_causal"]
    return found, counted


def require_same(found: dict[str, Any], counted: dict[str, int], alone: tuple[list[float], dict[str, int]]) -> None:
    assert logprobs(found) == pytest.approx(alone[0], abs=1e-4)
    assert counted == alone[1]


def test_an_aborted_prompt_leaves_nothing(server, prompt, alone) -> None:
    with paused(server, prompt) as (running, _, _):
        post(server, "/abort_request", rid=RID)
    assert running.result()["meta_info"]["finish_reason"]["type"] == "abort"
    # Two in a row, the second of which goes through the tree that the first has filled.
    for _ in range(2):
        before = counts(server)
        again = answer(server, prompt)
        require_same(again, since(server, before), alone)
    assert_nothing_leaked(server)


def test_a_retracted_prompt_begins_again(server, prompt, alone) -> None:
    with paused(server, prompt) as (running, end, before):
        post(server, "/pause_generation", mode="retract")
        at_start = counts(server)
    found = running.result()
    assert found["meta_info"]["num_retractions"] == 1
    # All of it is computed again, as log-probabilities of all of it are asked for.
    require_same(found, since(server, at_start), alone)
    assert since(server, before)["dense_tokens"] == 2 * GROUP
    assert since(server, before)["sparse_tokens"] == LENGTH - GROUP + end - GROUP
    assert_nothing_leaked(server)


def test_a_retracted_prompt_goes_on_behind_what_is_cached_of_it(server, prompt, alone) -> None:
    """That is a chunk before where it was, and within a group, of which what the cached part handed on is gone."""
    with paused(server, prompt, LENGTH - 1) as (running, end, before):
        post(server, "/pause_generation", mode="retract")
    found = running.result()
    assert found["meta_info"]["num_retractions"] == 1
    # The tree has a chunk when the next one is prepared.
    cached = end - CHUNK
    assert sum(since(server, before)[name] for name in ("sparse_tokens", "dense_tokens")) == LENGTH + CHUNK
    server.flush_cache()
    answer(server, prompt[:cached])
    expected = answer(server, prompt, LENGTH - 1)
    assert expected["meta_info"]["cached_tokens"] == cached
    assert logprobs(found) == pytest.approx(logprobs(expected), abs=1e-5)
    # It tells the two apart, though what follows the prompt hears little of a part of a group in its middle.
    assert max(abs(a - b) for a, b in zip(logprobs(found), alone[0][-8:], strict=True)) > 1e-4
    assert_nothing_leaked(server)
