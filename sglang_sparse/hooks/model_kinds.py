"""The kinds of models that are served without some flags and fields, and the refusal of these.

**Recurrent states.** A sparse step leaves approximate KV and an approximate state, which the next step overwrites.
Rectification goes on from copies, see ``attention/exact_states.py``. SGLang's strategy ``extra_buffer`` stores states
for the prefix cache at multiples of a number of tokens: rows that rectify do so there, as many as fit in a pass, and
``scheduler/exact_kv.py`` keeps out what other rows store behind a sparse step.

**Windows and chunks.** SGLang may give their layers a KV pool of their own, and frees there what lies before a window,
which for chunks is as long as a chunk. ``scheduler/exact_kv.py`` keeps what rectification reads of it. What else reads
KV of the past, or writes it elsewhere, was compared with transformers or is refused. ``--disable-hybrid-swa-memory``
keeps all KV in one pool, and needs more memory.

**Towers for images and videos.** Rectification encodes generated tokens alone, whose positions behind an image are
those that SGLang's decoding gives them, see ``partial_batch.position_info``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from sglang_sparse.config.arguments import deterministic
from sglang_sparse.errors import SparseArgumentError, within
from sglang_sparse.hooks.flag_predicates import environment, require_none, uses_ranks_or_stages
from sglang_sparse.hooks.model_limits import TEXT_ALONE, has_towers, state_layers
from sglang_sparse.methods.support import FlagLimit, above_one, given, other_than

if TYPE_CHECKING:
    from sglang_sparse.config.arguments import Arguments, ModelConfig
    from sglang_sparse.config.settings import Settings
    from sglang_sparse.methods.groups import PrefillGroups

_host_cache = given("enable_hierarchical_cache")


@dataclass(frozen=True)
class ModelKind:
    """A kind of model that methods serve without some flags and fields.

    Attributes:
        name: the kind.
        applies: whether SGLang's ``ModelConfig`` is of this kind.
        limits: the flags.
        fields: the fields of configs that must be false, with reasons.
        no_prefill: why no prefill method serves it; empty where some do.
    """

    name: str
    applies: Callable[[ModelConfig], bool]
    limits: tuple[FlagLimit, ...]
    fields: Mapping[str, str] = field(default_factory=dict)
    no_prefill: str = ""


def _most(other: str = "", reasons: Mapping[str, str] = MappingProxyType({})) -> tuple[FlagLimit, ...]:
    """Return limits of the flags that most kinds of models refuse.

    Args:
        other: what else cures each.
        reasons: why, by the name of the limit, where it is known.
    """
    cures = (
        ("--disaggregation-mode", other_than("disaggregation_mode", "null"), "allowed: null"),
        (
            "external cache linker",
            given("enable_unified_cache_external_linker"),
            "leave out --enable-unified-cache-external-linker",
        ),
        ("streaming sessions", given("enable_streaming_session"), "leave out --enable-streaming-session"),
        (
            "deterministic inference",
            lambda args: deterministic(args) or None,
            "leave out --enable-deterministic-inference",
        ),
    )
    return tuple(
        FlagLimit(name, got, f"{reasons.get(name, 'not proven yet')}; {cure}{other}") for name, got, cure in cures
    )


def _drafts(reason: str, other: str = "") -> FlagLimit:
    """Return the limit of a kind without speculative decoding; ``other`` is as in `_most`."""
    cure = f"leave out --speculative-algorithm{other}"
    return FlagLimit("speculative decoding", given("speculative_algorithm"), f"{reason}; {cure}")


def _strategy(args: Arguments) -> object | None:
    """The strategy of the prefix cache, if there is one and it is not proven."""
    found = args.mamba_radix_cache_strategy
    return None if args.disable_radix_cache or found in ("auto", "extra_buffer") else found


STATES = ModelKind(
    "a model with recurrent states",
    lambda model: bool(state_layers(model)),
    (
        FlagLimit(
            "--mamba-radix-cache-strategy",
            _strategy,
            "no_buffer would share the state behind a sparse answer as that of its prompt, and extra_buffer_lazy is "
            "not proven yet; allowed: extra_buffer, or --disable-radix-cache",
        ),
        FlagLimit(
            "--linear-attn-backend",
            lambda args: (
                None if args.disable_radix_cache or (kernels := args.linear_attn_backend) == "triton" else kernels
            ),
            "SGLang has no extra_buffer with it; allowed: triton, or --disable-radix-cache",
        ),
        FlagLimit(
            "--enable-linear-replayssm",
            given("enable_linear_replayssm", "enable_linear_replayssm_spec"),
            "stored states lag behind the tokens; leave it out",
        ),
        FlagLimit(
            "--enable-int8-mamba-checkpoint",
            given("enable_int8_mamba_checkpoint"),
            "rounded states are not proven yet; leave it out",
        ),
        FlagLimit(
            "mixed chunk",
            given("enable_mixed_chunk"),
            "the states that a mixed pass stores are not proven yet; leave out --enable-mixed-chunk",
        ),
        FlagLimit(
            "pipeline parallelism",
            above_one("pp_size"),
            "SGLang's Qwen3-Next has one stage, and others are not proven yet; allowed: --pp-size 1",
        ),
        FlagLimit(
            "hierarchical cache",
            _host_cache,
            "SGLang copies states to host memory on GPUs alone, where it is not proven yet; leave out "
            "--enable-hierarchical-cache",
        ),
        _drafts("what a verification does to the states is not followed"),
        *_most(
            reasons={
                "streaming sessions": "a turn would go on from the state behind a sparse answer",
                "deterministic inference": "it is not proven that the kernels of states compute each row as if alone",
            },
        ),
    ),
    {
        "check_exactness": "a node of the prefix cache without a state cannot be computed again",
        "rectify_on_finish": "an answer is shared up to its last stored state, which a pass at its end would not move",
    },
    no_prefill="states are stored at other places than those where the KV of sparse prefill may be shared",
)

_ONE_POOL = "--disable-hybrid-swa-memory"


def _unproven_drafts(args: Arguments) -> str | None:
    """The algorithm of drafts, if it is not proven in two pools."""
    name = (args.speculative_algorithm or "").upper()
    proven = name == "SPARSE_SELF" or (name == "EAGLE3" and args.sparse_method and not args.sparse_prefill_method)
    return None if not name or (proven and not _host_cache(args)) else name


def _prefilled_elsewhere(args: Arguments) -> str | None:
    """The prefill method, if what it prefills is on ranks of attention or stages, or comes back from host memory."""
    return args.sparse_prefill_method if uses_ranks_or_stages(args) or _host_cache(args) else None


WINDOW_POOL = ModelKind(
    "a model with a KV pool for its windows",
    lambda model: model.is_hybrid_swa,
    (
        FlagLimit(
            "speculative decoding",
            _unproven_drafts,
            "not proven yet; allowed without --enable-hierarchical-cache: SPARSE_SELF, or EAGLE3 with --sparse-method "
            f"alone; or add {_ONE_POOL}",
        ),
        FlagLimit(
            "--sparse-prefill-method on ranks, on stages or with host memory",
            _prefilled_elsewhere,
            f"not proven yet; leave it out, or add {_ONE_POOL}",
        ),
        *_most(f", or add {_ONE_POOL}"),
        FlagLimit(
            "early release of windows",
            environment("SGLANG_OPT_RELEASE_PREFILL_SWA"),
            "rectification reads a prompt's windows later; unset the variable",
        ),
    ),
    {"check_exactness": f"a prefix without its windows cannot be computed again; or add {_ONE_POOL}"},
)


def _other_windows(model: ModelConfig) -> bool:
    text = model.hf_text_config
    full = (model.head_dim, model.v_head_dim, text.num_key_value_heads)
    windowed = (model.swa_head_dim, model.swa_v_head_dim, getattr(text, "swa_num_key_value_heads", full[2]))
    return model.is_hybrid_swa_compress and windowed != full


OTHER_WINDOWS = ModelKind(
    "a model whose windows have KV of another shape",
    _other_windows,
    (FlagLimit("one KV pool", given("disable_hybrid_swa_memory"), f"SGLang's has one shape; leave out {_ONE_POOL}"),),
)

CHUNKS = ModelKind(
    "a model with chunked attention",
    lambda model: model.is_local_attention_model,
    (
        _drafts("SGLang's CUDA graphs verify drafts without chunks"),
        FlagLimit(
            "mixed chunk",
            given("enable_mixed_chunk"),
            "SGLang's FA3 attends to all tokens in a mixed pass; leave out --enable-mixed-chunk",
        ),
    ),
)

_TEXT = f", or serve text alone (not Qwen2.5-VL) by {TEXT_ALONE}"
TOWERS = ModelKind(
    "a model with towers for media",
    has_towers,
    (
        FlagLimit(
            "towers on other servers",
            given("language_only", "encoder_only", "enable_adaptive_dispatch_to_encoder"),
            "not proven yet; leave out --language-only, --encoder-only and --enable-adaptive-dispatch-to-encoder"
            f"{_TEXT}",
        ),
        FlagLimit("mixed chunk", given("enable_mixed_chunk"), f"not proven yet; leave out --enable-mixed-chunk{_TEXT}"),
        FlagLimit(
            "--hicache-storage-backend",
            given("hicache_storage_backend"),
            f"not proven yet with images; leave it out{_TEXT}",
        ),
        _drafts("not proven yet", _TEXT),
        # With --rl-on-policy-target SGLang numbers all tokens as text.
        *_most(_TEXT),
    ),
    # Of images, ids reach 31 bits, see ``prefix_keys.TOKEN_BITS``.
    no_prefill=f"its group keys have no room for image ids; text alone (not of Qwen2.5-VL) is served by {TEXT_ALONE}",
)
MODEL_KINDS = (STATES, CHUNKS, WINDOW_POOL, OTHER_WINDOWS, TOWERS)


def kinds_of(model: ModelConfig) -> tuple[ModelKind, ...]:
    """Return the kinds that a model is of."""
    return tuple(kind for kind in MODEL_KINDS if kind.applies(model))


def refuse_prefill(prefill: PrefillGroups, model: ModelConfig) -> str | None:
    """Say why prefill methods cannot serve a model, or None."""
    return next((kind.no_prefill for kind in kinds_of(model) if kind.no_prefill), None) or prefill.refuse(model)


def require_kinds(args: Arguments, settings: Settings, model: ModelConfig) -> None:
    """Refuse the flags and fields without which a model's kinds are served.

    Args:
        args: the server's: before SGLang resolves them, and afterwards, as it may set such a flag itself.
        settings: the methods.
        model: SGLang's ``ModelConfig``.

    Raises:
        SparseArgumentError: names the flag or the field, its value, the reason, and what to type.
    """
    configs = (*settings.decode.configs, *(settings.prefill.configs if settings.prefill else ()))
    for kind in kinds_of(model):
        where = f"on {kind.name}"
        require_none(args, kind.limits, f"{settings.flag} {where} cannot run with")
        for name, hint in kind.fields.items():
            if any(getattr(config, name, False) for config in configs):
                with within(settings.flag):
                    raise SparseArgumentError(field=name, got=True, allowed="false", where=where, hint=hint)


def refuse_interval(interval: int, settings: Settings, model: ModelConfig) -> None:
    """Refuse an interval for which a request would keep much more of its windows than the server was planned for.

    Args:
        interval: tokens between rectifications, above 0.
        settings: the server's methods.
        model: SGLang's ``ModelConfig``.

    Raises:
        SparseArgumentError: it is longer than the server's own, and than the tokens that SGLang keeps anyway.
    """
    if not model.is_hybrid_swa:
        return
    from sglang.srt.environ import envs

    own = settings.rectify.rectify_interval if settings.rectify else 0
    most = max(own, envs.SGLANG_SWA_EVICTION_INTERVAL.get())
    if interval > most:
        hint = f"so much is kept of the windows; start the server with a longer interval, or with {_ONE_POOL}"
        raise SparseArgumentError(
            field="rectify_interval", got=interval, allowed=f"at most {most}", where="on this server", hint=hint
        )
