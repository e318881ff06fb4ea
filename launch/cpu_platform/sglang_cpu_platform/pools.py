"""KV pool and page allocator where SGLang's own need a GPU or do not fit its out-of-tree call."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MLATokenToKVPool


class IndexedLatentPool(DSATokenToKVPool):
    """SGLang's pool of latents and indexer keys, whose keys are written without Triton; for latents see ``patches``."""

    def set_index_k_scale_buffer(
        self, layer_id: int, loc: torch.Tensor, index_k: torch.Tensor, index_k_scale: torch.Tensor
    ) -> None:
        """Write the indexer's keys ``[tokens, 128]`` e4m3 and their scales ``[tokens]`` float32 to the slots `loc`."""
        keys, scales = self.index_views(layer_id)
        page, place = loc // self.page_size, loc % self.page_size
        keys[page, place] = index_k.view(torch.uint8)
        scales[page, place] = index_k_scale

    def index_views(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys ``[pages, page_size, 128]`` uint8 and scales ``[pages, page_size]`` float32 within a layer's pages.

        A page holds the keys of all its tokens, and then their scales.
        """
        buffer = self.index_k_with_scale_buffer[layer_id - self.start_layer]
        width = self.page_size * self.index_head_dim
        keys = buffer[:, :width].unflatten(1, (self.page_size, self.index_head_dim))
        return keys, buffer[:, width:].view(torch.float32)

    def index_keys(self, layer_id: int, slots: torch.Tensor) -> torch.Tensor:
        """The indexer's keys of some slots, scaled: ``[tokens, 128]`` float32."""
        keys, scales = self.index_views(layer_id)
        page, place = slots // self.page_size, slots % self.page_size
        return keys[page, place].view(torch.float8_e4m3fn).float() * scales[page, place, None]


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
