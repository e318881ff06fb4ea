"""Report the sparse backend at start, and its counters in /server_info."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sglang_sparse.attention.counters import KEY
from sglang_sparse.attention.native_counts import counters_of
from sglang_sparse.attention.protocols import Scheduler
from sglang_sparse.config import arguments
from sglang_sparse.config.settings import Settings, settings_of
from sglang_sparse.config.versions import UnsupportedSGLangError, installed_sglang
from sglang_sparse.hooks import prometheus

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.managers.data_parallel_controller import DataParallelController

logger = logging.getLogger(__name__)

# What a scheduler reports, and where SGLang's data-parallel controller keeps the reports of its schedulers.
REPORTED = ("sparse_method", "sparse_prefill_method")
REPLICAS = "sparse_schedulers"


def report_active(info: dict[str, object], scheduler: Scheduler, *_: object) -> None:
    """After ``Scheduler.get_init_info``: report the methods if the sparse backend runs, and create its metrics.

    Raises:
        UnsupportedSGLangError: SGLang has built a prefix cache other than the hooked one.
    """
    settings = settings_of(scheduler.server_args)
    if settings is None:
        return
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    tree, backend = scheduler.tree_cache, scheduler.tp_worker.model_runner.attn_backend
    if settings.passes_through:
        runs = _runs_dsa(backend)
        if runs:
            _announce(scheduler, settings)
    elif type(tree) is UnifiedRadixCache:
        # `--radix-cache-backend` may build another one, and a class of its own may go around what is hooked.
        runs = type(backend).__name__ == "SparseAttentionBackend"
    else:
        raise UnsupportedSGLangError(
            f"got a {type(tree).__name__} as prefix cache; its inserts are not hooked, as UnifiedRadixCache's are"
        )
    if runs:
        info.update({field: getattr(arguments.of(scheduler.server_args), field) for field in REPORTED})
    prometheus.start(scheduler)


def report_replicas(info: dict[str, object], controller: DataParallelController, *_: object) -> None:
    """After ``DataParallelController.get_init_info``: pass on what each scheduler reported."""
    info[REPLICAS] = [{field: one.get(field) for field in REPORTED} for one in controller._scheduler_init_infos]


def _runs_dsa(backend: AttentionBackend) -> bool:
    """Whether SGLang has built its own backend for DSA, alone or within those that divide batches or layers."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend

    inner = (one for one in vars(backend).values() if isinstance(one, AttentionBackend))
    return isinstance(backend, DeepseekSparseAttnBackend) or any(map(_runs_dsa, inner))


def _announce(scheduler: Scheduler, settings: Settings) -> None:
    """Say once for all ranks what runs."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if parallel.tp_rank == parallel.pp_rank == 0 and not parallel.dp_rank:
        logger.info(
            "sglang_sparse: method %s: SGLang runs DSA unchanged, this plugin counts; kernels %s",
            settings.decode.described,
            settings.method.kernels(""),
        )


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
    asked = settings.asked or settings
    reports = [report for info in scheduled.scheduler_infos for report in info.get(REPLICAS, [info])]
    for rank, report in enumerate(reports):
        if [report.get(field) for field in REPORTED] != [asked.name, asked.prefill_name]:
            raise RuntimeError(
                f"{settings.flag}: scheduler {rank} runs dense; the plugin is not active in its process "
                f"(SGLang {installed_sglang()})"
            )


def add_internal_state(output: Any, scheduler: Scheduler, *_: object) -> None:
    """After ``Scheduler.get_internal_state``: add the counters under ``sparse``."""
    settings = settings_of(scheduler.server_args)
    if settings is not None:
        output.internal_state[KEY] = counters_of(scheduler.tp_worker.model_runner, settings).snapshot()
