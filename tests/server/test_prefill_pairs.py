"""Prefill methods beside decode methods, also by layer and on the smallest and largest pages; incomplete groups."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from checkpoints import random_qwen3
from feature_cells import PAGE_SIZE, PROOFS, Cell
from server_requests import (
    ask,
    ask_all,
    assert_exact,
    assert_nothing_leaked,
    cold,
    prompt_logprobs,
    prompts_that_part,
    sparse_state,
)

pytestmark = pytest.mark.long

PAGE, GROUP, CHUNK, SHARED = 16, 128, 512, 1024
CHUNKS = ("--chunked-prefill-size", str(CHUNK))
ANCHOR = {"block_size": 32, "step": GROUP // 32, "dense_tail": 0, "theta": 0.5, "crossover_tokens": 2 * GROUP}
DECODE = {
    "resa": {"active_ratio": 0.2, "min_pages": 4},
    "rocketkv": {"prompt_budget": 256, "window_size": 16, "topk": 16},
    "skip_softmax": {"threshold_scale_factor": {"decode": 300.0}},
}
SKIP_PREFILL = {"threshold_scale_factor": 250.0, "dense_fallback": "never"}
TRAINED = Path("eval/models/tiny-gqa")


def by_layer(first: str, second: str, others: str) -> dict[str, Any]:
    """Decode methods for the trained model's four layers."""
    rules = {layers: {"method": name, **DECODE[name]} for layers, name in (("0", first), ("1", second), ("2-", others))}
    return {"layers": rules, "rectify_interval": 0}


@pytest.fixture(scope="module")
def family() -> list[list[int]]:
    """Prompts that part at the end of a group, or 1, 40 or 100 tokens later."""
    return prompts_that_part(5, SHARED, [(0, 33), (1, 129), (40, 127), (100, 300), (100, 1)])


class Pair(NamedTuple):
    """A decode method beside a prefill method, on pages of so many tokens."""

    method: str
    config: dict[str, Any]
    prefill_method: str
    prefill: dict[str, Any]
    page: int


PAIRS = (
    Pair("rocketkv", DECODE["rocketkv"], "anchor", ANCHOR, PAGE),
    Pair("skip_softmax", DECODE["skip_softmax"], "anchor", ANCHOR, PAGE),
    Pair("resa", by_layer("resa", "resa", "skip_softmax"), "skip_softmax", SKIP_PREFILL, 1),
    Pair("resa", by_layer("skip_softmax", "resa", "resa"), "skip_softmax", SKIP_PREFILL, 2),
    Pair("rocketkv", by_layer("resa", "rocketkv", "skip_softmax"), "skip_softmax", SKIP_PREFILL, 64),
)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda one: f"{one.method}-{one.prefill_method}-{one.page}")
def test_prefixes_and_company_change_nothing(pair: Pair, serve, checkpoint, family: list[list[int]]) -> None:
    # The attention of a random model is too flat for blocks to be skipped.
    model = checkpoint if pair.prefill_method == "anchor" else TRAINED
    flags = ["--dtype", "float32", "--page-size", str(pair.page), "--sparse-prefill-method", pair.prefill_method]
    flags += ["--sparse-prefill-config", json.dumps({**pair.prefill, "check_exactness": True})]
    config = {**pair.config, "page_size": pair.page, "dense_fallback": "never"}
    with serve(model, *CHUNKS, *flags, method=pair.method, config=config) as server:
        expected = cold(server, family)
        server.flush_cache()
        before = sparse_state(server)
        answers = [*ask_all(server, family), *ask_all(server, family, at_once=1)]
        assert [answer["output_ids"] for answer in answers] == [*expected, *expected]
        # What was asked before is found up to a whole group.
        cached = [answer["meta_info"]["cached_tokens"] for answer in answers[len(family) :]]
        assert all(count % GROUP == 0 for count in cached) and min(cached) >= SHARED - GROUP
        after = sparse_state(server)
        assert (after["method"], after["prefill"]["method"]) == (pair.method, pair.prefill_method)
        assert after["sparse_layer_rows"] > before["sparse_layer_rows"]
        for part in after.get("parts", []):
            pages = part["pages_held"] - part["pages_attended"]
            assert (part["blocks_skipped"] if part["method"] == "skip_softmax" else pages) > 0, part
        causal, attended = (
            after["prefill"][name] - before["prefill"][name] for name in ("pairs_causal", "pairs_attended")
        )
        assert 0 < attended < 0.95 * causal
        assert_exact(server, 2 * GROUP)
        assert_nothing_leaked(server)


def test_the_page_sizes_that_the_table_of_proofs_has_from_here_are_here() -> None:
    served = {
        Cell(PAGE_SIZE, rule["method"], str(pair.page))
        for pair in PAIRS
        for rule in pair.config.get("layers", {}).values()
    }
    named = {cell for cell, proof in PROOFS.items() if Path(__file__).name in proof}
    assert named and named <= served


def test_incomplete_groups_are_shared_if_asked_for(serve, checkpoint, family: list[list[int]]) -> None:
    """By pages, and the server answers a repeated prompt as before, from what it has cached."""
    prompt = family[-1]
    for share in (False, True):
        with serve(checkpoint, *CHUNKS, prefill={**ANCHOR, "share_partial_groups": share}) as server:
            first, again = ask(server, prompt), ask(server, prompt)
            end = (len(prompt) - 1) // PAGE * PAGE
            assert end % GROUP
            assert again["meta_info"]["cached_tokens"] == (end if share else end // GROUP * GROUP)
            if share:
                assert again["output_ids"] == first["output_ids"]
            assert_nothing_leaked(server)


def test_a_chunk_that_cuts_a_group_sees_what_one_piece_up_to_there_sees(
    serve, tmp_path, family: list[list[int]]
) -> None:
    """Its queries find keys with all of the group so far. With one layer, a token's logits show which it had.

    If the prompt goes on and this is one block alone, it has some of the group before as well: as in a longer chunk.
    """
    model, prefill = random_qwen3(tmp_path, layers=1), {**ANCHOR, "share_partial_groups": True, "theta": 2.0}
    prompt, chunk = family[-2], 208

    with (
        serve(model, "--chunked-prefill-size", str(chunk), prefill=prefill) as server,
        serve(model, "--chunked-prefill-size", str(2 * chunk), prefill=prefill) as longer,
        serve(model, "--chunked-prefill-size", "-1", prefill=prefill) as whole,
    ):
        more = []
        for options in (None, {"theta": 2.2}):
            found, in_longer = prompt_logprobs(server, prompt, options), prompt_logprobs(longer, prompt, options)
            for start in range(0, len(prompt), chunk):
                end = min(start + chunk, len(prompt))
                own, ended = slice(start, end - 1), prompt_logprobs(whole, prompt[:end], options)[start:]
                if end < len(prompt) and end % GROUP <= ANCHOR["block_size"]:
                    more += [abs(a - b) for a, b in zip(found[own], ended, strict=True)]
                else:
                    assert found[own] == pytest.approx(ended, abs=1e-4), (start, end)
                if end % (2 * chunk) == 0:
                    assert found[own] == pytest.approx(in_longer[own], abs=1e-4), (start, end)
        assert max(more) > 1e-2
        dense = prompt_logprobs(whole, prompt, {"exact_prefix": True})
        assert max(abs(a - b) for a, b in zip(found, dense, strict=True)) > 1e-2
        assert_nothing_leaked(server)
