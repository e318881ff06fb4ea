"""What the method did, counted for the server info, and the proof that a scheduler runs sparse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sglang_sparse.config import settings_of
from sglang_sparse.method import ModelShape
from sglang_sparse.versions import installed_sglang

if TYPE_CHECKING:
    from sglang_sparse.config import Settings
    from sglang_sparse.plan import DecodePlan
    from sglang_sparse.pools import AuxPools

KEY = "sparse"


class Counters:
    """Counts since the server started. A *row* is one request in one decode step; a *layer row* that in one layer.

    ``sparse_layer_rows``, ``pages_attended`` and ``pages_held`` count what the selection kernel did, which includes the
    dense rows of a sparse batch: these select all their pages, and count among ``dense_fallback_rows`` as well.

    Args:
        settings: the method and its config.
        aux_pools: the page summaries.
        model: the model on this rank.
        select_stats: int64 ``[3]`` on the device, which the selection itself increments: see ``BatchView.stats``.
    """

    def __init__(self, settings: Settings, aux_pools: AuxPools, model: ModelShape, select_stats: torch.Tensor):
        self.select_stats = select_stats
        self._settings = settings
        self._pools = aux_pools
        self._model = model
        self._decode_steps = 0
        self._decode_rows = 0
        self._dense_rows = 0
        self._max_active_fraction = 0.0
        self._extend_pages = torch.zeros(1, dtype=torch.int64, device=select_stats.device)

    def add_extend(self, last_slots: torch.Tensor) -> None:
        """Count the pages that an extend pass touched, from the ``last_slots`` of its refresh."""
        self._extend_pages += (last_slots >= 0).sum()

    def add_decode(self, plan: DecodePlan) -> None:
        """Count a decode step."""
        self._decode_steps += 1
        self._decode_rows += plan.n_pages.shape[0]
        if not plan.sparse:
            self._dense_rows += plan.n_pages.shape[0]
            return
        if self._settings.config.dense_fallback == "auto":
            self._dense_rows += int(plan.covered.sum())
        fractions = plan.n_select / plan.n_pages
        self._max_active_fraction = max([self._max_active_fraction, *fractions[~plan.covered].tolist()])

    def snapshot(self) -> dict[str, Any]:
        """Return all counts as plain values; reads the device, so not for every step."""
        selections, attended, held = self.select_stats.tolist()
        return {
            "method": self._settings.name,
            "config": self._settings.config.model_dump(),
            "sparse_layers": len(self._pools.layers),
            "decode_steps": self._decode_steps,
            "decode_rows": self._decode_rows,
            "dense_fallback_rows": self._dense_rows,
            "sparse_layer_rows": selections // self._model.num_kv_heads,
            "pages_attended": attended,
            "pages_held": held,
            "active_fraction": attended / held if held else 0.0,
            "max_active_fraction": self._max_active_fraction,
            "extend_pages_summarised": int(self._extend_pages),
            "summary_overflows": int(self._pools.overflow),
            "aux_bytes": self._pools.nbytes,
            "aux_bytes_accounted": self._pools.accounted_bytes,
            "aux_bytes_measured": self._pools.measured_bytes,
        }


def _counters(model_runner: Any) -> Counters:
    return model_runner.attn_backend.counters


def report_active(info: dict[str, Any], scheduler: Any, *_: Any) -> None:
    """After ``Scheduler.get_init_info``: name the backend that really runs."""
    if settings_of(scheduler.server_args) is not None:
        backend = scheduler.tp_worker.model_runner.attn_backend
        if type(backend).__name__ == "SparseAttentionBackend":
            info["sparse_method"] = scheduler.server_args.sparse_method


def require_active_schedulers(result: Any, cls: type, server_args: Any, *_: Any, **__: Any) -> None:
    """After ``Engine._launch_subprocesses``: end the start when a scheduler runs dense.

    Raises:
        RuntimeError: a scheduler came up without the sparse backend.
    """
    method = getattr(server_args, "sparse_method", None)
    if not method:
        return
    for rank, info in enumerate(result[3].scheduler_infos):
        if info.get("sparse_method") != method:
            raise RuntimeError(
                f"--sparse-method {method}: scheduler {rank} runs dense; the plugin is not active in its process "
                f"(SGLang {installed_sglang()})"
            )


def add_internal_state(output: Any, scheduler: Any, *_: Any) -> None:
    """After ``Scheduler.get_internal_state``: the counters under ``sparse``."""
    if settings_of(scheduler.server_args) is not None:
        output.internal_state[KEY] = _counters(scheduler.tp_worker.model_runner).snapshot()
