"""RocketKV on real servers: what a prompt keeps is a function of the prompt alone, and needles are among it."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from server_requests import (
    RETRACT,
    ask,
    ask_all,
    assert_exact,
    assert_nothing_leaked,
    assert_refused,
    cold,
    find_needles,
    forced,
    greedy,
    logprobs,
    random_prompts,
    sparse_state,
    sparse_steps,
    spent,
)

from launch.server import ServerProcess

MODEL = Path(__file__).parent.parent.parent / "eval" / "models" / "tiny-gqa"
PAGE, LAYERS, WINDOW, BUDGET, TOPK = 16, 4, 32, 256, 16
FLAGS = ("--dtype", "float32", "--context-length", "10240")
CONFIG = {"prompt_budget": BUDGET, "topk": TOPK, "dense_fallback": "never"}
DENSE = {"sparse": False}
GROUP = 128
ANCHOR = {"block_size": 32, "step": 4, "theta": 0.5, "crossover_tokens": 2 * GROUP}


def kept(server: ServerProcess) -> tuple[int, int]:
    """Prompts that were cut, and those that could not be, so far."""
    found = sparse_state(server)["kept"]
    return found["prompts"], found["whole_prompts"]


@pytest.fixture(scope="module")
def some() -> list[list[int]]:
    """Random prompts at and around the ends of budget, blocks, pages and chunks."""
    return random_prompts(5, (40, BUDGET, BUDGET + 1, BUDGET + 2, 511, 544, 549, 1023, 1504))


@pytest.fixture(scope="module")
def cut(some) -> list[list[int]]:
    return [prompt for prompt in some if len(prompt) > BUDGET]


@pytest.fixture(scope="module")
def server(serve) -> Iterator[ServerProcess]:
    with serve(MODEL, *FLAGS, "--chunked-prefill-size", "128", method="rocketkv", config=CONFIG) as server:
        yield server


@pytest.fixture(scope="module")
def alone(server, some) -> list[list[int]]:
    """Cold, in chunks of 128 tokens."""
    server.flush_cache()
    return greedy(server, some)


def test_few_blocks_of_what_is_kept_are_attended(server, some, cut, alone) -> None:
    server.flush_cache()
    before, (prompts, _) = sparse_state(server), kept(server)
    assert greedy(server, some[-2:]) == alone[-2:]
    used = spent(server, before)
    assert kept(server) == (prompts + 2, 0)
    assert used["sparse_layer_rows"] == LAYERS * used["decode_rows"] and used["dense_fallback_rows"] == 0
    assert used["pages_attended"] == TOPK * 2 * used["sparse_layer_rows"]
    dense = [ask(server, prompt, 24, DENSE)["output_ids"] for prompt in cut]
    everything = [ask(server, prompt, 24, {"topk": 10**6})["output_ids"] for prompt in cut]
    assert everything == dense
    # What is not kept is missed, whatever a step would choose from it.
    count = (BUDGET - WINDOW + 64) // 4
    assert [ask(server, prompt, 24, {"topk": count})["output_ids"] for prompt in cut[-3:]] != dense[-3:]
    assert alone[-len(cut) :] != dense


def test_a_cached_prefix_is_used_up_to_the_window(server, some, alone) -> None:
    edges = (1, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 40, 0)
    for index, before in ((-1, edges), (7, (1, 0)), (2, (WINDOW, 0))):
        prompt = some[index]
        for cached in before:
            server.flush_cache()
            # So many tokens before the prompt's end another one went on differently; 0 is the prompt itself.
            ask(server, [*prompt[: len(prompt) - cached], *([7] if cached else [])], 1)
            answer = ask(server, prompt, 24)
            expected = (len(prompt) - max(cached, WINDOW)) // PAGE * PAGE
            assert answer["output_ids"] == alone[index]
            assert answer["meta_info"]["cached_tokens"] == expected <= len(prompt) - WINDOW
    assert kept(server)[1] == 0


def test_a_prompt_that_is_visible_throughout_is_cached_as_always(server, some) -> None:
    server.flush_cache()
    for prompt, options in ((some[1], None), (some[-1], DENSE)):
        first, second = (ask(server, prompt, 24, options) for _ in range(2))
        assert second["meta_info"]["cached_tokens"] == (len(prompt) - 1) // PAGE * PAGE
        assert second["output_ids"] == first["output_ids"]


def test_eight_at_once_equal_one_after_the_other(server, some, alone) -> None:
    server.flush_cache()
    before = kept(server)[0]
    assert greedy(server, [*some, *some], at_once=8) == [*alone, *alone]
    cut = sum(len(prompt) > BUDGET for prompt in some)
    assert kept(server) == (before + 2 * cut, 0)
    assert_nothing_leaked(server)


def test_a_second_turn_chooses_anew(server, some) -> None:
    """All of a conversation is in the tree, and its next question keeps what it asks for, as on a cold server."""
    rng = random.Random(9)
    for options, decoded in ((None, 0), (DENSE, 60 - 1)):
        server.flush_cache()
        prompt = some[-2]
        first = ask(server, prompt, 60, options)["output_ids"]
        turns = [[*prompt, *first, *(rng.randrange(10, 4000) for _ in range(50))] for _ in range(2)]
        hits = [ask(server, turn, 24) for turn in turns]
        # The first one prefills what was decoded, and the second one finds it.
        shared = [(len(prompt) + more) // PAGE * PAGE for more in (decoded, len(first))]
        assert [hit["meta_info"]["cached_tokens"] for hit in hits] == shared
        server.flush_cache()
        assert [hit["output_ids"] for hit in hits] == greedy(server, turns)
    assert kept(server)[1] == 0


def test_a_request_may_ask_for_more_or_less(server, some) -> None:
    def attended(**options: Any) -> int:
        before = sparse_state(server)
        ask(server, some[-1], 8, options)
        return spent(server, before)["pages_attended"]

    assert 0 < attended(topk=4) < attended() < attended(topk=40)
    before = sparse_state(server)
    ask(server, some[-1], 40, {"rectify_interval": 8})
    assert spent(server, before)["rectified_requests"] >= 4
    for field, value, said in (
        ("prompt_budget", 64, "prompt_budget: belongs to the server's config"),
        ("topk", 0, "topk: got 0"),
        ("theta2", 3, "theta2: --sparse-method rocketkv has no such field"),
    ):
        assert_refused(server, {field: value}, said)


def test_needles_are_found_while_little_is_kept(server, tmp_path: Path) -> None:
    """At 2k a tenth of the tokens is kept, and a step attends to a thirtieth."""
    before, (prompts, _) = sparse_state(server), kept(server)
    find_needles(server, tmp_path)
    used = spent(server, before)
    assert used["dense_fallback_rows"] == 0 and 0 < used["pages_attended"] < 0.035 * used["pages_held"]
    assert kept(server)[0] >= prompts + 6 and kept(server)[1] == 0


def test_an_abort_leaks_nothing(server, some) -> None:
    """While it decodes, and in the middle of its prompt."""
    for prompt, counter in ((some[-1], "decode_rows"), (some[-1] * 6, "extend_pages_summarised")):
        server.flush_cache()
        before = sparse_state(server)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(ask, server, prompt, 1000, None, "it")
            while spent(server, before)[counter] < 100:
                assert not running.done(), server.log_tail()
            server.client.post("/abort_request", json={"rid": "it"}).raise_for_status()
            assert running.result()["meta_info"]["finish_reason"]["type"] == "abort"
        assert (spent(server, before)["decode_rows"] > 0) == (counter == "decode_rows")
    assert_nothing_leaked(server)


def test_two_ranks_in_one_piece_without_prefix_cache_keep_the_same(serve, some, alone) -> None:
    flags = ("--tp", "2", "--chunked-prefill-size", "4096", "--disable-radix-cache")
    with serve(MODEL, *FLAGS, *flags, method="rocketkv", config=CONFIG) as ranks:
        assert greedy(ranks, some, at_once=6) == alone
        assert kept(ranks) == (sum(len(prompt) > BUDGET for prompt in some), 0)
        assert_nothing_leaked(ranks)


def test_under_forced_retraction_in_mixed_batches(serve, cut) -> None:
    """The last layer alone is sparse: KV is then dense, and a log-probability shows what its own step has attended to.

    A step within a mixed batch and the one that a retracted request is prefilled with attend to all; every other one
    must see what it would have seen without.
    """
    flags = ("--enable-mixed-chunk", "--chunked-prefill-size", "208", "--disable-overlap-schedule")
    config = {**CONFIG, "layers": [LAYERS - 1], "kt_cache_dtype": "bfloat16"}
    prompts = cut[-6:] * 2
    tokens = random_prompts(2, [40] * len(prompts))
    with serve(MODEL, *FLAGS, *flags, method="rocketkv", config=config, env=RETRACT) as server:
        solo, dense = (
            [logprobs(forced(server, *one, **options)) for one in zip(prompts, tokens, strict=True)]
            for options in ({}, DENSE)
        )
        before = kept(server)[0]
        with ThreadPoolExecutor(8) as pool:
            answers = [*pool.map(lambda one: forced(server, *one), zip(prompts, tokens, strict=True))]
        retracted = [answer["meta_info"].get("num_retractions", 0) for answer in answers]
        assert sum(retracted) > 0
        # Each time anew, but for a request that was retracted before its prompt was whole.
        assert len(prompts) <= kept(server)[0] - before <= len(prompts) + sum(retracted) and kept(server)[1] == 0
        told, ran_sparse = sparse_steps(answers, solo, dense)
        assert 0 < ran_sparse <= told
        assert_nothing_leaked(server)


def test_identity_and_rectification(serve, some) -> None:
    """Everything is kept and attended: dense answers; and what a request that attends to less leaves is exact."""
    config = {"prompt_budget": 10240, "topk": 10240, "rectify_interval": 16, "check_exactness": True}
    flags = ("--chunked-prefill-size", "512")
    with serve(MODEL, *FLAGS, *flags, method="rocketkv", config={**CONFIG, **config}) as server:
        before = sparse_state(server)
        found = greedy(server, some, at_once=4)
        used = spent(server, before)
        assert used["pages_attended"] == used["pages_held"] > 0 and used["dense_fallback_rows"] == 0
        assert kept(server) == (0, 0)
        assert found == [ask(server, prompt, 24, DENSE)["output_ids"] for prompt in some]
        server.flush_cache()
        first = ask(server, some[-1], 60, {"topk": TOPK})["output_ids"]
        turn = [*some[-1], *first, 11, 12]
        assert ask(server, turn, 1)["meta_info"]["cached_tokens"] == (len(some[-1]) + 48) // PAGE * PAGE
        # Prefills after which nothing decodes.
        for prompt in some[-3:]:
            ask(server, [9, *prompt], 1)
        assert_exact(server)
        assert_nothing_leaked(server)


@pytest.mark.soak
def test_beside_anchor_and_rectification(serve, cut) -> None:
    config = {**CONFIG, "rectify_interval": 16, "check_exactness": True}
    flags = ("--chunked-prefill-size", str(2 * GROUP))
    rng = random.Random(4)
    prompts = [
        *cut,
        *([*cut[-1][: 3 * GROUP + more], *(rng.randrange(10, 4000) for _ in range(300))] for more in (0, 9)),
    ]
    with serve(MODEL, *FLAGS, *flags, method="rocketkv", config=config, prefill=ANCHOR) as server:
        expected = cold(server, prompts)
        server.flush_cache()
        before = kept(server)[0]
        answers = ask_all(server, [*prompts, *prompts], 24)
        # No row is rectified before its ninth token, whatever runs beside it.
        assert [answer["output_ids"][:8] for answer in answers] == [*expected, *expected]
        limits = [(len(prompt) - WINDOW) // PAGE * PAGE for prompt in [*prompts, *prompts]]
        cached = [answer["meta_info"]["cached_tokens"] for answer in answers]
        assert all(map(int.__le__, cached, limits)) and sum(cached) > 0
        assert kept(server) == (before + 2 * len(prompts), 0)
        state = sparse_state(server)
        assert 0 < state["prefill"]["pairs_attended"] < state["prefill"]["pairs_causal"]
        assert state["rectified_requests"] > 0 and 0 < state["pages_attended"] < 0.5 * state["pages_held"]
        assert_exact(server, 2 * GROUP)
        assert_nothing_leaked(server)
