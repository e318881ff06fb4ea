"""Checks of the invariants between two iterations of the event loop."""

from __future__ import annotations

from typing import Any

import sessions
import torch
from engine import Engine

from sglang_sparse.debug.kv_compare import stale_summaries
from sglang_sparse.debug.tree_check import TreeReport, check_tree, compare_with_recomputed
from sglang_sparse.scheduler import exact_kv
from sglang_sparse.scheduler.request_fields import committed_len, pool_row, protected_len
from sglang_sparse.scheduler.request_state import state_of


class BrokenInvariantError(AssertionError):
    """A schedule reached a state that must not exist."""


class LostPageError(BrokenInvariantError):
    """A page or a request slot without an owner, or with several."""


def holders(scheduler: Any) -> list[Any]:
    """The requests that hold KV: decoding, just prefilled, or between two chunks."""
    found = {}
    for batch in (scheduler.running_batch, scheduler.last_batch):
        found.update((id(request), request) for request in (batch.reqs if batch is not None else ()))
    if scheduler.chunked_req is not None:
        found[id(scheduler.chunked_req)] = scheduler.chunked_req
    return [request for request in found.values() if pool_row(request) is not None]


def waiting(scheduler: Any) -> list[Any]:
    """The requests that wait. Those of a decode server may hold KV already, that arrives or that they took back."""
    found = [*scheduler.waiting_queue]
    if (before := scheduler.disagg_decode_prealloc_queue) is not None:
        handed = (*before.queue, *scheduler.disagg_decode_transfer_queue.queue)
        found += [*(each.req for each in handed), *before.retracted_queue]
    return found


def row_of(engine: Engine, request: Any, end: int) -> torch.Tensor:
    """The slots ``[end]`` int64 of a request's first tokens."""
    return engine.scheduler.req_to_token_pool.req_to_token[pool_row(request), :end].to(torch.int64)


def check_ownership(engine: Engine) -> None:
    """Every page has exactly one owner: the free list, the tree, or one request; and no request slot is lost."""
    scheduler, size = engine.scheduler, engine.options.page_size
    allocator = scheduler.token_to_kv_pool_allocator
    owners = (*holders(scheduler), *waiting(scheduler), *sessions.kept(scheduler))
    # A session's turn has the session's record.
    requests = {id(each.kv): each for each in reversed(owners) if pool_row(each) is not None}.values()
    # Neither core's nodes are walked: each says by itself which slots it holds.
    tree = scheduler.tree_cache.all_values_flatten()[::size] // size
    in_tree = set(tree.tolist())
    private = []
    for request in requests:
        row = row_of(engine, request, request.kv.kv_allocated_len)[::size] // size
        shared = protected_len(request) // size
        if is_compacted(request):
            if row[:shared].any():
                raise LostPageError(f"{request.rid} has let go of its prompt and still names its pages")
        elif not in_tree.issuperset(row[:shared].tolist()):
            raise LostPageError(f"{request.rid} reads pages as a shared prefix that the tree does not hold")
        private.append(row[shared:])
    owned = torch.cat([allocator.get_all_free_pages(), tree, *private]).sort().values
    expected = torch.arange(1, engine.options.pages + 1)
    if not torch.equal(owned, expected):
        counts = torch.bincount(owned, minlength=len(expected) + 1)[1:]
        lost, doubled = ((counts == 0).nonzero() + 1).flatten(), ((counts > 1).nonzero() + 1).flatten()
        raise LostPageError(f"pages {lost.tolist()} have no owner, pages {doubled.tolist()} several")
    rows = scheduler.req_to_token_pool
    # The first is for padding.
    size = len(rows.req_to_token) - 1
    if len(rows.free_slots) + len(requests) != size:
        raise LostPageError(f"{size} request slots: {len(rows.free_slots)} free, {len(requests)} in use")


def is_compacted(request: Any) -> bool:
    """Whether a request has let go of its prompt."""
    state = state_of(request)
    return state is not None and state.compacted


def check_summaries(engine: Engine) -> None:
    """The summaries of every page that a request wrote are those of the page's keys."""
    size = engine.options.page_size
    ends = []
    kept = sessions.kept(engine.scheduler)
    for request in (*holders(engine.scheduler), *kept):
        row = row_of(engine, request, committed_len(request))
        if request in kept:
            # The next turn writes the rest of its last page, and the page's summary with it.
            row = row[: len(row) // size * size]
        if is_compacted(request):
            # Its first page may begin with blocks that nobody uses.
            row = row[protected_len(request) + size :]
        last = row[size - 1 :: size]
        # A page that is not full may have keys of drafts that were wrong, which the next round overwrites.
        ends.append(torch.cat([last, row[-1:]]) if len(row) % size and not engine.options.drafts else last)
    if not sum(map(len, ends)):
        return
    slots = torch.cat(ends)
    stale = stale_summaries(engine.runner.token_to_kv_pool, slots)
    if stale.any():
        raise BrokenInvariantError(f"the summaries of pages {(slots[stale] // size).tolist()} are not of their keys")


def check_exact_lengths(engine: Engine) -> None:
    """protected <= exact <= committed for every request that ran; a verification writes more than it commits."""
    for request in holders(engine.scheduler):
        exact = exact_kv.shareable_len(request)
        if exact is None and not engine.options.drafter:
            raise BrokenInvariantError(f"{request.rid} holds KV and has no exact length")
        if engine.options.drafts:
            exact = exact_len(request)
        if not protected_len(request) <= exact <= committed_len(request):
            raise BrokenInvariantError(
                f"{request.rid}: protected {protected_len(request)}, exact {exact}, committed {committed_len(request)}"
            )


def exact_len(request: Any) -> int:
    """Return the length of a request's exact and committed KV: a verification writes more than it commits."""
    exact, committed = exact_kv.shareable_len(request), committed_len(request)
    return committed if exact is None else min(exact, committed)


def check_running_kv(engine: Engine) -> float:
    """KV below the exact length of every request is that of a cold run alone; returns the worst difference."""
    worst = 0.0
    for request in holders(engine.scheduler):
        if is_compacted(request):
            # There is no room for the rest of it; ``compaction.py`` compares what it holds.
            continue
        end = exact_len(request)
        tokens = [*request.origin_input_ids, *request.output_ids][:end]
        # The newest token of an overlapped step is only on the device; the step that wrote its KV ends with it.
        end = len(tokens)
        state = state_of(request)
        # A group that two passes shared has KV of its own.
        compared = torch.arange(end if state.split_group is None else min(end, state.split_group))
        run = state.options.prefill, len(request.origin_input_ids)
        found = compare_with_recomputed(engine.runner, tokens, row_of(engine, request, end), compared, prefill=run)
        worst = max(worst, found)
    running = {id(request.kv) for request in holders(engine.scheduler)}
    for session in sessions.kept(engine.scheduler):
        if id(session.kv) not in running:
            end = committed_len(session)
            found = compare_with_recomputed(
                engine.runner, session.tokens[:end], row_of(engine, session, end), torch.arange(end)
            )
            worst = max(worst, found)
    return worst


def check_step(engine: Engine) -> TreeReport:
    """All that is cheap, and the pages that entered the tree since the last step."""
    check_ownership(engine)
    check_exact_lengths(engine)
    check_summaries(engine)
    if engine.compaction:
        engine.compaction.check(holders(engine.scheduler))
        engine.compaction.count_evicted(holders(engine.scheduler), engine.scheduler.tree_cache)
        last = engine.scheduler.last_batch
        if last is not None and last.forward_mode.is_decode():
            engine.compaction.check_sparse(last)
    return check_tree(engine.scheduler)
