"""On a GPU both decode graphs of a model with windows or chunks attend to all that they should.

With sinks and two pools too.
"""

from pathlib import Path

import pytest
import torch
from server_requests import assert_nothing_leaked, forced, logprobs, random_prompts, sparse_state, spent
from window_checkpoints import random_chunked, random_windowed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
FULL, INTERVAL = 2, 16
FLAGS = ("--dtype", "bfloat16", "--mem-fraction-static", "0.2", "--max-total-tokens", "65536")
FLAGS += ("--cuda-graph-max-bs-decode", "4")
RESA = {"active_ratio": 1.0, "rectify_interval": INTERVAL, "dense_fallback": "never"}
# SGLang frees a window's past every 128 tokens otherwise.
AT_ONCE = {"SGLANG_SWA_EVICTION_INTERVAL": "1"}
# The heads of Gemma 3 as published, in all sizes but the largest, and of gpt-oss, which has sinks and two KV pools.
# Each token of gpt-oss goes to all experts, or rounding would choose others. Llama 4 has two pools, and norms of
# queries and keys, which have no test on CPUs.
HEADS = {
    "Gemma3": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256},
    "GptOss": {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 64, "num_experts_per_tok": 4},
    "Llama4": {"num_attention_heads": 10, "num_key_value_heads": 2, "head_dim": 128, "use_qk_norm": True},
}


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        ("Gemma3", "fa3"),
        ("Gemma3", "flashinfer"),
        ("Gemma3", "triton"),
        ("GptOss", "fa3"),
        ("GptOss", "triton"),
        ("Llama4", "fa3"),
    ],
)
def test_all_pages_are_dense_attention(serve, tmp_path: Path, family: str, backend: str) -> None:
    """Short and long rows, within the window and beyond it; steps that are forced differ by rounding alone."""
    chunked = family == "Llama4"
    if chunked:
        model = random_chunked(tmp_path, 512, **HEADS[family])
    else:
        model = random_windowed(tmp_path, family, 512, dtype="bfloat16", **HEADS[family])
    with serve(model, *FLAGS, "--attention-backend", backend, config=RESA, env=AT_ONCE) as server:
        assert ("Use sliding window memory pool" in server.log()) is (family != "Gemma3")
        state = sparse_state(server)
        assert state["sparse_layers"] == FULL and state["config"]["layers"] == ("3,7" if chunked else "2,5")
        for length in (40, 600, 3000):
            (prompt,), (tokens,) = random_prompts(1, [length], 1000), random_prompts(2, [40], 1000)
            before = sparse_state(server)
            sparse = forced(server, prompt, tokens)
            used = spent(server, before)
            assert used["sparse_layer_rows"] == FULL * used["decode_rows"] > 0 == used["dense_fallback_rows"]
            dense = forced(server, prompt, tokens, sparse=False)
            assert logprobs(sparse) == pytest.approx(logprobs(dense), abs=0.05)
        server.flush_cache()
        few = forced(server, prompt, tokens, active_ratio=0.1)
        assert logprobs(few) != pytest.approx(logprobs(dense), abs=0.05)
        # What it left in the cache was rectified.
        follow_up, last = [*prompt, *tokens, 20], tokens[:20]
        shared = forced(server, follow_up, last, sparse=False)
        assert shared["meta_info"]["cached_tokens"] > len(prompt) + len(tokens) - 2 * INTERVAL - 1
        server.flush_cache()
        assert logprobs(shared) == pytest.approx(logprobs(forced(server, follow_up, last, sparse=False)), abs=0.05)
        assert_nothing_leaked(server)
