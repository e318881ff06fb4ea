"""Tests of the partners for a method's other layers: those that start, and the message of each that does not."""

import json
from types import SimpleNamespace
from typing import Any

from rope_calibrations import calibration
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang_sparse.config.settings import build
from sglang_sparse.tools import support_matrix


def test_partners_are_those_that_start() -> None:
    asked = support_matrix.methods()
    found, of_prefill = (
        {method.name: support_matrix.rule_partners(method) for method in asked if method.prefill == prefill}
        for prefill in (False, True)
    )
    heads = ("resa", "rocketkv", "skip_softmax")
    for name in heads:
        assert found[name] == ("dense", "itself with other fields", *(other for other in heads if other != name))
    assert found["robsa"] == ("dense", "itself with other fields", "skip_softmax") and found["dsa"] == ()
    assert set(support_matrix.OTHER_FIELDS) == set(found)
    for name, other in (("anchor", "skip_softmax"), ("skip_softmax", "anchor")):
        assert of_prefill[name] == ("dense", "itself with other fields", other)
    assert set(support_matrix.OTHER_PREFILL_FIELDS) == set(of_prefill)


def test_dsa_has_all_layers() -> None:
    assert build("dsa", {"layers": {"all": {}}}).config == build("dsa", {}).config


def test_what_compacts_has_all_layers() -> None:
    """Beside dense layers the model is asked, and beside other fields of its own nobody needs to be."""
    compact = {"method": "rocketkv", "eviction": "compact"}
    place = support_matrix.Place("MHA/GQA", False, {"layers": {"0-1": "dense", "2-": compact}})
    found = support_matrix.refusal(support_matrix.Method("rocketkv", False), place)
    assert found is not None and "layers are dense, which would attend to what is gone" in found


def test_what_serves_both_kinds_stands_beside_either() -> None:
    skip = {"method": "skip_softmax", "threshold_scale_factor": {"decode": 5}}
    robsa, resa = {"method": "robsa", "allow_uncalibrated": True}, {"method": "resa", "rectify_interval": 0}
    for name, rules, kind in (("robsa", (robsa, skip), "MLA"), ("skip_softmax", (skip, robsa), "MLA")):
        method = build(name, {"layers": dict(zip("01", rules, strict=True))}).decode
        assert method.attention == kind and not all(one.latents for one in method.methods)
    method = build("resa", {"layers": {"0": resa, "1": skip}}).decode
    assert method.attention == "MHA" and not all(one.latents for one in method.methods)
    both = build("skip_softmax", {"layers": {"0": skip, "1": {"threshold_scale_factor": {"decode": 9}}}}).decode
    assert both.attention == "MHA" and all(one.latents for one in both.methods)


def test_a_chunk_holds_the_longest_window() -> None:
    rules = {"0-3": {"window_size": 100}, "4-": {"window_size": 40}}
    place = support_matrix.Place("MHA/GQA", False, {"layers": rules})
    rocketkv = support_matrix.Method("rocketkv", False)
    assert support_matrix.refusal(rocketkv, place, {"chunked_prefill_size": 128}) is None
    found = support_matrix.refusal(rocketkv, place, {"chunked_prefill_size": 112})
    assert found is not None and "allowed: at least 128, so that the last 100 tokens" in found


def test_parts_have_the_sensitive_layers_among_theirs() -> None:
    """A part that none is left to does not start."""
    known = calibration([0.9, 1.0, 1.0, 0.9], "weights")
    settings = build("robsa", {"calibration": known, "layers": {"0-1": {"theta1": 0.8}, "2-": {"theta1": 0.7}}})
    assert [part.sparse_layers(4) for part in settings.decode.methods] == [(1,), (2,)]
    assert settings.decode.sparse_layers(4) == (1, 2) and settings.decode.attention == "MLA"
    again = build("robsa", json.loads(json.dumps(settings.resolved)))
    assert again.decode.configs == settings.decode.configs
    model: Any = SimpleNamespace(attention_arch=SimpleNamespace(name="MLA"), num_hidden_layers=4)
    model.hf_text_config = SimpleNamespace(qk_rope_head_dim=64, kv_lora_rank=512)
    model.hf_config, model.model_override_args = model.hf_text_config, {}
    assert settings.decode.refuse(model) is None
    other = build("robsa", {"calibration": known, "layers": {"0-1": {"theta1": 0.8}, "3": {"theta1": 0.7}}})
    assert "no layer is left to run sparse" in str(other.decode.refuse(model))
