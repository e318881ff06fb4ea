"""Report the sparse backend at start, and its counters in /server_info."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sglang_sparse.attention.counters import KEY
from sglang_sparse.attention.protocols import Scheduler
from sglang_sparse.config import arguments
from sglang_sparse.config.settings import settings_of
from sglang_sparse.config.versions import UnsupportedSGLangError, installed_sglang


def report_active(info: dict[str, object], scheduler: Scheduler, *_: object) -> None:
    """After ``Scheduler.get_init_info``: report the methods if the sparse backend runs.

    Raises:
        UnsupportedSGLangError: SGLang has built a prefix cache other than the hooked one.
    """
    if settings_of(scheduler.server_args) is not None:
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        tree = scheduler.tree_cache
        if not isinstance(tree, UnifiedRadixCache):
            raise UnsupportedSGLangError(f"got a {type(tree).__name__} as prefix cache; its inserts are not hooked")
        backend = scheduler.tp_worker.model_runner.attn_backend
        if type(backend).__name__ == "SparseAttentionBackend":
            info["sparse_method"] = arguments.of(scheduler.server_args).sparse_method
            info["sparse_prefill_method"] = arguments.of(scheduler.server_args).sparse_prefill_method


def require_active_schedulers(
    result: Iterable[object], cls: type, server_args: object, *_: object, **__: object
) -> None:
    """After ``Engine._launch_subprocesses``: end the start when a scheduler runs dense.

    Raises:
        RuntimeError: a scheduler came up without the sparse backend.
    """
    settings = settings_of(server_args)
    if settings is None:
        return
    from sglang.srt.entrypoints.engine import SchedulerInitResult

    (scheduled,) = (each for each in result if isinstance(each, SchedulerInitResult))
    asked = {"sparse_method": settings.name, "sparse_prefill_method": settings.prefill_name}
    for rank, info in enumerate(scheduled.scheduler_infos):
        if any(info.get(field) != name for field, name in asked.items()):
            raise RuntimeError(
                f"{settings.flag}: scheduler {rank} runs dense; the plugin is not active in its process "
                f"(SGLang {installed_sglang()})"
            )


def add_internal_state(output: Any, scheduler: Scheduler, *_: object) -> None:
    """After ``Scheduler.get_internal_state``: add the counters under ``sparse``."""
    if settings_of(scheduler.server_args) is not None:
        output.internal_state[KEY] = scheduler.tp_worker.model_runner.attn_backend.counters.snapshot()
