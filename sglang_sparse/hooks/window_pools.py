"""Models whose windowed layers have a KV pool of their own: what they refuse.

SGLang frees there what lies before a window. ``scheduler/exact_kv.py`` keeps what rectification reads of it; what else
reads KV of the past, or writes it elsewhere, is refused. ``--disable-hybrid-swa-memory`` keeps all KV in one pool, and
needs more memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_sparse.config.arguments import deterministic
from sglang_sparse.errors import SparseArgumentError
from sglang_sparse.hooks.flag_predicates import (
    above_one,
    environment,
    given,
    other_than,
    require_none,
    uses_dp_attention,
)
from sglang_sparse.methods.support import FlagLimit

if TYPE_CHECKING:
    from sglang_sparse.config.arguments import Arguments, ModelConfig
    from sglang_sparse.config.settings import Settings

WHERE = "on a model with a KV pool for its windows"
_ONE_POOL = "--disable-hybrid-swa-memory"

WINDOW_POOL_LIMITS = (
    FlagLimit(
        "speculative decoding",
        given("speculative_algorithm"),
        f"not proven yet; leave out --speculative-algorithm, or add {_ONE_POOL}",
    ),
    FlagLimit(
        "--disaggregation-mode",
        other_than("disaggregation_mode", "null"),
        f"windows that another server sends are not proven yet; allowed: null, or {_ONE_POOL}",
    ),
    FlagLimit(
        "pipeline parallelism", above_one("pp_size"), f"not proven yet; allowed: --pp-size 1, or add {_ONE_POOL}"
    ),
    FlagLimit(
        "data-parallel attention",
        uses_dp_attention,
        f"not proven yet; leave out --enable-dp-attention, or add {_ONE_POOL}",
    ),
    FlagLimit(
        "hierarchical cache",
        given("enable_hierarchical_cache"),
        f"windows in host memory are not proven yet; leave out --enable-hierarchical-cache, or add {_ONE_POOL}",
    ),
    FlagLimit(
        "streaming sessions",
        given("enable_streaming_session"),
        f"not proven yet; leave out --enable-streaming-session, or add {_ONE_POOL}",
    ),
    FlagLimit(
        "deterministic inference",
        lambda args: deterministic(args) or None,
        f"not proven yet; leave out --enable-deterministic-inference, or add {_ONE_POOL}",
    ),
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
