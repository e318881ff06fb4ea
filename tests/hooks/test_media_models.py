"""Models with towers for media run sparse with them, or without for text alone; prefill methods need the latter."""

import json
from pathlib import Path
from typing import Any

import pytest
from model_configs import CONFIGS
from refusals import refused
from sglang.srt.plugins import load_plugins

load_plugins()

from resolved import ServerArgs

from sglang_sparse.config.arguments import of
from sglang_sparse.hooks.model_limits import QWEN2_5_VL, WITH_STATES, WITH_TOWERS, has_towers, state_layers

QWEN3_VL = "Qwen3VLForConditionalGeneration"
SKIP = {"threshold_scale_factor": {"prefill": 300, "decode": 25}}


def start(folder: Path, architecture: str = QWEN3_VL, text_alone: bool = False, **flags: Any) -> Any:
    kind = "states_and_towers" if architecture in WITH_STATES else "towers"
    config = {**CONFIGS[kind], "architectures": [architecture], "language_model_only": text_alone}
    (folder / "config.json").write_text(json.dumps(config))
    return ServerArgs(model_path=str(folder), **flags)


@pytest.mark.parametrize("architecture", WITH_TOWERS)
@pytest.mark.parametrize("text_alone", [False, True])
def test_models_with_proven_towers_are_served(architecture: str, text_alone: bool, tmp_path: Path) -> None:
    if text_alone and architecture == QWEN2_5_VL:
        with refused("--model-path", architecture) as caught:
            start(tmp_path, architecture, text_alone, sparse_method="resa")
        assert "needs M-RoPE for text" in str(caught.value)
        return
    finish = {"rectify_on_finish": architecture not in WITH_STATES}
    args = start(tmp_path, architecture, text_alone, sparse_method="resa", sparse_config=finish)
    model = of(args).new_model_config()
    assert has_towers(model) is not text_alone
    assert state_layers(model) == ({0, 2} if architecture in WITH_STATES else set())
    assert json.loads(args.sparse_config)["rectify_interval"] > 0


@pytest.mark.parametrize("architecture", ["Qwen2VLForConditionalGeneration", "Gemma3ForConditionalGeneration"])
def test_other_towers_are_refused_by_name(architecture: str, tmp_path: Path) -> None:
    with refused("--model-path", architecture) as caught:
        start(tmp_path, architecture, sparse_method="resa", enable_multimodal=True)
    assert "multimodal model: " in str(caught.value) and "language_model_only" in str(caught.value)


@pytest.mark.parametrize("flags", [{"sparse_method": "resa"}, {}], ids=["with decode", "alone"])
def test_prefill_methods_are_for_text_alone(flags: dict[str, Any], tmp_path: Path) -> None:
    with refused("--model-path", QWEN3_VL) as caught:
        start(tmp_path, sparse_prefill_method="anchor", **flags)
    assert "language_model_only" in str(caught.value)
    (other := tmp_path / "text").mkdir()
    assert start(other, text_alone=True, sparse_prefill_method="anchor", **flags).sparse_prefill_method == "anchor"


def test_prefill_that_comes_with_a_decode_method_is_left_out(tmp_path: Path) -> None:
    args = start(tmp_path, sparse_method="skip_softmax", sparse_config=SKIP)
    assert args.sparse_prefill_method is None
