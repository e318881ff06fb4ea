"""Legs of AnchorAttention beside its controls: what they have in common."""

import pytest

from eval.lab.legs.leg import LEGS
from sglang_sparse.config.files import read_config


@pytest.mark.parametrize("label", ["lookup", "prefilled", "lookup-prefilled"])
def test_controls_have_its_config_but_for_the_tail(label: str) -> None:
    found = {}
    for leg in LEGS:
        kind, _, of = leg.name.removeprefix("needles-").partition("-")
        if of == label and leg.server is not None and leg.server.flags[0] == "--sparse-prefill-method":
            found[kind] = read_config(leg.server.flags[3])
            asked = dict(zip(leg.commands[0].arguments, leg.commands[0].arguments[1:], strict=False))
            assert asked["--form"] == ("prefilled" if "prefilled" in label else "chat")
            assert "multikey" in asked["--tasks"] and asked["--lengths"] == "32k"
    own = found.pop("anchor")
    assert found and all(config == {**own, "dense_tail": 0} for config in found.values())
