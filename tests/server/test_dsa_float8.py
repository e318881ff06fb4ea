"""DSA over SGLang's float8 latents: near what it computes over exact ones, and served as those are."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from server_requests import assert_nothing_leaked, read_logprobs, sparse_state
from tiny_dsa import FLAGS, GREEDY, LAYERS, MODEL, PAGE, RETRACTING, TOPK, long_texts, moved

from launch.server import ServerProcess

pytestmark = [pytest.mark.long, pytest.mark.skipif(torch.cuda.is_available(), reason="refused next to CUDA")]

FLOAT8 = (*FLAGS, "--kv-cache-dtype", "fp8_e4m3")
# With a plugin that forbids the platform's own code of such rows.
ALONE = {
    "PYTHONPATH": str(Path(__file__).parents[1] / "support" / "third_party"),
    "SGLANG_PLUGINS": "torch_cpu,sglang_sparse,own_rows",
}
# Values, scales and rotated key; key and scale of the indexer.
TOKEN_BYTES = LAYERS * (512 + 4 * 4 + 64 * 2 + 128 + 4)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return long_texts()


@pytest.fixture(scope="module")
def server(serve) -> Iterator[ServerProcess]:
    with serve(MODEL, *FLOAT8, method="dsa", config={}, env=RETRACTING | ALONE) as server:
        yield server
        assert_nothing_leaked(server)


def prompt_logprobs(server: ServerProcess, text: str) -> torch.Tensor:
    """Of every token but the first, of a prompt that is read in chunks."""
    server.flush_cache()
    params, asked = {**GREEDY, "max_new_tokens": 1}, {"return_logprob": True, "logprob_start_len": 0}
    answer: dict[str, Any] = server.generate(text=text, sampling_params=params, **asked)
    return torch.tensor(read_logprobs(answer))


def test_prefixes_bring_their_rows_along_and_retraction_changes_nothing(server, texts) -> None:
    params = {**GREEDY, "max_new_tokens": 8}
    server.flush_cache()
    together = server.generate(text=texts, sampling_params=params)
    assert any(answer["meta_info"]["num_retractions"] for answer in together)
    for text, first in zip(texts, together, strict=True):
        before = sparse_state(server)
        again = server.generate(text=text, sampling_params=params)
        tokens, cached = again["meta_info"]["prompt_tokens"], again["meta_info"]["cached_tokens"]
        assert tokens > TOPK and cached == (tokens - 1) // PAGE * PAGE
        assert moved(server, before, "sparse_layer_rows")[0] > 0
        assert again["output_ids"] == first["output_ids"]


def test_it_computes_what_the_platform_computes_and_nearly_what_exact_latents_give(serve, server, texts) -> None:
    """The CPU platform quantises, writes and reads such rows by code of its own."""
    ours, *others = prompt_logprobs(server, texts[1]), serve(MODEL, *FLOAT8), serve(MODEL, *FLAGS)
    found = []
    for other in others:
        with other as started:
            found.append(prompt_logprobs(started, texts[1]))
    theirs, exact = ((ours - one).abs() for one in found)
    assert theirs.quantile(0.99) < 3e-3 and theirs.max() < 0.02
    assert 1e-3 < exact.median() < 0.05 and exact.quantile(0.95) < 0.3


def test_it_says_what_a_token_takes(server) -> None:
    state = server.server_info()["internal_states"][0]
    assert state["sparse"]["kv_bytes_per_token"] == TOKEN_BYTES
    # A page more, into which what pads a batch is written.
    pool = state["memory_usage"]["token_capacity"] + PAGE
    assert state["memory_usage"]["kvcache"] == pytest.approx(pool * TOKEN_BYTES / 2**30, abs=1e-3)
