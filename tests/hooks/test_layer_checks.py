"""Tests of faults in sparse layers that only a loaded model shows: they end the start, before any request."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_configs import CONFIGS, write_config
from refusals import refused
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.plugins import load_plugins

load_plugins()

from resolved import Backends, ServerArgs

from sglang_sparse.config.settings import build, settings_of
from sglang_sparse.hooks import model_runner
from sglang_sparse.hooks.judge import refusal
from sglang_sparse.hooks.layer_checks import require_layers

LAYERS, DIM = 4, 16
CONFIG = SimpleNamespace(num_hidden_layers=LAYERS, head_dim=DIM, v_head_dim=DIM)


class Attention(torch.nn.Module):
    """As in SGLang's models."""

    def __init__(self, layer_id: int, head_dim: int = DIM, **options: Any):
        super().__init__()
        self.attn = RadixAttention(2, head_dim, 0.25, 1, layer_id, **options)


def make_model(odd: int = 0, **options: Any) -> torch.nn.Module:
    """Plain layers, but for an odd one."""
    modules = [Attention(layer, **(options if layer == odd else {})) for layer in range(LAYERS)]
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(modules)
    return model


def said(model: object, settings: Any = None, config: Any = CONFIG) -> str:
    with refused("layers") as caught:
        require_layers(settings or build("resa", {}), model, config)
    return str(caught.value)


ODD = {
    "a sliding window of 64 tokens": {"sliding_window_size": 64},
    "cross attention": {"is_cross_attention": True},
    "attention of type encoder_only": {"attn_type": AttentionType.ENCODER_ONLY},
    "a soft cap by sigmoid": {"logit_cap": 30.0, "logit_capping_method": "sigmoid"},
    "chunked attention": {"use_irope": True},
    "heads of 32 and 32 dimensions": {"head_dim": 32},
    "heads of 16 and 8 dimensions": {"v_head_dim": 8},
}


@pytest.mark.parametrize("name", ODD)
def test_a_layer_that_is_not_served_is_named_with_what_to_type(name: str) -> None:
    message = said(make_model(2, **ODD[name]))
    assert message.startswith(f"--sparse-method resa: layer 2 has {name} (layers.2.attn); allowed: ")
    typed = message.rpartition("to leave layers 2 dense: --sparse-config ")[2]
    config = json.loads(typed.strip("'"))
    assert config == {"layers": [0, 1, 3]}
    require_layers(build("resa", config), make_model(2, **ODD[name]), CONFIG)


RESA: dict[str, Any] = {"sparse_method": "resa"}
BOTH = {"sparse_method": "skip_softmax", "sparse_config": {"threshold_scale_factor": {"prefill": 300, "decode": 25}}}
ONE_POOL = {"disable_hybrid_swa_memory": True, "attention_backend": "torch_native"}


@pytest.mark.parametrize(
    ("name", "flags", "layers"),
    [
        ("ignored_window", RESA, ["all"]),
        ("windows", RESA, ["1,3"]),
        ("windows", RESA | {"sparse_config": {"layers": [3]}}, [[3]]),
        ("windows", RESA | {"sparse_prefill_method": "anchor"}, ["1,3", "1,3"]),
        ("windows", BOTH, ["1,3", "1,3"]),
        ("two_pools", RESA | ONE_POOL, ["0,2"]),
        ("local_attention", RESA, ["3"]),
        ("local_attention", RESA | ONE_POOL, ["3"]),
    ],
)
def test_all_layers_are_those_of_full_attention(
    name: str, flags: dict[str, Any], layers: list[object], tmp_path: Path
) -> None:
    args = ServerArgs(model_path=write_config(tmp_path, name), **flags)
    configs = [json.loads(config) for config in (args.sparse_config, args.sparse_prefill_config) if config]
    assert [config["layers"] for config in configs] == layers


def test_a_rule_for_all_layers_is_one_for_those_of_full_attention(tmp_path: Path) -> None:
    def rules(given: dict[str, Any]) -> Any:
        config = {"layers": given}
        args = ServerArgs(model_path=write_config(tmp_path, "windows"), sparse_method="resa", sparse_config=config)
        return json.loads(args.sparse_config)["layers"]

    assert list(rules({"all": {"active_ratio": 0.2}})) == ["1,3"]
    assert rules({"0,2": "dense", "1,3": {}})["0,2"] == "dense"
    with refused("layers", [0, 2]):
        rules({"0-2": {"active_ratio": 0.2}, "3": {}})


