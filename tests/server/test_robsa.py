"""RoBSA on MLA: everything selected equals dense, and SGLang's features hold while only the heaviest blocks are."""

import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from server_requests import ask, assert_exact, assert_nothing_leaked, greedy, sparse_state

from launch.server import ServerProcess

MODEL = Path("eval/models/tiny-mla")
LAYERS = 4
ALWAYS = {"allow_uncalibrated": True, "dense_fallback": "never"}
CHUNKS = ("--chunked-prefill-size", "512")


@pytest.fixture(scope="module")
def mixed() -> list[list[int]]:
    """Eight random prompts whose lengths are at and around borders of blocks and chunks."""
    rng = random.Random(3)
    return [[rng.randrange(10, 4000) for _ in range(length)] for length in (17, 32, 33, 130, 512, 513, 777, 1500)]


@pytest.fixture(scope="module")
def dense_outputs(serve, mixed) -> list[list[int]]:
    with serve(MODEL, *CHUNKS) as server:
        return greedy(server, mixed)


def test_everything_selected_equals_dense_under_forced_retraction_too(serve, mixed, dense_outputs) -> None:
    retract = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
    everything = {**ALWAYS, "theta1": 1.0}
    with serve(MODEL, *CHUNKS, method="robsa", config=everything, env=retract) as server:
        assert greedy(server, mixed) == dense_outputs
        state = sparse_state(server)
        assert state["decode_rows"] >= len(mixed) * 23
        assert state["sparse_layer_rows"] == state["decode_rows"] * LAYERS
        assert state["dense_fallback_rows"] == 0 and state["pages_attended"] == state["pages_held"]
        server.flush_cache()
        assert greedy(server, mixed, at_once=8) == dense_outputs
        assert "Testing retraction" in server.log()
        assert_nothing_leaked(server)


@pytest.fixture(scope="module")
def server(serve) -> Iterator[ServerProcess]:
    config = {**ALWAYS, "theta1": 0.8, "max_active_ratio": 0.9, "check_exactness": True}
    with serve(MODEL, *CHUNKS, method="robsa", config=config) as server:
        yield server


def test_the_heaviest_blocks_are_attended(server, mixed) -> None:
    greedy(server, mixed[-2:])
    state = sparse_state(server)
    assert 0.02 < state["active_fraction"] < 0.8
    assert state["config"]["theta1"] == 0.8
    assert "no summaries; aux memory 0 bytes per token" in server.log()


def test_a_request_may_ask_for_more(server, mixed) -> None:
    def attended(**options: object) -> float:
        before = sparse_state(server)
        ask(server, mixed[-1], 8, options)
        after = sparse_state(server)
        held, seen = (after[name] - before[name] for name in ("pages_held", "pages_attended"))
        return seen / held

    assert attended(theta1=0.5) < attended() < attended(theta1=1.0) == attended(sparse=False) == 1.0
    bad = {"text": "x", "sampling_params": {"custom_params": {"theta1": 2}}}
    answer = httpx.post(f"{server.url}/generate", json=bad, timeout=60)
    assert answer.status_code == 400 and "theta1: got 2" in answer.text


def test_prefixes_are_shared_and_exact(server, mixed) -> None:
    server.flush_cache()
    alone = greedy(server, mixed)
    server.flush_cache()
    assert greedy(server, mixed, at_once=8) == alone
    hit = ask(server, mixed[-1], 24)
    assert hit["output_ids"] == alone[-1] and hit["meta_info"]["cached_tokens"] >= 1488
    # Decoded KV is approximate and not shared, unless it is rectified.
    turn = [*mixed[-1], *alone[-1], 7, 8, 9]
    assert ask(server, turn, 2)["meta_info"]["cached_tokens"] == 1488
    ask(server, mixed[-1], 40, {"rectify_interval": 8})
    assert sparse_state(server)["rectified_tokens"] > 0
    assert_exact(server)
    assert_nothing_leaked(server)


def test_two_ranks_select_as_one(serve, server, mixed) -> None:
    """With the mean over all heads; each rank for itself selects otherwise, and serves all the same."""
    server.flush_cache()
    alone = greedy(server, mixed[-4:], 12)
    flags = (*CHUNKS, "--tp", "2")
    with serve(MODEL, *flags, method="robsa", config={**ALWAYS, "theta1": 0.8, "max_active_ratio": 0.9}) as ranks:
        assert greedy(ranks, mixed[-4:], 12, at_once=4) == alone
        assert sparse_state(ranks)["active_fraction"] < 0.8
        assert_nothing_leaked(ranks)


def test_an_abort_leaks_nothing(server, mixed) -> None:
    with (
        httpx.Client(base_url=server.url, timeout=60) as client,
        client.stream(
            "POST",
            "/generate",
            json={
                "input_ids": mixed[-1],
                "stream": True,
                "sampling_params": {"max_new_tokens": 400, "ignore_eos": True},
            },
        ) as stream,
    ):
        next(stream.iter_lines())
    assert_nothing_leaked(server)
