"""Sparse prefill in groups of the paper's size: prompts that part beyond a group's end, all at once."""

import random

import pytest
from checkpoints import random_qwen3
from server_requests import ask_all, assert_exact, assert_nothing_leaked, greedy, sparse_state

pytestmark = pytest.mark.long

GROUP = 16 * 128
# Leaves out some of the keys before a group, not all.
SPARSE = {"theta": 0.5, "dense_fallback": "never", "check_exactness": True}
PAST = (1, 130, 3000)


def test_all_who_share_a_prefix_have_its_cold_keys(serve, tmp_path) -> None:
    checkpoint = random_qwen3(tmp_path / "model", layers=2, num_attention_heads=4)
    rng = random.Random(11)

    def some(count: int) -> list[int]:
        return [rng.randrange(10, 1000) for _ in range(count)]

    # The first of two shared groups is dense. Each hit completes a group of its own, which is then shared as well.
    shared = some(2 * GROUP + max(PAST) + 30)
    hits = [shared[: 2 * GROUP + past] for past in PAST]
    hits = [hit + some(-len(hit) % GROUP + more) for hit, more in zip(hits, (150, 700, 150), strict=True)]
    first, cold = [*shared, *some(30)], [some(length) for length in (100, 600, GROUP - 1, GROUP + 129)]
    prompts = [first, *hits, *cold]
    whole = ("--chunked-prefill-size", str(6 * GROUP), "--context-length", "12288")
    with serve(checkpoint, *whole, "--disable-radix-cache", prefill={**SPARSE, "check_exactness": False}) as server:
        expected = greedy(server, [first, *hits], tokens=4)
    limits = ("--chunked-prefill-size", str(2 * GROUP), "--context-length", "12288")
    with serve(checkpoint, *limits, prefill=SPARSE) as server:
        at_once = greedy(server, prompts, tokens=4, at_once=8)
        assert at_once[:4] == expected
        # Every page of the tree against its prefix, computed again group by group, which gives the same bits as one
        # piece; the server ends at a difference of 1e-4, in proportion where numbers are larger than 4.
        assert_exact(server, GROUP)
        server.flush_cache()
        greedy(server, [first], tokens=4)
        before = sparse_state(server)["prefill"]
        answers = ask_all(server, prompts, tokens=4)
        assert [answer["output_ids"] for answer in answers] == at_once
        cached = [answer["meta_info"]["cached_tokens"] for answer in answers[1:4]]
        assert cached == [(2 * GROUP + past) // GROUP * GROUP for past in PAST]
        after = sparse_state(server)["prefill"]
        causal, attended = (after[name] - before[name] for name in ("pairs_causal", "pairs_attended"))
        assert attended < 0.9 * causal
        assert_exact(server, GROUP)
        assert_nothing_leaked(server)
