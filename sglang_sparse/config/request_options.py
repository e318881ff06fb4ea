"""The options that a single request may set through ``custom_params``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

from pydantic import ValidationError

from sglang_sparse.config.settings import Settings
from sglang_sparse.errors import SparseArgumentError, nearest
from sglang_sparse.methods import registry
from sglang_sparse.methods.config import SparseConfig, refused_value
from sglang_sparse.methods.groups import DecodeGroups, PrefillGroups

SPARSE = "sparse"
LOSSLESS = "lossless"
FORCED_TOKENS = "forced_tokens"
DECODE, PREFILL = "decode", "prefill"
# Begins the part of a radix namespace (SGLang's extra_key) with a request's overrides of prefill.
NAMESPACE = "sglang_sparse:"
# Begins the part with the id of a LoRA adapter, which SGLang appends.
ADAPTER = "sglang_sparse_adapter:"


@dataclass(frozen=True)
class RequestOptions:
    """Options of a request.

    Attributes:
        decode: the server's decode methods, with the fields that the request overrides in their configs.
        sparse: False asks for dense decode.
        lossless: False accepts all drafts of a server that verifies them.
        rectify_interval: generated tokens between dense rectifications; 0 means never.
        forced_tokens: the output, decided beforehand; see ``scheduler/forced_tokens.py``.
        prefill: the server's prefill methods, with the fields that the request overrides; None for dense prefill.
        namespace: names these overrides; empty without any. KV is shared among equals only.
    """

    decode: DecodeGroups
    sparse: bool
    rectify_interval: int
    forced_tokens: tuple[int, ...]
    prefill: PrefillGroups | None = None
    namespace: str = ""
    lossless: bool = True


def parse_options(
    settings: Settings, custom_params: Mapping[str, object] | None, processor: bool = False
) -> RequestOptions:
    """Read a request's options: those under ``sparse``, or without a custom logit processor all of ``custom_params``.

    Args:
        settings: the server's.
        custom_params: the request's.
        processor: True if the request has a custom logit processor, which reads them, too.

    Raises:
        SparseArgumentError: a field is mistyped, misspelt, out of range or not one that this server's method has.
    """
    if settings.asked:
        options = parse_options(settings.asked, custom_params, processor)
        return options if settings.prefill else replace(options, prefill=None, namespace="")
    params = _given(custom_params or {}, processor)
    by_phase = _by_phase(settings, params)
    of_decode, of_prefill = (
        tuple(dict.fromkeys(name for config in configs for name in config.request_fields))
        for configs in _configs(settings).values()
    )
    overridable = tuple(dict.fromkeys((*of_decode, *of_prefill)))
    _require_known(settings, params, overridable, strict=isinstance((custom_params or {}).get(SPARSE), Mapping))
    sparse = _asks_sparse(settings, params)
    overrides = _overrides(by_phase[DECODE], of_decode)
    of_prompt = _overrides(by_phase[PREFILL], of_prefill)
    for name, _, value in (*overrides, *of_prompt):
        if not sparse:
            message = f"{name}: has no meaning for a request with {SPARSE}: false"
            raise SparseArgumentError(message, field=name, got=value)
        if not isinstance(value, (int, float, str)):
            raise SparseArgumentError(field=name, got=value, allowed="a number, or true or false")
    forced = _token_ids(params.get(FORCED_TOKENS, []))
    decode = _decode_with(settings.decode, overrides)
    interval = getattr(decode.config, "rectify_interval", 0) if sparse else 0
    if params.get("exact_prefix") is True:
        for name, _, value in of_prompt:
            # A value for both phases still has a meaning in decode.
            if name != "exact_prefix" and (name not in of_decode or isinstance(params[name], dict)):
                message = f"{name}: has no meaning for a request with exact_prefix: true"
                raise SparseArgumentError(message, field=name, got=value)
    prefill, namespace = _prefill_with(settings.prefill, of_prompt, sparse) if settings.prefill else (None, "")
    return RequestOptions(decode, sparse, interval, forced, prefill, namespace, _asked(params, LOSSLESS))


def _given(params: Mapping[str, object], processor: bool) -> Mapping[str, object]:
    """Return the part of ``custom_params`` that holds options; another part may belong to a custom logit processor."""
    sparse = params.get(SPARSE)
    if not isinstance(sparse, Mapping):
        return {name: value for name, value in params.items() if name == SPARSE} if processor else params
    for name in () if processor else sorted(params.keys() & {*registry.known_fields(), LOSSLESS, FORCED_TOKENS}):
        message = f"{name}: got {params[name]!r} next to {SPARSE}: {{…}}; move it into {SPARSE}"
        raise SparseArgumentError(message, field=name, got=params[name])
    return sparse


def _require_known(settings: Settings, params: Mapping[str, object], overridable: Sequence[str], strict: bool) -> None:
    """Refuse fields that a request cannot set; of other names only misspelt ones, and all if ``strict``."""
    # Few servers verify drafts.
    names = (*overridable, *(() if strict else (SPARSE,)), FORCED_TOKENS)
    for key, value in params.items():
        if key in (*names, LOSSLESS):
            continue
        if any(key in type(config).model_fields for configs in _configs(settings).values() for config in configs):
            message = f"{key}: belongs to the server's config"
            raise SparseArgumentError(message, field=key, got=value, allowed=names, where="in a request")
        if key in registry.known_fields():
            raise SparseArgumentError(f"{key}: {settings.flag} has no such field", field=key, got=value, allowed=names)
        # A short name such as "sparse" resembles too many names with another meaning.
        hint = nearest(str(key), [*overridable, FORCED_TOKENS], cutoff=0.85)
        if strict:
            message = f"{SPARSE}: unknown field {key!r}"
            raise SparseArgumentError(message, field=key, got=value, allowed=names, hint=hint)
        if hint:
            raise SparseArgumentError(f"custom_params: unknown field {key!r}", field=key, got=value, hint=hint)


def _configs(settings: Settings) -> dict[str, Sequence[SparseConfig]]:
    """The configs of the methods of each phase."""
    return {DECODE: settings.decode.configs, PREFILL: settings.prefill.configs if settings.prefill else ()}


def _by_phase(settings: Settings, params: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """Return the params of each phase: a field of both phases may map each phase to a value."""
    found = {phase: dict(params) for phase in (DECODE, PREFILL)}
    for name, value in params.items():
        having = [
            phase
            for phase, configs in _configs(settings).items()
            if any(name in config.phase_fields for config in configs)
        ]
        if not having or not isinstance(value, dict):
            continue
        if not value or not set(value) <= set(having):
            allowed = f"a number, or a mapping with {' and '.join(having)}"
            raise SparseArgumentError(field=name, got=value, allowed=allowed, where="on this server")
        for phase, own in found.items():
            del own[name]
            own.update({name: value[phase]} if phase in value else {})
    return found


def _asked(params: Mapping[str, object], name: str) -> bool:
    value = params.get(name, True)
    if not isinstance(value, bool):
        allowed = "true, false, or a mapping of options" if name == SPARSE else "true or false"
        raise SparseArgumentError(field=name, got=value, allowed=allowed)
    return value


def _asks_sparse(settings: Settings, params: Mapping[str, object]) -> bool:
    sparse = _asked(params, SPARSE)
    if not sparse and any(method.selects_in_model for method in settings.decode.methods):
        message = f"{SPARSE}: got false, allowed on this server: true; its model is trained to attend sparsely"
        raise SparseArgumentError(message, field=SPARSE, got=sparse)
    return sparse


Overrides = tuple[tuple[str, type, Any], ...]
C = TypeVar("C", bound=SparseConfig)


def _overrides(params: Mapping[str, object], names: Sequence[str]) -> Overrides:
    # The types are part of the cache key: True equals 1, but only 1 is an interval.
    return tuple((name, type(params[name]), params[name]) for name in names if name in params)


def _whole(value: object) -> object:
    """Turn a float without a fraction into an int: gRPC sends all numbers as floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _token_ids(given: object) -> tuple[int, ...]:
    tokens = [_whole(token) for token in given] if isinstance(given, list) else [None]
    found = tuple(token for token in tokens if isinstance(token, int) and not isinstance(token, bool) and token >= 0)
    if len(found) < len(tokens):
        message = f"{FORCED_TOKENS}: got {str(given)[:80]}, allowed: a list of token ids"
        raise SparseArgumentError(message, field=FORCED_TOKENS, got=given)
    return found


