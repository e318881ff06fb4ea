"""Compaction: copy the blocks that a request keeps of its prompt to private pages, and release the prompt.

Source: the first stage of RocketKV (arXiv:2502.14051), permanent KV cache eviction. Unlike there, the prompt stays in
the radix tree, without this request's lock: the tree evicts it when it needs the memory, and other requests find it
until then.

In the request's row of ``req_to_token`` the private pages replace the prompt's last ones: the blocks that each KV head
keeps lie directly before the window, so that positions, lengths, selection and attention stay as they are. The entries
before them name no page any more, and ``cache_protected_len``, where the request's own pages begin, moves back to
them, so that SGLang counts and releases the right pages.

A prompt and its private copy exist together for a moment. Room for one copy is enough for a whole batch, because each
released prompt makes room for the next copy; SGLang leaves that much free when it admits a request with others. If
there is still no room, the request goes on as it is and tries again at its next step: nobody waits for it, and a
request alone is admitted as always. A copy leaves a page for each row's next token, so that no request is retracted
for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang_sparse.attention import memory
from sglang_sparse.attention.plan import plan_decode
from sglang_sparse.attention.protocols import KVPool, PrefillAdder, RadixTree, Req, ScheduleBatch, Scheduler
from sglang_sparse.config.settings import hooked_settings_of
from sglang_sparse.methods.roles import PromptSelector
from sglang_sparse.scheduler.request_fields import (
    leave_tree,
    locked_node,
    pool_row,
    prefill_end,
    prefix_len,
    protected_len,
)
from sglang_sparse.scheduler.request_state import ensure_state, options_of, state_of

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import TreePathNodeInfo

    from sglang_sparse.config.settings import Settings
    from sglang_sparse.methods.aux_buffers import AuxBuffers
    from sglang_sparse.methods.roles import PromptSelector
    from sglang_sparse.scheduler.request_state import RequestState


@dataclass(frozen=True)
class Span:
    """The blocks of a request that are copied, and their places: only the kept blocks change positions.

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
        requests: that have released their prompt.
        freed_tokens: KV tokens that they no longer hold, in all.
        waits: decode steps at which a request had no room for its copy, summed over requests.
    """

    def __init__(self, method: PromptSelector, aux: AuxBuffers, kv_pool: KVPool):
        self.requests = 0
        self.freed_tokens = 0
        self.waits = 0
        self._block, self._page = method.block_size, aux.page_size
        self._aux = aux
        self._kept = aux.require_kept(min(aux.layers))
        self._keys = {layer: kv_pool.get_key_buffer(layer) for layer in sorted(aux.layers)}
        self._values = {layer: kv_pool.get_value_buffer(layer) for layer in sorted(aux.layers)}
        self._moves: list[Move] = []

    def span(self, request: Req, state: RequestState) -> Span | None:
        """Return what of a request would be copied; None where that frees nothing."""
        kept, first_visible = state.kept
        end = (prefill_end(request) or 0) // self._page * self._page
        boundary = min(first_visible, end // self._block)
        start = (boundary - kept) * self._block // self._page * self._page
        return Span(start, end, kept, boundary) if first_visible and start > 0 else None

    def release_prompt(self, request: Req, span: Span, tree: RadixTree, reserve: int) -> bool:
        """Give a request private pages and its prompt back to the tree, or what of it was its own to the pool.

        On the scheduler's stream, which by now is behind what earlier passes read of ``req_to_token``.

        Args:
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
        assert place is not None
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

        One request after the other, in the order of their releases: a later one may take pages that the tree has
        evicted from an earlier one's prompt.
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
        step = max(1, memory.COPIED_AT_ONCE // self._block)
        for first in range(0, span.kept, step):
            yield kept[:, first : first + step], span.boundary - span.kept + first
        for first in range(span.boundary, span.end // self._block, step):
            last = min(first + step, span.end // self._block)
            yield torch.arange(first, last, device=kept.device).expand(len(kept), -1), first

    def snapshot(self) -> dict[str, int]:
        """Return the counts."""
        return {"compacted": self.requests, "freed_tokens": self.freed_tokens, "compact_waits": self.waits}


def compact_running(running: ScheduleBatch | None, scheduler: Scheduler, *_: object) -> None:
    """After ``Scheduler.update_running_batch``: let requests go of prompts that are in the tree by now.

    A request does so at the first step at which it would attend to a part of what it sees: in none that follows it
    could attend to all, as it only grows, and from then on its batches run sparse whatever the crossover says.
    """
    settings = hooked_settings_of(scheduler.server_args)
    if running is None:
        # Where memory is short SGLang leaves a step out.
        return
    if settings is None or not (isinstance(settings.method, PromptSelector) and settings.method.compacts):
        return
    backend, tree = scheduler.tp_worker.model_runner.attn_backend, scheduler.tree_cache
    compaction = backend.keeps[0].compaction
    assert isinstance(compaction, Compaction)
    states = [ensure_state(settings, backend.counters.rectify, request) for request in running.reqs]
    ready = {
        row: span
        for row, (request, state) in enumerate(zip(running.reqs, states, strict=True))
        if _prefilled(request, state, tree) and (span := compaction.span(request, state)) is not None
    }
    if not ready:
        return
    forced = any(state.compacted for state in states)
    plan = plan_decode(backend.groups, running.seq_lens_cpu, [state.options for state in states], forced)
    if not plan.sparse:
        return
    reserve = len(states) * tree.page_size
    holders = None
    for row, span in ready.items():
        if not plan.selective[row]:
            continue
        holders = holders or _holders([*running.reqs, *filter(None, [scheduler.chunked_req])], tree)
        if not _frees_memory(running.reqs[row], span, holders, tree):
            continue
        if compaction.release_prompt(running.reqs[row], span, tree, reserve):
            states[row].compacted, holders = True, None
            # There may be room for who waits.
            running.batch_is_full = False
        else:
            compaction.waits += 1


def _holders(requests: list[Req], tree: RadixTree) -> Counter[tuple[int, int]]:
    """Count who holds each node of the tree, by its id and length."""
    locks = [node for request in requests if (node := locked_node(request)) is not None]
    paths = tree.tree_core.collect_path_info(locks)
    return Counter(node for path in paths for node in _nodes(path))


def _nodes(path: Sequence[TreePathNodeInfo]) -> list[tuple[int, int]]:
    return [(info.node_id, info.path_end - info.path_start) for info in path]


def _frees_memory(request: Req, span: Span, holders: Counter[tuple[int, int]], tree: RadixTree) -> bool:
    """Whether less KV is held when all holders of this prompt release it.

    A shared page is free only after its last holder has released it, and each holder takes a copy.
    """
    node = locked_node(request)
    own = () if node is None else tree.tree_core.collect_path_info([node])[0]
    shared = sum(length // holders[node_id, length] for node_id, length in _nodes(own))
    # The pages up to ``span.end`` that are its own are given back, and as many are taken from ``span.start`` on.
    return shared + span.start > protected_len(request)


def _prefilled(request: Req, state: RequestState, tree: RadixTree) -> bool:
    """Whether the results of a request's prefill are processed, which is when SGLang puts its prompt into the tree."""
    end = prefill_end(request)
    if state.compacted or not state.kept[1] or end is None:
        return False
    return tree.disable or end <= prefix_len(request)


@contextmanager
def room_for_a_copy(settings: Settings | None, adder: PrefillAdder, request: Req) -> Iterator[None]:
    """Let SGLang believe, while it decides on a request, that less memory is left: by the largest copy to come.

    Without it a few prompts that fill the pool would hold it until one of them ends.

    Args:
        settings: the server's.
        request: that would run together with those that are admitted already.
    """
    method = settings.method if settings else None
    if settings is None or not (isinstance(method, PromptSelector) and method.compacts):
        yield
        return
    room, sampling_params = _reserved_tokens(settings, method, adder, request), request.sampling_params
    adder.memory_budget.total_offset += room
    adder.memory_budget.current_offset += room
    ignores_eos = sampling_params.ignore_eos
    # Without a radix tree SGLang would look ahead to where such requests end, and count whole prompts as given back.
    sampling_params.ignore_eos = False
    try:
        yield
    finally:
        sampling_params.ignore_eos = ignores_eos
        adder.memory_budget.total_offset -= room
        adder.memory_budget.current_offset -= room


def _reserved_tokens(settings: Settings, method: PromptSelector, adder: PrefillAdder, request: Req) -> int:
    page = adder.page_size
    others = [*adder.can_run_list, *(adder.running_batch.reqs if adder.running_batch is not None else ())]
    # To a request that takes the place of others SGLang has promised theirs, and forgets them where it does not fit.
    if not others or adder.preempt_list:
        return 0
    most = method.max_kept * method.block_size + method.window_tokens + 2 * page
    copies = [
        most + len(other.output_ids) for other in (request, *others) if _will_release_prompt(settings, method, other)
    ]
    return max(copies) + (len(others) + 1) * page if copies else 0


def _will_release_prompt(settings: Settings, method: PromptSelector, request: Req) -> bool:
    state = state_of(request)
    if state is not None and state.compacted:
        return False
    return options_of(settings, request).sparse and method.kept(len(request.origin_input_ids))[1] > 0
