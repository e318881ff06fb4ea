"""Skip-Softmax prefill on real servers: dense at a threshold of zero, needles, one KV for all who share a prefix."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_requests import (
    ask,
    assert_exact,
    assert_nothing_leaked,
    assert_refused,
    cold,
    find_needles,
    greedy,
    prompt_logprobs,
    prompts_that_part,
    sparse_state,
)

from launch.server import ServerProcess

MODEL = Path(__file__).parent.parent.parent / "eval" / "models" / "tiny-gqa"
PAGE, LAYERS, GROUP = 16, 4, 128
CONFIG = {"threshold_scale_factor": 250.0, "dense_fallback": "never", "check_exactness": True}
FLAGS = ("--dtype", "float32", "--context-length", "4096", "--sparse-prefill-method", "skip_softmax")
EXACT = {"exact_prefix": True}
FIELDS = ("sparse_tokens", "dense_tokens", "pairs_attended", "pairs_causal", "blocks_skipped", "blocks_visited")


def counted(server: ServerProcess, before: dict[str, int] | None = None) -> dict[str, int]:
    """Return the counts of prefill, since ``before`` if given."""
    found = sparse_state(server)["prefill"]
    return {name: found[name] - (before[name] if before else 0) for name in FIELDS}


@pytest.fixture(scope="module")
def server(serve) -> Iterator[ServerProcess]:
    with serve(MODEL, *FLAGS, "--sparse-prefill-config", json.dumps(CONFIG), "--chunked-prefill-size", "512") as server:
        yield server


@pytest.fixture(scope="module")
def long_prompts() -> list[list[int]]:
    """Prompts of up to 1,300 tokens that part where a tile ends, or 1, 40 or 100 tokens later."""
    return prompts_that_part(3, 7 * GROUP, [(0, 0), (0, 1), (40, 129), (100, 300), (100, 1), (0, 400)])


def test_a_threshold_of_zero_is_dense(server, prompts) -> None:
    chosen = prompts[::3]
    before = counted(server)
    found = [ask(server, prompt, 16, {"threshold_scale_factor": 0})["output_ids"] for prompt in chosen]
    used = counted(server, before)
    assert used["sparse_tokens"] == sum(map(len, chosen)) and used["dense_tokens"] == 0
    assert used["pairs_attended"] == used["pairs_causal"] > 0
    assert used["blocks_skipped"] == 0 < used["blocks_visited"]
    assert sparse_state(server)["prefill"]["sparse_layers"] == LAYERS
    before = counted(server)
    dense = [ask(server, prompt, 16, EXACT)["output_ids"] for prompt in chosen]
    assert counted(server, before)["sparse_tokens"] == 0
    assert found == dense
    assert_nothing_leaked(server)


def test_needles_are_found_while_blocks_are_skipped(server, tmp_path: Path) -> None:
    before = counted(server)
    find_needles(server, tmp_path)
    used = counted(server, before)
    assert 0.3 * used["blocks_visited"] < used["blocks_skipped"] < used["blocks_visited"]
    assert used["pairs_attended"] < 0.7 * used["pairs_causal"]


def test_a_higher_threshold_skips_more(server, long_prompts) -> None:
    server.flush_cache()
    skipped = []
    for factor in (1.0, 50, 250, 1000.0):
        before = counted(server)
        ask(server, long_prompts[-1], 2, {"threshold_scale_factor": factor})
        used = counted(server, before)
        skipped.append(used["blocks_skipped"])
        assert used["sparse_tokens"] == len(long_prompts[-1])
    assert 0 < skipped[0] < skipped[1] < skipped[2] < skipped[3]


def test_prefixes_chunks_and_company_change_nothing(serve, server, long_prompts) -> None:
    expected = cold(server, long_prompts)
    server.flush_cache()
    chunks = prompt_logprobs(server, long_prompts[-1])
    hits = [ask(server, prompt) for prompt in long_prompts]
    assert [answer["output_ids"] for answer in hits] == expected
    for prompt, answer in zip(long_prompts, hits, strict=True):
        # The last token must be forwarded, and with it its tile.
        shared = len(prompt) if prompt == long_prompts[-1] else 7 * GROUP
        assert answer["meta_info"]["cached_tokens"] == min(shared, len(prompt) - 1) // GROUP * GROUP
    assert_exact(server, 2 * GROUP)
    server.flush_cache()
    assert greedy(server, long_prompts, 8, at_once=6) == expected
    assert_exact(server, 2 * GROUP)
    assert_nothing_leaked(server)
    with serve(MODEL, *FLAGS, "--sparse-prefill-config", json.dumps(CONFIG), "--chunked-prefill-size", "-1") as whole:
        found = [prompt_logprobs(whole, long_prompts[-1], options) for options in (None, EXACT)]
        apart = [max(abs(a - b) for a, b in zip(chunks, one, strict=True)) for one in found]
        assert apart[0] < 1e-3 and apart[1] > 1e-2
        assert greedy(whole, long_prompts, tokens=8) == expected


def test_requests_that_differ_share_nothing(server, long_prompts) -> None:
    server.flush_cache()
    prompt = long_prompts[-1]
    kinds: list[dict[str, Any] | None] = [None, {"threshold_scale_factor": 90}, EXACT, {"sparse": False}]
    kinds.append({"threshold_scale_factor": {"prefill": CONFIG["threshold_scale_factor"]}})
    hits = [ask(server, prompt, options=options)["meta_info"]["cached_tokens"] for options in kinds]
    # A dense prompt is cached page by page; a threshold that is the server's own is no difference.
    assert hits == [0, 0, 0, (len(prompt) - 1) // PAGE * PAGE, len(prompt) // GROUP * GROUP]
    assert_exact(server, 2 * GROUP)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"threshold_scale_factor": -1}, "threshold_scale_factor: got -1; must be a number from 0 to 1e30"),
        ({"threshold_scale_factor": True}, "threshold_scale_factor: got True"),
        ({"threshold_scale_factor": {"decode": 2.0}}, "allowed on this server: a number, or a mapping with prefill"),
    ],
)
def test_bad_options_are_refused(server, options: dict[str, Any], said: str) -> None:
    assert_refused(server, options, said)


@pytest.mark.soak
def test_beside_resa_and_rectification(serve, long_prompts) -> None:
    decode = {"active_ratio": 0.1, "min_pages": 4, "dense_fallback": "never", "rectify_interval": 16}
    flags = [*FLAGS, "--sparse-prefill-config", json.dumps(CONFIG), "--chunked-prefill-size", "512"]
    flags += ["--sparse-method", "resa", "--sparse-config", json.dumps(decode)]
    with serve(MODEL, *flags) as server:
        expected = cold(server, long_prompts, 40)
        server.flush_cache()
        together = greedy(server, long_prompts, 40, at_once=len(long_prompts))
        # No row is rectified before its ninth token; when it is hangs on what runs beside it.
        assert [tokens[:8] for tokens in together] == [tokens[:8] for tokens in expected]
        state = sparse_state(server)
        assert 0 < state["pages_attended"] < 0.5 * state["pages_held"]
        assert state["rectified_requests"] >= 2 * 2 * len(long_prompts)
        assert 0 < state["prefill"]["blocks_skipped"] < state["prefill"]["blocks_visited"]
        assert_exact(server, 2 * GROUP)
        assert_nothing_leaked(server)
