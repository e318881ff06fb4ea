"""What may have the other layers where rules give a decode method some, found by asking as ``capabilities.py`` does."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sglang_sparse import capabilities, registry

# By decode method, what a second rule of it says otherwise than the first one.
OTHER_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "resa": {"active_ratio": 0.2},
    "robsa": {"theta1": 0.8},
    "rocketkv": {"topk": 32},
    "skip_softmax": {"threshold_scale_factor": {"decode": 50}},
    "dsa": {"index_share_layers": 2},
}


def rule_partners(method: capabilities.Method) -> tuple[str, ...]:
    """What may have the other layers where rules give a decode method some; on some machine.

    Returns:
        "dense", "itself with other fields", or the name of another method.
    """
    if method.prefill:
        return ()
    others = {"dense": "dense", "itself with other fields": OTHER_FIELDS.get(method.name, {})}
    others |= {name: {"method": name} for name in registry.decode_methods() if name != method.name}
    place = capabilities.place_of(method)

    def served(rule: Any) -> bool:
        fields = {**place.fields, "layers": {"0-3": {}, "4-": rule}}
        fields |= capabilities.UNRECTIFIED if method.takes(capabilities.UNRECTIFIED) else {}
        places = (dataclasses.replace(place, fields=fields, gpu=gpu) for gpu in (True, False))
        return any(capabilities.refusal(method, place) is None for place in places)

    return tuple(name for name, rule in others.items() if rule and served(rule))
