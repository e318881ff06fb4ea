"""What may have the other layers where rules give a method some, found by asking as ``support_matrix.py`` does."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sglang_sparse.methods import registry
from sglang_sparse.tools import support_matrix

# By method, what a second rule of it says otherwise than the first one.
OTHER_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "resa": {"active_ratio": 0.2},
    "robsa": {"theta1": 0.8},
    "rocketkv": {"topk": 32},
    "skip_softmax": {"threshold_scale_factor": {"decode": 50}},
    "dsa": {"implementation": "portable"},
}
OTHER_PREFILL_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "anchor": {"theta": 8.0},
    "skip_softmax": {"threshold_scale_factor": 50.0},
}


def rule_partners(method: support_matrix.Method) -> tuple[str, ...]:
    """What may have the other layers where rules give a method some; on some machine.

    Returns:
        "dense", "itself with other fields", or the name of another method of the phase.
    """
    names = registry.prefill_methods() if method.prefill else registry.decode_methods()
    fields = (OTHER_PREFILL_FIELDS if method.prefill else OTHER_FIELDS).get(method.name, {})
    others: dict[str, Any] = {"dense": "dense", "itself with other fields": fields}
    others |= {name: {"method": name} for name in names if name != method.name}
    place = support_matrix.place_of(method)

    def served(rule: Any) -> bool:
        fields = {**place.fields, "layers": {"0-3": {}, "4-": rule}}
        fields |= support_matrix.UNRECTIFIED if method.takes(support_matrix.UNRECTIFIED) else {}
        places = (dataclasses.replace(place, fields=fields, gpu=gpu) for gpu in (True, False))
        return any(support_matrix.refusal(method, place) is None for place in places)

    return tuple(name for name, rule in others.items() if rule and served(rule))
