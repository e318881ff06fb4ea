"""Counters of a decode method's selection, or of one of its parts, on the device or on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sglang_sparse.methods.roles import AttendsItself
from sglang_sparse.methods.views import SELECT_STATS

if TYPE_CHECKING:
    import torch

    from sglang_sparse.attention.plan import GroupPlan
    from sglang_sparse.methods.base import DecodeMethod


# Counts of pages.
PAGES = ("pages_attended", "pages_held")


class SelectionCounts:
    """Counts of one method in its layers.

    ``sparse_layer_rows``, ``pages_attended`` and ``pages_held`` count what the selection kernel did, which includes the
    dense rows of a sparse batch: these select all their pages, and count among ``dense_fallback_rows`` as well. A page
    is the method's block. ``overflowed_layer_rows`` needed more than their method allows and got all; rows whose
    scores say nothing (NaN) get all too, and are not among them.

    A ``AttendsItself`` looks at all keys of the rows of a sparse batch, so that all their pages count as attended to;
    what it skips of them are its own ``more_counts``.

    Args:
        method: the method.
        layers: how many it has.
        kv_heads: of this rank.
        smallest_block: tokens of the smallest block of any method of the server.

    Attributes:
        size: how many numbers it counts on the device.
        max_active_fraction: the largest share of its pages that a row was to attend to which runs sparse, in these
            layers or in others; None where the device decides.
    """

    def __init__(self, method: DecodeMethod, layers: int, kv_heads: int, smallest_block: int):
        self.size = SELECT_STATS + len(method.more_counts)
        self.max_active_fraction = None if method.decides_on_device else 0.0
        self._last: GroupPlan | None = None
        self._more_counts = method.more_counts
        self._layers = layers
        self._kv_heads = kv_heads
        self._unit = method.block_size // smallest_block
        # What a selection counts on the device, where there is none.
        self._looked_at = [0] * SELECT_STATS if isinstance(method, AttendsItself) else None

    def add(self, plan: GroupPlan, sparse: torch.Tensor) -> None:
        """Count a sparse decode pass.

        Args:
            plan: of this method.
            sparse: ``[rows]`` bool, rows that attend to less than everything in some layer, of whatever method.
        """
        if self._looked_at is not None:
            rows, pages = plan.n_pages.shape[0], int(plan.n_pages.sum())
            pairs = self._layers * self._kv_heads
            for place, count in enumerate((rows, pages, pages)):
                self._looked_at[place] += pairs * count
        if self.max_active_fraction is not None and plan is not self._last:
            self._last = plan
            fractions = (plan.n_select / plan.n_pages)[sparse].tolist()
            self.max_active_fraction = max([self.max_active_fraction, *fractions])

    def host_totals(self) -> dict[str, int]:
        """Return what is counted on the host."""
        return self._of_selection(*self._looked_at) if self._looked_at else {}

    def device_totals(self, counted: Sequence[int]) -> dict[str, int]:
        """Name what is counted on the device, ``size`` numbers."""
        return {
            **({} if self._looked_at else self._of_selection(*counted[:SELECT_STATS])),
            **dict(zip(self._more_counts, counted[SELECT_STATS:], strict=True)),
        }

    def addable(self, totals: Mapping[str, int]) -> dict[str, int]:
        """Return the counts with pages of the smallest size, of which those of several methods may be added up."""
        return {name: count * (self._unit if name in PAGES else 1) for name, count in totals.items()}

    def _of_selection(self, selections: int, attended: int, held: int, overflowed: int) -> dict[str, int]:
        return {
            "sparse_layer_rows": selections // self._kv_heads,
            "pages_attended": attended,
            "pages_held": held,
            "overflowed_layer_rows": overflowed // self._kv_heads,
        }


def sum_counts(totals: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Add up counts by their names."""
    found: dict[str, int] = {}
    for counts in totals:
        for name, count in counts.items():
            found[name] = found.get(name, 0) + count
    return found
