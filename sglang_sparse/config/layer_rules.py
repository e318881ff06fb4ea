"""Read the mapping form of the config field ``layers``: each rule makes some layers dense or gives them a method.

Rules with one method and one config become that method on those layers, like the text form.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from sglang_sparse.errors import SparseArgumentError, within
from sglang_sparse.methods import registry
from sglang_sparse.methods.config import SHARED, validated
from sglang_sparse.methods.layers import LayerSpan, parse_layers, parse_spans

if TYPE_CHECKING:
    from sglang_sparse.methods.base import DecodeMethod
    from sglang_sparse.methods.config import SparseConfig
    from sglang_sparse.methods.groups import DecodeGroups, PrefillGroups
    from sglang_sparse.methods.prefill import PrefillMethod

DENSE, METHOD, LAYERS = "dense", "method", "layers"
M = TypeVar("M", "DecodeMethod", "PrefillMethod")
Checkpoint = Callable[[], Mapping[str, object]] | None


class Phase(NamedTuple, Generic[M]):
    """Decode or prefill: the flags, an example of a rule, and the available methods."""

    word: str
    flag: str
    config: str
    example: str
    methods: Callable[[], dict[str, str]]
    load: Callable[[str], type[M]]

    @property
    def form(self) -> str:
        """The allowed forms of a rule, for errors."""
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
        name: the method's name.
        method: its class.
        fields: the fields of its config.
        origin: the beginning of an error.
    """

    name: str
    method: type[Any]
    fields: dict[str, object]
    origin: str

    def config(self, layers: str, checkpoint: Checkpoint) -> SparseConfig:
        """Validate the fields and return the config."""
        return validated(self.origin, self.method.config_class, {**self.fields, LAYERS: layers}, checkpoint)


@dataclass(frozen=True)
class RuleMethods(Generic[M]):
    """The methods of rules: their names, and the rules of each.

    ``given`` has the rules by their layers.
    """

    given: Mapping[str, object]
    names: Sequence[str]
    methods: Sequence[M]
    specs: Sequence[Sequence[str]]

    @property
    def first_specs(self) -> list[str]:
        """The first rule of each method, for errors."""
        return [specs[0] for specs in self.specs]

    def as_dict(self, methods: Sequence[M], shared: Collection[str]) -> dict[str, object]:
        """Return the rules in full, without the fields next to them."""
        found: dict[str, object] = dict.fromkeys(self.given, DENSE)
        for name, method, specs in zip(self.names, methods, self.specs, strict=True):
            own = method.config.model_dump(mode="json", exclude={*shared, LAYERS})
            found |= {spec: {METHOD: name, **own} for spec in specs}
        return found


def methods_of_rules(
    phase: Phase[M], name: str, fields: Mapping[str, object], checkpoint: Checkpoint
) -> RuleMethods[M]:
    """Read and validate rules, and merge those with the same method and config.

    Args:
        phase: decode or prefill.
        name: the method of the phase's flag, which some rule must run.
        fields: the config. Fields next to ``layers`` apply to rules that do not set them, if their methods have them.
        checkpoint: reads the model's config.json; None without a model.

    Raises:
        SparseArgumentError: rules are malformed or overlap, or their fields are wrong.
    """
    origin = f"{phase.config} of {name}: {LAYERS}"
    given = _read(phase, origin, fields[LAYERS])
    shared = {field: value for field, value in fields.items() if field != LAYERS}
    rules = {spec: _rule(phase, name, spec, rule, shared) for spec, rule in given.items() if isinstance(rule, dict)}
    _require_all(rules, given)
    _require_had(f"{phase.config} of {name}", shared, list(rules.values()))
    if name not in {rule.name for rule in rules.values()}:
        allowed = f"a rule that does, another {phase.flag}, or none at all for dense {phase.word}"
        raise SparseArgumentError(f"{origin}: no rule runs {name}", field=LAYERS, got=given, allowed=allowed)
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


