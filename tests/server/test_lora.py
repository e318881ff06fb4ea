"""LoRA: requests of several adapters and of the base model in one batch, sparse, with the KV of each kept apart."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import approximate
import pytest
import torch
from approximate import assert_same
from checkpoints import random_adapter, random_eagle3, untied
from server_requests import (
    RETRACT,
    assert_abort_leaks_nothing,
    assert_exact,
    assert_nothing_leaked,
    random_prompts,
    sparse_state,
)

from launch.server import ServerProcess

pytestmark = [pytest.mark.long, pytest.mark.skipif(torch.cuda.is_available(), reason="equal answers need float32")]
FLAGS = ("--max-total-tokens", "8192", "--context-length", "2048", "--chunked-prefill-size", "512")
FLAGS += ("--dtype", "float32")
TOKENS = 24
# With all pages active a row's answer is the same, whenever it is rectified, and with whom.
ALL: dict[str, Any] = {"active_ratio": 1.0, "rectify_interval": 7, "dense_fallback": "never", "check_exactness": True}
ANCHOR = {**approximate.ANCHOR, "check_exactness": True}
BOTH_PHASES = {"threshold_scale_factor": {"decode": 50.0, "prefill": 250.0}, **approximate.SELECTIVE}
METHODS = {**approximate.METHODS, "skip_softmax in both phases": ("skip_softmax", BOTH_PHASES, None)}
NAMES = (None, "a", "b")
PROMPTS = random_prompts(23, (300, 200, 90, 17), 1000)
# The same prompts for each adapter, neighbours with different ones.
ASKED = [(prompt, name) for prompt in PROMPTS for name in NAMES]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory):
    """The flags with two adapters of a model, of different ranks."""

    @cache
    def made(model: Path) -> tuple[str, ...]:
        folder = tmp_path_factory.mktemp("adapters")
        paths = {name: random_adapter(folder / name, model, seed, 12 - 4 * seed) for seed, name in ((1, "a"), (2, "b"))}
        return "--lora-paths", *(f"{name}={path}" for name, path in paths.items())

    return made


MODEL = Path("eval/models/tiny-gqa")


@pytest.fixture(scope="module")
def expected(serve, adapters) -> dict[tuple[int, str | None], dict[str, Any]]:
    """A dense server's answers to prompts, by their place, with each adapter."""
    with serve(MODEL, *FLAGS, *adapters(MODEL)) as server:
        found = [approximate.ask(server, prompt, TOKENS, lora_path=name) for prompt, name in ASKED]
    answers = {(place // len(NAMES), ASKED[place][1]): answer for place, answer in enumerate(found)}
    assert len({tuple(answers[0, name]["output_ids"]) for name in NAMES}) == len(NAMES), "adapters that change nothing"
    return answers


def all_at_once(server: ServerProcess, asked: list[tuple[list[int], str | None]] = ASKED) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(asked)) as pool:
        return [*pool.map(lambda one: approximate.ask(server, one[0], TOKENS, lora_path=one[1]), asked)]


def started(serve, adapters, name: str, *flags: str, **fields: Any) -> AbstractContextManager[ServerProcess]:
    """A server with one of `METHODS`, with fields of its config, and two adapters."""
    method, config, prefill = METHODS[name]
    model, page = approximate.model_of(name) if name in approximate.METHODS else (MODEL, "16")
    given = (*FLAGS, "--page-size", page, *adapters(model), *flags)
    return serve(model, *given, method=method, config={**config, **fields}, prefill=prefill)


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--max-loras-per-batch", "2"),
        ("--disable-overlap-schedule",),
        ("--enable-hierarchical-cache", "--hicache-size", "1"),
        ("--tp-size", "2"),
        ("--pp-size", "2"),
    ],
    ids=lambda more: more[0] if more else "plain",
)
def test_all_pages_are_a_dense_servers_answers(serve, adapters, expected, more: tuple[str, ...], tmp_path) -> None:
    """Rows of all adapters share rectifying passes, first with cold prompts and then from the prefix cache.

    With room for two adapters, the base model counts as one, others take the place of those that finished.
    """
    stages = "--pp-size" in more
    model, config = untied(MODEL, tmp_path) if stages else MODEL, {**ALL, "check_exactness": not stages}
    with serve(model, *FLAGS, *adapters(MODEL), *more, config=config) as server:
        for _ in range(2):
            for answer, exact in zip(all_at_once(server), expected.values(), strict=True):
                assert_same(answer, exact)
        state = sparse_state(server)
        assert state["rectified_tokens"] > 0 and state["dense_fallback_rows"] == 0
        assert state["rectified_requests"] > state["rectifying_steps"], "no pass had several rows"
        if not stages:
            assert_exact(server)
        assert_abort_leaks_nothing(server, input_ids=PROMPTS[0], lora_path="a")
        assert_nothing_leaked(server)


