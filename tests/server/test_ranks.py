"""Ranks that share a model: replicas of its attention, or stages of its layers, answer as one scheduler does."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import approximate
import pytest
import torch
from checkpoints import untied
from server_requests import RANKS, assert_nothing_leaked, random_prompts

from launch.server import ServerProcess

pytestmark = [pytest.mark.long, pytest.mark.skipif(torch.cuda.is_available(), reason="refused next to CUDA")]
MODELS = Path("eval/models")
FLAGS = (
    "--max-total-tokens",
    "8192",
    "--context-length",
    "2048",
    "--chunked-prefill-size",
    "512",
    "--dtype",
    "float32",
)
SELECTIVE: dict[str, Any] = {"dense_fallback": "never", "rectify_interval": 0}
ANCHOR = {"block_size": 32, "step": 2, "dense_tail": 0, "theta": 0.5, "crossover_tokens": 64}
METHODS: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "resa and anchor": ("resa", {"active_ratio": 0.2, "min_pages": 2, **SELECTIVE}, ANCHOR),
    "robsa": ("robsa", {"allow_uncalibrated": True, "page_size": 64, "theta1": 0.6, **SELECTIVE}, None),
    "rocketkv": ("rocketkv", {"prompt_budget": 256, "window_size": 16, "topk": 16, **SELECTIVE}, None),
    "skip_softmax": ("skip_softmax", {"threshold_scale_factor": {"decode": 50.0}, **SELECTIVE}, None),
}
RECTIFIED = {
    name: (method, {**config, "rectify_interval": 7}, prefill) for name, (method, config, prefill) in METHODS.items()
}
PROMPTS = random_prompts(17, (700, 40, 333), 1000)
ASKED = {"return_logprob": True, "sampling_params": {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}}


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for one, other in zip(found, expected, strict=True):
        approximate.assert_same(one, other)


def states(server: ServerProcess) -> list[dict[str, Any]]:
    return [state["sparse"] for state in server.server_info()["internal_states"]]


@pytest.fixture(scope="module")
def alone(serve) -> Callable[[str], list[dict[str, Any]]]:
    """Return a function that gives one scheduler's answers with a method."""

    @cache
    def answered(name: str) -> list[dict[str, Any]]:
        with started(serve, name) as server:
            return [server.generate(input_ids=prompt, **ASKED) for prompt in PROMPTS]

    return answered


def model_of(name: str) -> Path:
    return MODELS / ("tiny-mla" if name == "robsa" else "tiny-gqa")


def started(serve, name: str, *flags: str, model: Path | None = None) -> AbstractContextManager[ServerProcess]:
    method, config, prefill = METHODS[name]
    given = (model or model_of(name), *FLAGS, "--page-size", str(config.get("page_size", 16)), *flags)
    return serve(*given, method=method, config=config, prefill=prefill)


@pytest.mark.parametrize("name", ["resa and anchor", "robsa", "rocketkv"])
def test_ranks_of_attention_answer_as_one_does(serve, alone, name: str) -> None:
    with started(serve, name, *RANKS) as server:
        # One after the other, each rank in turn while the other one idles; then all at once, with prompts and answers
        # of both ranks side by side; then from each rank's prefix cache.
        for prompt, expected in zip(PROMPTS, alone(name), strict=True):
            assert_same([server.generate(input_ids=prompt, **ASKED) for _ in range(2)], [expected] * 2)
        assert_same(server.generate(input_ids=PROMPTS * 2, **ASKED), alone(name) * 2)
        server.flush_cache()
        assert_same(server.generate(input_ids=PROMPTS * 2, **ASKED), alone(name) * 2)
        found = states(server)
        assert len(found) == 2 and all(state["decode_rows"] > state["dense_fallback_rows"] for state in found)
        assert_nothing_leaked(server)


