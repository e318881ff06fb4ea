"""The exact part of a request's KV, and the rule that only exact KV enters the radix tree.

``shareable_len`` of a request: KV of positions ``[0, shareable_len)`` equals what dense attention over the same tokens
would have written. A dense pass over tokens that follow exact KV writes exact KV; a sparse decode step does not, unless
the method is ``exact``: then sparse attention is what the model was trained for. What a sparse prefill writes counts as
exact, see ``scheduler/prefill_chunks.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING

from sglang_sparse.attention.native_counts import native_counts
from sglang_sparse.attention.plan import PLAN, dense_plan, plan_decode
from sglang_sparse.attention.protocols import ForwardBatch, ModelRunner, RadixTree, Req, ScheduleBatch
from sglang_sparse.config.settings import current_settings, settings_of
from sglang_sparse.scheduler import arrivals, forced_tokens, prefill_chunks, prompt_windows
from sglang_sparse.scheduler.due_rows import Rectification
from sglang_sparse.scheduler.partial_batch import BOUNDED, DENSE_PASS, LATER
from sglang_sparse.scheduler.request_fields import committed_len, free_tokens, has_backup
from sglang_sparse.scheduler.request_state import RequestState, ensure_state, options_of, state_of

if TYPE_CHECKING:
    from sglang_sparse.attention.backend import SparseAttentionBackend
    from sglang_sparse.attention.plan import DecodePlan

_RETRACTED = (
    "The KV cache is full, and with deterministic inference sglang_sparse cannot run this request again where it was: "
    "its output would depend on the other requests. Send it again, and start the server with a lower "
    "--max-running-requests or a higher --schedule-conservativeness."
)


def begin_pass(
    forward_batch: ForwardBatch, cls: type, batch: ScheduleBatch, model_runner: ModelRunner, **_: object
) -> None:
    """After ``ForwardBatch.init_new``: decide which rows of a decode pass run sparse, and move the exact lengths.

    The pass is launched before anything that reads the KV it writes, on the same stream, so the lengths may move now.
    """
    settings = settings_of(model_runner.server_args)
    if settings is None or model_runner.is_draft_worker:
        return
    if settings.passes_through:
        native_counts(model_runner, settings).follow(forward_batch, batch)
        forced_tokens.prepare(forward_batch, batch, [options_of(settings, request) for request in batch.reqs])
        return
    backend = model_runner.attn_backend
    states = [ensure_state(settings, backend.counters.rectify, request) for request in batch.reqs]
    forced_tokens.prepare(forward_batch, batch, [state.options for state in states])
    prefill_chunks.begin(backend, forward_batch, batch)
    prompt_windows.begin(backend, forward_batch, batch)
    mode = batch.forward_mode
    step = backend.rectifying
    if isinstance(step, Rectification) and step.outer_batch is batch:
        # Only its sampling runs; the passes over its rows come here one by one.
        return
    if batch.spec_algorithm.is_some() and not mode.is_extend_without_speculative() and not backend.verified:
        # What stays of a round was written by its dense pass, and is exact as far as it is committed. Without a decode
        # method no other pass follows the prompt, and the device alone may know the lengths.
        lengths = batch.seq_lens_cpu.tolist() if settings.name else [None] * len(states)
        for state, length in zip(states, lengths, strict=True):
            state.shareable_len = length
    if backend.decodes(mode) or mode.is_extend_without_speculative():
        arrivals.begin(backend, batch, states)
    if backend.decodes(mode):
        _begin_decode(backend, forward_batch, batch, states)
    elif mode.is_extend_without_speculative():
        if backend.exact_states and getattr(batch, DENSE_PASS, False):
            # The states of the others are exact: their newest token alone is not forwarded yet.
            backend.exact_states.restore(batch, [row for row, tokens in enumerate(batch.extend_lens) if tokens > 1])
        for state, prefix, extended in zip(states, batch.prefix_lens, batch.extend_lens, strict=True):
            # A prefix comes from the tree or an earlier chunk, both exact; the rows that decode within a mixed
            # batch may have an approximate tail. A window that is encoded again may end before the exact length.
            exact = prefix if state.shareable_len is None else state.shareable_len
            if exact >= prefix:
                state.shareable_len = max(exact, prefix + extended)
    if backend.verified:
        # SGLang may prepare a pass before it begins, that of a rank without requests too.
        backend.begin(forward_batch)


def _begin_decode(
    backend: SparseAttentionBackend, forward_batch: ForwardBatch, batch: ScheduleBatch, states: Sequence[RequestState]
) -> None:
    plan = _plan(backend, batch, states)
    setattr(forward_batch, PLAN, plan)
    lengths, covered = batch.seq_lens_cpu.tolist(), plan.covered.tolist()
    if backend.exact_states:
        rows = enumerate(zip(states, lengths, covered, strict=True))
        leaving = [
            row
            for row, (state, length, dense) in rows
            if not dense and state.shareable_len == length - 1 and state.options.rectify_interval
        ]
        backend.exact_states.save(batch, leaving)
    exact = all(method.exact for method in backend.groups.methods)
    if not backend.verified:
        for state, length, dense in zip(states, lengths, covered, strict=True):
            if (dense or exact) and state.shareable_len == length - 1:
                state.shareable_len = length
    elif exact:
        # The model was trained for this KV: all that a verification commits may be shared.
        for state in states:
            state.shareable_len = None
    else:
        _move_verified(states, lengths, covered)


def _plan(backend: SparseAttentionBackend, batch: ScheduleBatch, states: Sequence[RequestState]) -> DecodePlan:
    if getattr(batch, DENSE_PASS, False):
        return dense_plan(len(states))
    if getattr(batch, LATER, False) and (plan := backend.plan_later()):
        return plan
    compacted = any(state.compacted for state in states)
    options = [state.options for state in states for _ in range(backend.rows_each)]
    plan = plan_decode(backend.groups, backend.lengths(batch.seq_lens_cpu), options, compacted)
    return plan._replace(bounded=getattr(batch, BOUNDED, False), later=getattr(batch, LATER, False))


def _move_verified(states: Sequence[RequestState], lengths: Sequence[int], covered: Sequence[bool]) -> None:
    """Move the exact lengths by what the last verification has committed, where it ran dense.

    How much that is, is known when the next one begins, so that what the last one of a request commits is not shared.
    A sparse verification writes approximate KV, and a dense one behind it writes nothing better, until a rectifying
    pass has encoded it again.
    """
    for state, length, dense in zip(states, lengths, covered, strict=True):
        if state.verified_from is not None and state.shareable_len == state.verified_from:
            state.shareable_len = length
        state.verified_from = length if dense and state.shareable_len == length else None


def shareable_len(request: Req) -> int | None:
    """Return how many tokens of SGLang's ``Req`` have exact KV, or None: all whose KV is committed."""
    state = state_of(request)
    return None if state is None else state.shareable_len


