"""Servers as they are deployed: replicas, stages, host memory and drafts change no token."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import untied
from server_requests import RANKS, assert_nothing_leaked, logprobs, random_prompts
from tiny_dsa import FLAGS, GREEDY, LAYERS, MODEL, PAGE, TOPK, long_texts

from launch.server import ServerProcess

pytestmark = [pytest.mark.long, pytest.mark.skipif(torch.cuda.is_available(), reason="refused next to CUDA")]
DRAFTER = Path("eval/models/tiny-gqa")
TOKENS = 24
CHAIN = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(DRAFTER))
CHAIN += ("--speculative-draft-attention-backend", "torch_native")
ASKED = {"return_logprob": True, "sampling_params": {**GREEDY, "max_new_tokens": TOKENS}}
DEPLOYMENTS: dict[str, tuple[str, ...]] = {
    "data parallelism": ("--dp-size", "2"),
    "data-parallel attention": RANKS,
    "pipeline parallelism": ("--pp-size", "2"),
}


def prompts() -> list[dict[str, Any]]:
    """Some of which more tokens are held than chosen, and a short one."""
    return [*({"text": text} for text in long_texts()), {"input_ids": list(range(10, 140))}]


def answers(server: ServerProcess, times: int = 1) -> list[dict[str, Any]]:
    """Each prompt so often, one after the other, as replicas take turns."""
    return [server.generate(**given, **ASKED) for given in prompts() for _ in range(times)]


def states(server: ServerProcess) -> list[dict[str, Any]]:
    return [state["sparse"] for state in server.server_info()["internal_states"]]


@pytest.fixture(scope="module")
def alone(serve) -> list[dict[str, Any]]:
    """The answers of one scheduler."""
    with serve(MODEL, *FLAGS, method="dsa", config={}) as server:
        return answers(server)


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one["output_ids"] == other["output_ids"]
        assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-3)


@pytest.mark.parametrize("ranks", DEPLOYMENTS)
def test_ranks_answer_as_one_does(serve, alone, ranks: str, tmp_path: Path) -> None:
    with serve(untied(MODEL, tmp_path), *FLAGS, *DEPLOYMENTS[ranks], method="dsa", config={}) as server:
        times = 2 if ranks.startswith("data") else 1
        assert_same(answers(server, times), [answer for answer in alone for _ in range(times)])
        found = states(server)
        assert len(found) == times
        # The first stage has half of the layers, and reports for all.
        layers = LAYERS // 2 if ranks.startswith("pipeline") else LAYERS
        for state in found:
            rows = state["decode_rows"] - state["dense_fallback_rows"]
            assert rows >= 3 * (TOKENS - 1) and state["sparse_layer_rows"] == rows * layers
            assert state["pages_attended"] == rows * layers * TOPK
        # Ranks of uneven load at once, of which one is idle in the end.
        together = server.generate(text=long_texts(), **ASKED)
        assert [answer["output_ids"] for answer in together] == [answer["output_ids"] for answer in alone[:3]]
        assert_nothing_leaked(server)


@pytest.fixture(scope="module")
def tiered(serve) -> Iterator[ServerProcess]:
    """Three prompts do not fit into its KV pool, all fit into host memory."""
    flags = ("--max-total-tokens", "2048", "--enable-hierarchical-cache", "--hicache-ratio", "4")
    with serve(MODEL, *FLAGS, *flags, method="dsa", config={}) as server:
        yield server


def test_prompts_come_back_from_host_memory(tiered, alone) -> None:
    assert_same(answers(tiered), alone)
    # Others take the place of all of them.
    for prompt in random_prompts(5, (1500, 1500)):
        tiered.generate(input_ids=prompt, sampling_params={**GREEDY, "max_new_tokens": 1})
    for given, expected in zip(prompts(), alone, strict=True):
        (before,) = states(tiered)
        answer = tiered.generate(**given, **ASKED)
        assert_same([answer], [expected])
        (after,) = states(tiered)
        known = answer["meta_info"]["cached_tokens_details"]
        tokens = answer["meta_info"]["prompt_tokens"]
        assert known["host"] >= PAGE and known["host"] + known["device"] == (tokens - 1) // PAGE * PAGE
        # Their index keys have come along.
        assert after["index_keys_prefilled"] - before["index_keys_prefilled"] == LAYERS * (
            tokens - answer["meta_info"]["cached_tokens"]
        )
    assert_nothing_leaked(tiered)


def test_drafts_are_verified_as_each_would_choose(serve, alone) -> None:
    """By chains of a small model; each draft is a row of its own, and what is accepted is shared."""
    with serve(MODEL, *FLAGS, *CHAIN, method="dsa", config={}) as server:
        found = answers(server)
        assert_same(found, alone)
        info = server.server_info()["internal_states"][0]
        assert info["avg_spec_accept_length"] > 1.1
        rows = info["sparse"]["decode_rows"] - info["sparse"]["dense_fallback_rows"]
        assert info["sparse"]["pages_attended"] == rows * LAYERS * TOPK
        (prompt,) = random_prompts(7, (600,))
        params = {**GREEDY, "max_new_tokens": 80}
        answer = server.generate(input_ids=prompt, sampling_params=params)["output_ids"]
        second = {"input_ids": [*prompt, *answer], "sampling_params": {**params, "max_new_tokens": 8}}
        turn = server.generate(**second)
        # All but the last token have KV.
        assert turn["meta_info"]["cached_tokens"] == (600 + 79) // PAGE * PAGE
        server.flush_cache()
        assert server.generate(**second)["output_ids"] == turn["output_ids"]
        assert_nothing_leaked(server)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("resa", {"config": {"active_ratio": 0.3, "rectify_interval": 8, "dense_fallback": "never"}}),
        ("rocketkv", {"config": {"dense_fallback": "never"}}),
        ("skip_softmax", {"config": {"threshold_scale_factor": 100.0, "dense_fallback": "never"}}),
        ("anchor", {"prefill": {"theta": 4.0}}),
    ],
)
def test_replicas_of_other_methods_answer_as_one_does(serve, method: str, options: dict[str, Any]) -> None:
    """Each has its own counters, and neither waits for the other."""
    found, given = [], random_prompts(9, (300, 650))
    decode = {"method": method} if "config" in options else {}
    for flags in ((), ("--dp-size", "2")):
        with serve(DRAFTER, "--dtype", "float32", *flags, **decode, **options) as server:
            asked = [prompt for prompt in given for _ in range(2 if flags else 1)]
            found.append([server.generate(input_ids=prompt, **ASKED)["output_ids"] for prompt in asked])
            counted = states(server)
            assert_nothing_leaked(server)
    assert found[1] == [answer for answer in found[0] for _ in range(2)] and len(counted) == 2
    if method == "resa":
        assert all(state["rectified_requests"] > 0 for state in counted)
