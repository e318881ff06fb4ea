"""Models whose windowed layers have a KV pool of their own: what they refuse.

SGLang frees there what lies before a window. ``scheduler/exact_kv.py`` keeps what rectification reads of it; what else
reads KV of the past, or writes it elsewhere, is refused. ``--disable-hybrid-swa-memory`` keeps all KV in one pool, and
needs more memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_sparse.config.arguments import deterministic
from sglang_sparse.errors import SparseArgumentError
from sglang_sparse.hooks.asked import above_one, attends_apart, environment, given, require_none
from sglang_sparse.methods.support import FlagLimit

if TYPE_CHECKING:
    from sglang_sparse.config.arguments import Arguments
    from sglang_sparse.config.settings import Settings

WHERE = "on a model with a KV pool for its windows"
_ONE_POOL = "--disable-hybrid-swa-memory"
_UNPROVEN = f"not proven yet; leave it out, or add {_ONE_POOL}"

WINDOW_POOL_LIMITS = (
    FlagLimit("speculative decoding", given("speculative_algorithm"), _UNPROVEN),
    FlagLimit(
        "--disaggregation-mode",
        lambda args: None if (mode := args.disaggregation_mode) == "null" else mode,
        f"windows that another server sends are not proven yet; allowed: null, or {_ONE_POOL}",
    ),
    FlagLimit("pipeline parallelism", above_one("pp_size"), _UNPROVEN),
    FlagLimit("data-parallel attention", attends_apart, _UNPROVEN),
    FlagLimit("hierarchical cache", given("enable_hierarchical_cache"), _UNPROVEN),
    FlagLimit("streaming sessions", given("enable_streaming_session"), _UNPROVEN),
    FlagLimit("deterministic inference", lambda args: deterministic(args) or None, _UNPROVEN),
    FlagLimit(
        "early release of windows",
        environment("SGLANG_OPT_RELEASE_PREFILL_SWA"),
        "rectification reads the windows of a prompt for longer; unset the variable",
    ),
)


def require(args: Arguments, settings: Settings) -> None:
    """Refuse what reads KV of windowed layers that is gone.

    Args:
        args: the server's arguments, before SGLang resolves them.
        settings: the methods.

    Raises:
        SparseArgumentError: names the flag or the field, its value, the reason, and what to type.
    """
    if not args.new_model_config().is_hybrid_swa:
        return
    require_none(args, WINDOW_POOL_LIMITS, f"{settings.flag} {WHERE} cannot run with")
    configs = (*settings.decode.configs, *(settings.prefill.configs if settings.prefill else ()))
    if any(config.check_exactness for config in configs):
        hint = f"a prefix without its windows cannot be computed again; or add {_ONE_POOL}"
        raise SparseArgumentError(field="check_exactness", got=True, allowed="false", where=WHERE, hint=hint)
