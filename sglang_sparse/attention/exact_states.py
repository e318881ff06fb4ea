"""Copies of recurrent states, from which a rectifying pass goes on.

A layer with a recurrent state overwrites it with each token. Behind a sparse step it is approximate, and KV that is to
be exact again needs the state as it was after the exact tokens. So it is copied before the first sparse step behind
these, and copied back before the pass. No paper has this; ReSA's models have KV in every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from sglang_sparse.config.settings import Settings, hooked_settings_of
from sglang_sparse.scheduler.request_fields import pool_row
from sglang_sparse_kernels.common.launch import to_device

if TYPE_CHECKING:
    from sglang_sparse.attention.protocols import Req, ScheduleBatch


class ExactStates:
    """A copy of the states of each request that may run.

    Args:
        pool: SGLang's ``HybridReqToTokenPool``, whose rows index the copies.
    """

    def __init__(self, pool: Any):
        self._pool = pool
        states = pool.mamba_pool.mamba_cache
        # [layers, slots, ...] each.
        self._copies = [
            (state, state.new_empty(state.shape[0], len(pool.req_to_token), *state.shape[2:]))
            for state in (*states.conv, states.temporal)
        ]

    def save(self, requests: Sequence[Req]) -> None:
        """Copy the states of requests, which are those after their exact tokens."""
        if not requests:
            return
        rows, slots = self._places(requests)
        for state, copy in self._copies:
            copy[:, rows] = state[:, slots]

    def restore(self, requests: Sequence[Req]) -> None:
        """Put the copies in the place of the requests' states."""
        if not requests:
            return
        rows, slots = self._places(requests)
        for state, copy in self._copies:
            state[:, slots] = copy[:, rows]

    def store(self, batch: ScheduleBatch, rows: Sequence[int]) -> None:
        """Store the states of rows of a decode batch for the prefix cache, where SGLang would: it believes so."""
        rows = [row for row in rows if batch.mamba_track_mask_cpu[row]] if batch.mamba_track_mask_cpu else []
        if rows:
            _, slots = self._places([batch.reqs[row] for row in rows])
            self._pool.mamba_pool.copy_from(
                slots, batch.mamba_track_indices[to_device(rows, torch.int64, slots.device)]
            )

    def _places(self, requests: Sequence[Req]) -> tuple[torch.Tensor, torch.Tensor]:
        mapping = self._pool.req_index_to_mamba_index_mapping
        of_requests = [row for request in requests if (row := pool_row(request)) is not None]
        rows = to_device(of_requests, torch.int64, mapping.device)
        return rows, mapping[rows].to(torch.int64)


def make_copies(pool: object, settings: Settings) -> ExactStates | None:
    """Return the copies of a server that rectifies a model with recurrent states; None for others."""
    return ExactStates(pool) if hasattr(pool, "mamba_pool") and settings.rectifies else None


def charge_copies(rest: float, configurator: Any, *_: object) -> float:
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

    schedule = get_schedule()
    requests = schedule.max_mamba_cache_size // configurator._calculate_mamba_ratio()
    if schedule.max_running_requests is not None:
        requests = min(requests, max(1, schedule.max_running_requests // configurator.attn_dp_size))
    # SGLang's request pool has a row more, for what pads a batch.
    nbytes = (requests + 1) * configurator.mambaish_config.mamba2_cache_params.mamba_cache_per_req
    return rest - nbytes / 2**30
