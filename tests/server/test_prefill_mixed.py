"""Sparse prefill with mixed chunk on real servers: rows that decode within batches of prompts stay dense."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from server_requests import ask, assert_exact, assert_nothing_leaked, cold, sparse_state

from launch.server import ServerProcess

pytestmark = pytest.mark.long

GROUP, SHARED, TOKENS = 128, 768, 8
HEADS_AND_LAYERS = 8 * 4
CROSSOVER = 2 * GROUP
PREFILL = {
    "block_size": 32,
    "step": GROUP // 32,
    "dense_tail": 0,
    "theta": 0.5,
    "crossover_tokens": CROSSOVER,
    "check_exactness": True,
}
INTERVAL = 8
COUNTS = ("sparse_tokens", "dense_tokens", "pairs_attended", "pairs_causal")
DECODE = {"active_ratio": 0.1, "min_pages": 4, "dense_fallback": "never", "rectify_interval": INTERVAL}
# Selects all pages: a row then decodes the same within a mixed batch and without.
ALL_PAGES = {"active_ratio": 1.0}


def decode_rows(server: ServerProcess) -> int:
    return sparse_state(server)["decode_rows"]


def some(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, 1000) for _ in range(count)]


@pytest.mark.parametrize(
    ("flags", "config", "options"),
    [
        (("--chunked-prefill-size", str(2 * GROUP)), DECODE, ALL_PAGES),
        # Beside a decoding row there is no room for a group.
        (("--chunked-prefill-size", str(GROUP), "--disable-overlap-schedule"), None, None),
    ],
    ids=["resa", "dense decode and chunks of one group"],
)
def test_prompts_and_decoding_rows_in_one_batch(serve, checkpoint, flags, config, options) -> None:
    rng = random.Random(5)
    shared, running = some(rng, SHARED + 100), some(rng, 5 * GROUP + 50)
    parts = [(100, 200), (0, 0), (0, 1), (1, 129), (40, 127), (40, 129), (100, 1), (0, 300)]
    prompts = [shared[: SHARED + kept] + some(rng, more) for kept, more in parts]
    with serve(checkpoint, "--enable-mixed-chunk", *flags, config=config, prefill=PREFILL) as server:
        expected = cold(server, prompts, TOKENS, options)
        # One request after the other decodes in decode passes alone.
        decoded = decode_rows(server) + sparse_state(server)["rectified_requests"]
        assert decoded >= (TOKENS - 1) * len(prompts)
        server.flush_cache()
        before = sparse_state(server)
        with ThreadPoolExecutor(9) as pool:
            background = pool.submit(ask, server, running, 4000, options, "background")
            while decode_rows(server) == before["decode_rows"]:
                assert not background.done(), server.log_tail()
                time.sleep(0.01)
            first = ask(server, prompts[0], TOKENS, options)
            hits = [*pool.map(lambda prompt: ask(server, prompt, TOKENS, options), prompts)]
            server.client.post("/abort_request", json={"rid": "background"}).raise_for_status()
            aborted = background.result()
        assert [first["output_ids"], *(answer["output_ids"] for answer in hits)] == [expected[0], *expected]
        cached = [answer["meta_info"]["cached_tokens"] for answer in hits]
        # The last token must be forwarded, and with it its group.
        assert cached == [len(prompts[0]) // GROUP * GROUP, SHARED - GROUP, *[SHARED] * 6]
        # It was decoding all the while.
        assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
        require_counts(server, before, [running, prompts[0], *prompts], [0, 0, *cached], aborted, hits)
        ran = aborted["output_ids"][:200]
        assert ask(server, running, len(ran), options)["output_ids"] == ran
        assert_exact(server, CROSSOVER)
        assert_nothing_leaked(server)


def require_counts(
    server: ServerProcess,
    before: dict[str, Any],
    prompts: list[list[int]],
    cached: list[int],
    aborted: dict[str, Any],
    hits: list[dict[str, Any]],
) -> None:
    """Decoding rows are in no counter of prefill, and many of them ran within batches of prompts."""
    after = sparse_state(server)
    found = {name: after["prefill"][name] - before["prefill"][name] for name in COUNTS}
    tokens = [len(prompt) - start for prompt, start in zip(prompts, cached, strict=True)]
    dense = sum(max(0, CROSSOVER - start) for start in cached)
    pairs = [n * (start + 1 + start + n) // 2 for n, start in zip(tokens, cached, strict=True)]
    assert found["sparse_tokens"] == sum(tokens) - dense
    assert found["dense_tokens"] == dense
    assert found["pairs_causal"] == sum(pairs) * HEADS_AND_LAYERS
    assert found["pairs_attended"] < 0.9 * found["pairs_causal"]
    generated = len(aborted["output_ids"]) + sum(len(answer["output_ids"]) for answer in [hits[0], *hits])
    # A prompt's pass gives its request's first token.
    decoded = sum(after[name] - before[name] for name in ("decode_rows", "rectified_requests"))
    mixed = generated - len(prompts) - decoded
    assert mixed >= 8, mixed
    # Nor does a row wait for its rectification until no prompt is left.
    assert after["rectify_max_delay_steps"] == 0
