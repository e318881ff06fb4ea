"""On a GPU both decode graphs of models with recurrent states, or with images, attend to all that they should."""

from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest
import torch
from checkpoints import random_hybrid
from media import FIRST, SECOND, Showing, with_image
from media_checkpoints import random_vision_language
from server_requests import (
    ask_all,
    assert_nothing_leaked,
    forced,
    logprobs,
    prompt_logprobs,
    random_prompts,
    sparse_state,
    spent,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
FLAGS = ("--dtype", "bfloat16", "--mem-fraction-static", "0.3", "--max-total-tokens", "65536")
FLAGS += ("--cuda-graph-max-bs-decode", "4", "--max-running-requests", "8")
# FlashInfer's kernels of states are compiled for minutes. Logits are not to add their rounding to that of states.
FLAGS += ("--linear-attn-prefill-backend", "triton", "--enable-fp32-lm-head")
RESA = {"active_ratio": 1.0, "dense_fallback": "never", "rectify_interval": 16}
# A state is stored at its multiples.
GRID = 256
SPARSE = {"active_ratio": 0.1}
# As published models have them; SGLang's kernels of states are made for heads of 128.
STATES = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
STATES |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True}


def hybrid(path: Path) -> Path:
    """With heads of 256.

    Dense MLPs: rounding would choose other experts, and then a dense prefill differs from dense decode as much.
    """
    return random_hybrid(path, "Qwen3_5", layers=8, head_dim=256, **STATES)


def vision_language(path: Path) -> Path:
    """With heads of 128, whose rotary dimensions are shared out among time, height and width."""
    return random_vision_language(
        path, "Qwen3VL", head_dim=128, rope_parameters={**ROPE, "mrope_section": [24, 20, 20]}
    )


def both(path: Path) -> Path:
    rope = {**ROPE, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
    return random_vision_language(path, "Qwen3_5", num_hidden_layers=8, head_dim=256, rope_parameters=rope, **STATES)


@pytest.mark.parametrize(
    ("make", "layers", "backend"),
    [
        (hybrid, "3,7", "fa3"),
        (hybrid, "3,7", "flashinfer"),
        (hybrid, "3,7", "triton"),
        (vision_language, "all", "fa3"),
        (vision_language, "all", "triton"),
        (both, "3,7", "fa3"),
    ],
)
def test_all_pages_are_dense_attention(
    serve, tmp_path: Path, make: Callable[[Path], Path], layers: str, backend: str
) -> None:
    """Steps that are forced differ by rounding alone, and what follows on a sparse answer is a dense server's.

    Rounding makes a dense prefill differ from dense decode, too: what differs more than that is no rounding.
    """
    with_images = make is not hybrid
    with serve(make(tmp_path), *FLAGS, "--attention-backend", backend, config=RESA) as server:
        shown, state = Showing(server), sparse_state(server)
        assert state["config"]["layers"] == layers
        for length in (40, 600, 3000):
            prompt, tokens, last = random_prompts(length, (length, 300, 60), 1000)
            prompt = with_image(prompt, 20) if with_images else prompt
            before = sparse_state(server)
            sparse = logprobs(forced(shown, prompt, tokens))
            used = spent(server, before)
            assert used["sparse_layer_rows"] == state["sparse_layers"] * used["decode_rows"] > 0
            assert used["dense_fallback_rows"] == 0
            dense = logprobs(forced(shown, prompt, tokens, sparse=False))
            prefilled = prompt_logprobs(shown, [*prompt, *tokens], {"sparse": False})[-len(tokens) :]
            rounding, largest = apart(dense, prefilled)
            mean, most = apart(sparse, dense)
            assert mean < 1.5 * rounding < 0.1 and most < 3 * largest
        assert apart(logprobs(forced(shown, prompt, tokens, **SPARSE)), dense)[0] > 1.5 * rounding
        # What it left in the cache was rectified, up to the last stored state.
        server.flush_cache()
        forced(shown, prompt, tokens, **SPARSE)
        follow_up = [*prompt, *tokens, 20]
        shared = forced(shown, follow_up, last, sparse=False)
        assert shared["meta_info"]["cached_tokens"] >= (len(prompt) + len(tokens) - 1) // GRID * GRID > len(prompt)
        server.flush_cache()
        fresh = forced(shown, follow_up, last, sparse=False)
        mean, most = apart(logprobs(shared), logprobs(fresh))
        assert mean < 1.5 * rounding and most < 3 * largest
        if with_images:
            short = with_image(prompt[-20:], 10)
            one, other = (logprobs(forced(Showing(server, image), short, tokens)) for image in (FIRST, SECOND))
            assert apart(one, other)[0] > 1.5 * rounding
        ask_all(server, random_prompts(5, (150, 210, 280, 290, 335, 410), 1000), 300, SPARSE)
        assert_nothing_leaked(server)


def apart(some: list[float], others: list[float]) -> tuple[float, float]:
    """The mean and the largest difference between log-probabilities."""
    found = [abs(one - other) for one, other in zip(some, others, strict=True)]
    return fmean(found), max(found)
