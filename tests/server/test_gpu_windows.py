"""On a GPU both decode graphs of a model with windows, with heads of 256, attend to all that they should."""

from pathlib import Path

import pytest
import torch
from checkpoints import random_windowed
from server_requests import assert_nothing_leaked, forced, logprobs, random_prompts, sparse_state, spent

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
FULL = 2
FLAGS = ("--dtype", "bfloat16", "--mem-fraction-static", "0.2", "--max-total-tokens", "65536")
FLAGS += ("--cuda-graph-max-bs-decode", "4")
RESA = {"active_ratio": 1.0, "rectify_interval": 16, "dense_fallback": "never"}


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 as published has heads of 256 in all sizes but the largest."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256}
    return random_windowed(tmp_path_factory.mktemp("gemma3"), "Gemma3", 512, **heads)


@pytest.mark.parametrize("backend", ["fa3", "flashinfer", "triton"])
def test_all_pages_are_dense_attention(serve, gemma3: Path, backend: str) -> None:
    """Short and long rows, within the window and beyond it; steps that are forced differ by rounding alone."""
    with serve(gemma3, *FLAGS, "--attention-backend", backend, config=RESA) as server:
        state = sparse_state(server)
        assert state["sparse_layers"] == FULL and state["config"]["layers"] == "2,5"
        for length in (40, 600, 3000):
            (prompt,), (tokens,) = random_prompts(1, [length], 1000), random_prompts(2, [40], 1000)
            before = sparse_state(server)
            sparse = forced(server, prompt, tokens)
            used = spent(server, before)
            assert used["sparse_layer_rows"] == FULL * used["decode_rows"] > 0 == used["dense_fallback_rows"]
            dense = forced(server, prompt, tokens, sparse=False)
            assert logprobs(sparse) == pytest.approx(logprobs(dense), abs=0.05)
        few = forced(server, prompt, tokens, active_ratio=0.1)
        assert logprobs(few) != pytest.approx(logprobs(dense), abs=0.05)
        assert_nothing_leaked(server)
