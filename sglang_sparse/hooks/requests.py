"""Validate a request's options when it arrives."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_sparse.config import arguments
from sglang_sparse.config.request_options import (
    FORCED_TOKENS,
    LOSSLESS,
    NAMESPACE,
    RequestOptions,
    namespaced,
    parse_options,
)
from sglang_sparse.config.settings import Settings, settings_of
from sglang_sparse.errors import SparseArgumentError
from sglang_sparse.hooks import refusals

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_params import SamplingParams


def refuse_bad_options(original: Callable[..., Any], manager: Any, obj: Any, *args: object, **kwargs: object) -> Any:
    """Around ``TokenizerManager._create_tokenized_object``: end a request with a bad field with HTTP status 400.

    Raises:
        SparseArgumentError: names the field, its value and the allowed ones.
    """
    settings = settings_of(manager.server_args)
    if settings is not None:
        sampling = {**(manager.preferred_sampling_params or {}), **(obj.sampling_params or {})}
        options = _validate(settings, manager, sampling.get("custom_params"))
        tokenized = original(manager, obj, *args, **kwargs)
        width = tokenized.sampling_params.beam_width or 1
        if width > 1 and not (settings.passes_through and not options.forced_tokens):
            raise SparseArgumentError(field="beam_width", got=width, allowed="1", where="on this server")
        server = arguments.of(manager.server_args)
        if arguments.drafts_itself(server):
            _require_exact_sampling(tokenized.sampling_params, options)
        if server.speculative_algorithm and options.forced_tokens:
            where = f"with --speculative-algorithm {server.speculative_algorithm}"
            raise SparseArgumentError(field=FORCED_TOKENS, got=options.forced_tokens[:8], allowed="none", where=where)
        if NAMESPACE in (getattr(tokenized, "extra_key", None) or ""):
            allowed = f"anything without {NAMESPACE!r}"
            raise SparseArgumentError(field="extra_key", got=tokenized.extra_key, allowed=allowed)
        if not settings.passes_through:
            tokenized.extra_key = namespaced(tokenized.extra_key, options)
        return tokenized
    return original(manager, obj, *args, **kwargs)


# What of a request's sampling parameters changes with each token, and the value that changes nothing.
_BY_TOKEN = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
# Many instruction-tuned models do, for all requests in OpenAI's form that leave it out.
_FROM_MODEL = "the model's generation_config.json may set it: start the server with --sampling-defaults openai"


def _require_exact_sampling(params: SamplingParams, options: RequestOptions) -> None:
    """Refuse what a verification of several tokens at once would apply inexactly."""
    where = f"with --speculative-algorithm {arguments.SPARSE_SELF}"
    for field, none in _BY_TOKEN.items():
        if (got := getattr(params, field)) != none:
            hint = _FROM_MODEL if field == "repetition_penalty" else ""
            raise SparseArgumentError(field=field, got=got, allowed=f"{none:g}", where=where, hint=hint)
    if params.sampling_seed is not None and params.n > 1:
        raise SparseArgumentError(
            field="sampling_seed", got=params.sampling_seed, allowed="none with n above 1", where=where
        )
    if not options.lossless and any((params.json_schema, params.regex, params.ebnf, params.structural_tag)):
        raise SparseArgumentError(field=LOSSLESS, got=False, allowed="true", where="with a grammar")


def _validate(settings: Settings, manager: Any, params: Any) -> RequestOptions:
    if params is not None and not isinstance(params, dict):
        raise SparseArgumentError(field="custom_params", got=params, allowed="a mapping")
    options = parse_options(settings, params)
    refusals.require_interval(options.rectify_interval, arguments.of(manager.server_args), manager.model_config)
    if not options.lossless and not arguments.drafts_itself(arguments.of(manager.server_args)):
        allowed = f"true on this server; --speculative-algorithm {arguments.SPARSE_SELF} has it draft"
        raise SparseArgumentError(field=LOSSLESS, got=False, allowed=allowed)
    vocabulary = manager.model_config.vocab_size
    if any(token >= vocabulary for token in options.forced_tokens):
        got, allowed = max(options.forced_tokens), f"ids below {vocabulary}"
        raise SparseArgumentError(field=FORCED_TOKENS, got=got, allowed=allowed)
    return options