@pytest.mark.parametrize("name", ["resa and anchor", "robsa", "rocketkv"])
def test_ranks_rectify_together(serve, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """With one prompt at a time on each rank, as when a row is rectified depends on its neighbours."""
    monkeypatch.setitem(METHODS, name, RECTIFIED[name])
    with started(serve, name) as server:
        expected = [server.generate(input_ids=prompt, **ASKED) for prompt in PROMPTS]
        (alone,) = states(server)

    def at(rank: int) -> list[dict[str, Any]]:
        return [
            server.generate(input_ids=prompt, data_parallel_rank=rank, **ASKED) for prompt in PROMPTS[:: 1 - 2 * rank]
        ]

    # Of the MLA model's dense layers each rank has the whole.
    whole = ("--moe-dense-tp-size", "1") if name == "robsa" else ()
    with started(serve, name, *RANKS, *whole) as server:
        for rank in range(2):
            assert_same(at(rank)[:: 1 - 2 * rank], expected)
        for state in states(server):
            assert state["rectified_tokens"] == alone["rectified_tokens"] > 0
        before = [state["rectified_requests"] for state in states(server)]
        server.flush_cache()
        # One rank rectifies while the other one prefills, decodes, rectifies other rows or has none; a row may be taken
        # along early, so that answers are others.
        with ThreadPoolExecutor() as pool:
            for answers in pool.map(at, range(2)):
                assert [len(one["output_ids"]) for one in answers] == [24] * len(PROMPTS)
        assert all(state["rectified_requests"] > many for state, many in zip(states(server), before, strict=True))
        assert_nothing_leaked(server)


def test_ranks_with_whole_dense_layers_rectify(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang has counted a step's tokens before it is divided. Finished answers are encoded to their ends."""
    method, config, _ = RECTIFIED["robsa"]
    monkeypatch.setitem(METHODS, "robsa", (method, {**config, "rectify_on_finish": True}, None))
    found = []
    for flags in ((), ("--tp-size", "2", "--moe-dense-tp-size", "1")):
        with started(serve, "robsa", *flags) as server:
            answers = [server.generate(input_ids=prompt, **ASKED) for prompt in PROMPTS]
            turns = [
                {"input_ids": prompt + answer["output_ids"] + prompt[:70]}
                for prompt, answer in zip(PROMPTS, answers, strict=True)
            ]
            answers += [server.generate(**turn, **ASKED) for turn in turns]
            (state,) = states(server)
            found.append((answers, state["rectified_tokens"], state["finish_tokens_rectified"]))
            # Rows of many lengths, of which some are due.
            assert len(server.generate(input_ids=PROMPTS * 2, **ASKED)) == 2 * len(PROMPTS)
            assert_nothing_leaked(server)
    assert_same(found[1][0], found[0][0])
    assert found[1][1:] == found[0][1:] and all(found[0][1:])


@pytest.mark.parametrize("name", ["resa and anchor", "robsa"])
def test_stages_rectify(serve, monkeypatch: pytest.MonkeyPatch, name: str, tmp_path: Path) -> None:
    """One prompt at a time, as when a row is rectified depends on its neighbours."""
    monkeypatch.setitem(METHODS, name, RECTIFIED[name])
    model = untied(model_of(name), tmp_path)
    with started(serve, name, model=model) as server:
        expected = [server.generate(input_ids=prompt, **ASKED) for prompt in PROMPTS]
        (alone,) = states(server)
    with started(serve, name, "--pp-size", "2", model=model) as server:
        assert_same([server.generate(input_ids=prompt, **ASKED) for prompt in PROMPTS], expected)
        (found,) = states(server)
        assert found["rectified_tokens"] == alone["rectified_tokens"] > 0
        assert_nothing_leaked(server)


def test_rows_of_micro_batches_keep_their_places(serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With all pages active a row's answer is the same, whenever it is rectified, and with whom."""
    method, config, _ = RECTIFIED["resa and anchor"]
    monkeypatch.setitem(METHODS, "resa", (method, {**config, "active_ratio": 1.0}, None))
    model = untied(model_of("resa"), tmp_path)
    with started(serve, "resa", model=model) as server:
        expected = [server.generate(input_ids=prompt, **ASKED) for prompt in PROMPTS]
    for flags in (("--pp-size", "2"), RANKS):
        with started(serve, "resa", *flags, model=model) as server:
            assert_same(server.generate(input_ids=PROMPTS * 3, **ASKED), expected * 3)
            assert all(state["rectified_tokens"] > 0 for state in states(server))
            assert_nothing_leaked(server)


@pytest.mark.parametrize("name", METHODS)
def test_stages_answer_as_one_does(serve, alone, name: str, tmp_path: Path) -> None:
    with started(serve, name, "--pp-size", "2", model=untied(model_of(name), tmp_path)) as server:
        assert_same([server.generate(input_ids=prompt, **ASKED) for prompt in PROMPTS], alone(name))
        assert_same(server.generate(input_ids=PROMPTS * 2, **ASKED), alone(name) * 2)
        (first,) = states(server)
        # It has half of the layers, and what belongs to them.
        layers = json.loads((model_of(name) / "config.json").read_text())["num_hidden_layers"]
        assert first["sparse_layers"] == layers // 2
        assert_nothing_leaked(server)
