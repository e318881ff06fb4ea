"""On a GPU decode graphs, rectifying passes and prefill graphs compute each row of a batch with its own adapter."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_adapter
from server_requests import assert_nothing_leaked, logprobs, random_prompts, sparse_state, spent

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
MODELS = Path("eval/models")
FLAGS = ("--dtype", "bfloat16", "--mem-fraction-static", "0.4", "--max-total-tokens", "65536")
FLAGS += ("--cuda-graph-max-bs-decode", "4", "--max-lora-rank", "16")
NO_PREFILL_GRAPHS = ("--disable-prefill-cuda-graph",)
# Half of the layers, so that a sparse graph attends densely too; most blocks, so that it is nearly as likely.
SPARSE: dict[str, Any] = {"layers": "2-", "min_seq_len": 0, "crossover_tokens": 0, "rectify_interval": 10}
METHODS: dict[str, dict[str, Any]] = {
    "resa": {**SPARSE, "active_ratio": 0.9},
    "robsa": {**SPARSE, "theta1": 0.99, "max_active_ratio": 0.95, "allow_uncalibrated": True, "page_size": 64},
}
TOKENS, NAMES = 24, ("a", None, "b")
ADAPTERS = ((1, "a"), (2, "b"))


@pytest.mark.parametrize(
    ("method", "model", "backend", "kernels", "more"),
    [
        ("resa", "tiny-gqa", "fa3", "csgmv", ()),
        ("resa", "tiny-gqa", "triton", "triton", ()),
        ("resa", "tiny-gqa", "flashinfer", "csgmv", NO_PREFILL_GRAPHS),
        ("resa", "tiny-gqa", "flashinfer", "triton_v2", NO_PREFILL_GRAPHS),
        ("robsa", "tiny-mla", "flashinfer", "csgmv", NO_PREFILL_GRAPHS),
        ("robsa", "tiny-mla", "triton", "triton", NO_PREFILL_GRAPHS),
    ],
)
def test_decode_is_as_likely_as_in_prefill(
    serve, tmp_path: Path, method: str, model: str, backend: str, kernels: str, more: tuple[str, ...]
) -> None:
    """Tokens that a batch of several adapters generated have the log-probabilities of prompts that end in them."""
    made = [f"{name}={random_adapter(tmp_path / name, MODELS / model, seed, 8 * seed)}" for seed, name in ADAPTERS]
    page = str(METHODS[method].get("page_size", 16))
    flags = (*FLAGS, "--attention-backend", backend, "--lora-backend", kernels, "--page-size", page, *more)
    with serve(MODELS / model, *flags, "--lora-paths", *made, method=method, config=METHODS[method]) as server:
        prompts, names = random_prompts(3, (700, 640, 300), 1000), [*NAMES]
        for sparse in (True, False):
            before = sparse_state(server)
            params = {"max_new_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
            asked = {"sampling_params": {**params, "custom_params": {"sparse": sparse}}, "return_logprob": True}
            answers = server.generate(input_ids=prompts, lora_path=names, **asked)
            moved = spent(server, before)
            assert moved["dense_fallback_rows"] == (0 if sparse else moved["decode_rows"])
            assert (moved["rectified_tokens"] > 0) is sparse
            if sparse:
                _assert_turns_go_on(server, prompts, answers, names)
            # Cold, so that nothing of it is what decode or a rectifying pass has written.
            server.flush_cache()
            assert _distance(server, prompts, answers, names) < 0.1
            assert _distance(server, prompts, answers, names[1:] + names[:1]) > 0.5, "adapters that change nothing"
            server.flush_cache()
        assert_nothing_leaked(server)


def _assert_turns_go_on(
    server: Any, prompts: list[list[int]], answers: list[dict[str, Any]], names: list[str | None]
) -> None:
    """Tokens behind what rectifying passes have written are as likely as behind a prefill."""
    turns = [prompt + answer["output_ids"] for prompt, answer in zip(prompts, answers, strict=True)]
    tokens = turns[0][:8]
    params = {"max_new_tokens": len(tokens), "temperature": 0.0, "ignore_eos": True}
    params["custom_params"] = {"forced_tokens": tokens}
    asked = {"input_ids": turns, "lora_path": names, "sampling_params": params, "return_logprob": True}
    warm = server.generate(**asked)
    # A page is 64 tokens at most, and two thirds of an answer are rectified.
    cached = [answer["meta_info"]["cached_tokens"] for answer in warm]
    assert all(count > len(prompt) - 64 for count, prompt in zip(cached, prompts, strict=True)), cached
    server.flush_cache()
    for one, other in zip(warm, server.generate(**asked), strict=True):
        differences = [abs(a - b) for a, b in zip(logprobs(one), logprobs(other), strict=True)]
        assert sum(differences) / len(differences) < 0.1


def _distance(server: Any, prompts: list[list[int]], answers: list[dict[str, Any]], names: list[str | None]) -> float:
    """The mean difference from the log-probabilities that a prefill with these adapters gives the same tokens."""
    found = []
    for prompt, answer, name in zip(prompts, answers, names, strict=True):
        given = {"sampling_params": {"max_new_tokens": 1}, "return_logprob": True, "lora_path": name}
        whole = server.generate(input_ids=prompt + answer["output_ids"], logprob_start_len=len(prompt) - 1, **given)
        prefilled = [entry[0] for entry in whole["meta_info"]["input_token_logprobs"][-TOKENS:]]
        found += [abs(one - other) for one, other in zip(logprobs(answer), prefilled, strict=True)]
    return sum(found) / len(found)
