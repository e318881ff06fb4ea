"""Methods by layer on real servers: dense where nothing is left out, each part counted, prefixes exact."""

from collections.abc import Iterator
from typing import Any

import pytest
from server_requests import ask, assert_exact, assert_nothing_leaked, assert_refused, by_part, greedy, sparse_state

from launch.server import ServerProcess

pytestmark = pytest.mark.long

PAGE, KV_HEADS = 16, 2
TENTH = {"active_ratio": 0.1, "min_pages": 4}
RULES = {"0-1": "dense", "2": TENTH, "3": {"method": "skip_softmax", "threshold_scale_factor": {"decode": 2000}}}
CONFIG = {"layers": RULES, "dense_fallback": "never", "rectify_interval": 0, "check_exactness": True}
# Nothing is left out.
ALL = {"active_ratio": 1.0, "threshold_scale_factor": 0}
NAMES = ("sparse_layer_rows", "pages_attended", "pages_held")


@pytest.fixture(scope="module")
def server(serve, checkpoint) -> Iterator[ServerProcess]:
    with serve(checkpoint, "--chunked-prefill-size", "512", config=CONFIG) as server:
        yield server


@pytest.fixture(scope="module")
def solo(server, prompts) -> list[list[int]]:
    return greedy(server, prompts[3:14:5])


def test_layers_that_leave_nothing_out_are_dense(server, prompts) -> None:
    before, earlier = sparse_state(server), by_part(server)
    found = [ask(server, prompt, 24, ALL)["output_ids"] for prompt in prompts[3:14:5]]
    after, (resa, skip) = sparse_state(server), by_part(server, earlier)
    rows = after["decode_rows"] - before["decode_rows"]
    assert rows >= 23 * len(found) and after["dense_fallback_rows"] == before["dense_fallback_rows"]
    # A layer each, both of all rows.
    assert resa["sparse_layer_rows"] == skip["sparse_layer_rows"] == rows
    assert resa["pages_attended"] == resa["pages_held"] == skip["pages_attended"] == skip["pages_held"] > 0
    assert skip["blocks_visited"] == 0
    assert [ask(server, prompt, 24, {"sparse": False})["output_ids"] for prompt in prompts[3:14:5]] == found


def test_each_part_is_counted_and_the_server_is_their_sum(server, prompts, solo) -> None:
    state = sparse_state(server)
    assert [(part["method"], part["layers"]) for part in state["parts"]] == [("resa", [2]), ("skip_softmax", [3])]
    assert [part["config"]["page_size"] for part in state["parts"]] == [PAGE, PAGE] and state["sparse_layers"] == 2
    before = by_part(server)
    ask(server, prompts[-1], 8)
    resa, skip = by_part(server, before)
    assert resa["pages_attended"] == 13 * KV_HEADS * resa["sparse_layer_rows"] < resa["pages_held"] / 9
    assert skip["pages_attended"] == skip["pages_held"] == resa["pages_held"]
    assert 0 < skip["blocks_skipped"] < skip["blocks_visited"]
    state = sparse_state(server)
    for name in NAMES:
        assert state[name] == sum(part[name] for part in state["parts"])
    assert state["blocks_skipped"] == state["parts"][1]["blocks_skipped"]
    assert state["parts"][1]["max_active_fraction"] is None
    assert state["max_active_fraction"] == state["parts"][0]["max_active_fraction"] > 0


def test_a_requests_fields_go_to_the_parts_that_have_them(server, prompts) -> None:
    def used(options: dict[str, Any]) -> tuple[int, int]:
        before = by_part(server)
        ask(server, prompts[-1], 4, options)
        resa, skip = by_part(server, before)
        return resa["pages_attended"] // resa["sparse_layer_rows"] // KV_HEADS, skip["blocks_skipped"]

    own, more = used({}), used({"active_ratio": 0.5})
    assert (own[0], more[0]) == (13, 63) and min(own[1], more[1]) > 0
    assert used({"threshold_scale_factor": 0}) == (13, 0)
    assert used(ALL) == (126, 0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"theta": 1}, "theta: --sparse-method resa has no such field; allowed: active_ratio, token_budget, rectify_"),
        ({"active_ratio": 2}, "active_ratio: got 2"),
        ({"lossless": False}, "lossless: got False"),
        ({"threshold_scale_factor": {"prefill": 3}}, "allowed on this server: a number, or a mapping with decode"),
    ],
)
def test_fields_of_no_part_are_refused(server, options: dict[str, Any], said: str) -> None:
    assert_refused(server, options, said)


def test_prefixes_and_company_change_nothing(server, prompts, solo) -> None:
    some = prompts[3:14:5]
    assert [ask(server, prompt, 24)["meta_info"]["cached_tokens"] for prompt in some] == [
        (len(prompt) - 1) // PAGE * PAGE for prompt in some
    ]
    assert greedy(server, some) == solo
    server.flush_cache()
    assert greedy(server, [*some, *some], at_once=8) == [*solo, *solo]


def test_only_exact_answers_are_shared(server, prompts) -> None:
    """Also where a part alone left something out."""
    prompt = prompts[13]
    for options, more in (({"threshold_scale_factor": 0}, 0), ({"rectify_interval": 8}, 48)):
        server.flush_cache()
        first = ask(server, prompt, 60, options)["output_ids"]
        second = ask(server, [*prompt, *first, 11, 12], 1)["meta_info"]["cached_tokens"]
        assert second >= (len(prompt) + more) // PAGE * PAGE
        assert bool(more) == (second > len(prompt))
    assert_exact(server)
    assert_nothing_leaked(server)


def test_two_configs_of_one_method_on_two_ranks(serve, checkpoint, prompts) -> None:
    """Summaries of two kinds; the part that attends to everything makes no row dense."""
    rules = {"0": {**TENTH, "summary": "centroids", "group": "vote"}, "1,3": {"active_ratio": 1.0}, "2": "dense"}
    config = {"layers": rules, "min_seq_len": 300, "crossover_tokens": 0, "rectify_interval": 0}
    with serve(checkpoint, "--tp", "2", config={**config, "check_exactness": True}) as ranks:
        short, long = prompts[4], prompts[15]
        first = ask(ranks, short, 30)["output_ids"]
        cached = ask(ranks, [*short, *first, 11], 1)["meta_info"]["cached_tokens"]
        assert cached == (len(short) + 29) // PAGE * PAGE
        before = sparse_state(ranks)
        first = ask(ranks, long, 30)["output_ids"]
        after = sparse_state(ranks)
        assert after["dense_fallback_rows"] == before["dense_fallback_rows"]
        tenth, everything = after["parts"]
        assert tenth["layers"] == [0] and everything["layers"] == [1, 3]
        assert everything["pages_attended"] == everything["pages_held"] == 2 * tenth["pages_held"] > 0
        assert tenth["pages_attended"] < tenth["pages_held"] / 4
        assert ask(ranks, [*long, *first, 11], 1)["meta_info"]["cached_tokens"] == len(long) // PAGE * PAGE
        assert_exact(ranks)
        assert_nothing_leaked(ranks)
