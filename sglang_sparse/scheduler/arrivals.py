"""Pages that no pass of this server wrote: what summarises their keys is computed where they arrive.

A page's entries are a pure function of its keys (`AuxBuffers`), so they need no transport and no room in host memory.

A hierarchical cache decides what to load when SGLang admits a request. The pass that prefills the rest of the prompt
reads all of the prefix and waits for it layer by layer, so that the refresh at the end of this pass may read it, too.
Nobody selects from these pages before: only decode passes do, and any that may see them is launched behind this pass,
on the same stream. Other requests that found them meanwhile are prefilled in this pass or a later one.

The prompt of a request that another server has prefilled is there when its first decode step begins. So is the KV of a
request that a decode server gave up to host memory and has taken back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from sglang_sparse.attention.protocols import Req, ScheduleBatch
from sglang_sparse.config.settings import current_settings
from sglang_sparse.scheduler.request_fields import pool_row, prefix_len
from sglang_sparse.scheduler.request_state import RequestState, state_of

if TYPE_CHECKING:
    from sglang_sparse.attention.backend import SparseAttentionBackend

# The attribute of SGLang's Req with the positions, from and to, whose KV arrives for it.
ATTRIBUTE = "sglang_sparse_arriving"


@contextmanager
def noted(request: Req) -> Iterator[None]:
    """Note what SGLang loads for a request within the block, where it admits the request."""
    start = prefix_len(request)
    setattr(request, ATTRIBUTE, None)
    yield
    if (end := prefix_len(request)) > start:
        setattr(request, ATTRIBUTE, (start, end))


def note_transferred(_: None, batch: ScheduleBatch) -> None:
    """After ``ScheduleBatch.prepare_for_prebuilt``: note what another server has computed, or this one taken back.

    A prefix of this server's tree as well: who brought it there may have ended before its first decode step.
    """
    if current_settings() is not None:
        for request, length in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
            setattr(request, ATTRIBUTE, (0, length))
            state = state_of(request)
            if state is not None and state.shareable_len is not None:
                # With overlap scheduling, a step had written one token more when SGLang gave the request up.
                state.shareable_len = min(state.shareable_len, length)


def expected(request: Req) -> bool:
    """Whether KV arrives for a request, or has arrived and no pass has begun since."""
    return getattr(request, ATTRIBUTE, None) is not None


def begin(backend: SparseAttentionBackend, batch: ScheduleBatch, states: Sequence[RequestState]) -> None:
    """Tell the backend, once, which slots arrive for the requests of a batch."""
    waiting = [(each, state) for each, state in zip(batch.reqs, states, strict=True) if expected(each)]
    if not waiting:
        return
    loading = batch.forward_mode.is_extend_without_speculative()
    found: list[torch.Tensor] = []
    pages, size = 0, batch.tree_cache.page_size
    for request, state in waiting:
        start, end = getattr(request, ATTRIBUTE)
        setattr(request, ATTRIBUTE, None)
        if not loading and state.shareable_len is None:
            state.shareable_len = end
        found.append(batch.req_to_token_pool.req_to_token[pool_row(request), start:end].long())
        pages += -(-end // size) - start // size
    if backend.decoding.last_layer >= 0:
        backend.counters.arrived_pages += pages
        backend.decoding.expect(torch.cat(found), loading)
