"""Validate the options of requests in the scheduler, where all arrive, and in a tokenizer that has the plugin."""

from __future__ import annotations

import copy
import json
from array import array
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING, cast

import numpy as np

from sglang_sparse.config import arguments
from sglang_sparse.config.request_options import (
    ADAPTER,
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
from sglang_sparse.scheduler.sessions import runs_turn

if TYPE_CHECKING:
    from fastapi import Request
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.managers.io_struct import GenerateReqInput, TokenizedGenerateReqInput
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.session.session_controller import Session


def carry_options(
    original: Callable[..., AsyncIterator[dict[str, object]]],
    manager: TokenizerManager,
    obj: GenerateReqInput,
    request: Request | None = None,
) -> AsyncIterator[dict[str, object]]:
    """Around ``TokenizerManager.generate_request``: add the ``custom_params`` of the HTTP body to what it generates by.

    Only some of SGLang's entries do so; the others, such as ``/v1/responses``, would drop them.
    """
    sampling = obj.sampling_params or {}
    each = sampling if isinstance(sampling, list) else [sampling]
    # FastAPI has read it. Long prompts are not parsed twice, unless they come with options that were dropped.
    body = getattr(request, "_body", b"")
    dropped = b'"custom_params"' in body and not any(one.get("custom_params") for one in each)
    # A request for an embedding has no processor.
    if dropped and hasattr(obj, "custom_logit_processor") and settings_of(manager.server_args):
        given = json.loads(body).get("custom_params")
        carried = [{**one, "custom_params": given} for one in each]
        obj.sampling_params = carried if isinstance(sampling, list) else carried[0]
    return original(manager, obj, request)


def refuse_bad_options(
    original: Callable[..., TokenizedGenerateReqInput], manager: TokenizerManager, *args: object, **kwargs: object
) -> TokenizedGenerateReqInput:
    """Around ``TokenizerManager._create_tokenized_object``: end a request with a bad field with HTTP status 400.

    The scheduler would do so too, but only after the answer to a streamed request has begun. Further tokenizer
    processes and servers in other languages leave it to the scheduler.

    Raises:
        SparseArgumentError: names the field, its value and the allowed ones.
    """
    tokenized = original(manager, *args, **kwargs)
    settings = settings_of(manager.server_args)
    if settings is not None:
        if not settings.passes_through:
            _require_text(args[0], manager.model_config)
        _require_options(settings, manager, tokenized)
    return tokenized


def admit(
    original: Callable[..., Req],
    scheduler: Scheduler,
    received: TokenizedGenerateReqInput,
    *args: object,
    **kwargs: object,
) -> Req:
    """Around ``Scheduler._create_generation_req``: end a request with a bad field, and give others their namespace.

    Args:
        original: SGLang's method.
        scheduler: SGLang's.
        received: the request as the tokenizer or another server has sent it. A later pipeline stage may get the same
            object, so its options stay as they are.
        *args: of the new ``Req``.
        **kwargs: of the new ``Req``.

    Returns:
        SGLang's ``Req``; one with a bad field is aborted with HTTP status 400.
    """
    settings = settings_of(scheduler.server_args)
    if settings is None:
        return original(scheduler, received, *args, **kwargs)
    if not settings.passes_through and runs_turn(cast("Session | None", kwargs.get("session"))):
        # Were the turn that SGLang refuses the session's, SGLang would take the one that runs for ended with it.
        kwargs["session"] = None
    try:
        options = _require_options(settings, scheduler, received)
    except SparseArgumentError as error:
        # SGLang prefills a token of it before it ends: with nothing that was refused, or needs what was.
        refused = namespaced(None, None, bool(kwargs.get("lora_id")))
        request = original(scheduler, received, *args, **{**kwargs, "extra_key": refused})
        request.sampling_params = copy.copy(request.sampling_params)
        request.sampling_params.custom_params = request.custom_logit_processor = None
        request.sampling_params.stop_token_ids = request.input_embeds = None
        request.logprob.top_logprobs_num = 0
        received.return_logprob, received.logprob_start_len = False, -1
        request.set_finish_with_abort(str(error))
        return request
    if not settings.passes_through:
        kwargs["extra_key"] = namespaced(received.extra_key, options, bool(kwargs.get("lora_id")))
    return original(scheduler, received, *args, **kwargs)


def _require_text(asked: object, model: ModelConfig) -> None:
    """Refuse media for a model that is served for text alone, where SGLang would leave them out of the prompt.

    Raises:
        SparseArgumentError: names the field.
    """
    from sglang.srt.multimodal.mm_utils import has_valid_data

    for field in ("image_data", "video_data", "audio_data"):
        if has_valid_data(getattr(asked, field, None)) and not model.is_multimodal:
            raise SparseArgumentError(field=field, got="media", allowed="none", where="on this server, for text alone")


def _require_options(
    settings: Settings, owner: Scheduler | TokenizerManager, tokenized: TokenizedGenerateReqInput
) -> RequestOptions:
    """Return a request's options.

    Args:
        settings: the server's.
        owner: who has the server's arguments and model.
        tokenized: the request.

    Raises:
        SparseArgumentError: names the field, its value and the allowed ones.
    """
    sampling, server = tokenized.sampling_params, arguments.of(owner.server_args)
    params = sampling.custom_params
    if params is not None and not isinstance(params, dict):
        raise SparseArgumentError(field="custom_params", got=params, allowed="a mapping")
    # A request for an embedding has no such field.
    options = parse_options(settings, params, bool(getattr(tokenized, "custom_logit_processor", None)))
    refusals.require_interval(options.rectify_interval, server, settings, owner.model_config)
    drafts = arguments.drafts_itself(server)
    if not options.lossless and not drafts:
        allowed = f"true on this server; --speculative-algorithm {arguments.SPARSE_SELF} has it draft"
        raise SparseArgumentError(field=LOSSLESS, got=False, allowed=allowed)
    if options.forced_tokens and server.speculative_algorithm:
        where = f"with --speculative-algorithm {server.speculative_algorithm}"
        raise SparseArgumentError(field=FORCED_TOKENS, got=options.forced_tokens[:8], allowed="none", where=where)
    _require_vocabulary(tokenized, options, owner.model_config.vocab_size)
    _require_embeddings(tokenized, owner.model_config)
    width = sampling.beam_width or 1
    if width > 1 and not (settings.passes_through and not options.forced_tokens):
        raise SparseArgumentError(field="beam_width", got=width, allowed="1", where="on this server")
    if drafts:
        _require_exact_sampling(sampling, options)
    key = getattr(tokenized, "extra_key", None) or ""
    for reserved in (NAMESPACE, ADAPTER):
        if reserved in key:
            raise SparseArgumentError(field="extra_key", got=key, allowed=f"anything without {reserved!r}")
    return options


def _require_vocabulary(tokenized: TokenizedGenerateReqInput, options: RequestOptions, vocabulary: int) -> None:
    """Refuse token ids and counts beyond the vocabulary, which would end SGLang's scheduler."""
    sampling = tokenized.sampling_params
    given: dict[str, Iterable[int] | None] = {
        "input_ids": tokenized.input_ids,
        # SGLang indexes by them for min_new_tokens alone.
        "stop_token_ids": sampling.stop_token_ids if sampling.min_new_tokens else None,
        FORCED_TOKENS: options.forced_tokens,
    }
    for field, tokens in given.items():
        # A prompt is an array of up to a million, and this runs in the scheduler.
        ids = np.asarray(tokens if isinstance(tokens, array) else list(tokens or ()))
        beyond = ids[(ids < 0) | (ids >= vocabulary)]
        if len(beyond):
            raise SparseArgumentError(field=field, got=int(beyond[0]), allowed=f"ids from 0 to {vocabulary - 1}")
    # A request for an embedding has none.
    number = getattr(tokenized, "top_logprobs_num", 0)
    if number > vocabulary:
        raise SparseArgumentError(field="top_logprobs_num", got=number, allowed=f"up to {vocabulary}")


def _require_embeddings(tokenized: TokenizedGenerateReqInput, model: ModelConfig) -> None:
    """Refuse embeddings of prompts that SGLang's scheduler cannot compute with: it makes them bfloat16."""
    rows = getattr(tokenized, "input_embeds", None)
    if rows is None:
        return
    if str(model.dtype) != "torch.bfloat16":
        where = f"with a model in {str(model.dtype).removeprefix('torch.')}"
        hint = "start the server with --dtype bfloat16"
        raise SparseArgumentError(field="input_embeds", got=f"{len(rows)} rows", allowed="none", where=where, hint=hint)
    widths = {len(row) for row in rows}
    if widths != {model.hidden_size}:
        got = f"rows of {', '.join(map(str, sorted(widths)))} numbers"
        raise SparseArgumentError(field="input_embeds", got=got, allowed=f"rows of {model.hidden_size}")


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