def test_the_kinds_of_layers_decide_whatever_the_config_says_of_its_window(tmp_path: Path) -> None:
    """OLMo has windows where ``use_sliding_window`` is false."""
    kinds = {
        "sliding_window": 64,
        "use_sliding_window": False,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    names = {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo3", "eos_token_id": 0, "pad_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["qwen3"], **names, **kinds}))
    args = ServerArgs(model_path=str(tmp_path), sparse_method="resa")
    assert json.loads(args.sparse_config)["layers"] == "1,3"


def test_what_stands_beside_the_attention_is_seen() -> None:
    model: Any = make_model()
    model.layers[1].sink_k = torch.nn.Parameter(torch.zeros(2))
    model.layers[3].attn.layer_id = 2
    model.layers[0].attn.xai_temperature_len = 1024
    message = said(model)
    assert "layer 0 has logits scaled by position, from 1024 on" in message and "layers 0,1,2,3 dense" not in message
    assert "layer 1 has attention sinks of another kind, sink_k (layers.1.attn)" in said(
        model, build("resa", {"layers": [1]})
    )
    assert "layer 2 has KV shared with layers.2 (layers.3.attn)" in said(model, build("resa", {"layers": [2]}))
    assert message.endswith("no layer is like that: start without --sparse-method resa")
    assert "layer 3 has no attention of SGLang's" in said(model, build("resa", {"layers": [3]}))


def test_soft_caps_and_a_sink_for_each_query_head_are_served() -> None:
    model: Any = make_model(1, logit_cap=30.0)
    for layer in model.layers:
        layer.sinks = torch.nn.Parameter(torch.zeros(2))
    require_layers(build("resa", {}), model, CONFIG)
    model.layers[1].sinks = torch.nn.Parameter(torch.zeros(7, 2))
    assert "layer 1 has attention sinks of another kind, sinks (layers.1.attn)" in said(model)


WHAT = {
    "attention_sinks": "attention sinks",
    "local_attention": "chunked attention",
    "soft_cap": "a soft cap",
    "gemma4": "heads of more than 256 dimensions",
}
CAPPED, WIDE = ["triton", "flashinfer", "fa3"], ["torch_native", "triton"]


@pytest.mark.parametrize(
    ("model", "allowed"),
    [("attention_sinks", ["triton", "fa3"]), ("local_attention", ["fa3"]), ("soft_cap", CAPPED), ("gemma4", WIDE)],
)
@pytest.mark.parametrize("name", ["fa3", "triton", "flashinfer", "torch_native"])
def test_a_model_needs_a_backend_that_has_what_it_has(
    tmp_path: Path, model: str, allowed: list[str], name: str
) -> None:
    args = ServerArgs(model_path=write_config(tmp_path, model), sparse_method="resa")
    settings, asked = settings_of(args.record), Backends(args, name)
    assert settings is not None
    why = refusal(asked, settings, (9, 0), stand_in=True)
    assert (why is None) is (name in allowed), why
    said = f"{name!r} is not supported for a model with {WHAT[model]}; allowed: {', '.join(allowed)}"
    assert name in allowed or said in str(why)


@pytest.mark.parametrize(("flag", "name"), [("sparse_method", "rocketkv"), ("sparse_prefill_method", "anchor")])
@pytest.mark.parametrize("grok", [False, True])
def test_methods_whose_kernels_lack_soft_caps_are_refused(tmp_path: Path, flag: str, name: str, grok: bool) -> None:
    """SGLang caps Grok 1's logits at 30, which its config does not say."""
    path = write_config(tmp_path, "soft_cap")
    if grok:
        config = {**CONFIGS["qwen3"], "architectures": ["Grok1ForCausalLM"]}
        (tmp_path / "config.json").write_text(json.dumps(config))
    with refused("--model-path") as caught:
        ServerArgs(model_path=path, **{flag: name})
    assert f"{name}'s kernels lack this model's soft cap of {30.0 if grok else 50.0} on logits" in str(caught.value)


