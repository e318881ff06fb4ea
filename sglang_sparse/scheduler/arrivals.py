"""Pages that a hierarchical cache brings back: what summarises their keys is computed again where they arrive.

A page's entries are a pure function of its keys (`AuxBuffers`), so they need no transport and no room in host memory.
SGLang decides what to load when it admits a request. The pass that prefills the rest of the prompt reads all of the
prefix and waits for it layer by layer, so that the refresh at the end of this pass may read it, too. Nobody selects
from these pages before: only decode passes do, and any that may see them is launched behind this pass, on the same
stream. Other requests that found them meanwhile are prefilled in this pass or a later one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from sglang_sparse.attention.protocols import Req, ScheduleBatch
from sglang_sparse.scheduler.request_fields import pool_row, prefix_len

if TYPE_CHECKING:
    from sglang_sparse.attention.backend import SparseAttentionBackend

# The attribute of SGLang's Req with the positions, from and to, whose KV is loaded for it.
ATTRIBUTE = "sglang_sparse_arriving"


@contextmanager
def noted(request: Req) -> Iterator[None]:
    """Note what SGLang loads for a request within the block, where it admits the request."""
    start = prefix_len(request)
    setattr(request, ATTRIBUTE, None)
    yield
    if (end := prefix_len(request)) > start:
        setattr(request, ATTRIBUTE, (start, end))


def begin(backend: SparseAttentionBackend, batch: ScheduleBatch) -> None:
    """Tell the backend, once, which slots are loaded for the requests of an extend batch."""
    found: list[torch.Tensor] = []
    for request in batch.reqs:
        span = getattr(request, ATTRIBUTE, None)
        if span is not None:
            setattr(request, ATTRIBUTE, None)
            found.append(batch.req_to_token_pool.req_to_token[pool_row(request), slice(*span)].long())
    if found:
        backend.expect(torch.cat(found))
