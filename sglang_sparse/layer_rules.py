"""The mapping form of the config field ``layers``: each rule says which layers run dense, or by which method.

Rules of one method and one config are that method on those layers, as the text form would say it; rules of several are
a ``Composite``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_sparse import registry
from sglang_sparse.layers import LayerSpan, parse_layers, parse_spans
from sglang_sparse.method_config import SHARED
from sglang_sparse.validation import SparseArgumentError, validated

if TYPE_CHECKING:
    from sglang_sparse.method import DecodeMethod
    from sglang_sparse.method_config import MethodConfig

DENSE, METHOD, LAYERS = "dense", "method", "layers"
FORM = (
    f'"{DENSE}", or a mapping of a method\'s fields, with "{METHOD}" unless it is that of --sparse-method, such as '
    '{"0-1": "dense", "2-": {"method": "resa", "active_ratio": 0.05}}'
)
# Kinds of attention as users know them.
KINDS = {"MHA": "MHA and GQA", "MLA": "MLA", "DSA": "DSA"}

Checkpoint = Callable[[], Mapping[str, Any]] | None


@dataclass(frozen=True)
class _Rule:
    """A rule that names a method.

    Attributes:
        name: of the method.
        method: its class.
        fields: what its config is made of.
        origin: what an error begins with.
    """

    name: str
    method: type[DecodeMethod]
    fields: dict[str, Any]
    origin: str

    def config(self, layers: str, checkpoint: Checkpoint) -> MethodConfig:
        """Validate."""
        return validated(self.origin, self.method.config_class, {**self.fields, LAYERS: layers}, checkpoint)


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
    origin = f"--sparse-config of {name}: {LAYERS}"
    given = _read(origin, fields[LAYERS])
    beside = {field: value for field, value in fields.items() if field != LAYERS}
    rules = {spec: _rule(name, spec, rule, beside) for spec, rule in given.items() if rule != DENSE}
    _require_all(rules, given)
    _require_had(f"--sparse-config of {name}", beside, list(rules.values()))
    if name not in {rule.name for rule in rules.values()}:
        raise SparseArgumentError(
            f"{origin}: no rule runs {name}; allowed: a rule that does, another --sparse-method, or none at all for "
            "dense decode"
        )
    configs = {spec: rule.config("all", checkpoint) for spec, rule in rules.items()}
    groups: dict[tuple[str, str], list[str]] = {}
    for spec, rule in rules.items():
        groups.setdefault((rule.name, configs[spec].model_dump_json()), []).append(spec)
    methods: list[DecodeMethod] = []
    names = [rule_name for rule_name, _ in groups]
    for specs in groups.values():
        rule = rules[specs[0]]
        methods.append(rule.method(rule.config(",".join(specs), checkpoint)))
    if len(methods) > 1:
        methods = _apart(origin, names, methods, [specs[0] for specs in groups.values()])
    said: dict[str, Any] = dict.fromkeys(given, DENSE)
    for rule_name, method, specs in zip(names, methods, groups.values(), strict=True):
        own = method.config.model_dump(mode="json", exclude={*SHARED, LAYERS})
        said |= {spec: {METHOD: rule_name, **own} for spec in specs}
    if len(methods) == 1:
        return methods[0], said
    # To read a config takes no torch.
    from sglang_sparse.composite import Composite

    return Composite(names, methods), said


def require_range(rules: Mapping[str, Any], num_layers: int) -> None:
    """Refuse rules, also dense ones, for layers that a model does not have.

    Args:
        rules: by their layers.
        num_layers: of the model.

    Raises:
        ValueError: names the rule and the layers that there are.
    """
    for spec in rules:
        try:
            parse_layers(spec, num_layers)
        except ValueError as error:
            raise ValueError(f'{LAYERS}: rule "{spec}": {error}') from None


def _read(origin: str, given: Mapping[Any, Any]) -> dict[str, Any]:
    # YAML reads a single layer as a number.
    rules = {str(spec): rule for spec, rule in given.items()}
    if len(rules) < len(given) or not rules:
        raise SparseArgumentError(f"{origin}: got {given!r}, allowed: each layer once, by {FORM}")
    spans: list[tuple[LayerSpan, str]] = []
    for spec, rule in rules.items():
        if rule != DENSE and not isinstance(rule, dict):
            raise SparseArgumentError(f'{origin}: rule "{spec}": got {rule!r}, allowed: {FORM}')
        try:
            spans += [(span, spec) for span in parse_spans(spec)]
        except ValueError as error:
            raise SparseArgumentError(f'{origin}: rule "{spec}": {error}') from None
    for place, ((first, last), spec) in enumerate(spans):
        for (start, end), other in spans[:place]:
            low, high = max(first, start), min(math.inf if last is None else last, math.inf if end is None else end)
            if low <= high:
                both = f'rule "{spec}" names' if spec == other else f'rules "{other}" and "{spec}" both name'
                twice = " twice" if spec == other else ""
                raise SparseArgumentError(f"{origin}: {both} layer {low}{twice}; allowed: one rule for each layer")
    return rules


def _rule(name: str, spec: str, given: Mapping[str, Any], beside: Mapping[str, Any]) -> _Rule:
    fields = {field: value for field, value in given.items() if field != METHOD}
    origin = f'--sparse-config of {name}: {LAYERS}: rule "{spec}"'
    asked = given.get(METHOD, name)
    try:
        if not isinstance(asked, str):
            raise ValueError(f"{METHOD}: got {asked!r}, allowed: {', '.join(registry.decode_methods())}")
        registry.require_known(METHOD, asked, registry.decode_methods())
        method = registry.load_decode_method(asked)
    except ValueError as error:
        raise SparseArgumentError(f"{origin}: {error}") from error
    if LAYERS in fields:
        raise SparseArgumentError(f'{origin}: got a field "{LAYERS}"; allowed: the layers as the name of the rule')
    known = method.config_class.model_fields
    return _Rule(asked, method, {field: beside[field] for field in beside if field in known} | fields, origin)


def _require_had(origin: str, beside: Mapping[str, Any], rules: Sequence[_Rule]) -> None:
    known = dict.fromkeys(field for rule in rules for field in rule.method.config_class.model_fields)
    for field in beside:
        if field not in known:
            raise SparseArgumentError(
                f'{origin}: unknown field {field!r} beside "{LAYERS}", which no rule\'s method has; '
                f"allowed: {', '.join(known)}"
            )


def _require_all(rules: Mapping[str, _Rule], given: Mapping[str, Any]) -> None:
    """Refuse a part of the layers for a method whose model chooses in all of them."""
    for rule in rules.values():
        if rule.method.selects_in_model and list(given) != ["all"]:
            raise SparseArgumentError(
                f"{rule.origin}: {rule.name} has all layers: its model was trained to choose in each by an indexer of "
                'its own, and none was trained to attend to everything or by another method; allowed: one rule, "all"'
            )


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
            found = ", ".join(f'{json.dumps(value)} for "{spec}"' for value, spec in said.items())
            raise SparseArgumentError(
                f'{origin}: {field} is {found}; allowed: one for all rules: set it beside "{LAYERS}"'
            )
    return [_of_decode_alone(f'{origin}: rule "{spec}"', method) for method, spec in zip(methods, specs, strict=True)]


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
