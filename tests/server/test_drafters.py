"""Sparse prefill beside SGLang's own speculative algorithms: answers and shared prefixes as without."""

import json
from typing import Any

import pytest
from checkpoints import random_eagle3
from server_load import RETRACT
from server_requests import (
    ask,
    ask_all,
    assert_exact,
    assert_nothing_leaked,
    assert_refused,
    greedy,
    prompts_that_part,
    sparse_state,
)

pytestmark = pytest.mark.long

PAGE, GROUP, TOKENS = 16, 128, 24
METHODS: dict[str, dict[str, Any]] = {
    "anchor": {"theta": 0.5, "block_size": 32, "step": 4, "dense_tail": 0},
    "skip_softmax": {"threshold_scale_factor": 250.0},
}
COMMON = {"dense_fallback": "never", "check_exactness": True}
CHAIN = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
EXACT = {"exact_prefix": True}


def flags(method: str) -> list[str]:
    config = json.dumps({**METHODS[method], **COMMON})
    found = ["--sparse-prefill-method", method, "--sparse-prefill-config", config, "--chunked-prefill-size", "256"]
    return [*found, "--dtype", "float32", "--enable-metrics"]


@pytest.fixture(scope="module")
def long_prompts() -> list[list[int]]:
    """Prompts of up to 700 tokens that part where a group ends, or 1, 40 or 100 tokens later; and two short ones."""
    parted = prompts_that_part(5, 3 * GROUP, [(0, 3), (0, 1), (0, 129), (40, 129), (100, 200), (100, 1)])
    return [*parted, parted[0][:9], parted[-1][:100]]


@pytest.fixture(scope="module")
def expected(serve, checkpoint, long_prompts) -> dict[str, tuple[list[list[int]], dict[str, Any]]]:
    """By method, the answers of a server without drafts, one by one, and what it counted."""
    found = {}
    for method in METHODS:
        with serve(checkpoint, *flags(method)) as server:
            found[method] = greedy(server, long_prompts, TOKENS), sparse_state(server)["prefill"]
    return found


@pytest.fixture(scope="module", params=["STANDALONE", "EAGLE3"])
def drafter(request, checkpoint, tmp_path_factory) -> tuple[str, ...]:
    """The model itself, which drafts behind dense prompts; and a random head, whose drafts are wrong."""
    own = request.param == "STANDALONE"
    model = checkpoint if own else random_eagle3(tmp_path_factory.mktemp("eagle3"), checkpoint)
    chosen = () if own else CHAIN
    return "--speculative-algorithm", request.param, "--speculative-draft-model-path", str(model), *chosen


def tokens_a_round(answers: list[dict[str, Any]]) -> float:
    """Drafts that were accepted and the tokens behind them, on average."""
    rounds = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    return sum(answer["meta_info"]["completion_tokens"] for answer in answers) / rounds


@pytest.mark.parametrize("method", METHODS)
def test_drafts_change_no_answer(serve, checkpoint, long_prompts, expected, drafter, method) -> None:
    """One by one, behind cached prefixes, and as a batch; a verification is no prefill."""
    answers, counted = expected[method]
    with serve(checkpoint, *flags(method), *drafter) as server:
        alone = ask_all(server, long_prompts, TOKENS, at_once=1)
        assert [answer["output_ids"] for answer in alone] == answers
        assert 1 <= tokens_a_round(alone) <= 4 and (tokens_a_round(alone) > 1.3) is ("STANDALONE" in drafter)
        state = sparse_state(server)
        assert state["prefill"]["sparse_tokens"] > 0 and state["decode_steps"] == 0
        if "EAGLE3" not in drafter:
            same = ("sparse_tokens", "dense_tokens", "pairs_attended", "pairs_causal")
            assert {name: state["prefill"][name] for name in same} == {name: counted[name] for name in same}
        assert server.server_info()["internal_states"][0]["avg_spec_accept_length"] >= 1
        assert "sglang:sparse_prefill" in server.client.get("/metrics").text
        assert_exact(server, 2 * GROUP)
        server.flush_cache()
        assert greedy(server, long_prompts, TOKENS, at_once=8) == answers
        assert greedy(server, long_prompts, TOKENS, at_once=8) == answers
        assert_refused(server, {"forced_tokens": [5, 6]}, "forced_tokens: got")
        assert_exact(server, 2 * GROUP)
        assert_nothing_leaked(server)


def test_prefixes_are_shared_by_whole_groups_and_generated_ones_where_prompts_are_dense(
    serve, checkpoint, long_prompts, drafter
) -> None:
    with serve(checkpoint, *flags("anchor"), *drafter) as server:
        first, second, third = long_prompts[0], long_prompts[1], long_prompts[2]
        answer = ask(server, first, TOKENS)
        # A tree of pairs has the last position of a group together with the first token behind it.
        again = ask(server, first + answer["output_ids"], TOKENS)
        assert again["meta_info"]["cached_tokens"] == 3 * GROUP
        pairs = "EAGLE3" in drafter
        for prompt in (second, third):
            assert ask(server, prompt)["meta_info"]["cached_tokens"] == (2 if pairs else 3) * GROUP
        assert ask(server, third)["meta_info"]["cached_tokens"] == 4 * GROUP
        dense = ask(server, first, TOKENS, EXACT)
        whole = first + dense["output_ids"]
        again = ask(server, [*whole, 7], 2, EXACT)
        assert again["meta_info"]["cached_tokens"] == (len(whole) - 1) // PAGE * PAGE
        assert_exact(server, 2 * GROUP)


def test_retracted_rows_answer_the_same(serve, checkpoint, long_prompts, expected, drafter) -> None:
    with serve(checkpoint, *flags("anchor"), *drafter, "--max-total-tokens", "3000", env=RETRACT) as server:
        assert greedy(server, long_prompts, TOKENS, at_once=4) == expected["anchor"][0]
        assert "Testing retraction" in server.log()
        drawn = {"max_new_tokens": 8, "temperature": 1.0, "top_p": 0.9, "top_k": 20}
        assert server.generate(input_ids=long_prompts[0], sampling_params=drawn)["meta_info"]["completion_tokens"] <= 8
        assert_exact(server, 2 * GROUP)
        assert_nothing_leaked(server)