def forget_exact_length(_: None, request: Req) -> None:
    """After ``Req.reset_for_retract``: its KV is gone, and will be written again by a prefill.

    Unless a decode server of a disaggregated pair keeps a copy, and takes it back as it was.
    """
    state = state_of(request)
    if state is not None:
        if not has_backup(request):
            state.shareable_len = None
        state.verified_from = None
        state.approximate_states.clear()
        state.split_group = state.cut = None
        state.kept, state.compacted = (0, 0), False


def keep_windows(original: Callable[..., None], tree: RadixTree, request: Req, length: int, **kwargs: object) -> None:
    """Around ``BasePrefixCache.evict_sliding_windows``: keep what rectification reads of a request in windowed layers.

    SGLang frees what lies before the window of the newest token. A dense pass begins at the exact length, and reads the
    window before that.
    """
    original(tree, request, kept_from(request, length), **kwargs)


def kept_from(request: Req, length: int) -> int:
    """Return the length before whose window a request of so many tokens needs no KV in windowed layers."""
    state = state_of(request)
    if state is None or state.shareable_len is None or not state.options.rectify_interval:
        return length
    # With EAGLE a key of the tree is a pair of tokens: it ends one token earlier, and may end a page earlier.
    return min(length, state.shareable_len - 1)


def abort_retracted(
    found: tuple[list[Req], float, list[Req]], batch: ScheduleBatch
) -> tuple[list[Req], float, list[Req]]:
    """After ``ScheduleBatch.retract_decode``: abort what it retracts, with deterministic inference.

    A retracted request is prefilled again, so that its KV is exact from then on: its output would depend on the memory
    that others take.

    Args:
        found: the requests that are retracted, SGLang's new estimate, and those that are aborted.
        batch: not used.
    """
    settings = current_settings()
    if settings is None or not settings.name or not settings.decode.deterministic or not found[0]:
        return found
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    retracted, ratio, aborted = found
    for request in retracted:
        request.to_finish = FINISH_ABORT(_RETRACTED, status_code=HTTPStatus.SERVICE_UNAVAILABLE)
    return [], ratio, [*aborted, *retracted]


