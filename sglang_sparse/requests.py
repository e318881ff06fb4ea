"""What a single request may ask for through ``custom_params``, and what the scheduler keeps about it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from sglang_sparse import refusals
from sglang_sparse.config import Settings, explain_value, settings_of
from sglang_sparse.method import DecodeMethod

if TYPE_CHECKING:
    from sglang_sparse.stats import RectifyCounts

SPARSE = "sparse"
FORCED_TOKENS = "forced_tokens"
# The attribute of SGLang's Req that holds its RequestState; a request of a dense server never has it.
ATTRIBUTE = "sglang_sparse"


@dataclass(frozen=True)
class RequestOptions:
    """How one request runs.

    Attributes:
        method: the server's method, with the fields that the request overrides in its config.
        sparse: False asks for dense decode.
        rectify_interval: generated tokens between dense rectifications; 0 means never.
        forced_tokens: the output, decided beforehand; see ``forcing.py``.
    """

    method: DecodeMethod
    sparse: bool
    rectify_interval: int
    forced_tokens: tuple[int, ...]


@dataclass
class RequestState:
    """What the plugin keeps on SGLang's ``Req``.

    Attributes:
        options: how it runs.
        counts: where its rectifications are counted.
        exact_len: KV of positions ``[0, exact_len)`` is exact; None while nothing of it is computed.
    """

    options: RequestOptions
    counts: RectifyCounts
    exact_len: int | None = None


def parse_options(settings: Settings, params: Mapping[str, Any] | None) -> RequestOptions:
    """Read a request's ``custom_params``. Keys that are none of ours belong to custom logit processors.

    Args:
        settings: the server's.
        params: the request's ``custom_params``.

    Raises:
        ValueError: a field is mistyped, misspelt, out of range or not one that this server's method has; names it.
    """
    params = params or {}
    overridable = settings.config.request_fields
    names = (*overridable, SPARSE, FORCED_TOKENS)
    for key in params:
        if key in names:
            continue
        if key in ("active_ratio", "rectify_interval"):
            raise ValueError(f"{key}: --sparse-method {settings.name} has no such field; allowed: {', '.join(names)}")
        # A short name such as "sparse" is close to too many that mean something else.
        nearest = difflib.get_close_matches(str(key), [*overridable, FORCED_TOKENS], n=1, cutoff=0.85)
        if nearest:
            raise ValueError(f"custom_params: unknown field {key!r}; did you mean {nearest[0]!r}?")
    sparse = params.get(SPARSE, True)
    if not isinstance(sparse, bool):
        raise ValueError(f"{SPARSE}: got {sparse!r}, allowed: true or false")
    # The types are part of the key: True equals 1, and only one of them is an interval.
    overrides = tuple((name, type(params[name]), params[name]) for name in overridable if name in params)
    for name, _, value in overrides:
        if not sparse:
            raise ValueError(f"{name}: has no meaning for a request with {SPARSE}: false")
        if not isinstance(value, (int, float, str)):
            raise ValueError(f"{name}: got {value!r}, allowed: a number")
    forced = params.get(FORCED_TOKENS, [])
    if not isinstance(forced, list) or not all(type(token) is int and token >= 0 for token in forced):
        raise ValueError(f"{FORCED_TOKENS}: got {str(forced)[:80]}, allowed: a list of token ids")
    method = _method_with(settings, overrides) if overrides else settings.method
    interval = getattr(method.config, "rectify_interval", 0) if sparse else 0
    return RequestOptions(method, sparse, interval, tuple(forced))


@lru_cache(maxsize=256)
def _method_with(settings: Settings, overrides: tuple[tuple[str, type, Any], ...]) -> DecodeMethod:
    fields = settings.config.model_dump() | {name: value for name, _, value in overrides}
    if fields.get("rectify_interval") == 0 and "rectify_on_finish" in fields:
        fields["rectify_on_finish"] = False
    try:
        config = type(settings.config).model_validate(fields)
    except ValidationError as error:
        raise ValueError(explain_value(error.errors()[0])) from None
    return type(settings.method)(config)


def refuse_bad_options(original: Callable[..., Any], manager: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``TokenizerManager._create_tokenized_object``: a bad field ends the request with HTTP status 400.

    Raises:
        ValueError: names the field, what was got and what is allowed.
    """
    settings = settings_of(manager.server_args)
    if settings is not None:
        sampling = {**(manager.preferred_sampling_params or {}), **(obj.sampling_params or {})}
        _validate(settings, manager, sampling.get("custom_params"))
    return original(manager, obj, *args, **kwargs)


def _validate(settings: Settings, manager: Any, params: Any) -> None:
    if params is not None and not isinstance(params, dict):
        raise ValueError(f"custom_params: got {params!r}, allowed: a mapping")
    options = parse_options(settings, params)
    refusals.require_interval(options.rectify_interval, manager.server_args, manager.model_config)
    vocabulary = manager.model_config.vocab_size
    if any(token >= vocabulary for token in options.forced_tokens):
        raise ValueError(f"{FORCED_TOKENS}: got {max(options.forced_tokens)}, allowed: ids below {vocabulary}")


def state_of(request: Any) -> RequestState | None:
    """Return what is kept about SGLang's ``Req``, or None on a dense server."""
    return getattr(request, ATTRIBUTE, None)


def ensure_state(settings: Settings, counts: RectifyCounts, request: Any) -> RequestState:
    """Return what is kept about a ``Req``, made when it first runs."""
    state = state_of(request)
    if state is None:
        state = RequestState(parse_options(settings, request.sampling_params.custom_params), counts)
        setattr(request, ATTRIBUTE, state)
    return state