def _config_with(config: C, overrides: Overrides) -> C:
    # A field is for the methods that have it.
    overrides = tuple(one for one in overrides if one[0] in config.request_fields)
    if not overrides:
        return config
    own = type(config).model_fields
    integers = {name for name, field in own.items() if field.annotation in (int, int | None)}
    asked = {name: _whole(value) if name in integers else value for name, _, value in overrides}
    replaced = {other: own[other].default for name in asked if (other := config.replaces.get(name))}
    if both := sorted(replaced.keys() & asked.keys()):
        raise SparseArgumentError(field=both[0], got=asked[both[0]], allowed=f"one of {', '.join(both)}")
    fields = config.model_dump() | replaced | asked
    if fields.get("rectify_interval") == 0 and "rectify_on_finish" in fields:
        fields["rectify_on_finish"] = False
    try:
        return type(config).model_validate(fields)
    except ValidationError as error:
        raise refused_value(error.errors()[0]) from None


@lru_cache(maxsize=256)
def _decode_with(server: DecodeGroups, overrides: Overrides) -> DecodeGroups:
    return server.with_configs([_config_with(config, overrides) for config in server.configs]) if overrides else server


@lru_cache(maxsize=256)
def _prefill_with(server: PrefillGroups, overrides: Overrides, sparse: bool) -> tuple[PrefillGroups | None, str]:
    """The prefill methods of a request, and the namespace of what differs from the server's."""
    configs, fields = [], {}
    for own in server.configs:
        config = _config_with(own, overrides)
        configs.append(config)
        # Only request fields: values that only a server may have, such as a list, cannot be keys of a cache.
        asked = {name: getattr(config, name) for name in config.request_fields}
        fields |= {name: value for name, value in asked.items() if value != getattr(own, name)}
    if any(config.exact_prefix for config in configs) or not sparse:
        return None, "" if server.config.exact_prefix else f"{NAMESPACE}exact_prefix"
    if not fields:
        return server, ""
    return server.with_configs(configs), NAMESPACE + json.dumps(fields, sort_keys=True)


