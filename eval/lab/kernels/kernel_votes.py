"""Pages chosen by votes for ``bench_kernels``, beside those of the paper's scores: by bounds, and by centroids.

Records of centroids take as many bytes as two bfloat16 bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from eval.lab.kernels.kernel_inputs import NUM_CENTROIDS, Layer, Step
from sglang_sparse_kernels.common.timing import Run
from sglang_sparse_kernels.page_centroids import update_page_centroids
from sglang_sparse_kernels.page_vote import page_vote, reference, select_by_votes

# Names of implementations: ReSA with ``group: vote``, and with ``summary: centroids`` as well.
VOTES, CENTROIDS = "vote", f"{NUM_CENTROIDS} centroids+vote"
# Of a vote, which is a logarithm: sums of 16-bit products in another order.
LARGEST_VOTE_ERROR = 0.01


def _summaries(name: str, step: Step) -> Sequence[torch.Tensor]:
    if step.shape.summary_dtype != torch.bfloat16:
        raise ValueError("stands beside bounds of bfloat16 alone")
    return step.centroids if name == CENTROIDS else [layer.summary for layer in step.layers]


def _vote(summary: torch.Tensor, step: Step, layer: Layer) -> torch.Tensor:
    tables = (step.view.page_table, step.view.n_pages)
    rest = (step.sm_scale, step.view.scores, step.shape.local_pages)
    return page_vote(layer.q, summary, *tables, *rest, summaries_ready=True)


def vote_calls(name: str, step: Step) -> list[Run]:
    """Score every page of each layer; a result is ``[B, Hkv, max_pages]``."""
    summaries = _summaries(name, step)
    step.forget()
    return [partial(_vote, summary, step, layer) for layer, summary in zip(step.layers, summaries, strict=True)]


def chain_calls(name: str, step: Step) -> list[Run]:
    """Score, select and attend, each layer; the selection is in the view then."""

    view, local = step.view, step.shape.local_pages
    pages = (view.page_table, view.n_pages, view.n_select, view.max_select)
    rest = (step.sm_scale, view.scores, view.selected, view.stats, local)

    def whole(layer: Layer, summary: torch.Tensor) -> torch.Tensor:
        return step.attend_to(layer, select_by_votes(layer.q, summary, *pages, *rest, tables_ready=True))

    summaries = _summaries(name, step)
    step.forget()
    return [partial(whole, layer, summary) for layer, summary in zip(step.layers, summaries, strict=True)]


def update_calls(step: Step) -> list[Run]:
    """Centroids of the newest page of every row, in all layers after the last one, as a server does."""
    found, caches = step.centroids, [layer.k_cache for layer in step.layers]

    def update(layer: Layer) -> None:
        if layer is step.layers[-1]:
            update_page_centroids(caches, found, step.batch.last_slots, step.shape.page_size)

    return [partial(update, layer) for layer in step.layers]


def expected_votes(name: str, step: Step, row: int, head: int) -> torch.Tensor:
    """Of one row and KV head of the first layer, by the definition in plain torch; ``[n_pages]`` float64."""
    layer, shape = step.layers[0], step.shape
    group = shape.q_heads // shape.kv_heads
    query = layer.q[row : row + 1, head * group : (head + 1) * group]
    summary = _summaries(name, step)[0][:, head : head + 1]
    tables = step.view.page_table[row : row + 1], step.view.n_pages[row : row + 1]
    out = torch.empty(1, 1, tables[0].shape[1], device=query.device)
    votes = reference.page_vote(query, summary, *tables, step.sm_scale, out, shape.local_pages)
    return votes[0, 0, : shape.n_pages].double()
