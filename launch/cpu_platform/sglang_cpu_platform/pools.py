"""KV pool and page allocator where SGLang's own need a GPU or do not fit its out-of-tree call."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool


class MLAPool(MLATokenToKVPool):
    """Latent KV pool without the ``index_head_dim`` that SGLang passes to every out-of-tree MLA pool."""

    def __init__(self, *args: Any, index_head_dim: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class TorchPagedAllocator(PagedTokenToKVPoolAllocator):
    """Page allocator in PyTorch; the base class launches Triton kernels in these two methods.

    Both count the pages first and return None without taking any if too few are free, which makes the scheduler
    retract requests.
    """

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """Slots for tokens ``prefix_lens[i] .. seq_lens[i] - 1`` of every row.

        Args:
            prefix_lens, seq_lens: ``[rows]`` int64, and their ``_cpu`` twins with the same values.
            last_loc: ``[rows]`` int64, slot of the last prefix token, -1 without a prefix.
            extend_num_tokens: sum of ``seq_lens - prefix_lens``.

        Returns:
            ``[extend_num_tokens]`` int64 slots in row order, or None if too few pages are free.
        """
        owned = -(-prefix_lens // self.page_size)
        new = -(-seq_lens // self.page_size) - owned
        total = int(new.sum())
        if not self._reserve(total):
            return None
        counts = seq_lens - prefix_lens
        row = torch.repeat_interleave(torch.arange(len(counts)), counts)
        step = torch.arange(extend_num_tokens) - (counts.cumsum(0) - counts)[row]
        position = prefix_lens[row] + step
        page = position // self.page_size - owned[row]
        slots = last_loc[row] + 1 + step
        fresh = page >= 0
        first = (new.cumsum(0) - new)[row]
        slots[fresh] = self.free_pages[(first + page)[fresh]] * self.page_size + position[fresh] % self.page_size
        self.free_pages = self.free_pages[total:]
        return slots

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """One slot per row for token ``seq_lens[i] - 1``; shapes and result as in ``alloc_extend``."""
        fresh = (seq_lens - 1) % self.page_size == 0
        total = int(fresh.sum())
        if not self._reserve(total):
            return None
        slots = last_loc.to(torch.int64) + 1
        slots[fresh] = self.free_pages[:total] * self.page_size
        self.free_pages = self.free_pages[total:]
        return slots

    def _reserve(self, pages: int) -> bool:
        if self.need_sort and pages > len(self.free_pages):
            self.merge_and_sort_free()
        return pages <= len(self.free_pages)