def namespaced(extra_key: str | None, options: RequestOptions | None, adapted: bool = False) -> str | None:
    """Return the radix namespace of a request that the client wants in ``extra_key``.

    Args:
        extra_key: the client's.
        options: the request's; None for one that is refused.
        adapted: whether it has a LoRA adapter, the id of which SGLang appends to what this returns.
    """
    parts = [options.namespace if options else "", ADAPTER if adapted else ""]
    return "|".join([extra_key or "", *filter(None, parts)]) if any(parts) else extra_key


def adapter_of_namespace(extra_key: str | None) -> str | None:
    """Return the id of the LoRA adapter whose KV a radix namespace holds; None for the base model."""
    _, found, rest = (extra_key or "").rpartition(ADAPTER)
    return rest.partition("|")[0] if found else None


def prefill_of_namespace(settings: Settings, extra_key: str | None) -> PrefillGroups | None:
    """Return the prefill methods whose KV a radix namespace holds; None for dense prefill."""
    _, found, rest = (extra_key or "").rpartition(NAMESPACE)
    # SGLang may add to a namespace.
    fields = rest.partition("|")[0]
    if settings.prefill is None or fields == "exact_prefix":
        return None
    given = json.loads(fields) if found else {}
    return _prefill_with(settings.prefill, _overrides(given, sorted(given)), sparse=True)[0]
