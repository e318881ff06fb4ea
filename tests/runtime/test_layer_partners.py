"""What may have the other layers beside a method: those that start, and of each no its message."""

from typing import Any

import pytest
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang_sparse import capabilities, layer_partners
from sglang_sparse.config import SparseArgumentError, build


def refused(layers: Any, name: str) -> str:
    with pytest.raises(SparseArgumentError) as caught:
        build(name, {"layers": layers, "rectify_interval": 0} if name != "dsa" else {"layers": layers})
    return str(caught.value)


def test_partners_are_those_that_start() -> None:
    found = {
        method.name: layer_partners.rule_partners(method) for method in capabilities.methods() if not method.prefill
    }
    heads = ("resa", "rocketkv", "skip_softmax")
    for name in heads:
        assert found[name] == ("dense", "itself with other fields", *(other for other in heads if other != name))
    assert found["robsa"] == ("dense", "itself with other fields") and found["dsa"] == ()
    assert set(layer_partners.OTHER_FIELDS) == set(found)


@pytest.mark.parametrize(
    "rules", [{"0-1": "dense", "2-": {}}, {"0-1": {}, "2-": {"index_share_layers": 2}}, {"0-": {}}]
)
def test_dsa_has_all_layers(rules: dict[str, Any]) -> None:
    message = refused(rules, "dsa")
    assert "dsa has all layers" in message and 'allowed: one rule, "all"' in message
    assert build("dsa", {"layers": {"all": {}}}).config == build("dsa", {}).config


def test_what_compacts_has_all_layers() -> None:
    """Beside dense layers the model is asked, and beside other fields of its own nobody needs to be."""
    compact = {"method": "rocketkv", "eviction": "compact"}
    place = capabilities.Place("MHA/GQA", False, {"layers": {"0-1": "dense", "2-": compact}})
    found = capabilities.refusal(capabilities.Method("rocketkv", False), place)
    assert found is not None and "a dense layer would attend to what is gone" in found
    assert 'rule "1-": rocketkv runs beside no other' in refused({"0": {}, "1-": compact}, "rocketkv")


@pytest.mark.parametrize("name", ["resa", "rocketkv", "skip_softmax"])
def test_no_model_has_two_kinds_of_attention(name: str) -> None:
    """Whichever of the two the flag names."""
    robsa, other = {"method": "robsa", "allow_uncalibrated": True}, {"method": name}
    assert 'rule "1": robsa serves MLA models' in refused({"0": other, "1": robsa}, name)
    message = refused({"0": robsa, "1": other}, "robsa")
    assert f'rule "1": {name} serves MHA and GQA models' in message and "allowed beside robsa: robsa" in message
