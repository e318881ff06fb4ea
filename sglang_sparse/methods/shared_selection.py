"""The selection of each layer for a round's first draft; the later drafts attend to it as well.

Tokens that follow one another need nearly the same pages, and a draft that selects none reads no summaries. Source:
contextual locality, TriForce (arXiv 2404.11912), section 3.2, which selects anew after some rounds, here each round.
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

    Rows share this memory evenly, so that lists fit unless a row is much longer than the others or attends to nearly
    all its pages, or the pool has few pages for each row. The CUDA graph of a first draft writes it, that of a later
    one reads it.

    Args:
        layers: the sparse layers.
        kv_heads: KV heads of this rank.
        num_pages: pages of the KV pool with its dummy page 0.
        page_size: tokens per page.
        later: most drafts behind the first one of a round.
        device: of the KV pool.

    Attributes:
        rows: of the batch whose lists these are, with those that pad a graph; 0 where nothing is stored.
        reused: whether the pass that runs, or is captured, attends to these lists.
    """

    def __init__(
        self, layers: Collection[int], kv_heads: int, num_pages: int, page_size: int, later: int, device: str
    ) -> None:
        self._place = {layer: place for place, layer in enumerate(sorted(layers))}
        self._kv_heads, self._page_size, self._later = kv_heads, page_size, later
        entries = -(-num_pages * kv_heads // ALIGNED) * ALIGNED
        self._memory = torch.zeros(len(layers), entries, dtype=torch.int32, device=device)
        self.rows, self.reused = 0, False

    @property
    def nbytes(self) -> int:
        """Bytes of all lists."""
        return self._memory.nbytes

    def _width(self, rows: int) -> int:
        # The counts take an entry of each list.
        return max(0, self._memory.shape[1] // (self._kv_heads * rows) - 1) // ALIGNED * ALIGNED

    def fits(self, rows: int, longest: int) -> bool:
        """Whether there is room for so many rows that attend to at most ``longest`` pages in the first draft."""
        return longest + self._later <= self._width(rows)

    def begin_capture(self, rows: int, reused: bool) -> None:
        """Prepare to capture a graph of so many rows, all of them padding; see the attributes."""
        self.rows = rows if self._width(rows) else 0
        self.reused = reused and self.rows > 0
        self._memory.zero_()

    def _parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return lists ``[layers, rows, kv_heads, width]`` and their counts ``[layers, rows, kv_heads]``, in place."""
        lists, width = self.rows * self._kv_heads, self._width(self.rows)
        shape = (self.rows, self._kv_heads)
        indices = self._memory[:, : lists * width].unflatten(1, (*shape, width))
        return indices, self._memory[:, lists * width :][:, :lists].unflatten(1, shape)

    def store(self, layer_id: int, selected: SparseIndices) -> None:
        """Copy what a layer has selected for the first draft, if `rows` says that it fits."""
        assert selected.unit == "page"
        if not self.rows:
            return
        (indices, counts), place = self._parts(), self._place[layer_id]
        width = min(indices.shape[3], selected.indices.shape[2])
        indices[place, :, :, :width].copy_(selected.indices[:, :, :width])
        counts[place].copy_(selected.counts)

    def read(self, layer_id: int, slots: torch.Tensor) -> SparseIndices:
        """Return what a later draft attends to in a layer: in the first one, lists of all layers are extended.

        Args:
            layer_id: the layer; they come in order.
            slots: ``[rows]`` int64, where the rows have their newest tokens; any for those that pad.
        """
        (indices, counts), place = self._parts(), self._place[layer_id]
        if place == 0:
            self._extend(indices, counts, slots)
        return SparseIndices(indices[place], counts[place])

    def _extend(self, indices: torch.Tensor, counts: torch.Tensor, slots: torch.Tensor) -> None:
        """Append the page of each row's newest token, where it has just begun."""
        page = (slots // self._page_size).to(torch.int32)[:, None]
        end = (counts - 1).clamp_min(0).to(torch.int64)
        last = indices.gather(3, end[..., None])[..., 0]
        begun = (counts > 0) & (last != page)
        indices.scatter_(3, (end + begun)[..., None], torch.where(begun, page, last)[..., None])
        counts += begun
