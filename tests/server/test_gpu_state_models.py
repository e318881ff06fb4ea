"""On a GPU both decode graphs of a model with recurrent states attend to all that they should, with heads of 256."""

from pathlib import Path

import pytest
import torch
from checkpoints import random_hybrid
from server_requests import ask_all, assert_nothing_leaked, forced, logprobs, random_prompts, sparse_state, spent

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
FLAGS = ("--dtype", "bfloat16", "--mem-fraction-static", "0.2", "--max-total-tokens", "65536")
FLAGS += ("--cuda-graph-max-bs-decode", "4", "--max-running-requests", "8")
# FlashInfer's kernels of states are compiled for minutes. Logits are not to add their rounding to that of states.
FLAGS += ("--linear-attn-prefill-backend", "triton", "--enable-fp32-lm-head")
RESA = {"active_ratio": 1.0, "dense_fallback": "never", "rectify_interval": 16}
# A state is stored at its multiples.
GRID = 256
SPARSE = {"active_ratio": 0.1}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the heads of Qwen3-Next as published; SGLang's kernels of states are made for heads of 128.

    Dense MLPs: rounding would choose other experts, and then a dense prefill differs from dense decode as much.
    """
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256}
    states = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
    states |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    return random_hybrid(tmp_path_factory.mktemp("qwen3.5"), "Qwen3_5", layers=8, **heads, **states)


@pytest.mark.parametrize("backend", ["fa3", "flashinfer", "triton"])
def test_all_pages_are_dense_attention(serve, hybrid: Path, backend: str) -> None:
    """Steps that are forced differ by rounding alone, and what follows on a sparse answer is a dense server's."""
    with serve(hybrid, *FLAGS, "--attention-backend", backend, config=RESA) as server:
        state = sparse_state(server)
        assert state["sparse_layers"] == 2 and state["config"]["layers"] == "3,7"
        for length in (40, 600, 3000):
            prompt, tokens, last = random_prompts(length, (length, 300, 20), 1000)
            before = sparse_state(server)
            sparse = forced(server, prompt, tokens)
            used = spent(server, before)
            assert used["sparse_layer_rows"] == 2 * used["decode_rows"] > 0 == used["dense_fallback_rows"]
            dense = forced(server, prompt, tokens, sparse=False)
            assert logprobs(sparse) == pytest.approx(logprobs(dense), abs=0.1)
        few = forced(server, prompt, tokens, **SPARSE)
        assert logprobs(few) != pytest.approx(logprobs(dense), abs=0.1)
        # What it left in the cache was rectified, up to the last stored state.
        server.flush_cache()
        forced(server, prompt, tokens, **SPARSE)
        follow_up = [*prompt, *tokens, 20]
        shared = forced(server, follow_up, last, sparse=False)
        assert shared["meta_info"]["cached_tokens"] >= (len(prompt) + len(tokens) - 1) // GRID * GRID > len(prompt)
        server.flush_cache()
        assert logprobs(shared) == pytest.approx(logprobs(forced(server, follow_up, last, sparse=False)), abs=0.1)
        ask_all(server, random_prompts(5, (150, 210, 280, 290, 335, 410), 1000), 300, SPARSE)
        assert_nothing_leaked(server)
