"""Models whose layers with windows or chunks have a KV pool of their own: what they refuse.

SGLang frees there what lies before a window, which for chunks is as long as a chunk. ``scheduler/exact_kv.py`` keeps
what rectification reads of it; what else reads KV of the past, or writes it elsewhere, is refused.
``--disable-hybrid-swa-memory`` keeps all KV in one pool, and needs more memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_sparse.errors import SparseArgumentError
from sglang_sparse.hooks.flag_predicates import environment
from sglang_sparse.hooks.model_limits import ModelKind, unproven
from sglang_sparse.methods.support import FlagLimit, given

if TYPE_CHECKING:
    from sglang_sparse.config.arguments import ModelConfig
    from sglang_sparse.config.settings import Settings

_ONE_POOL = "--disable-hybrid-swa-memory"

WINDOW_POOL = ModelKind(
    "a model with a KV pool for its windows",
    lambda model: model.is_hybrid_swa,
    (
        *unproven(f", or add {_ONE_POOL}"),
        FlagLimit(
            "early release of windows",
            environment("SGLANG_OPT_RELEASE_PREFILL_SWA"),
            "rectification reads the windows of a prompt for longer; unset the variable",
        ),
    ),
    {"check_exactness": f"a prefix without its windows cannot be computed again; or add {_ONE_POOL}"},
)

CHUNKS = ModelKind(
    "a model with chunked attention",
    lambda model: model.is_local_attention_model,
    (
        FlagLimit(
            "speculative decoding",
            given("speculative_algorithm"),
            "SGLang's CUDA graphs verify drafts without chunks; leave out --speculative-algorithm",
        ),
    ),
)


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
