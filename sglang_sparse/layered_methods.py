"""What the rules of ``config/layer_rules.py`` make of a phase.

Rules of one method and one config are that method on those layers, as the text form would say it; rules of several are
a ``Composite``, and for prefill a ``LayeredPrefill``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from sglang_sparse.config.layer_rules import (
    DECODE_PHASE,
    DENSE,
    LAYERS,
    PREFILL_PHASE,
    Checkpoint,
    RuleMethods,
    methods_of_rules,
)
from sglang_sparse.methods import registry
from sglang_sparse.methods.config import SHARED
from sglang_sparse.validation import SparseArgumentError

if TYPE_CHECKING:
    from sglang_sparse.methods.base import DecodeMethod
    from sglang_sparse.methods.prefill import PrefillMethod

# Kinds of attention as users know them.
KINDS = {"MHA": "MHA and GQA", "MLA": "MLA", "DSA": "DSA"}


def build_rules(
    name: str, fields: Mapping[str, Any], checkpoint: Checkpoint = None
) -> tuple[DecodeMethod, dict[str, Any]]:
    """Build the decode method of a config whose ``layers`` is a mapping.

    Args:
        name: of ``--sparse-method``, which some rule must run.
        fields: the config. What stands beside ``layers`` is for every rule whose method has it and does not give it.
        checkpoint: reads the model's config.json; None where no model is at hand.

    Returns:
        The method, and the rules in full: by their layers "dense" or the fields of a method.

    Raises:
        SparseArgumentError: rules are malformed, overlap or cannot be combined, or their fields are wrong.
    """
    found = methods_of_rules(DECODE_PHASE, name, fields, checkpoint)
    methods = found.methods
    if len(methods) > 1:
        methods = _apart(f"--sparse-config of {name}: {LAYERS}", found.names, methods, found.first_specs)
    said = found.said(methods, SHARED)
    if len(methods) == 1:
        return methods[0], said
    # To read a config takes no torch.
    from sglang_sparse.methods.groups import Composite

    return Composite(found.names, methods), said


def build_prefill_rules(
    name: str, fields: Mapping[str, Any], checkpoint: Checkpoint = None
) -> tuple[PrefillMethod, dict[str, Any]]:
    """Build the prefill method of a config whose ``layers`` is a mapping; see ``build_rules``.

    What all layers share is said once, beside the rules; where nobody says how long the dense tail is, it is the
    longest that one of the methods has by default.
    """
    from sglang_sparse.layered_prefill import SHARED as SHARED_BY_PREFILL
    from sglang_sparse.layered_prefill import LayeredPrefill
    from sglang_sparse.methods.prefill import PrefillConfig

    found = methods_of_rules(PREFILL_PHASE, name, fields, checkpoint)
    shared = _shared_by_prefill(name, found, SHARED_BY_PREFILL)
    # Rules that differ in nothing else are of one method.
    own = {
        spec: rule if rule == DENSE else {field: rule[field] for field in rule if field not in shared}
        for spec, rule in found.given.items()
    }
    found = methods_of_rules(PREFILL_PHASE, name, {**fields, **shared, LAYERS: own}, checkpoint)
    said = found.said(found.methods, SHARED_BY_PREFILL)
    if len(found.methods) == 1:
        return found.methods[0], said
    layers = ",".join(str(method.config.layers) for method in found.methods)
    config = PrefillConfig.model_validate({**shared, LAYERS: layers})
    try:
        return LayeredPrefill(config, found.names, found.methods), said
    except ValueError as error:
        raise SparseArgumentError(f"--sparse-prefill-config of {name}: {LAYERS}: {error}") from error


def _shared_by_prefill(name: str, found: RuleMethods, fields: Sequence[str]) -> dict[str, Any]:
    """What the configs say of these fields, of which each is one for all."""
    configs, shared = [method.config for method in found.methods], {}
    for field in fields:
        values = {getattr(config, field): spec for spec, config in zip(found.first_specs, configs, strict=True)}
        asked = any(field in config.model_fields_set for config in configs)
        if len(values) > 1 and (asked or field != "dense_tail"):
            _refuse_apart(f"--sparse-prefill-config of {name}: {LAYERS}", field, values)
        shared[field] = max(values) if field == "dense_tail" else next(iter(values))
    return shared


def _apart(
    origin: str, names: Sequence[str], methods: Sequence[DecodeMethod], specs: Sequence[str]
) -> list[DecodeMethod]:
    """Refuse what cannot stand in one model, and leave prefill to the method that is named for it."""
    for place, (name, method, spec) in enumerate(zip(names, methods, specs, strict=True)):
        if not method.combines:
            raise SparseArgumentError(
                f'{origin}: rule "{spec}": {name} runs beside dense layers alone, and other rules name another method '
                f"or other fields; allowed beside each other: {_combining(_kinds(methods[0]))}"
            )
        if method.alone:
            raise SparseArgumentError(
                f'{origin}: rule "{spec}": {name} runs beside no other method and no other fields with this config: '
                f"{method.alone}"
            )
        for other, first, where in zip(methods[:place], names, specs, strict=False):
            if not _kinds(method) & _kinds(other):
                raise SparseArgumentError(
                    f'{origin}: rule "{spec}": {name} serves {KINDS[method.attention]} models, and {first} of rule '
                    f'"{where}" {KINDS[other.attention]} models; allowed beside {first}: {_combining(_kinds(other))}'
                )
    for field in SHARED:
        said = {getattr(method.config, field): spec for method, spec in zip(methods, specs, strict=True)}
        if len(said) > 1:
            _refuse_apart(origin, field, said)
    return [_of_decode_alone(f'{origin}: rule "{spec}"', method) for method, spec in zip(methods, specs, strict=True)]


def _refuse_apart(origin: str, field: str, said: Mapping[Any, str]) -> NoReturn:
    found = ", ".join(f'{json.dumps(value)} for "{spec}"' for value, spec in said.items())
    raise SparseArgumentError(f'{origin}: {field} is {found}; allowed: one for all rules: set it beside "{LAYERS}"')


def _kinds(method: DecodeMethod | type[DecodeMethod]) -> set[str]:
    return {method.attention, "MLA"} if method.latents else {method.attention}


def _combining(kinds: Collection[str]) -> str:
    found = registry.loaded_decode_methods().items()
    return ", ".join(name for name, method in found if method.combines and _kinds(method) & set(kinds))


def _of_decode_alone(origin: str, method: DecodeMethod) -> DecodeMethod:
    config, nothing = method.config, {}
    for field in config.phase_fields:
        value = getattr(config, field)
        if value["prefill"] and field in config.model_fields_set:
            raise SparseArgumentError(
                f"{origin}: {field} has {value['prefill']:g} for prefill, and beside rules of other methods prefill is "
                f'what --sparse-prefill-method says; allowed: {{"{field}": {{"decode": …}}}}'
            )
        nothing[field] = {**value, "prefill": 0.0}
    return type(method)(config.model_copy(update=nothing)) if nothing else method