def require_range(rules: Mapping[str, object], num_layers: int) -> None:
    """Refuse rules, dense ones too, for layers that a model does not have.

    Args:
        rules: the rules by their layers.
        num_layers: layers of the model.

    Raises:
        SparseArgumentError: names the rule and the existing layers.
    """
    for spec in rules:
        with within(f'{LAYERS}: rule "{spec}"'):
            parse_layers(spec, num_layers)


def _read(phase: Phase[M], origin: str, given: object) -> dict[str, object]:
    assert isinstance(given, dict)
    # YAML reads a single layer as a number.
    rules = {str(spec): rule for spec, rule in given.items()}
    if len(rules) < len(given) or not rules:
        message = f"{origin}: got {given!r}, allowed: each layer once, by {phase.form}"
        raise SparseArgumentError(message, field=LAYERS, got=given)
    spans: list[tuple[LayerSpan, str]] = []
    for spec, rule in rules.items():
        if rule != DENSE and not isinstance(rule, dict):
            message = f'{origin}: rule "{spec}": got {rule!r}, allowed: {phase.form}'
            raise SparseArgumentError(message, field=LAYERS, got=rule)
        with within(f'{origin}: rule "{spec}"'):
            spans += [(span, spec) for span in parse_spans(spec)]
    for place, ((first, last), spec) in enumerate(spans):
        for (start, end), other in spans[:place]:
            low, high = max(first, start), min(math.inf if last is None else last, math.inf if end is None else end)
            if low <= high:
                both = f'rule "{spec}" names' if spec == other else f'rules "{other}" and "{spec}" both name'
                message = f"{origin}: {both} layer {low}{' twice' if spec == other else ''}"
                raise SparseArgumentError(message, field=LAYERS, got=spec, allowed="one rule for each layer")
    return rules


def _rule(phase: Phase[M], name: str, spec: str, given: Mapping[str, object], shared: Mapping[str, object]) -> _Rule:
    fields = {field: value for field, value in given.items() if field != METHOD}
    origin = f'{phase.config} of {name}: {LAYERS}: rule "{spec}"'
    asked = given.get(METHOD, name)
    with within(origin):
        if not isinstance(asked, str):
            raise SparseArgumentError(field=METHOD, got=asked, allowed=phase.methods())
        registry.require_known(METHOD, asked, phase.methods())
        method = phase.load(asked)
    if LAYERS in fields:
        message, allowed = f'{origin}: got a field "{LAYERS}"', "the layers as the name of the rule"
        raise SparseArgumentError(message, field=LAYERS, got=fields[LAYERS], allowed=allowed)
    known = {*method.config_class.model_fields} - {method.config_class.replaces.get(field) for field in fields}
    return _Rule(asked, method, {field: shared[field] for field in shared if field in known} | fields, origin)


def _require_had(origin: str, shared: Mapping[str, object], rules: Sequence[_Rule]) -> None:
    known = dict.fromkeys(field for rule in rules for field in rule.method.config_class.model_fields)
    for field in shared:
        if field not in known:
            message = f'{origin}: unknown field {field!r} next to "{LAYERS}", which no rule\'s method has'
            raise SparseArgumentError(message, field=field, got=shared[field], allowed=known)


def _require_all(rules: Mapping[str, _Rule], given: Mapping[str, object]) -> None:
    """Refuse rules for some layers if the model itself chooses tokens in all layers."""
    for rule in rules.values():
        if getattr(rule.method, "selects_in_model", False) and list(given) != ["all"]:
            raise SparseArgumentError(
                f"{rule.origin}: {rule.name} needs all layers: its model was trained to choose in each by an indexer, "
                "and in none to attend to everything or by another method",
                field=LAYERS,
                got=given,
                allowed='one rule, "all"',
            )


# Names of the kinds of attention for users.
KINDS = {"MHA": "MHA and GQA", "MLA": "MLA", "DSA": "DSA"}


