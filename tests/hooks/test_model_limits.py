"""Every limit of the table of models refuses those that it is there for, and SGLang flags that are for others alone."""

import inspect
import re
from pathlib import Path

import pytest
from model_configs import CONFIGS, write_config
from refusals import refused
from sglang.srt.dllm.config import DllmConfig
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs as StockServerArgs

load_plugins()

from resolved import ServerArgs

from sglang_sparse.hooks import model_limits

# Of ``model_configs``, by what the limit calls it. Some are refused for more than one reason.
MODELS = {
    "encoder-only or embedding model": ("encoder_only",),
    "encoder-decoder model": ("encoder_decoder",),
    "diffusion language model": ("diffusion",),
    "multimodal model": ("multimodal",),
    "model that needs M-RoPE for text": ("positions_alone",),
    "hybrid SSM or linear-attention model": ("hybrid_ssm",),
    "model of windowed layers alone": ("windows_alone",),
    "model with dual chunk attention": ("dual_chunk",),
    "model whose chunks SGLang does not see": ("unseen_chunks",),
    "model with its own sparse attention": ("own_sparse_attention",),
    "model whose layers share KV": ("shared_kv",),
    "model with several attentions a layer": ("several_attentions",),
}
# What SGLang refuses by itself for each model that a method serves, but DSA's, and what it says.
BY_SGLANG = (
    ("enable_encoder_swa_bounded_replay", True, "requires DeepSeek-V4.1"),
    ("enable_page_major_kv_layout", True, "temporarily unsupported"),
    ("enable_kv_cache_sharding", True, "only supported on PD prefill workers"),
    ("enable_hisparse", True, "only supported for DSA"),
    ("prefill_only_disable_kv_cache", True, "requires --is-embedding"),
    ("dllm_algorithm", "LowConfidence", "Unknown diffusion LLM"),
)


def test_no_limit_lacks_a_model() -> None:
    assert {limit.name for limit in model_limits.MODEL_LIMITS} == set(MODELS)


@pytest.mark.parametrize(("limit", "name"), [(limit, name) for limit, names in MODELS.items() for name in names])
def test_a_model_is_refused(limit: str, name: str, tmp_path: Path) -> None:
    (found,) = (one for one in model_limits.MODEL_LIMITS if one.name == limit)
    with refused("--model-path", CONFIGS[name]["architectures"][0]) as caught:
        ServerArgs(model_path=write_config(tmp_path, name), sparse_method="resa")
    assert f"{limit}: {found.reason}" in str(caught.value)


def test_models_that_diffuse_are_those_that_sglang_knows() -> None:
    known = re.findall(r'"(\w+)": \{\s*"block_size"', inspect.getsource(DllmConfig.from_server_args))
    assert sorted(known) == sorted(model_limits._DIFFUSING)


@pytest.mark.parametrize(("flag", "value", "message"), BY_SGLANG)
def test_what_sglang_refuses_needs_no_limit(flag: str, value: object, message: str, tmp_path: Path) -> None:
    def checked() -> None:
        args = StockServerArgs(model_path=write_config(tmp_path, "qwen3"), **{flag: value})
        args.resolve_once()
        args.check_server_args()

    with pytest.raises((ValueError, AssertionError, RuntimeError), match=message):
        checked()
