"""Sessions: a turn goes on behind what the session keeps, and answers as its whole prompt does to a cold cache."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from approximate import METHODS, ask, assert_same, model_of
from server_requests import (
    RETRACT,
    assert_abort_leaks_nothing,
    assert_nothing_leaked,
    random_prompts,
    sparse_state,
    spent,
)

from launch.server import ServerProcess

MODELS = Path("eval/models")
FLAGS = ("--max-total-tokens", "8192", "--context-length", "2048", "--chunked-prefill-size", "512")
FLAGS += ("--dtype", "float32")
# The second, with the short answer before it, is shorter than the window of rocketkv, which reaches into the first: a
# whole number of pages, all of them in the radix tree.
TURNS = random_prompts(17, (704, 5, 130), 1000)
LONGEST = (2, 40, 40)
OTHER = random_prompts(18, (300,), 1000)[0]
PLAIN: list[dict[str, Any] | None] = [None, None, None]


@contextmanager
def session(server: ServerProcess, name: str = "talk", *, streaming: bool = True) -> Iterator[dict[str, Any]]:
    """Open a session; yield the fields of a request that is its next turn, or that keeps its KV in the radix tree."""
    given = {"session_id": name, "capacity_of_str_len": 4096, "streaming": streaming}
    assert server.client.post("/open_session", json=given).json() == name
    yield {"session_params": {"id": name}} if streaming else {"session_id": name}
    assert server.client.post("/close_session", json={"session_id": name}).status_code == 200


def talk(
    server: ServerProcess, custom: list[dict[str, Any] | None], name: str = "talk"
) -> list[tuple[list[int], dict[str, Any]]]:
    """The whole prompt of each turn of a session, and its answer."""
    history: list[int] = []
    found = []
    with session(server, name) as turn:
        for tokens, longest, options in zip(TURNS, LONGEST, custom, strict=True):
            answer = ask(server, tokens, longest, custom=options, **turn)
            history = [*history, *tokens]
            found.append((history, answer))
            assert answer["meta_info"]["prompt_tokens"] == len(history)
            history = [*history, *answer["output_ids"]]
            # What a session keeps is its own.
            ask(server, OTHER)
    return found


@pytest.mark.parametrize("name", METHODS)
def test_turns_answer_as_their_whole_prompts_do(serve, name: str) -> None:
    method, config, prefill = METHODS[name]
    model, page = model_of(name)
    flags = (*FLAGS, "--page-size", page, "--enable-streaming-session")
    # Some turns prefill otherwise than the one before: nothing may be kept for them.
    asked = [PLAIN] if prefill is None else [PLAIN, [None, {"exact_prefix": True}, None]]
    with serve(model, *flags, method=method, config=config, prefill=prefill) as server:
        for custom in asked:
            turns = talk(server, custom)
            known = [answer["meta_info"]["cached_tokens"] for _, answer in turns]
            if custom is PLAIN:
                assert known[1] >= len(TURNS[0]) - 64 and known[2] >= len(TURNS[0]) - 64
            else:
                assert known[1] == 0
            dropped = sparse_state(server)["tail_tokens_dropped"]
            assert dropped > 0
            for (prompt, answer), longest, options in zip(turns, LONGEST, custom, strict=True):
                server.flush_cache()
                assert_same(answer, ask(server, prompt, longest, custom=options))
        assert_nothing_leaked(server)


def test_turns_may_be_retracted_and_aborted(serve) -> None:
    """With all pages active, so that tokens which are prefilled again change nothing."""
    method, config, _ = METHODS["resa"]
    flags = (*FLAGS, "--page-size", "16", "--enable-streaming-session")
    with serve(
        MODELS / "tiny-gqa", *flags, method=method, config={**config, "active_ratio": 1.0}, env=RETRACT
    ) as server:
        with ThreadPoolExecutor() as pool:
            talks = list(pool.map(lambda name: talk(server, PLAIN, name), "abc"))
        assert sum(answer["meta_info"]["num_retractions"] for turns in talks for _, answer in turns) > 3
        server.flush_cache()
        whole = talks[0][-1][0]
        expected = ask(server, whole)
        for turns in talks:
            assert turns[-1][0] == whole
            assert_same(turns[-1][1], expected)
        before = sparse_state(server)
        with session(server) as turn, ThreadPoolExecutor() as pool:
            company = [pool.submit(ask, server, OTHER, 200) for _ in "ab"]
            # The row with the fewest tokens answered is retracted.
            while not spent(server, before)["decode_rows"]:
                time.sleep(0.01)
            first = pool.submit(ask, server, TURNS[0], 60, **turn)
            time.sleep(0.3)
            beside = []
            while not first.done():
                beside.append(server.client.post("/generate", json={"input_ids": [1, 2, 3], **turn}).status_code)
            # A turn that is retracted has not ended. The last may have come behind it.
            assert first.result()["meta_info"]["num_retractions"] > 0
            assert len(beside) > 3 and {*beside[:-1]} == {400}
            assert all(len(one.result()["output_ids"]) == 200 for one in company)
        with session(server) as turn:
            ask(server, whole[:-1], **turn)
            assert_abort_leaks_nothing(server, input_ids=TURNS[1], **turn)
        assert_nothing_leaked(server)


@pytest.mark.parametrize(
    "config",
    [METHODS["resa"][:2], ("rocketkv", {**METHODS["rocketkv"][1], "eviction": "compact"})],
    ids=["resa", "compact"],
)
def test_the_radix_tree_keeps_what_a_session_refers_to(serve, config: tuple[str, dict[str, Any]]) -> None:
    flags = (*FLAGS, "--page-size", "16", "--enable-session-radix-cache")
    with serve(MODELS / "tiny-gqa", *flags, method=config[0], config=config[1]) as server:
        whole = TURNS[0]
        with session(server, streaming=False) as turn:
            first = ask(server, whole, **turn)
            whole = [*whole, *first["output_ids"], *TURNS[2]]
            second = ask(server, whole, **turn)
            assert second["meta_info"]["cached_tokens"] >= (0 if "eviction" in config[1] else len(TURNS[0]) - 16)
        server.flush_cache()
        assert_same(second, ask(server, whole))
        assert_nothing_leaked(server)