def build_rules(
    name: str, fields: Mapping[str, object], checkpoint: Checkpoint = None
) -> tuple[DecodeGroups, dict[str, object]]:
    """Build the decode methods of a config whose ``layers`` is a mapping.

    Args:
        name: the method of ``--sparse-method``, which some rule must run.
        fields: the config. Fields next to ``layers`` apply to rules that do not set them, if their methods have them.
        checkpoint: reads the model's config.json; None without a model.

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
    name: str, fields: Mapping[str, object], checkpoint: Checkpoint = None
) -> tuple[PrefillGroups, dict[str, object]]:
    """Build the prefill methods of a config whose ``layers`` is a mapping; see ``build_rules``.

    Fields that all layers share are set once, next to the rules. Without a ``dense_tail``, it is the longest default of
    the methods.
    """
    from sglang_sparse.methods.groups import PrefillGroups
    from sglang_sparse.methods.prefill import PrefillConfig

    fields_of_all = [field for field in PrefillConfig.model_fields if field != LAYERS]
    found = methods_of_rules(PREFILL_PHASE, name, fields, checkpoint)
    shared = _shared_fields(f"--sparse-prefill-config of {name}: {LAYERS}", found, fields_of_all)
    # Rules that differ in nothing else are of one method.
    own = {
        spec: {field: rule[field] for field in rule if field not in shared} if isinstance(rule, dict) else rule
        for spec, rule in found.given.items()
    }
    found = methods_of_rules(PREFILL_PHASE, name, {**fields, **shared, LAYERS: own}, checkpoint)
    with within(f"--sparse-prefill-config of {name}: {LAYERS}"):
        return PrefillGroups(found.names, found.methods), found.as_dict(found.methods, fields_of_all)


def _shared_fields(origin: str, found: RuleMethods[M], fields: Sequence[str]) -> dict[str, object]:
    """Return the values of fields that all configs share; refuse those that differ."""
    configs, shared = [method.config for method in found.methods], {}
    for field in fields:
        values = {getattr(config, field): spec for spec, config in zip(found.first_specs, configs, strict=True)}
        asked = any(field in config.model_fields_set for config in configs)
        if len(values) > 1 and (asked or field != "dense_tail"):
            listed = ", ".join(f'{json.dumps(value)} for "{spec}"' for value, spec in values.items())
            allowed = f'one for all rules: set it next to "{LAYERS}"'
            raise SparseArgumentError(f"{origin}: {field} is {listed}", field=field, got=list(values), allowed=allowed)
        shared[field] = max(values) if field == "dense_tail" else next(iter(values))
    return shared


def _check_compatible(origin: str, found: RuleMethods[DecodeMethod]) -> list[DecodeMethod]:
    """Refuse what cannot stand in one model, and leave prefill to the method that is named for it."""
    names, methods, specs = found.names, found.methods, found.first_specs
    for place, (name, method, spec) in enumerate(zip(names, methods, specs, strict=True)):
        if not method.combines:
            raise SparseArgumentError(
                f'{origin}: rule "{spec}": {name} can be combined with dense layers only, and other rules have '
                f"another method or other fields; these can be combined: {_combining(_kinds(methods[0]))}",
                field=LAYERS,
                got=name,
            )
        if method.alone:
            message = (
                f'{origin}: rule "{spec}": {name} cannot be combined with another method or other fields with this '
            )
            raise SparseArgumentError(f"{message}config: {method.alone}", field=LAYERS, got=name)
        for other, first, where in zip(methods[:place], names, specs, strict=False):
            if not _kinds(method) & _kinds(other):
                raise SparseArgumentError(
                    f'{origin}: rule "{spec}": {name} serves {KINDS[method.attention]} models, and {first} of rule '
                    f'"{where}" {KINDS[other.attention]} models',
                    field=LAYERS,
                    got=name,
                    allowed=_combining(_kinds(other)),
                    where=f"with {first}",
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
                f"{origin}: {field} has {value['prefill']:g} for prefill, and with rules of other methods only "
                "--sparse-prefill-method decides prefill",
                field=field,
                got=value,
                allowed=f'{{"{field}": {{"decode": …}}}}',
            )
    return method.decode_alone() if config.phase_fields else method
