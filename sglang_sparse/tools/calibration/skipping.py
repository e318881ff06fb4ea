"""Measure the blocks of a layer that Skip-Softmax skips at some factors, and the attention mass of the others.

The kernels' own definition (``reference``) decides which blocks are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_sparse.tools.calibration.capture import Captured
from sglang_sparse_kernels.skip_softmax_decode import BLOCK_KEYS as DECODE_KEYS
from sglang_sparse_kernels.skip_softmax_decode import reference as decode
from sglang_sparse_kernels.skip_softmax_prefill import BLOCK_KEYS as PREFILL_KEYS
from sglang_sparse_kernels.skip_softmax_prefill import Span, make_plan
from sglang_sparse_kernels.skip_softmax_prefill import reference as prefill
from sglang_sparse_kernels.sparse_decode.reference import softmax

# Logits that are held at once.
LOGITS = 1 << 27
# Tiles of a prompt that are looked at, evenly spaced: all of a very long one would take hours.
MOST_TILES = 64


class Skipped(NamedTuple):
    """Of one layer and prompt in one phase.

    Attributes:
        visited: blocks that were looked at, as the op counts them.
        skipped: how many of them are skipped, by factor.
        queries: over all query heads.
        mass: share of the attention mass that is kept, by factor, mean over these; NaN where logits are not finite.
            That of attention sinks is always kept.
        sinks: the share that attention sinks hold, or None.
    """

    visited: int
    skipped: list[int]
    queries: int
    mass: list[float]
    sinks: float | None = None


class _Judged(NamedTuple):
    """Some queries: ``[…, blocks]`` masses of their blocks, and which of the blocks each factor keeps."""

    mass: Tensor
    kept: Callable[[float], Tensor]


def skipped_in_prefill(captured: Captured, dense_below: int, dense_from: int, factors: Sequence[float]) -> Skipped:
    """Judge the tiles of a prompt's sparse part, up to ``MOST_TILES`` of them.

    Args:
        captured: of the layer, with the queries of all positions.
        dense_below: position of the first query that is sparse.
        dense_from: position behind the last one.
        factors: values of ``threshold_scale_factor``.
    """
    return _count(captured, _tiles(captured, dense_below, dense_from), factors, queries_dim=2)


def skipped_in_decode(captured: Captured, queries: int, factors: Sequence[float]) -> Skipped:
    """Judge a prompt's last positions as decode would have them: each as the newest token of a separate row.

    Args:
        captured: of the layer, with at least ``queries`` queries.
        queries: how many of the last positions.
        factors: values of ``threshold_scale_factor``.
    """
    return _count(captured, _rows(captured, queries), factors, queries_dim=1)


def _tiles(captured: Captured, dense_below: int, dense_from: int) -> Iterator[_Judged]:
    kv_heads = captured.key.shape[1]
    device = captured.key.device
    tiles = make_plan([Span(0, dense_below, dense_from)], 1, device).tiles
    # The middles of equal parts, so that the first and the last tiles count as much.
    chosen = sorted({len(tiles) * (2 * i + 1) // (2 * MOST_TILES) for i in range(MOST_TILES)})
    for tile in (tiles[place] for place in chosen):
        first, end = tile.first_position, tile.first_position + tile.num_queries
        later = torch.arange(end, device=device) > torch.arange(first, end, device=device)[:, None]
        size = captured.query.shape[1] // kv_heads * tile.num_queries * end
        for heads in torch.arange(kv_heads, device=device).split(max(1, LOGITS // size)):
            logits = _logits(captured, heads, slice(first, end), end).masked_fill_(later, -torch.inf)
            maxima = prefill.block_maxima(logits, PREFILL_KEYS)

            def kept(factor: float, maxima: Tensor = maxima, tile: prefill.QueryTile = tile) -> Tensor:
                return prefill.kept_blocks(maxima, prefill.log_threshold(tile, factor))

            yield _Judged(_masses(captured, heads, logits, PREFILL_KEYS), kept)


def _rows(captured: Captured, queries: int) -> Iterator[_Judged]:
    tokens, kv_heads = captured.key.shape[:2]
    heads = torch.arange(kv_heads, device=captured.key.device)
    for length in range(tokens - queries + 1, tokens + 1):
        logits = _logits(captured, heads, slice(length - 1, length), length)[:, :, 0]
        maxima = decode.block_maxima(logits)

        def kept(factor: float, maxima: Tensor = maxima, length: int = length) -> Tensor:
            return decode.kept_blocks(maxima, decode.log_threshold(factor, length))

        yield _Judged(_masses(captured, heads, logits, DECODE_KEYS), kept)


def _logits(captured: Captured, heads: Tensor, positions: slice, end: int) -> Tensor:
    """``[kv_heads, group, queries, end]`` float32 of the queries at some positions, which see all keys here."""
    # The queries that were captured are those of the last positions.
    before = captured.key.shape[0] - captured.query.shape[0]
    query = captured.query[positions.start - before : positions.stop - before].float().transpose(0, 1)
    query = query.unflatten(0, (captured.key.shape[1], -1))[heads] * captured.scaling
    return query @ captured.key[:end, heads].float().permute(1, 2, 0)[:, None]


def _masses(captured: Captured, heads: Tensor, logits: Tensor, block_keys: int) -> Tensor:
    """``[kv_heads, group, …, blocks]``; with attention sinks they add to less than 1."""
    sinks = captured.sinks
    sinks = None if sinks is None else sinks.unflatten(0, (captured.key.shape[1], -1))[heads].flatten()
    weights = softmax(logits, sinks, inner=logits.dim() - 2)
    return (
        torch.nn.functional.pad(weights, (0, -weights.shape[-1] % block_keys)).unflatten(-1, (-1, block_keys)).sum(-1)
    )


def _count(captured: Captured, found: Iterator[_Judged], factors: Sequence[float], queries_dim: int) -> Skipped:
    """Add up; ``queries_dim`` is the dimension of the masses whose queries share what is kept."""
    visited = queries = 0
    skipped: list[Tensor] = []
    lost: list[Tensor] = []
    on_keys: list[Tensor] = []
    for mass, kept_at in found:
        left_out = ~torch.stack([kept_at(factor) for factor in factors])
        visited += left_out[0].numel()
        queries += mass[..., 0].numel()
        on_keys.append(mass.sum(dtype=torch.float64))
        skipped.append(left_out.flatten(1).sum(1))
        lost.append((mass * left_out.unsqueeze(queries_dim + 1)).flatten(1).sum(1, dtype=torch.float64))
    mass = 1 - torch.stack(lost).sum(0) / queries
    sinks = None if captured.sinks is None else 1 - torch.stack(on_keys).sum().item() / queries
    return Skipped(visited, torch.stack(skipped).sum(0).tolist(), queries, mass.tolist(), sinks)
