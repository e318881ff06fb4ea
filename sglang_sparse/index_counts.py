"""What DSA's selections are counted by, beside what ``page_topk`` counts itself."""

from __future__ import annotations

from typing import Any

import torch


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


def snapshot(counted: torch.Tensor) -> dict[str, Any]:
    """Name what ``shared_tokens`` added up: tokens that layers would have chosen, and those they were given."""
    fresh, held = counted.tolist()
    return {"tokens": fresh, "held": held, "recall": held / fresh if fresh else None}
