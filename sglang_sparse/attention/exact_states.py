"""Copies of recurrent states, from which a rectifying pass goes on.

A layer with a recurrent state overwrites it with each token. Behind a sparse step it is approximate, and KV that is to
be exact again needs the state as it was after the exact tokens. So it is copied before the first sparse step behind
these, and copied back before the pass. No paper has this; ReSA's models have KV in every layer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch

from sglang_sparse.config.settings import Settings, hooked_settings_of
from sglang_sparse_kernels.common.launch import to_device

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    from sglang_sparse.attention.protocols import ScheduleBatch


logger = logging.getLogger(__name__)


class ExactStates:
    """A copy of the states of each request that may run.

    Args:
        pool: SGLang's, whose rows index the copies.
    """

    def __init__(self, pool: HybridReqToTokenPool):
        self._pool = pool
        states = pool.mamba_pool.mamba_cache
        # [layers, slots, ...] each.
        self._copies = [
            (state, state.new_empty(state.shape[0], len(pool.req_to_token), *state.shape[2:]))
            for state in (*states.conv, states.temporal)
        ]
        logger.info(
            "sglang_sparse: %.1f MiB of copies of recurrent states, for %d requests",
            sum(copy.nbytes for _, copy in self._copies) / 2**20,
            len(pool.req_to_token) - 1,
        )

    def save(self, batch: ScheduleBatch, rows: Sequence[int]) -> None:
        """Copy the states of some rows of a batch, which are those after their exact tokens."""
        if rows:
            requests, slots = self._places(batch, rows)
            for state, copy in self._copies:
                copy[:, requests] = state[:, slots]

    def restore(self, batch: ScheduleBatch, rows: Sequence[int]) -> None:
        """Overwrite the states of some rows with their copies."""
        if rows:
            requests, slots = self._places(batch, rows)
            for state, copy in self._copies:
                state[:, slots] = copy[:, requests]

    def store(self, batch: ScheduleBatch, rows: Sequence[int]) -> None:
        """Store the states of rows of a decode batch for the prefix cache, where SGLang would: it believes so."""
        rows = [row for row in rows if batch.mamba_track_mask_cpu[row]] if batch.mamba_track_mask_cpu else []
        if rows:
            _, slots = self._places(batch, rows)
            stored = batch.mamba_track_indices[to_device(rows, torch.int64, slots.device)]
            self._pool.mamba_pool.copy_from(slots, stored)

    def _places(self, batch: ScheduleBatch, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of the request pool, and the slots of the states, ``[rows]`` int64 each."""
        requests = batch.req_pool_indices[to_device(rows, torch.int64, batch.req_pool_indices.device)].to(torch.int64)
        return requests, self._pool.req_index_to_mamba_index_mapping[requests].to(torch.int64)


def make_copies(pool: object, settings: Settings) -> ExactStates | None:
    """Return the copies of a server that rectifies a model with recurrent states; None for others."""
    states = hasattr(pool, "mamba_pool") and settings.rectifies
    return ExactStates(cast("HybridReqToTokenPool", pool)) if states else None


def charge_copies(rest: float, configurator: KVCacheConfigurator, *_: object) -> float:
    """After ``KVCacheConfigurator._handle_max_mamba_cache``: keep memory for the copies.

    Args:
        rest: GiB that SGLang leaves for KV.
        configurator: SGLang's, of the pools.

    Returns:
        GiB that are left.
    """
    settings = hooked_settings_of(configurator.server_args)
    if settings is None or configurator.is_draft_worker or not settings.rectifies:
        return rest
    from sglang.srt.runtime_context import get_schedule

    schedule, config = get_schedule(), configurator.mambaish_config
    assert config is not None and schedule.max_mamba_cache_size is not None
    requests = schedule.max_mamba_cache_size // configurator._calculate_mamba_ratio()
    if schedule.max_running_requests is not None:
        requests = min(requests, max(1, schedule.max_running_requests // configurator.attn_dp_size))
    # SGLang's request pool has a row more, for what pads a batch.
    return rest - (requests + 1) * config.mamba2_cache_params.mamba_cache_per_req / 2**30