def test_retracted_requests_keep_their_adapters(serve, adapters, expected) -> None:
    with serve(MODEL, *FLAGS, *adapters(MODEL), config=ALL, env=RETRACT) as server:
        answers = all_at_once(server)
        assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 3
        for answer, exact in zip(answers, expected.values(), strict=True):
            assert_same(answer, exact)
        assert_exact(server)
        assert_nothing_leaked(server)


@pytest.mark.parametrize("name", METHODS)
def test_a_batch_answers_as_each_request_alone(serve, adapters, name: str) -> None:
    """Without rectification, as when a row is rectified depends on its neighbours."""
    with started(serve, adapters, name, rectify_interval=0) as server:
        alone = [approximate.ask(server, prompt, TOKENS, lora_path=adapter) for prompt, adapter in ASKED]
        assert all(answer["meta_info"]["cached_tokens"] == 0 for answer in alone), "KV of another adapter"
        for _ in range(2):
            for answer, other in zip(all_at_once(server), alone, strict=True):
                assert_same(answer, other)
            server.flush_cache()
        assert sparse_state(server)["sparse_layer_rows"] > 0
        assert_nothing_leaked(server)


@pytest.mark.parametrize("name", METHODS)
def test_what_a_batch_rectifies_is_of_each_rows_adapter(serve, adapters, name: str) -> None:
    """KV of generated tokens in the prefix cache equals a recomputation with the adapter of their request."""
    with started(serve, adapters, name, rectify_interval=7) as server:
        all_at_once(server)
        assert sparse_state(server)["rectified_tokens"] > 0
        assert_exact(server, tokens=300)
        assert_nothing_leaked(server)


@pytest.mark.parametrize("prefill", [None, ANCHOR], ids=["dense", "anchor"])
def test_turns_go_on_behind_generated_tokens_of_their_adapter(serve, adapters, expected, prefill) -> None:
    prompt, more = PROMPTS[0], PROMPTS[1][:40]
    with serve(MODEL, *FLAGS, *adapters(MODEL), config=ALL, prefill=prefill) as server:
        for name in NAMES:
            first = approximate.ask(server, prompt, 40, lora_path=name)
            turn = prompt + first["output_ids"] + more
            warm = {other: approximate.ask(server, turn, 8, lora_path=other) for other in NAMES}
            assert warm[name]["meta_info"]["cached_tokens"] > (0 if prefill else len(prompt))
            others = [warm[other]["meta_info"]["cached_tokens"] for other in NAMES if other != name]
            # All have been asked for the prompt by then but the last ones.
            assert all(cached <= len(prompt) for cached in others)
            for other, answer in warm.items():
                server.flush_cache()
                assert_same(answer, approximate.ask(server, turn, 8, lora_path=other))
        assert_exact(server, tokens=300)
        assert_nothing_leaked(server)


def test_adapters_come_and_go_at_run_time(serve, expected, tmp_path: Path) -> None:
    """One name has other weights later: nothing of the first is found, or checked, any more."""
    paths = {seed: random_adapter(tmp_path / str(seed), MODEL, seed, 12 - 4 * seed) for seed in (1, 2)}
    flags = ("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "all")
    with serve(MODEL, *FLAGS, *flags, config=ALL) as server:
        for seed, name in ((1, "a"), (2, "b")):
            server.client.post(
                "/load_lora_adapter", json={"lora_name": "one", "lora_path": str(paths[seed])}
            ).raise_for_status()
            answers = all_at_once(server, [(prompt, own) for prompt in PROMPTS for own in (None, "one")])
            for place, answer in enumerate(answers):
                assert_same(answer, expected[place // 2, name if place % 2 else None])
            server.client.post("/unload_lora_adapter", json={"lora_name": "one"}).raise_for_status()
            assert_exact(server)
        assert_nothing_leaked(server)


def test_drafts_are_verified_with_the_adapter(serve, adapters, expected, tmp_path: Path) -> None:
    """The head that drafts has no adapter."""
    head = random_eagle3(tmp_path / "head", MODEL)
    drafts = ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(head))
    with serve(MODEL, *FLAGS, *adapters(MODEL), *drafts, config=ALL) as server:
        for answer, exact in zip(all_at_once(server), expected.values(), strict=True):
            assert_same(answer, exact)
        assert sparse_state(server)["rectified_tokens"] > 0
        assert_exact(server, tokens=300)
        assert_nothing_leaked(server)
