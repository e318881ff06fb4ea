"""The kinds of models that are served without some flags and fields, and what refuses these.

**Recurrent states.** A sparse step leaves approximate KV and an approximate state, which the next step overwrites.
Rectification goes on from copies, see ``attention/exact_states.py``. SGLang's strategy ``extra_buffer`` stores states
for the prefix cache at multiples of a number of tokens: rows that rectify do so there, and ``scheduler/exact_kv.py``
keeps out what other rows store behind a sparse step.

**Towers for images and videos.** Rectification encodes generated tokens alone, whose positions behind an image are
those that SGLang's decoding gives them, see ``partial_batch.position_info``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_sparse.errors import SparseArgumentError, within
from sglang_sparse.hooks.flag_predicates import require_none
from sglang_sparse.hooks.model_limits import TEXT_ALONE, ModelKind, has_towers, state_layers, unproven
from sglang_sparse.hooks.window_pools import CHUNKS, WINDOW_POOL
from sglang_sparse.methods.support import FlagLimit, given

if TYPE_CHECKING:
    from sglang_sparse.config.arguments import Arguments, ModelConfig
    from sglang_sparse.config.settings import Settings
    from sglang_sparse.methods.groups import PrefillGroups


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
            "which states a mixed pass stores is not proven yet; leave out --enable-mixed-chunk",
        ),
        # A turn of a streaming session would go on from the state behind a sparse answer.
        *unproven(),
    ),
    {
        "check_exactness": "a node of the prefix cache without a state cannot be computed again",
        "rectify_on_finish": "an answer is shared up to its last stored state, which is exact anyway",
    },
    no_prefill="states are stored at other places than those where the KV of sparse prefill may be shared",
)

_TEXT = f", or serve text alone by {TEXT_ALONE}"
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
        # With --rl-on-policy-target SGLang numbers all tokens as text.
        *unproven(_TEXT),
    ),
    # Of images, ids reach 31 bits, see ``prefix_keys.TOKEN_BITS``.
    no_prefill=f"keys of its groups have no room for the ids of images; text alone is served by {TEXT_ALONE}",
)
MODEL_KINDS = (STATES, CHUNKS, WINDOW_POOL, TOWERS)


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
