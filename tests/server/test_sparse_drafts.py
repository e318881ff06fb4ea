"""Verifications of SGLang's own drafts that run sparse, on real servers: one selection a request and round."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_eagle3
from server_requests import (
    RETRACT,
    ask,
    ask_all,
    assert_abort_leaks_nothing,
    assert_exact,
    assert_nothing_leaked,
    assert_refused,
    greedy,
    random_prompts,
    sparse_state,
    spent,
)

MODEL = Path("eval/models/tiny-gqa")
TOKENS, WIDTH = 24, 4
FLAGS = ("--chunked-prefill-size", "256", "--context-length", "800")
CHAIN = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(WIDTH))
COMMON = {"min_seq_len": 0, "crossover_tokens": 0, "check_exactness": True, "rectify_interval": 0}
ALL = {**COMMON, "active_ratio": 1.0, "dense_fallback": "never"}
SOME = {**COMMON, "active_ratio": 0.05, "min_pages": 2}

pytestmark = [pytest.mark.long, pytest.mark.skipif(torch.cuda.is_available(), reason="equal answers need float32")]


def drafted_by(model: Path) -> tuple[str, ...]:
    """The target itself drafts, which is mostly right, or a head."""
    algorithm = "STANDALONE" if model == MODEL else "EAGLE3"
    return (*FLAGS, "--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(model), *CHAIN)


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head whose drafts are hardly ever right."""
    return random_eagle3(tmp_path_factory.mktemp("random-drafts"), MODEL)


@pytest.fixture(scope="module")
def some() -> list[list[int]]:
    """Prompts of one chunk and of several, at and around borders of pages."""
    return random_prompts(5, (40, 257, 512, 700))


@pytest.fixture(scope="module")
def outputs(serve, some) -> list[list[int]]:
    with serve(MODEL, *FLAGS) as dense:
        return greedy(dense, some, TOKENS)


def rounds(answers: list[dict[str, Any]]) -> int:
    return sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)


@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
def test_all_pages_are_a_dense_servers_answers(serve, some, outputs, wrong, right: bool) -> None:
    """Whatever was drafted, and whoever is retracted; a round is one decode step."""
    with serve(MODEL, *drafted_by(MODEL if right else wrong), config=ALL, env=RETRACT) as server:
        before = sparse_state(server)
        answers = ask_all(server, some, TOKENS, at_once=1)
        assert [answer["output_ids"] for answer in answers] == outputs
        used = spent(server, before)
        # The first token is the prefill's.
        least, most = (-(-(TOKENS - 1) // WIDTH), 10) if right else (15, TOKENS - 1)
        assert least * len(some) <= rounds(answers) <= most * len(some)
        assert used["decode_steps"] == used["decode_rows"] >= rounds(answers)
        assert used["pages_attended"] == used["pages_held"] > 0 == used["dense_fallback_rows"]
        server.flush_cache()
        asked = [(row, 3 + 9 * turn + 3 * row) for turn in range(2) for row in range(len(some))]
        with ThreadPoolExecutor(4) as pool:
            found = [*pool.map(lambda one: ask(server, some[one[0]], one[1])["output_ids"], asked)]
        assert found == [outputs[row][:tokens] for row, tokens in asked]
        assert_exact(server)
        assert_nothing_leaked(server)


def test_a_selection_changes_no_answer_with_the_batch(serve, some, outputs) -> None:
    """Requests come, go and are left; only the KV of prompts is shared."""
    with serve(MODEL, *drafted_by(MODEL), config=SOME) as server:
        before = sparse_state(server)
        alone = greedy(server, some, TOKENS)
        used = spent(server, before)
        assert used["pages_attended"] < used["pages_held"] / 4 and alone != outputs
        assert used["tail_tokens_dropped"] >= len(some) * (TOKENS - 1)
        assert greedy(server, some * 2, TOKENS, at_once=4) == alone * 2
        assert_refused(server, {"forced_tokens": [5]}, "forced_tokens")
        assert_abort_leaks_nothing(server, input_ids=some[0])
        assert_exact(server)
        assert_nothing_leaked(server)


def test_what_rounds_commit_is_rectified_and_shared(serve, some) -> None:
    """Every eight tokens as far as pages are full, unless a request asks for none; at the end all but the newest."""
    with serve(MODEL, *drafted_by(MODEL), config=SOME | {"rectify_interval": 8, "rectify_on_finish": True}) as server:
        before = sparse_state(server)
        answers = greedy(server, some, TOKENS)
        used = spent(server, before)
        assert used["rectifying_steps"] >= len(some) and used["rectified_tokens"] >= 8 * len(some)
        assert used["pages_attended"] < used["pages_held"] / 4 and used["tail_tokens_dropped"] == 0
        # The newest token has no KV.
        shared = len(some[-1]) + TOKENS - 1
        assert ask(server, some[-1] + answers[-1], 1)["meta_info"]["cached_tokens"] == shared // 16 * 16
        before = sparse_state(server)
        ask_all(server, some, TOKENS, {"rectify_interval": 0}, at_once=1)
        assert spent(server, before)["rectifying_steps"] == 0
        assert_exact(server)
        assert_nothing_leaked(server)


def test_short_requests_stay_dense_and_are_shared(serve, some, outputs) -> None:
    """All but what the last round of a request committed, which no later round knew of."""
    with serve(MODEL, *drafted_by(MODEL), config={"check_exactness": True, "rectify_interval": 0}) as server:
        before = sparse_state(server)
        answers = ask_all(server, some, TOKENS, at_once=1)
        assert [answer["output_ids"] for answer in answers] == outputs
        used = spent(server, before)
        assert used["dense_fallback_rows"] == used["decode_rows"] >= rounds(answers)
        assert used["tail_tokens_dropped"] <= len(some) * WIDTH
        longest = some[-1] + outputs[-1]
        again = ask(server, longest, 1)["meta_info"]["cached_tokens"]
        assert again >= (len(longest) - WIDTH) // 16 * 16 - 16
        assert_exact(server)
        assert_nothing_leaked(server)
