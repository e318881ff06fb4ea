"""The difference between two selections of DSA, and whether a selection is the same every time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from eval.lab.agreement.agreement import LEAST_OVERLAP

# Variables of a server's environment that ``eval/lab/agreement/server`` reads.
WATCH, WATCH_REPLAYS = "DSA_WATCH", "DSA_WATCH_REPLAYS"


@dataclass(frozen=True)
class Apart:
    """Two selections, query by query.

    Attributes:
        overlap: ``[n]`` float64, the share of the tokens that both have.
        gap: ``[n]`` float32, of the tokens that only one has, the largest distance of a logit from that of the last
            token chosen, relative to it; 0 without such tokens.
        differing: ``[n]`` int64, tokens that one has and the other has not.
    """

    overlap: torch.Tensor
    gap: torch.Tensor
    differing: torch.Tensor

    def figures(self) -> dict[str, Any]:
        """The fields that a row of results has of it."""
        return {
            "queries": len(self.overlap),
            "overlap": self.overlap.mean().item(),
            "overlap_least": self.overlap.min().item(),
            "below": int((self.overlap < LEAST_OVERLAP).sum()),
            "differing": int(self.differing.sum()),
            "worst_relative_gap": self.gap.max().item(),
        }


def joined(parts: list[Apart]) -> Apart:
    """Those of further queries behind each other."""
    return Apart(*(torch.cat([getattr(part, name) for part in parts]) for name in ("overlap", "gap", "differing")))


def compare(given: torch.Tensor, chosen: torch.Tensor, logits: torch.Tensor, lengths: torch.Tensor) -> Apart:
    """Set one selection beside another.

    Args:
        given: ``[n, k]`` integers, positions in any order, then or between them -1.
        chosen: likewise; the k-th logit is the least of these.
        logits: ``[n, L]`` float32; what is beyond a query's tokens may be anything.
        lengths: ``[n]``, tokens of each query.

    Raises:
        ValueError: a selection names a token twice, or one that its query does not see, or has more tokens than the
            other.
    """
    one, other = (_members(positions, logits.shape[1], lengths) for positions in (given, chosen))
    counts = other.sum(1)
    if not torch.equal(one.sum(1), counts):
        raise ValueError(f"{int((one.sum(1) != counts).sum())} queries have more tokens in one selection")
    last = logits.masked_fill(~other, torch.inf).amin(1, keepdim=True)
    differing = one ^ other
    gap = ((logits - last).abs() / last.abs()).masked_fill(~differing, 0).amax(1)
    return Apart((one & other).sum(1).double() / counts.clamp(min=1), gap, differing.sum(1))


def _members(positions: torch.Tensor, width: int, lengths: torch.Tensor) -> torch.Tensor:
    """``[n, width]`` bool."""
    named = positions >= 0
    beyond = named & (positions >= lengths[:, None])
    if beyond.any():
        raise ValueError(f"{int(beyond.any(1).sum())} queries have tokens that they do not see")
    # The last column takes what names nothing.
    found = torch.zeros(len(positions), width + 1, dtype=torch.bool, device=positions.device)
    found.scatter_(1, torch.where(named, positions, width).long(), True)
    found = found[:, :width]
    if not torch.equal(found.sum(1), named.sum(1)):
        raise ValueError(f"{int((found.sum(1) != named.sum(1)).sum())} queries have a token twice")
    return found


def positions_of(
    slots: torch.Tensor, page_table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, pages: int, page: int
) -> torch.Tensor:
    """Convert slots of the KV pool to positions within each query's row.

    Args:
        slots: ``[n, k]`` int32, or -1.
        page_table: ``[R, P]`` int32; entries beyond a row's tokens may hold anything.
        rows: ``[n]``, the row of each query.
        lengths: ``[n]``, tokens of each query.
        pages: of the pool.
        page: tokens of a page.

    Returns:
        ``[n, k]`` int64, -1 where ``slots`` is.

    Raises:
        ValueError: a slot is not in its query's row.
    """
    inverse = torch.full((len(page_table), pages), -1, dtype=torch.int64, device=slots.device)
    for row in rows.unique().tolist():
        held = -(-int(lengths[rows == row].max()) // page)
        inverse[row, page_table[row, :held].long()] = torch.arange(held, device=slots.device)
    places = slots.long().clamp(0, pages * page - 1)
    found = inverse[rows.long()[:, None], places // page]
    if (((found < 0) & (slots >= 0)) | (slots >= pages * page)).any():
        raise ValueError("a selection names slots that are not its request's")
    return torch.where(slots < 0, -1, found * page + places % page)


def same_replays(again: Callable[[], object], chosen: torch.Tensor, count: int) -> int:
    """Count the replays that choose, bit for bit, the same as the first one.

    Args:
        again: selects into ``chosen``.
        chosen: ``[n, k]`` integers, emptied before each time: nothing of before can pass for a selection.
        count: replays, the first one among them.
    """
    first, same = None, 0
    for _ in range(count):
        chosen.fill_(-2)
        again()
        first = chosen.clone() if first is None else first
        same += torch.equal(chosen, first) and int(chosen.min()) > -2
    return same


def captured(again: Callable[[], object]) -> Callable[[], object]:
    """A CUDA graph of what writes into given memory; it is done once before, for kernels that compile at first use."""
    again()
    graph = torch.cuda.CUDAGraph()
    # Another thread of a server may copy meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        again()
    return graph.replay
