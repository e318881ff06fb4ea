"""Compaction: what a request keeps of its prompt moves to pages of its own, and the prompt may leave the KV pool.

Source: the first stage of RocketKV (arXiv:2502.14051), permanent KV cache eviction. Unlike there, the prompt stays in
the radix tree, without this request's lock: the tree evicts it when it needs the memory, and other requests find it
until then.

The private pages take the place of the prompt's last ones in the request's row of ``req_to_token``: the blocks that
each KV head keeps come to lie just before the window, side by side, so that positions, lengths, selection and
attention stay as they are. What of the row lies before them names no page any more, and ``cache_protected_len``, where
the request's own pages begin, moves back to them, which makes SGLang's accounting and release come out right.

When a request lets go is ``compact_running.py``'s to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglang_sparse.scheduler.request_fields import leave_tree, pool_row, prefill_end, protected_len

if TYPE_CHECKING:
    from sglang_sparse.config.request_options import RequestState
    from sglang_sparse.methods.base import ModelShape
    from sglang_sparse.methods.roles import KeepMethod
    from sglang_sparse.pools import AuxPools

# Tokens whose keys, or values, are copied at once.
COPIED_AT_ONCE = 1024
# Indices of a token that is copied, by KV head: positions and slots, and what comes in between.
INDEX_BYTES = 40


@dataclass(frozen=True)
class Span:
    """Which blocks of a request are copied, and where to: positions do not change but for the kept blocks.

    Attributes:
        start: position of the first private slot, at a page's end.
        end: behind the last one: the end of the last full page that prefill wrote.
        kept: blocks that each KV head keeps.
        boundary: the logical block behind those that are kept, when they are copied; the window's begin here.
    """

    start: int
    end: int
    kept: int
    boundary: int


@dataclass(frozen=True)
class Move:
    """A request whose KV is copied before the next pass.

    Attributes:
        span: what and where to.
        place: its row in SGLang's request pool.
        pages: ``[pages]``, the physical pages that its prefill wrote or found.
        slots: ``[end - start]`` int64, the private slots.
    """

    span: Span
    place: int
    pages: torch.Tensor
    slots: torch.Tensor


class Compaction:
    """Copies what requests keep, and counts them.

    Args:
        method: the server's method.
        aux: holds what the requests keep, and the entries of the private pages.
        kv_pool: SGLang's KV pool.

    Attributes:
        requests: that have let go of their prompt.
        freed_tokens: KV tokens that they no longer hold, in all.
        waits: decode steps at which a request had no room for its copy, summed over requests.
    """

    def __init__(self, method: KeepMethod, aux: AuxPools, kv_pool: Any):
        self.requests = 0
        self.freed_tokens = 0
        self.waits = 0
        self._block, self._page = method.block_size, aux.page_size
        self._aux = aux
        self._kept = aux.require_kept(min(aux.layers))
        self._keys = {layer: kv_pool.get_key_buffer(layer) for layer in sorted(aux.layers)}
        self._values = {layer: kv_pool.get_value_buffer(layer) for layer in sorted(aux.layers)}
        self._moves: list[Move] = []

    def span(self, request: Any, state: RequestState) -> Span | None:
        """Return what of a request would be copied; None where that frees nothing."""
        kept, first_visible = state.kept
        end = (prefill_end(request) or 0) // self._page * self._page
        boundary = min(first_visible, end // self._block)
        start = (boundary - kept) * self._block // self._page * self._page
        return Span(start, end, kept, boundary) if first_visible and start > 0 else None

    def let_go(self, request: Any, span: Span, tree: Any, reserve: int) -> bool:
        """Give a request private pages and its prompt back to the tree, or what of it was its own to the pool.

        On the scheduler's stream, which by now is behind what earlier passes read of ``req_to_token``.

        Args:
            request: SGLang's ``Req``.
            span: what it copies.
            tree: SGLang's radix cache, or what is in its place without one.
            reserve: tokens to leave free.

        Returns:
            Whether there was room; else nothing has changed.
        """
        from sglang.srt.mem_cache.common import evict_from_tree_cache

        allocator, table = tree.token_to_kv_pool_allocator, tree.req_to_token_pool
        need = span.end - span.start
        if allocator.available_size() + tree.evictable_size() < need + reserve:
            return False
        evict_from_tree_cache(tree, need)
        slots = allocator.alloc(need)
        if slots is None:
            return False
        place, own = pool_row(request), protected_len(request)
        row = table.req_to_token[place]
        self._moves.append(Move(span, place, row[: prefill_end(request) : self._page] // self._page, slots))
        allocator.free_segment(row[own : span.end], start_pos=own)
        # Page 0 belongs to nobody.
        table.write((place, slice(0, span.start)), 0)
        table.write((place, slice(span.start, span.end)), slots.to(row.dtype))
        leave_tree(request, tree, span.start)
        self.requests += 1
        self.freed_tokens += span.start
        return True

    def run(self) -> None:
        """Launch the copies that are due, on the stream of the passes, before anything of the next pass.

        One request after the other, in the order in which they let go: the private pages of a later one may be those
        of an earlier one's prompt, which the tree has evicted for it.
        """
        moves, self._moves = self._moves, []
        for move in moves:
            for tensor in (move.pages, move.slots):
                if tensor.is_cuda:
                    # It was made on the scheduler's stream.
                    tensor.record_stream(torch.cuda.current_stream())
            for layer in self._keys:
                self._copy(layer, move)
            first = (move.span.boundary - move.span.kept) * self._block - move.span.start
            self._aux.refresh(self._keys, move.slots[first + self._block - 1 :: self._block].contiguous())

    def _copy(self, layer: int, move: Move) -> None:
        span, kept = move.span, self._kept.blocks[layer][move.place, :, : move.span.kept]
        heads = torch.arange(kept.shape[0], device=kept.device)[:, None]
        for blocks, target in self._pieces(kept, span):
            to = move.slots[target * self._block - span.start :][: blocks.shape[1] * self._block]
            tokens = torch.arange(self._block, device=kept.device)
            positions = (blocks[:, :, None] * self._block + tokens).flatten(1)
            slots = move.pages[positions // self._page] * self._page + positions % self._page
            for cache in (self._keys[layer], self._values[layer]):
                cache[to, heads] = cache[slots, heads]
        kept.copy_(torch.arange(span.boundary - span.kept, span.boundary, device=kept.device))

    def _pieces(self, kept: torch.Tensor, span: Span) -> Iterator[tuple[torch.Tensor, int]]:
        """Logical blocks by KV head ``[kv_heads, n]`` that are copied at once, and where the first of them comes to."""
        step = max(1, COPIED_AT_ONCE // self._block)
        for first in range(0, span.kept, step):
            yield kept[:, first : first + step], span.boundary - span.kept + first
        for first in range(span.boundary, span.end // self._block, step):
            last = min(first + step, span.end // self._block)
            yield torch.arange(first, last, device=kept.device).expand(len(kept), -1), first

    def snapshot(self) -> dict[str, int]:
        """Return the counts."""
        return {"compacted": self.requests, "freed_tokens": self.freed_tokens, "compact_waits": self.waits}


def scratch_bytes(method: KeepMethod, model: ModelShape) -> int:
    """Return an upper bound of the GPU memory that copying takes, in bytes; 0 where nothing is copied."""
    if not method.compacts:
        return 0
    tokens = max(COPIED_AT_ONCE, method.block_size)
    return model.num_kv_heads * tokens * (model.head_dim * model.kv_dtype.itemsize + INDEX_BYTES)
