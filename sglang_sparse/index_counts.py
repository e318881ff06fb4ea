"""What DSA's selections are counted by, beside what ``page_topk`` counts itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang_sparse.methods.dsa import Dsa


def tally(lengths: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """What one layer's selection for decode rows adds to the first three of ``BatchView.stats``: int64 ``[3]``."""
    return torch.stack([(wanted > 0).sum(), wanted.sum(), lengths.sum()])


def count_native(backend: Any) -> None:
    """Count what the selections behind SGLang's indexer do in a decode step, whoever makes them.

    Args:
        backend: the ``SparseAttentionBackend`` of a server whose model chooses.
    """
    view = backend.view
    if view is not None:
        view.stats[:3] += tally(view.n_pages, view.n_select) * backend.counters.sparse_layers


def shared_tokens(reused: torch.Tensor, fresh: torch.Tensor, selective: torch.Tensor) -> torch.Tensor:
    """How much of a layer's own selection another layer's has.

    Args:
        reused: ``[rows, n]`` int32, positions in ascending order, then -1.
        fresh: likewise.
        selective: ``[rows]`` bool, rows that count: those that leave something out.

    Returns:
        int64 ``[2]``: tokens of ``fresh``, and those of them that are in ``reused``.
    """
    last = torch.iinfo(torch.int32).max
    held = torch.where(reused < 0, last, reused)
    places = torch.searchsorted(held, fresh).clamp(max=held.shape[1] - 1)
    meant = (fresh >= 0) & selective[:, None]
    return torch.stack([meant.sum(), (meant & (held.gather(1, places) == fresh)).sum()])


def state(method: Dsa, stored: int, reuse: torch.Tensor) -> dict[str, Any]:
    """What a server says of its indexer.

    Args:
        method: of the server.
        stored: keys that this project's indexer stored in prefill, over all layers; SGLang's own counts none.
        reuse: what ``shared_tokens`` added up: tokens that layers would have chosen, and those they were given.
    """
    found: dict[str, Any] = {} if method.native("indexer") else {"index_keys_prefilled": stored}
    if method.measure_reuse:
        fresh, held = reuse.tolist()
        found["reuse"] = {"tokens": fresh, "held": held, "recall": held / fresh if fresh else None}
    return found
