"""What the layers selected for the first draft of a round, which the drafts behind it attend to as well.

A few tokens later nearly the same pages are best, and a draft that chooses none reads no summaries. No source: MagicDec
(arXiv 2408.11049) drafts with one selection for a whole answer, the paper's ReSA has one for each token.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from sglang_sparse.methods.base import SparseIndices

# Lists begin at multiples of 64 bytes, which lets kernels load several entries at once.
ALIGNED = 16
# Of a page of the KV pool, for each sparse layer and KV head.
SHARED_BYTES = 4


class SharedSelection:
    """The lists of one batch, of all sparse layers, in one entry for each page of the KV pool and KV head.

    Rows share that memory evenly, so that lists fit unless one row is much longer than the others or attends to much
    more. The CUDA graph of a first draft writes it, that of a later one reads it.

    Args:
        layers: the sparse layers.
        kv_heads: KV heads of this rank.
        num_pages: pages of the KV pool with its dummy page 0.
        page_size: tokens per page.
        later: most drafts behind the first one of a round.
        device: of the KV pool.

    Attributes:
        rows: of the batch whose lists these are, with those that pad a graph; 0 where they did not fit.
        reused: whether the pass that runs, or is recorded, attends to these lists.
    """

    def __init__(
        self, layers: Collection[int], kv_heads: int, num_pages: int, page_size: int, later: int, device: str
    ) -> None:
        self._place = {layer: place for place, layer in enumerate(sorted(layers))}
        self._kv_heads, self._page_size, self._later = kv_heads, page_size, later
        self._memory = torch.zeros(len(layers), num_pages * kv_heads, dtype=torch.int32, device=device)
        self.rows, self.reused = 0, False

    @property
    def nbytes(self) -> int:
        """Bytes of all lists."""
        return self._memory.nbytes

    def _width(self, rows: int) -> int:
        # The counts take an entry of each list.
        return max(0, self._memory.shape[1] // (self._kv_heads * rows) - 1) // ALIGNED * ALIGNED

    def _parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return lists ``[layers, rows, kv_heads, width]`` and their counts ``[layers, rows, kv_heads]``, in place."""
        lists, width = self.rows * self._kv_heads, self._width(self.rows)
        shape = (self.rows, self._kv_heads)
        indices = self._memory[:, : lists * width].unflatten(1, (*shape, width))
        return indices, self._memory[:, lists * width :][:, :lists].unflatten(1, shape)

    def begin(self, rows: int, longest: int) -> None:
        """Make room for a batch in which a row attends to at most ``longest`` pages; ``rows`` as the attribute."""
        self.rows = rows if longest + self._later <= self._width(rows) else 0

    def record(self, rows: int, reused: bool) -> None:
        """Prepare to record a graph of so many rows, all of them padding."""
        self.rows = rows if self._width(rows) else 0
        self.reused = reused and self.rows > 0
        self._memory.zero_()

    def keep(self, layer_id: int, selected: SparseIndices) -> None:
        """Copy what a layer has selected for the first draft, unless it did not fit."""
        if not self.rows:
            return
        (indices, counts), place = self._parts(), self._place[layer_id]
        width = min(indices.shape[3], selected.indices.shape[2])
        indices[place, :, :, :width].copy_(selected.indices[:, :, :width])
        counts[place].copy_(selected.counts)

    def of(self, layer_id: int) -> SparseIndices:
        """Return what a later draft attends to."""
        (indices, counts), place = self._parts(), self._place[layer_id]
        return SparseIndices(indices[place], counts[place])

    def extend(self, slots: torch.Tensor) -> None:
        """Append the page that a later draft has begun to the lists of its row, in all layers.

        Args:
            slots: ``[rows]`` int64, where the rows have their newest tokens; whatever those have that pad.
        """
        indices, counts = self._parts()
        page = (slots // self._page_size).to(torch.int32)[:, None]
        end = (counts - 1).clamp_min(0).to(torch.int64)
        last = indices.gather(3, end[..., None])[..., 0]
        begun = (counts > 0) & (last != page)
        indices.scatter_(3, (end + begun)[..., None], torch.where(begun, page, last)[..., None])
        counts += begun
