"""Models that are served with their towers for images and videos: what they refuse.

Rectification encodes generated tokens alone, whose positions behind an image are those that SGLang's decoding gives
them, see ``partial_batch.position_info``. What else makes positions or embeddings is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_sparse.config.arguments import deterministic
from sglang_sparse.hooks.flag_predicates import above_one, given, other_than, require_none, uses_dp_attention
from sglang_sparse.hooks.model_limits import TEXT_ALONE, has_towers
from sglang_sparse.methods.support import FlagLimit

if TYPE_CHECKING:
    from sglang_sparse.config.arguments import Arguments
    from sglang_sparse.config.settings import Settings

WHERE = "on a model with towers for media"


def _unproven(cure: str) -> str:
    return f"not proven yet; {cure}, or serve text alone by {TEXT_ALONE}"


# Of images, ids reach 31 bits, see ``prefix_keys.TOKEN_BITS``.
NO_PREFILL = f"keys of its groups have no room for the ids of images; text alone is served by {TEXT_ALONE}"

MEDIA_LIMITS = (
    FlagLimit("speculative decoding", given("speculative_algorithm"), _unproven("leave out --speculative-algorithm")),
    FlagLimit(
        "--disaggregation-mode",
        other_than("disaggregation_mode", "null"),
        f"prompts with media from another server are not proven yet; allowed: null, or {TEXT_ALONE}",
    ),
    FlagLimit(
        "towers on other servers",
        given("language_only", "encoder_only", "enable_adaptive_dispatch_to_encoder"),
        _unproven("leave out --language-only, --encoder-only and --enable-adaptive-dispatch-to-encoder"),
    ),
    FlagLimit("pipeline parallelism", above_one("pp_size"), _unproven("allowed: --pp-size 1")),
    FlagLimit("data-parallel attention", uses_dp_attention, _unproven("leave out --enable-dp-attention")),
    FlagLimit(
        "hierarchical cache", given("enable_hierarchical_cache"), _unproven("leave out --enable-hierarchical-cache")
    ),
    FlagLimit("mixed chunk", given("enable_mixed_chunk"), _unproven("leave out --enable-mixed-chunk")),
    FlagLimit(
        "streaming sessions", given("enable_streaming_session"), _unproven("leave out --enable-streaming-session")
    ),
    # With --rl-on-policy-target SGLang numbers all tokens as text.
    FlagLimit(
        "deterministic inference",
        lambda args: deterministic(args) or None,
        _unproven("leave out --enable-deterministic-inference"),
    ),
)


def require(args: Arguments, settings: Settings) -> None:
    """Refuse what makes positions or embeddings of media elsewhere.

    Args:
        args: the server's arguments, before SGLang resolves them.
        settings: the methods.

    Raises:
        SparseArgumentError: names the flag, its value, the reason, and what to type.
    """
    if has_towers(args.new_model_config()):
        require_none(args, MEDIA_LIMITS, f"{settings.flag} {WHERE} cannot run with")
