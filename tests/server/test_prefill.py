"""Sparse prefill on real servers: dense where nothing is left out, one and the same for all who share a prefix."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from httpx import HTTPStatusError
from prometheus_client.parser import text_string_to_metric_families
from server_load import RETRACT
from server_requests import (
    ask,
    ask_all,
    assert_exact,
    assert_nothing_leaked,
    assert_refused,
    cold,
    greedy,
    prompt_logprobs,
    prompts_that_part,
    sparse_state,
)

from eval import identity
from eval.live.record import read_rows
from launch.server import ServerProcess
from sglang_sparse.attention.counters import PREFILL_TOTALS

PAGE, LAYERS, GROUP, CHUNK = 16, 4, 128, 512
THETA, SHARED = 0.5, 1024
CHUNKS = ("--chunked-prefill-size", str(CHUNK))
BLOCKS = {"block_size": 32, "step": GROUP // 32, "dense_tail": 0, "check_exactness": True}
# Leaves out some of the keys outside the anchor, not all.
SPARSE = {**BLOCKS, "theta": THETA, "crossover_tokens": 2 * GROUP}
EXACT = {"exact_prefix": True}
METRICS = ("--enable-metrics", "--decode-log-interval", "4")
LINE = re.compile(r"Sparse decode, .*; sparse prefill, sparsity: ([\d.]+|n/a), tokens: (\d+) sparse (\d+) dense")


def used(server: ServerProcess, before: dict[str, Any], field: str) -> int:
    return sparse_state(server)["prefill"][field] - before["prefill"][field]


@pytest.fixture(scope="module")
def server(serve, checkpoint) -> Iterator[ServerProcess]:
    """Both phases are sparse."""
    decode = {"active_ratio": 0.1, "min_pages": 4, "dense_fallback": "never", "rectify_interval": 8}
    with serve(checkpoint, *CHUNKS, *METRICS, config=decode, prefill=SPARSE) as server:
        yield server


@pytest.fixture(scope="module")
def long_prompts() -> list[list[int]]:
    """Prompts of up to 1,500 tokens that part where a group ends, or 1, 40 or 100 tokens later."""
    parts = [(0, 0), (0, 1), (1, 129), (40, 127), (40, 129), (100, 300), (100, 1), (0, 400)]
    return prompts_that_part(3, SHARED, parts)


def test_a_threshold_that_keeps_all_is_dense(serve, checkpoint, prompts, tmp_path) -> None:
    prefill = {**BLOCKS, "theta": 1e9, "dense_fallback": "never", "check_exactness": False}
    with serve(checkpoint, *CHUNKS, prefill=prefill) as server:
        before = sparse_state(server)
        found = greedy(server, prompts)
        tokens = sum(max(0, len(prompt) - GROUP) for prompt in prompts)
        assert used(server, before, "sparse_tokens") == tokens > 9_000
        assert used(server, before, "dense_tokens") == sum(map(len, prompts)) - tokens
        state = sparse_state(server)["prefill"]
        assert state["sparse_layers"] == LAYERS and state["pairs_attended"] == state["pairs_causal"] > 0
        before = sparse_state(server)
        dense = [ask(server, prompt, 24, EXACT)["output_ids"] for prompt in prompts]
        assert used(server, before, "sparse_tokens") == 0
        assert found == dense
        assert_nothing_leaked(server)
        with serve(checkpoint, *CHUNKS) as other:
            out = ["--out", str(tmp_path / "identity.jsonl"), "--revision", "test", "--prompts", "3", "--tokens", "8"]
            assert identity.main(["--base-url", server.url, "--compare-url", other.url, *out]) == 0
        summary = read_rows(tmp_path / "identity.jsonl")[-1]
        assert summary["sparse_path_proven"] and summary["equal"] == 3 and summary["prefill_sparse_tokens"] > 0


def test_much_is_left_out(server, long_prompts) -> None:
    server.flush_cache()
    before = sparse_state(server)
    sparse = prompt_logprobs(server, long_prompts[-1])
    causal, attended = (used(server, before, f"pairs_{kind}") for kind in ("causal", "attended"))
    assert attended < 0.8 * causal
    kept = []
    for theta in (0.0, THETA, 3.0):
        before = sparse_state(server)
        prompt_logprobs(server, long_prompts[-1], {"theta": theta})
        kept.append(used(server, before, "pairs_attended"))
    # The threshold finds some keys outside the anchor and leaves some out.
    assert kept[0] < kept[1] < kept[2] < causal
    dense = prompt_logprobs(server, long_prompts[-1], EXACT)
    differs = [i for i, (a, b) in enumerate(zip(sparse, dense, strict=True)) if abs(a - b) > 1e-3]
    # The prompt is dense below the crossover.
    assert differs and differs[0] >= 2 * GROUP - 1


def test_prefixes_chunks_and_company_change_nothing(server, long_prompts) -> None:
    expected = cold(server, long_prompts)
    server.flush_cache()
    ask(server, long_prompts[-1])
    hits = [ask(server, prompt) for prompt in long_prompts]
    assert [answer["output_ids"] for answer in hits] == expected
    for prompt, answer in zip(long_prompts, hits, strict=True):
        # The last token must be forwarded, and with it its group.
        shared = len(prompt) if prompt == long_prompts[-1] else SHARED
        assert answer["meta_info"]["cached_tokens"] == min(shared, len(prompt) - 1) // GROUP * GROUP
    assert_exact(server, 2 * GROUP)
    server.flush_cache()
    assert greedy(server, long_prompts, 8, at_once=8) == expected
    assert_exact(server, 2 * GROUP)
    assert_nothing_leaked(server)


def test_log_probabilities_of_a_prompt_are_those_of_one_piece(serve, checkpoint, server, long_prompts) -> None:
    """In chunks, behind a cached prefix, and from the middle of a prompt on, as a server gives them without chunks."""
    prompt, later = long_prompts[-1], SHARED + 50
    with serve(checkpoint, "--chunked-prefill-size", "-1", prefill=SPARSE) as whole:
        expected, exact = prompt_logprobs(whole, prompt), prompt_logprobs(whole, prompt, EXACT)
    server.flush_cache()
    assert prompt_logprobs(server, prompt) == pytest.approx(expected, abs=1e-4)
    assert max(abs(a - b) for a, b in zip(expected, exact, strict=True)) > 1e-2
    # From there on a prefix is found in the cache.
    found = prompt_logprobs(server, prompt, start=later)
    assert found == pytest.approx(expected[later:], abs=1e-4) and len(found) == len(prompt) - later - 1


def test_metrics_and_log_lines_add_up_to_the_counters(server, long_prompts) -> None:
    server.flush_cache()
    # Enough decode steps for several reports after the prefill.
    ask(server, long_prompts[-1], tokens=30)
    state = sparse_state(server)["prefill"]
    text = server.client.get("/metrics").raise_for_status().text
    shown = {sample.name: sample for family in text_string_to_metric_families(text) for sample in family.samples}
    for name in PREFILL_TOTALS:
        assert shown[f"sglang:sparse_prefill_{name}_total"].value == state[name] > 0, name
    labels = shown["sglang:num_running_reqs"].labels
    assert shown["sglang:sparse_prefill_sparsity"].labels == shown["sglang:sparse_prefill_pairs_causal_total"].labels
    assert shown["sglang:sparse_prefill_sparsity"].labels == labels and labels["tp_rank"] == "0"
    found = [[float(value.replace("n/a", "nan")) for value in groups] for groups in LINE.findall(server.log())]
    assert sum(line[1] for line in found) == state["sparse_tokens"]
    assert sum(line[2] for line in found) == state["dense_tokens"]
    assert any(0 < line[0] < 1 for line in found)


def test_short_prompts_are_cached_page_by_page(server) -> None:
    server.flush_cache()
    prompt = list(range(20, 20 + 2 * GROUP - 5))
    before = sparse_state(server)
    ask(server, prompt)
    assert ask(server, prompt)["meta_info"]["cached_tokens"] == (len(prompt) - 1) // PAGE * PAGE
    assert used(server, before, "sparse_tokens") == 0


def test_a_second_turn_hits_the_groups_of_the_first_prompt(server, long_prompts) -> None:
    server.flush_cache()
    before = sparse_state(server)
    first = ask(server, long_prompts[-1], tokens=40)
    sparse = used(server, before, "sparse_tokens")
    # Rectifying passes are extend passes, too, and none of the prefill's.
    assert sparse == len(long_prompts[-1]) - 2 * GROUP and used(server, before, "dense_tokens") == 2 * GROUP
    assert sparse_state(server)["rectified_tokens"] - before["rectified_tokens"] >= 4 * 8
    second = ask(server, [*long_prompts[-1], *first["output_ids"], 11, 12])
    assert second["meta_info"]["cached_tokens"] == len(long_prompts[-1]) // GROUP * GROUP
    assert_exact(server, 2 * GROUP)


def test_requests_that_differ_share_nothing(server, long_prompts) -> None:
    server.flush_cache()
    prompt = long_prompts[-1]
    kinds: list[dict[str, Any] | None] = [None, {"theta": 3.0}, EXACT, {"sparse": False}, {"theta": THETA}]
    hits = [ask(server, prompt, options=options)["meta_info"]["cached_tokens"] for options in kinds]
    # A dense prompt is cached page by page; a threshold that is the server's own is no difference.
    assert hits == [0, 0, 0, (len(prompt) - 1) // PAGE * PAGE, len(prompt) // GROUP * GROUP]
    assert_exact(server, 2 * GROUP)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"theta": -1}, "theta: got -1"),
        ({"theta": "much"}, "theta: got 'much'"),
        ({"exact_prefix": 1}, "exact_prefix: got 1"),
        ({"exact_prefix": True, "theta": 2.0}, "theta: has no meaning for a request with exact_prefix: true"),
    ],
)
def test_bad_options_are_refused(server, options: dict[str, Any], said: str) -> None:
    assert_refused(server, options, said)


def test_a_client_cannot_enter_anothers_namespace(server) -> None:
    with pytest.raises(HTTPStatusError, match="extra_key") as caught:
        server.generate(input_ids=[5, 6, 7], extra_key="mine|sglang_sparse:exact_prefix")
    assert caught.value.response.status_code == 400
    assert server.generate(input_ids=[5, 6, 7], extra_key="mine", sampling_params={"max_new_tokens": 2})["output_ids"]


def test_retracted_requests_end_as_if_alone(serve, checkpoint, prompts) -> None:
    retract = (*CHUNKS, "--max-total-tokens", "12000")
    with serve(checkpoint, *retract, prefill=SPARSE, env=RETRACT) as server:
        chosen = prompts[-8:]
        alone = greedy(server, chosen, tokens=60)
        server.flush_cache()
        answers = ask_all(server, chosen, tokens=60)
        assert [answer["output_ids"] for answer in answers] == alone
        assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
        assert_exact(server, 2 * GROUP)
        assert_nothing_leaked(server)
