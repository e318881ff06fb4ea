"""Refuse servers that cannot run, with one message, before memory is taken."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from sglang_sparse.config.arguments import SPARSE_SELF, deterministic, drafts_itself, verified_tokens
from sglang_sparse.config.machine import Gpu, on_gpu
from sglang_sparse.config.settings import Settings, prefill_chunk
from sglang_sparse.errors import SparseArgumentError, within
from sglang_sparse.hooks import dsa_flags, kv_dtypes
from sglang_sparse.hooks.backends import DETERMINISTIC_BACKENDS, GPU_ONLY_BACKENDS, dense_backends, features_of
from sglang_sparse.hooks.flag_predicates import listed, refused_flags, require_none
from sglang_sparse.hooks.layer_checks import fit_layers
from sglang_sparse.hooks.limits import (
    BY_NATIVE,
    CHECK_LIMITS,
    COMPACT_LIMITS,
    DECODE_LIMITS,
    DISAGGREGATION_LIMITS,
    DRAFT_LIMITS,
    FINISH_LIMITS,
    FLAG_LIMITS,
    PREFILL_LIMITS,
    RECTIFY_LIMITS,
    VERIFY_LIMITS,
)
from sglang_sparse.hooks.model_kinds import refuse_interval, refuse_prefill, require_kinds
from sglang_sparse.hooks.model_limits import MODEL_LIMITS, ModelLimit, state_layers
from sglang_sparse.methods.base import DecodeMethod
from sglang_sparse.methods.config import PAGE_SIZES
from sglang_sparse.methods.groups import DecodeGroups
from sglang_sparse.methods.roles import prompt_selectors

if TYPE_CHECKING:
    from sglang_sparse.config.arguments import Arguments, ModelConfig


# Ends what refuses a flag for this project's kernels of DSA.
PASSED_THROUGH = 'or leave the flag to SGLang by {"implementation": "native"}, on compute capability 9.x and 10.x'


def require_before(args: Arguments, settings: Settings, gpu: Gpu = None) -> None:
    """Refuse arguments that are wrong before SGLang resolves them.

    Args:
        args: the server's arguments.
        settings: the methods.
        gpu: the machine's GPU; None for this machine's.

    Raises:
        SparseArgumentError: names every refused flag, its value and the reason.
    """
    methods = settings.decode.methods
    if settings.passes_through:
        return _require_followed(args, settings)
    # SGLang's own kernels serve it, where they run.
    native = dsa_flags.native_instead(settings, gpu) is not None
    limits = dict.fromkeys((*FLAG_LIMITS, *(BY_NATIVE if native else ())))
    limits |= dict.fromkeys(limit for method in methods for limit in method.flag_limits)
    if settings.name and (native or not all(method.verifies for method in methods)):
        limits |= dict.fromkeys(DECODE_LIMITS)
    require_none(args, limits, f"{settings.flag} cannot run with", hint=_hint(settings))
    _require_verified(args, settings)
    for method in methods:
        if settings.config.page_size % method.block_size:
            raise SparseArgumentError(
                f"{settings.flag}: the page size is {settings.config.page_size} and the method's blocks have "
                f"{method.block_size} tokens",
                field="page_size",
                got=settings.config.page_size,
                allowed="pages of whole blocks",
            )
    if settings.prefill:
        require_none(args, PREFILL_LIMITS, f"{settings.prefill_flag} cannot run with")
    if drafts_itself(args):
        _require_drafts(args, settings)
    if args.disaggregation_mode != "null":
        require_none(args, DISAGGREGATION_LIMITS, f"{settings.flag} with --disaggregation-mode cannot run with")
    if any(one.compacts for one in prompt_selectors(methods)):
        other = ("without compaction", '{"eviction": "visibility"}')
        require_none(args, COMPACT_LIMITS, f"{settings.flag} cannot compact with", other)
    rectify = settings.rectify
    if rectify and rectify.rectify_interval:
        other = ("without rectification", '{"rectify_interval": 0}')
        require_none(args, RECTIFY_LIMITS, f"{settings.flag} cannot rectify with", other)
    if rectify and rectify.rectify_on_finish:
        other = ("without it", '{"rectify_on_finish": false}')
        require_none(args, FINISH_LIMITS, f"{settings.flag}: rectify_on_finish cannot run with", other)
    if settings.check_exactness:
        require_none(args, CHECK_LIMITS, f"{settings.flag}: check_exactness cannot run with")
    if not on_gpu(gpu):
        _require_cpu_backends(args, settings)


def _require_followed(args: Arguments, settings: Settings) -> None:
    """Refuse what this plugin cannot follow where SGLang computes all."""
    if drafts_itself(args):
        _require_drafts(args, settings)


def _require_cpu_backends(args: Arguments, settings: Settings) -> None:
    for name in ("attention_backend", "decode_attention_backend", "prefill_attention_backend"):
        flag, got = f"--{name.replace('_', '-')}", getattr(args, name)
        if got in GPU_ONLY_BACKENDS:
            message = f"{flag} {got} needs a GPU and this machine has none"
            allowed = dense_backends(settings.decode.attention, gpu=False)
            raise SparseArgumentError(message, field=flag, got=got, allowed=allowed)


def require_drafter(args: Arguments, here: bool = True) -> None:
    """Refuse lossless decoding without a decode method: its sparse steps are the drafts.

    Args:
        args: the server's.
        here: False where the method is the other server's of a pair.
    """
    if drafts_itself(args) and not (here and args.sparse_method):
        flag = "--speculative-algorithm"
        message = f"{flag} {SPARSE_SELF} needs --sparse-method, which was not given"
        if not here:
            message = f"{flag} {SPARSE_SELF} has nothing to draft with on this server of a pair; leave it out"
        raise SparseArgumentError(message, field=flag, got=args.speculative_algorithm)


def _require_drafts(args: Arguments, settings: Settings) -> None:
    """Refuse methods that cannot draft for a dense verification, and flags that exclude it."""
    require_drafter(args)
    origin = f"--speculative-algorithm {SPARSE_SELF}"
    methods = settings.decode.methods
    reason = None
    if any(method.exact for method in methods):
        reason = "the model is trained to attend sparsely, so there is no dense answer to verify against"
    elif any(one.compacts for one in prompt_selectors(methods)):
        reason = 'compaction frees KV that a verification reads; allowed: {"eviction": "visibility"}'
    if reason:
        message = f"{origin} cannot run with {settings.flag}: {reason}"
        raise SparseArgumentError(message, field="--speculative-algorithm", got=args.speculative_algorithm)
    require_none(args, DRAFT_LIMITS, f"{origin} cannot run with")


def _require_verified(args: Arguments, settings: Settings) -> None:
    """Refuse drafts that the decode method cannot verify; asked again once SGLang has chosen their number.

    The newest page may hold no token of the row but drafts, and the one before it the first of them.
    """
    if not settings.name:
        return
    require_none(args, VERIFY_LIMITS, f"{settings.flag} cannot run with", hint=_hint(settings))
    if settings.method.selects_in_model:
        # Each draft chooses for itself.
        return
    tokens, page = verified_tokens(args), settings.config.page_size
    where = f"with --speculative-algorithm {args.speculative_algorithm}"
    if tokens > page:
        allowed = f"up to the page size of {page}"
        raise SparseArgumentError(field="--speculative-num-draft-tokens", got=tokens, allowed=allowed, where=where)
    if tokens > 1 and (local := min(method.local_blocks for method in settings.decode.methods)) < 2:
        raise SparseArgumentError(field="local_pages", got=local, allowed="at least 2", where=where)


def _require_unpenalised(args: Arguments) -> None:
    """Refuse a model whose requests in OpenAI's form have a repetition penalty by default: each would be refused.

    Raises:
        SparseArgumentError: names the penalty and the flag to type.
    """
    if not drafts_itself(args):
        return
    penalty = args.get_model_config().get_default_sampling_params().get("repetition_penalty") or 1.0
    if penalty != 1.0:
        message = f"--speculative-algorithm {SPARSE_SELF} serves no repetition_penalty, and the model's "
        message += f"generation_config.json sets {penalty:g} for requests that leave it out"
        raise SparseArgumentError(message, field="--sampling-defaults", got="model", allowed="openai")


def _require_verifier(args: Arguments, gpu: Gpu) -> None:
    """Refuse attention backends whose pass over several tokens of a row is not the dense decode of each.

    The drafts of SGLang's own algorithms promise no equality.
    """
    if args.speculative_algorithm is None or not on_gpu(gpu):
        return
    reasons = {"torch_native": "it has no pass over several tokens of a row that have no KV yet"}
    if drafts_itself(args) and args.kv_cache_dtype.startswith("fp8"):
        reasons["triton"] = "it attends to new tokens before they are rounded to fp8, which dense decode does after"
    for name in args.get_attention_backends():
        if name in reasons:
            message = f"--speculative-algorithm {args.speculative_algorithm} cannot verify with {name}: {reasons[name]}"
            allowed = [other for other in GPU_ONLY_BACKENDS if other not in reasons]
            raise SparseArgumentError(message, field="--attention-backend", got=name, allowed=sorted(allowed))


def require_interval(interval: int, args: Arguments, settings: Settings, model: ModelConfig) -> None:
    """Refuse an interval that this server cannot serve, from its config or from a request.

    Args:
        interval: tokens between rectifications; 0 is always served.
        args: the server's, resolved.
        settings: its methods.
        model: SGLang's ``ModelConfig``.

    Raises:
        SparseArgumentError: it is longer than the context or a chunk of prefill, which bound the reserved memory, or
            the server has a flag that excludes rectification, or no memory for it.
    """
    if not interval:
        return
    if state_layers(model) and not settings.rectifies:
        hint = "it keeps no copies of recurrent states; start it with a rectify_interval"
        raise SparseArgumentError(
            field="rectify_interval", got=interval, allowed="0", where="on this server", hint=hint
        )
    for limit, name in ((model.context_len, "context length"), (prefill_chunk(args), "chunked prefill size")):
        if limit is not None and 0 < limit < interval:
            allowed = f"at most the {name} of {limit}"
            raise SparseArgumentError(field="rectify_interval", got=interval, allowed=allowed)
    refuse_interval(interval, settings, model)
    if found := refused_flags(args, RECTIFY_LIMITS):
        hint = f"it has {listed(found)}"
        raise SparseArgumentError(
            field="rectify_interval", got=interval, allowed="0", where="on this server", hint=hint
        )


def _hint(settings: Settings) -> str:
    return PASSED_THROUGH if settings.method.selects_in_model else ""


def require_after(args: Arguments, settings: Settings, gpu: Gpu = None) -> None:
    """Refuse resolved arguments of SGLang.

    Args:
        args: the server's, resolved.
        settings: the methods.
        gpu: the machine's GPU; None for this machine's.

    Raises:
        SparseArgumentError: has the value and the allowed ones.
    """
    model_config = args.get_model_config()
    if settings.passes_through:
        _require_fit(settings.flag, model_config, settings.decode.refuse(model_config))
    features = features_of(model_config, kind := settings.method.kind_of(model_config))
    allowed = dense_backends(kind, on_gpu(gpu), features)
    where = f" for a model with {' and '.join(features)}" if features else ""
    if deterministic(args):
        allowed = tuple(name for name in allowed if name in DETERMINISTIC_BACKENDS)
        where += " with deterministic inference"
    for name in args.get_attention_backends():
        if name not in allowed:
            message = f"{settings.flag}: attention backend {name!r} is not supported{where}"
            raise SparseArgumentError(message, field="--attention-backend", got=name, allowed=allowed)
    if settings.passes_through:
        return
    require_kinds(args, settings, model_config)
    _require_unpenalised(args)
    _require_verifier(args, gpu)
    _require_verified(args, settings)
    _require_prefill(args, settings)
    _require_window(args, settings)
    if args.cuda_graph_config is not None and args.cuda_graph_config.prefill.backend == "full":
        message = f"{settings.flag}: the prefill CUDA graph backend 'full' would not refresh the summaries"
        allowed = ("breakable", "disabled")
        raise SparseArgumentError(message, field="--cuda-graph-backend-prefill", got="full", allowed=allowed)
    kv_dtypes.require_dtypes(args, settings, gpu)
    with within(f"--sparse-config of {settings.name}"):
        interval = settings.rectify.rectify_interval if settings.rectify else 0
        require_interval(interval, args, settings, model_config)
    page, message = settings.config.page_size, f"{settings.flag}: the server's page size is {args.page_size}"
    if settings.name is None and args.page_size not in PAGE_SIZES:
        raise SparseArgumentError(message, field="--page-size", got=args.page_size, allowed=PAGE_SIZES)
    if args.page_size != page:
        message += f" and the config's is {page}; they must be equal: set --page-size {page} "
        message += f'or {{"page_size": {args.page_size}}}'
        raise SparseArgumentError(message, field="--page-size", got=args.page_size)


def _require_prefill(args: Arguments, settings: Settings) -> None:
    if settings.prefill is None:
        return
    page, methods = settings.config.page_size, settings.prefill.methods
    if reason := next((reason for method in methods if (reason := method.refuse_page_size(page))), None):
        message = f"--sparse-prefill-config of {settings.prefill_name}: {reason}"
        raise SparseArgumentError(message, field="--page-size", got=page)
    config, group = settings.prefill.config, settings.prefill.group_tokens
    chunk = prefill_chunk(args)
    if chunk is not None and chunk % group and not config.share_partial_groups:
        own = f"--sparse-prefill-method {settings.prefill_name} with a --sparse-prefill-config of "
        # Such a config inherits nothing from that of decode.
        kept = {field: getattr(config, field) for field in config.phase_fields if settings.comes_along}
        raise SparseArgumentError(
            f"{settings.prefill_flag}: the chunked prefill size is {chunk}",
            field="--chunked-prefill-size",
            got=chunk,
            allowed=f"multiples of {group} tokens, the group that can be cached, or "
            f"{own if settings.comes_along else ''}{json.dumps({**kept, 'share_partial_groups': True})}",
        )
    if config.share_partial_groups and settings.check_exactness:
        message = (
            f"{settings.flag}: check_exactness cannot prove KV that share_partial_groups puts into the prefix cache"
        )
        raise SparseArgumentError(message, field="check_exactness", got=True)


def _require_window(args: Arguments, settings: Settings) -> None:
    """Refuse chunks that a prompt's window may not fit: a prompt would wait for one that does, for ever."""
    window = max((method.window_tokens for method in prompt_selectors(settings.decode.methods)), default=0)
    page = settings.config.page_size
    if not window or (chunk := prefill_chunk(args)) is None:
        return
    # The last chunk begins at the end of a page or a group, not after the window's first token.
    unit = max(page, settings.prefill.group_tokens if settings.prefill else 1)
    needed = -(-(window - 1 + unit) // unit) * unit
    if chunk < needed:
        message = f"{settings.flag}: the chunked prefill size is {chunk}"
        allowed = f"at least {needed}, so that the last {window} tokens of a prompt fit one chunk"
        raise SparseArgumentError(message, field="--chunked-prefill-size", got=chunk, allowed=allowed)


def excludes(limit: ModelLimit, method: DecodeMethod | type[DecodeMethod]) -> bool:
    """Whether a limit applies to a decode method."""
    return not (limit.own_selection and method.selects_in_model)


def fit_prefill(args: Arguments, settings: Settings) -> Settings:
    """Drop a prefill method that came with the decode method if it does not fit the model; a requested one stays.

    Args:
        args: the server's; its ``sparse_config`` is changed to match.
        settings: the methods; not changed.
    """
    if args.sparse_prefill_method or not settings.comes_along or settings.prefill is None:
        return settings
    if refuse_prefill(settings.prefill, args.new_model_config()) is None:
        return settings
    decode = DecodeGroups(settings.decode.names, [settings.method.decode_alone()])
    fitted = replace(settings, decode=decode, prefill_name=None, prefill=None)
    args.sparse_config = json.dumps(fitted.resolved)
    return fitted


def require_model(args: Arguments, settings: Settings, stand_in: bool = False) -> Settings:
    """Refuse a model by its config, and by its weights unless it is a stand-in.

    Returns:
        The methods, see ``layer_checks.fit_layers``.

    Raises:
        SparseArgumentError: names the architecture and the reason for each kind of model that it is, or the layers that
            do not exist.
    """
    # SGLang caches the result of ``get_model_config``, and its own arguments are not resolved yet.
    model = args.new_model_config()
    kinds = [limit for limit in MODEL_LIMITS if excludes(limit, settings.method) and limit.applies(model)]
    _require_fit(settings.flag, model, "; ".join(f"{limit.name}: {limit.reason}" for limit in kinds))
    settings = fit_layers(settings, model)
    require_kinds(args, settings, model)
    weightless = stand_in or args.load_format == "dummy"
    _require_fit(settings.flag, model, settings.decode.refuse(model))
    if not stand_in:
        require_weights(args, settings, model)
    prefill = settings.prefill
    # Weights that the decode method has checked are not read again.
    judged = weightless or settings.comes_along
    reason = prefill and (refuse_prefill(prefill, model) or (None if judged else prefill.refuse_weights(model)))
    # Name its own flag, if that was given.
    asked = f"--sparse-prefill-method {settings.prefill_name}" if args.sparse_prefill_method else settings.flag
    _require_fit(asked, model, reason)
    return settings


def _require_fit(flag: str, model: ModelConfig, reason: str | None) -> None:
    if reason:
        architecture = (model.hf_config.architectures or ["unknown"])[0]
        message = f"{flag} does not fit {architecture}: {reason}"
        raise SparseArgumentError(message, field="--model-path", got=architecture)


def require_weights(args: Arguments, settings: Settings, model: ModelConfig) -> None:
    """Refuse weights that do not fit the decode method, as far as they are local.

    Args:
        args: the server's.
        settings: the methods.

    Raises:
        SparseArgumentError: names the architecture and the reason.
    """
    # Of a model that gets others at random its own say nothing.
    if args.load_format != "dummy":
        _require_fit(settings.flag, model, settings.decode.refuse_weights(model))
