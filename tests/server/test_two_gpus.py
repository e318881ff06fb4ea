"""Two GPUs share a model: each selects for its own KV heads, and the answers are those of one."""

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from server_requests import ask, assert_nothing_leaked, forced, greedy, logprobs, sparse_state, spent

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
TENTH = {"active_ratio": 0.1, "min_pages": 4, "dense_fallback": "never"}
# In float16, as it leaves fewer ties to rounding than bfloat16: a sum of two halves rounds otherwise than the whole.
FLAGS = ("--attention-backend", "triton", "--dtype", "float16", "--mem-fraction-static", "0.3")
FLAGS += ("--cuda-graph-max-bs-decode", "16", "--disable-prefill-cuda-graph")
TOKENS = 24
LATENTS = Path(__file__).parents[2] / "eval" / "models" / "tiny-mla"
# By NCCL alone: FlashInfer's all-reduce, which SGLang turns on for DeepSeek, never returns where a host keeps NVLink
# multicast off, and SGLang's own is compiled by both processes when the server starts.
PAIR = ("--tp-size", "2", "--enforce-disable-flashinfer-allreduce-fusion", "--disable-custom-all-reduce")
ROBSA = {"allow_uncalibrated": True, "page_size": 64, "theta1": 0.6, "dense_fallback": "never"}


class Answer(NamedTuple):
    """The tokens that one GPU generated, and their log-probabilities by sparse and by dense attention."""

    tokens: list[int]
    sparse: list[float]
    dense: list[float]


def answer(server: Any, prompt: list[int], tokens: list[int]) -> Answer:
    return Answer(
        tokens,
        logprobs(forced(server, prompt, tokens)),
        logprobs(forced(server, prompt, tokens, sparse=False)),
    )


def differences(one: list[float], two: list[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(one, two, strict=True)]


@pytest.fixture(scope="module")
def asked(prompts) -> list[list[int]]:
    return prompts[::2]


@pytest.fixture(scope="module")
def alone(serve, checkpoint, asked) -> list[Answer]:
    with serve(checkpoint, *FLAGS, config=TENTH) as server:
        return [answer(server, prompt, ask(server, prompt, TOKENS)["output_ids"]) for prompt in asked]


@pytest.fixture(scope="module")
def pair(serve, checkpoint, alone) -> Iterator[Any]:
    with serve(checkpoint, *FLAGS, *PAIR, config=TENTH) as server:
        yield server


def test_tokens_are_as_likely_as_on_one_gpu(pair, asked, alone) -> None:
    """Rounding decides between pages that score alike, and another page moves a token of this random model far.

    So sparse attention is held to the mean difference, and dense attention, which selects nothing, to the largest.
    """
    sparse, same = [], 0
    for prompt, one in zip(asked, alone, strict=True):
        two = answer(pair, prompt, one.tokens)
        assert max(differences(one.dense, two.dense)) < 0.02, (len(prompt), one, two)
        sparse += differences(one.sparse, two.sparse)
        same += ask(pair, prompt, TOKENS)["output_ids"] == one.tokens
    assert statistics.fmean(sparse) < 0.02
    assert same >= 0.7 * len(asked)
    # What the bound is worth: dense attention is far from it.
    assert statistics.fmean(differences(alone[-1].sparse, alone[-1].dense)) > 0.5


def test_many_at_once_on_two_gpus(pair, asked) -> None:
    pair.flush_cache()
    before = sparse_state(pair)
    assert [len(tokens) for tokens in greedy(pair, asked, TOKENS, at_once=len(asked))] == [TOKENS] * len(asked)
    state = spent(pair, before)
    assert_nothing_leaked(pair)
    # Counted by the first rank, which has one of two KV heads, in all of four layers.
    assert state["dense_fallback_rows"] == 0 and state["sparse_layer_rows"] == 4 * state["decode_rows"]
    assert 0 < state["pages_attended"] < state["pages_held"] / 4


@pytest.fixture(scope="module")
def latents_alone(serve, asked) -> list[Answer]:
    with serve(LATENTS, *FLAGS, "--page-size", "64", method="robsa", config=ROBSA) as server:
        return [answer(server, prompt, ask(server, prompt, TOKENS)["output_ids"]) for prompt in asked]


@pytest.mark.parametrize("scope", ["global", "rank"])
def test_mla_on_two_gpus(serve, asked, latents_alone, scope) -> None:
    """Both GPUs hold all latents and half of the heads; by the mean over all heads they select as one GPU does."""
    sparse, far = [], []
    config = {**ROBSA, "head_scope": scope}
    flags = (*FLAGS, "--page-size", "64", *PAIR)
    with serve(LATENTS, *flags, method="robsa", config=config) as pair:
        for prompt, one in zip(asked, latents_alone, strict=True):
            two = answer(pair, prompt, one.tokens)
            assert max(differences(one.dense, two.dense)) < 0.05, (len(prompt), one, two)
            sparse += differences(one.sparse, two.sparse)
            far += differences(one.sparse, one.dense)
        before = sparse_state(pair)
        greedy(pair, asked, TOKENS, at_once=len(asked))
        state = spent(pair, before)
        assert state["sparse_layer_rows"] == 4 * state["decode_rows"] > 0
        assert 0 < state["pages_attended"] < 0.8 * state["pages_held"]
        assert_nothing_leaked(pair)
    if scope == "global":
        assert statistics.fmean(sparse) < 0.02 < statistics.fmean(far)
