"""Every limit of the table of models refuses those that it is there for."""

from pathlib import Path

import pytest
from model_configs import CONFIGS, write_config
from refusals import refused
from sglang.srt.plugins import load_plugins

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
    "model with several attentions a layer": ("several_attentions",),
    "model with a soft cap on attention logits": ("soft_cap",),
}


def test_no_limit_lacks_a_model() -> None:
    assert {limit.name for limit in model_limits.MODEL_LIMITS} == set(MODELS)


@pytest.mark.parametrize(("limit", "name"), [(limit, name) for limit, names in MODELS.items() for name in names])
def test_a_model_is_refused(limit: str, name: str, tmp_path: Path) -> None:
    (found,) = (one for one in model_limits.MODEL_LIMITS if one.name == limit)
    with refused("--model-path", CONFIGS[name]["architectures"][0]) as caught:
        ServerArgs(model_path=write_config(tmp_path, name), sparse_method="resa")
    assert f"{limit}: {found.reason}" in str(caught.value)