def exact_committed_len(original: Callable[[Req], int], request: Req) -> int:
    """Around ``Req.owned_kv_len``: what a finished request inserts into the radix tree ends here.

    One that is compacted inserts nothing, and all of it is freed.
    """
    state = state_of(request)
    if state is not None and state.compacted:
        return committed_len(request)
    committed = original(request)
    exact = shareable_len(request)
    limit = committed if exact is None else min(committed, exact)
    method = prefill_chunks.sharing_method(request)
    return limit if method is None else min(limit, prefill_chunks.share_limit(request, method))


def release_inexact_tail(
    original: Callable[..., None], request: Req, start: int, end: int, tree_cache: RadixTree
) -> None:
    """Around ``_release_overallocated_kv_indices``: free the pages behind the exact length.

    SGLang asserts that there are none unless it speculates. The page that holds the exact length itself is freed by
    the tree, as the unaligned tail of what was inserted.

    Args:
        original: SGLang's function.
        request: the finished request.
        start: its exact length.
        end: its allocated length.
        tree_cache: the radix cache.
    """
    state = state_of(request)
    if state is None:
        return original(request, start, end, tree_cache)
    if request.finished():
        exact = start if state.shareable_len is None else min(start, state.shareable_len)
        # A verification commits what was accepted behind the end, too.
        wanted = len(request.origin_input_ids) + len(request.output_ids_through_stop)
        state.counts.tail_tokens_dropped += max(0, min(committed_len(request), wanted) - exact)
    page_size = tree_cache.token_to_kv_pool_allocator.page_size
    start = -(-start // page_size) * page_size
    if start < end:
        free_tokens(request, tree_cache, start, end)


def exact_checkpoint(
    original: Callable[..., tuple[int, int] | None], component: object, request: Req, token_ids_len: int
) -> tuple[int, int] | None:
    """Around ``MambaComponent._select_finished_checkpoint``: nothing is shared behind an approximate state.

    SGLang falls back to the state that was stored before it. The step in flight may be overwriting that one's slot.

    Args:
        original: SGLang's method.
        component: SGLang's, of the radix tree.
        request: the finished request.
        token_ids_len: tokens of its that may be inserted.

    Returns:
        How many tokens the state covers that is inserted with them, and its place; None for no state and no tokens.
    """
    state, latest = state_of(request), request.kv.mamba_last_track_seqlen
    if state is not None and latest is not None:
        exact = latest if state.shareable_len is None else state.shareable_len
        if latest > exact or latest in state.approximate_states:
            return None
    return original(component, request, token_ids_len)
