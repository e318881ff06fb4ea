"""The mapping form of the config field ``layers``: each rule says which layers run dense, or by which method.

Rules of one method and one config are that method on those layers, as the text form would say it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_sparse.methods import registry
from sglang_sparse.methods.config import SHARED, SparseArgumentError, validated
from sglang_sparse.methods.layers import LayerSpan, parse_layers, parse_spans

if TYPE_CHECKING:
    from sglang_sparse.methods.base import DecodeMethod
    from sglang_sparse.methods.config import SparseConfig
    from sglang_sparse.methods.groups import DecodeGroups, PrefillGroups

DENSE, METHOD, LAYERS = "dense", "method", "layers"
Checkpoint = Callable[[], Mapping[str, Any]] | None


class Phase(NamedTuple):
    """Of decode or prefill: the flags, what a rule may look like, and the methods that there are."""

    word: str
    flag: str
    config: str
    example: str
    methods: Callable[[], dict[str, str]]
    load: Callable[[str], type[Any]]

    @property
    def form(self) -> str:
        """What a rule may be."""
        return (
            f'"{DENSE}", or a mapping of a method\'s fields, with "{METHOD}" unless it is that of {self.flag}, such as '
            f'{{"0-1": "{DENSE}", "2-": {{"{METHOD}": {self.example}}}}}'
        )


DECODE_PHASE = Phase(
    "decode",
    "--sparse-method",
    "--sparse-config",
    '"resa", "active_ratio": 0.05',
    registry.decode_methods,
    registry.load_decode_method,
)
PREFILL_PHASE = Phase(
    "prefill",
    "--sparse-prefill-method",
    "--sparse-prefill-config",
    '"anchor", "theta": 8',
    registry.prefill_methods,
    registry.load_prefill_method,
)


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
    method: type[Any]
    fields: dict[str, Any]
    origin: str

    def config(self, layers: str, checkpoint: Checkpoint) -> SparseConfig:
        """Validate."""
        return validated(self.origin, self.method.config_class, {**self.fields, LAYERS: layers}, checkpoint)


@dataclass(frozen=True)
class RuleMethods:
    """The methods that rules give layers: their names, and the rules of each.

    ``given`` has the rules by their layers.
    """

    given: Mapping[str, Any]
    names: Sequence[str]
    methods: Sequence[Any]
    specs: Sequence[Sequence[str]]

    @property
    def first_specs(self) -> list[str]:
        """A rule of each method, for errors."""
        return [specs[0] for specs in self.specs]

    def as_dict(self, methods: Sequence[Any], shared: Collection[str]) -> dict[str, Any]:
        """The rules in full, without the fields that stand beside them."""
        found: dict[str, Any] = dict.fromkeys(self.given, DENSE)
        for name, method, specs in zip(self.names, methods, self.specs, strict=True):
            own = method.config.model_dump(mode="json", exclude={*shared, LAYERS})
            found |= {spec: {METHOD: name, **own} for spec in specs}
        return found


def methods_of_rules(phase: Phase, name: str, fields: Mapping[str, Any], checkpoint: Checkpoint) -> RuleMethods:
    """Read and validate rules, and put those together that say the same of one method.

    Args:
        phase: of the rules.
        name: of the method that the phase's flag names, which some rule must run.
        fields: the config. What stands beside ``layers`` is for every rule whose method has it and does not give it.
        checkpoint: reads the model's config.json; None where no model is at hand.

    Raises:
        SparseArgumentError: rules are malformed or overlap, or their fields are wrong.
    """
    origin = f"{phase.config} of {name}: {LAYERS}"
    given = _read(phase, origin, fields[LAYERS])
    beside = {field: value for field, value in fields.items() if field != LAYERS}
    rules = {spec: _rule(phase, name, spec, rule, beside) for spec, rule in given.items() if rule != DENSE}
    _require_all(rules, given)
    _require_had(f"{phase.config} of {name}", beside, list(rules.values()))
    if name not in {rule.name for rule in rules.values()}:
        raise SparseArgumentError(
            f"{origin}: no rule runs {name}; allowed: a rule that does, another {phase.flag}, or none at all for "
            f"dense {phase.word}"
        )
    configs = {spec: rule.config("all", checkpoint) for spec, rule in rules.items()}
    groups: dict[tuple[str, str], list[str]] = {}
    for spec, rule in rules.items():
        groups.setdefault((rule.name, configs[spec].model_dump_json()), []).append(spec)
    firsts = [rules[specs[0]] for specs in groups.values()]
    methods = [
        rule.method(rule.config(",".join(specs), checkpoint))
        for rule, specs in zip(firsts, groups.values(), strict=True)
    ]
    return RuleMethods(given, [rule_name for rule_name, _ in groups], methods, list(groups.values()))


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


def _read(phase: Phase, origin: str, given: Mapping[Any, Any]) -> dict[str, Any]:
    # YAML reads a single layer as a number.
    rules = {str(spec): rule for spec, rule in given.items()}
    if len(rules) < len(given) or not rules:
        raise SparseArgumentError(f"{origin}: got {given!r}, allowed: each layer once, by {phase.form}")
    spans: list[tuple[LayerSpan, str]] = []
    for spec, rule in rules.items():
        if rule != DENSE and not isinstance(rule, dict):
            raise SparseArgumentError(f'{origin}: rule "{spec}": got {rule!r}, allowed: {phase.form}')
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


def _rule(phase: Phase, name: str, spec: str, given: Mapping[str, Any], beside: Mapping[str, Any]) -> _Rule:
    fields = {field: value for field, value in given.items() if field != METHOD}
    origin = f'{phase.config} of {name}: {LAYERS}: rule "{spec}"'
    asked = given.get(METHOD, name)
    try:
        if not isinstance(asked, str):
            raise ValueError(f"{METHOD}: got {asked!r}, allowed: {', '.join(phase.methods())}")
        registry.require_known(METHOD, asked, phase.methods())
        method = phase.load(asked)
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
        if getattr(rule.method, "selects_in_model", False) and list(given) != ["all"]:
            raise SparseArgumentError(
                f"{rule.origin}: {rule.name} has all layers: its model was trained to choose in each by an indexer of "
                'its own, and none was trained to attend to everything or by another method; allowed: one rule, "all"'
            )


# Kinds of attention as users know them.
KINDS = {"MHA": "MHA and GQA", "MLA": "MLA", "DSA": "DSA"}


def build_rules(
    name: str, fields: Mapping[str, Any], checkpoint: Checkpoint = None
) -> tuple[DecodeGroups, dict[str, Any]]:
    """Build the decode methods of a config whose ``layers`` is a mapping.

    Args:
        name: of ``--sparse-method``, which some rule must run.
        fields: the config. What stands beside ``layers`` is for every rule whose method has it and does not give it.
        checkpoint: reads the model's config.json; None where no model is at hand.

    Returns:
        The methods, and the rules in full: by their layers "dense" or the fields of a method.

    Raises:
        SparseArgumentError: rules are malformed, overlap or cannot be combined, or their fields are wrong.
    """
    # To read a config takes no torch.
    from sglang_sparse.methods.groups import DecodeGroups

    found = methods_of_rules(DECODE_PHASE, name, fields, checkpoint)
    methods = found.methods
    if len(methods) > 1:
        methods = _check_compatible(f"--sparse-config of {name}: {LAYERS}", found)
    return DecodeGroups(found.names, methods), found.as_dict(methods, SHARED)


def build_prefill_rules(
    name: str, fields: Mapping[str, Any], checkpoint: Checkpoint = None
) -> tuple[PrefillGroups, dict[str, Any]]:
    """Build the prefill methods of a config whose ``layers`` is a mapping; see ``build_rules``.

    What all layers share is said once, beside the rules; where nobody says how long the dense tail is, it is the
    longest that one of the methods has by default.
    """
    from sglang_sparse.methods.groups import PrefillGroups
    from sglang_sparse.methods.prefill import PrefillConfig

    fields_of_all = [field for field in PrefillConfig.model_fields if field != LAYERS]
    found = methods_of_rules(PREFILL_PHASE, name, fields, checkpoint)
    shared = _shared_fields(f"--sparse-prefill-config of {name}: {LAYERS}", found, fields_of_all)
    # Rules that differ in nothing else are of one method.
    own = {
        spec: rule if rule == DENSE else {field: rule[field] for field in rule if field not in shared}
        for spec, rule in found.given.items()
    }
    found = methods_of_rules(PREFILL_PHASE, name, {**fields, **shared, LAYERS: own}, checkpoint)
    try:
        return PrefillGroups(found.names, found.methods), found.as_dict(found.methods, fields_of_all)
    except ValueError as error:
        raise SparseArgumentError(f"--sparse-prefill-config of {name}: {LAYERS}: {error}") from error


def _shared_fields(origin: str, found: RuleMethods, fields: Sequence[str]) -> dict[str, Any]:
    """What the configs say of these fields, of which each is one for all; refuses what differs."""
    configs, shared = [method.config for method in found.methods], {}
    for field in fields:
        values = {getattr(config, field): spec for spec, config in zip(found.first_specs, configs, strict=True)}
        asked = any(field in config.model_fields_set for config in configs)
        if len(values) > 1 and (asked or field != "dense_tail"):
            said = ", ".join(f'{json.dumps(value)} for "{spec}"' for value, spec in values.items())
            raise SparseArgumentError(
                f'{origin}: {field} is {said}; allowed: one for all rules: set it beside "{LAYERS}"'
            )
        shared[field] = max(values) if field == "dense_tail" else next(iter(values))
    return shared


def _check_compatible(origin: str, found: RuleMethods) -> list[DecodeMethod]:
    """Refuse what cannot stand in one model, and leave prefill to the method that is named for it."""
    names, methods, specs = found.names, found.methods, found.first_specs
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
    _shared_fields(origin, found, SHARED)
    return [_of_decode_alone(f'{origin}: rule "{spec}"', method) for method, spec in zip(methods, specs, strict=True)]


def _kinds(method: DecodeMethod | type[DecodeMethod]) -> set[str]:
    return {method.attention, "MLA"} if method.latents else {method.attention}


def _combining(kinds: Collection[str]) -> str:
    found = registry.loaded_decode_methods().items()
    return ", ".join(name for name, method in found if method.combines and _kinds(method) & set(kinds))


def _of_decode_alone(origin: str, method: DecodeMethod) -> DecodeMethod:
    config = method.config
    for field in config.phase_fields:
        value = getattr(config, field)
        if value["prefill"] and field in config.model_fields_set:
            raise SparseArgumentError(
                f"{origin}: {field} has {value['prefill']:g} for prefill, and beside rules of other methods prefill is "
                f'what --sparse-prefill-method says; allowed: {{"{field}": {{"decode": …}}}}'
            )
    return method.decode_alone() if config.phase_fields else method
