"""Models with recurrent states run sparse where they attend; what needs their states elsewhere is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from model_configs import CONFIGS, write_config
from refusals import refused
from sglang.srt.plugins import load_plugins

load_plugins()

from resolved import ServerArgs

from sglang_sparse.config.arguments import of
from sglang_sparse.config.settings import build
from sglang_sparse.hooks.model_limits import state_layers
from sglang_sparse.hooks.refusals import require_interval

SKIP = {"threshold_scale_factor": {"prefill": 300, "decode": 25}}


def start(folder: Path, method: str = "resa", config: dict[str, Any] | None = None, **flags: Any) -> Any:
    return ServerArgs(
        model_path=write_config(folder, "states"), sparse_method=method, sparse_config=config or {}, **flags
    )


def test_layers_without_kv_are_those_that_the_config_says(tmp_path: Path) -> None:
    assert state_layers(of(start(tmp_path)).new_model_config()) == {0, 2}
    other = tmp_path / "other"
    other.mkdir()
    assert not state_layers(of(ServerArgs(model_path=write_config(other, "qwen3"))).new_model_config())


@pytest.mark.parametrize(
    ("method", "config", "layers"),
    [
        ("resa", {}, "1,3"),
        ("resa", {"rectify_interval": 0, "layers": "3"}, "3"),
        ("rocketkv", {}, "1,3"),
        ("skip_softmax", SKIP, "1,3"),
        ("resa", {"layers": {"all": {"active_ratio": 0.2}}}, ["1,3"]),
        ("resa", {"layers": {"1": {}, "3": {"method": "rocketkv"}}, "rectify_interval": 0}, ["1", "3"]),
    ],
)
def test_only_the_layers_that_attend_run_sparse(
    method: str, config: dict[str, Any], layers: object, tmp_path: Path
) -> None:
    args = start(tmp_path, method, config)
    found = json.loads(args.sparse_config)
    assert args.sparse_prefill_method is None
    assert (list(found["layers"]) if isinstance(layers, list) else found["layers"]) == layers


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"rectify_on_finish": True}, "rectify_on_finish"),
        ({"check_exactness": True}, "check_exactness"),
    ],
)
def test_what_needs_the_states_of_the_past_is_refused(config: dict[str, Any], field: str, tmp_path: Path) -> None:
    with refused(field, config[field]) as caught:
        start(tmp_path, config=config)
    assert caught.value.allowed == "false"


def test_a_request_is_not_rectified_without_copies(tmp_path: Path) -> None:
    args = start(tmp_path, config={"rectify_interval": 0})
    with refused("rectify_interval", 16) as caught:
        require_interval(16, args, build("resa", {"rectify_interval": 0}), args.get_model_config())
    assert "it keeps no copies of recurrent states" in str(caught.value)
    require_interval(16, args, build("resa", {}), args.get_model_config())


def test_a_layer_with_a_state_is_refused_by_its_number(tmp_path: Path) -> None:
    with refused("layers", [2]) as caught:
        start(tmp_path, config={"layers": "1-3"})
    assert caught.value.allowed == '"all", or some of 1,3'


@pytest.mark.parametrize("flags", [{"sparse_method": "resa"}, {}], ids=["with decode", "alone"])
def test_prefill_methods_are_refused(flags: dict[str, Any], tmp_path: Path) -> None:
    with refused("--model-path", "Qwen3NextForCausalLM") as caught:
        ServerArgs(model_path=write_config(tmp_path, "states"), sparse_prefill_method="anchor", **flags)
    assert str(caught.value).startswith("--sparse-prefill-method anchor does not fit")


def test_compaction_is_refused(tmp_path: Path) -> None:
    with refused("--model-path", "Qwen3NextForCausalLM"):
        start(tmp_path, "rocketkv", {"eviction": "compact"})


@pytest.mark.parametrize(
    "flags",
    [
        {"mamba_radix_cache_strategy": "no_buffer"},
        {"mamba_radix_cache_strategy": "extra_buffer_lazy"},
        # From which SGLang chooses no_buffer.
        {"page_size": 1, "sparse_config": {"page_size": 1}, "disable_overlap_schedule": True},
    ],
    ids=["no_buffer", "lazy", "pages of one token"],
)
def test_other_strategies_are_refused_unless_nothing_is_shared(flags: dict[str, Any], tmp_path: Path) -> None:
    model = write_config(tmp_path, "states")
    with refused("--mamba-radix-cache-strategy", flags.get("mamba_radix_cache_strategy", "no_buffer")):
        ServerArgs(model_path=model, sparse_method="resa", **flags)
    ServerArgs(model_path=model, sparse_method="resa", disable_radix_cache=True, **flags)


@pytest.mark.parametrize("architecture", ["KimiLinearForCausalLM", "FalconH1ForCausalLM"])
def test_states_of_other_models_are_refused(architecture: str, tmp_path: Path) -> None:
    other = CONFIGS["hybrid_ssm"]
    if architecture == "KimiLinearForCausalLM":
        other = {**CONFIGS["mla"], "architectures": [architecture], "model_type": "kimi_linear"}
        other |= {
            "linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 8, "head_dim": 32}
        }
    (tmp_path / "config.json").write_text(json.dumps(other))
    with refused("--model-path", architecture) as caught:
        ServerArgs(model_path=str(tmp_path), sparse_method="robsa" if "Kimi" in architecture else "resa")
    assert "hybrid SSM or linear-attention model" in str(caught.value)


def test_a_request_keeps_no_more_of_its_windows_than_planned(tmp_path: Path) -> None:
    args = ServerArgs(model_path=write_config(tmp_path, "two_pools"), sparse_method="resa")
    model = args.get_model_config()
    # SGLang keeps 128 tokens anyway.
    require_interval(128, args, build("resa", {}), model)
    require_interval(200, args, build("resa", {"rectify_interval": 200}), model)
    with refused("rectify_interval", 200) as caught:
        require_interval(200, args, build("resa", {}), model)
    assert caught.value.allowed == "at most 128"