@pytest.mark.parametrize("name", ["anchor", "skip_softmax"])
def test_no_method_prefills_heads_of_512(tmp_path: Path, name: str) -> None:
    """Those of decode serve them, in the layers of full attention."""
    path = write_config(tmp_path, "gemma4")
    assert json.loads(ServerArgs(model_path=path, sparse_method="skip_softmax").sparse_config)["layers"] == "1,3"
    with refused("--model-path") as caught:
        ServerArgs(model_path=path, sparse_prefill_method=name)
    assert f"{name} prefills heads of at most 256 dimensions, this model's have 512" in str(caught.value)


def test_a_layer_with_chunks_is_refused_by_its_number(tmp_path: Path) -> None:
    model = write_config(tmp_path, "local_attention")
    for flags in ({}, ONE_POOL):
        with refused("layers", [1, 2]) as caught:
            ServerArgs(model_path=model, sparse_method="resa", sparse_config={"layers": "1-3"}, **flags)
        assert "layer 1 has chunked attention" in str(caught.value)


def test_each_phase_is_judged_by_its_own_layers() -> None:
    model, decode = make_model(3, sliding_window_size=8), {"layers": "0-2"}
    require_layers(build("resa", decode), model, CONFIG)
    message = said(model, build("resa", decode, "anchor", {}))
    assert message.startswith("--sparse-prefill-method anchor: layer 3 has")
    assert message.endswith("""--sparse-prefill-config '{"layers": [0, 1, 2]}'""")
    rules = {"layers": {"0": "dense", "1-": {"active_ratio": 0.5}}}
    assert said(model, build("resa", rules)).endswith("""give layers 3 the rule {"3": "dense"} in --sparse-config""")


def test_two_attentions_over_the_same_latents_are_one_layer() -> None:
    config = SimpleNamespace(num_hidden_layers=1, attention_arch=SimpleNamespace(name="MLA"))
    settings, layer = build("skip_softmax", {}), Attention(0, 576, v_head_dim=512)
    layer.other = RadixAttention(2, 192, 0.25, 2, 0, v_head_dim=128)
    model = torch.nn.ModuleList([layer])
    require_layers(settings, model, config)
    layer.sinks = torch.nn.Parameter(torch.zeros(2))
    assert "layer 0 has attention sinks of another kind, sinks (0.attn)" in said(model, settings, config)
    layer.sinks = None
    layer.attn.logit_cap = 30.0  # pyright: ignore[reportAttributeAccessIssue]
    assert "layer 0 has a soft cap of 30.0 on its logits (0.attn)" in said(model, settings, config)
    layer.attn.logit_cap = 0.0  # pyright: ignore[reportAttributeAccessIssue]
    layer.attn.k_scale_float = 0.5  # pyright: ignore[reportAttributeAccessIssue]
    assert "layer 0 has scales of its latents (0.attn)" in said(model, settings, config)


def test_a_mapping_of_attentions_is_looked_through() -> None:
    """SGLang's wrapper of models of transformers keeps them in one."""
    model: Any = torch.nn.Module()
    model.attention_instances = {layer: Attention(layer).attn for layer in range(LAYERS)}
    require_layers(build("resa", {}), model, CONFIG)
    model.attention_instances[1].sliding_window_size = 8
    assert "layer 1 has a sliding window of 8 tokens (attention_instances[1])" in said(model)


@pytest.mark.parametrize("draft", [False, True])
def test_the_load_of_the_model_is_where_it_ends(draft: bool) -> None:
    config = build("resa", {}).config.model_dump_json()
    plain = {"enable_deterministic_inference": False, "rl_on_policy_target": None}
    args = SimpleNamespace(sparse_method="resa", sparse_prefill_method=None, sparse_config=config, **plain)
    runner = SimpleNamespace(server_args=args, model_config=CONFIG, is_draft_worker=draft)

    def load(_: object) -> None:
        runner.model = make_model(1, sliding_window_size=8)

    if draft:
        return model_runner.hook_method(load, runner)
    with refused("layers", [1]):
        model_runner.hook_method(load, runner)


def test_a_prefix_without_its_windows_is_not_computed_again(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"sparse_method": "resa", "sparse_config": {"check_exactness": True}}
    model = write_config(tmp_path, "two_pools")
    with refused("check_exactness", True) as caught:
        ServerArgs(model_path=model, **asked)
    assert caught.value.allowed == "false" and "--disable-hybrid-swa-memory" in str(caught.value)
    ServerArgs(model_path=model, **asked, disable_hybrid_swa_memory=True)
