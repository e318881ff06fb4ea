"""Models with a recurrent state instead of KV in most layers: what they refuse.

A sparse step leaves approximate KV and an approximate state, which the next step overwrites. Rectification goes on from
copies, see ``attention/exact_states.py``. SGLang's strategy ``extra_buffer`` stores states for the prefix cache at
multiples of a number of tokens: rows that rectify do so there, and ``scheduler/exact_kv.py`` keeps out what other rows
store behind a sparse step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_sparse.config.arguments import deterministic
from sglang_sparse.config.settings import Settings
from sglang_sparse.errors import SparseArgumentError, within
from sglang_sparse.hooks.flag_predicates import above_one, given, other_than, uses_dp_attention
from sglang_sparse.hooks.media_models import NO_PREFILL
from sglang_sparse.hooks.model_limits import has_towers, state_layers
from sglang_sparse.methods.config import RectifyConfig
from sglang_sparse.methods.groups import PrefillGroups
from sglang_sparse.methods.support import FlagLimit

if TYPE_CHECKING:
    from sglang_sparse.config.arguments import Arguments, ModelConfig

WHERE = "on a model with recurrent states"


def _strategy(args: Arguments) -> object | None:
    """The strategy of the prefix cache, if there is one and it is not proven."""
    found = args.mamba_radix_cache_strategy
    return None if args.disable_radix_cache or found in ("auto", "extra_buffer") else found


STATE_LIMITS = (
    FlagLimit(
        "--mamba-radix-cache-strategy",
        _strategy,
        "no_buffer would share the state behind a sparse answer as that of its prompt, and extra_buffer_lazy is not "
        "proven yet; allowed: extra_buffer, or --disable-radix-cache",
    ),
    FlagLimit(
        "--linear-attn-backend",
        lambda args: None if args.disable_radix_cache or (kernels := args.linear_attn_backend) == "triton" else kernels,
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
        "speculative decoding",
        given("speculative_algorithm"),
        "what a verification does to the states is not followed; leave out --speculative-algorithm",
    ),
    FlagLimit(
        "--disaggregation-mode",
        other_than("disaggregation_mode", "null"),
        "states that another server sends are not proven yet; allowed: null",
    ),
    FlagLimit(
        "pipeline parallelism",
        above_one("pp_size"),
        "not proven yet; allowed: --pp-size 1",
    ),
    FlagLimit(
        "hierarchical cache",
        given("enable_hierarchical_cache"),
        "states in host memory are not proven yet; leave out --enable-hierarchical-cache",
    ),
    FlagLimit("data-parallel attention", uses_dp_attention, "not proven yet; leave out --enable-dp-attention"),
    FlagLimit(
        "mixed chunk",
        given("enable_mixed_chunk"),
        "which states a mixed pass stores is not proven yet; leave out --enable-mixed-chunk",
    ),
    FlagLimit(
        "streaming sessions",
        given("enable_streaming_session"),
        "a turn would go on from the state behind a sparse answer; leave out --enable-streaming-session",
    ),
    FlagLimit(
        "deterministic inference",
        lambda args: deterministic(args) or None,
        "it is not proven yet that the kernels of states compute each row as if it were alone; leave it out",
    ),
)


def limits_of(model: ModelConfig) -> tuple[FlagLimit, ...]:
    """Return what a server refuses for its model's states; nothing for other models."""
    return STATE_LIMITS if state_layers(model) else ()


def refuse_prefill(prefill: PrefillGroups, model: ModelConfig) -> str | None:
    """Say why prefill methods cannot serve a model, or None."""
    if state_layers(model):
        return "states are stored at other places than those where the KV of sparse prefill may be shared"
    if has_towers(model):
        return NO_PREFILL
    return prefill.refuse(model)


def refuse_states(settings: Settings, model: ModelConfig) -> None:
    """Refuse what would need the states at places where none are.

    Args:
        settings: the server's methods.
        model: SGLang's ``ModelConfig``.

    Raises:
        SparseArgumentError: the config asks for it.
    """
    if not state_layers(model):
        return
    with within(f"--sparse-config of {settings.name}"):
        for config in settings.decode.configs:
            if config.check_exactness:
                hint = "a node of the prefix cache without a state cannot be computed again"
                raise SparseArgumentError(field="check_exactness", got=True, allowed="false", where=WHERE, hint=hint)
            if isinstance(config, RectifyConfig) and config.rectify_on_finish:
                hint = "an answer is shared up to its last stored state, which is exact anyway"
                raise SparseArgumentError(field="rectify_on_finish", got=True, allowed="false", where=WHERE, hint=hint)
