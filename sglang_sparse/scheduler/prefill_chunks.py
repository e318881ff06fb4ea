"""Sparse prefill in the scheduler: which tokens of an extend batch are sparse, and what of their KV may be shared.

Where matches and chunks end, the window of a ``PromptSelector`` has its say too, see ``attention/prompt_selection.py``.

The rule of sharing: KV of a sparsely prefilled prompt is a function of its prefix at the ends of complete groups only
(see ``PrefillMethod``). So matches in the radix tree, chunks and what enters the tree are cut there, a group counts as
one in its keys (``scheduler/prefix_keys.py``), and everybody who shares a prefix has the KV that a cold prefill of the
prompt in one piece would have given. Generated tokens are encoded by decode and rectification, not by prefill; they are
shared only as far as a prompt would be dense.

In a mixed batch (SGLang's mixed chunk) rows that decode follow those of prompts, with one query token each. They attend
densely, as they do without a prefill method.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from sglang_sparse.attention.protocols import ForwardBatch, PrefillAdder, RadixTree, Req, ScheduleBatch
from sglang_sparse.config import arguments
from sglang_sparse.config.settings import current_settings
from sglang_sparse.methods.prefill import CutPrompt, PrefillSpan
from sglang_sparse.scheduler import arrivals
from sglang_sparse.scheduler.compaction import room_for_a_copy
from sglang_sparse.scheduler.partial_batch import DENSE_PASS
from sglang_sparse.scheduler.prompt_windows import outside, window_start
from sglang_sparse.scheduler.request_fields import matched_len, prefix_len
from sglang_sparse.scheduler.request_state import options_of, state_of

if TYPE_CHECKING:
    from sglang_sparse.attention.backend import SparseAttentionBackend
    from sglang_sparse.methods.groups import PrefillGroups
    from sglang_sparse.scheduler.request_state import RequestState


def keys_pairs() -> bool:
    """Whether the tree of this process's server keys pairs of tokens, see ``scheduler/prefix_keys.py``."""
    from sglang.srt.runtime_context import get_server_args
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    try:
        algorithm = arguments.of(get_server_args()).speculative_algorithm
    except ValueError:
        return False
    return SpeculativeAlgorithm.from_string(algorithm).is_eagle()


def method_of(request: Req) -> PrefillGroups | None:
    """Return the prefill method of SGLang's ``Req`` with its own config, or None where its prefill is dense."""
    state = state_of(request)
    if state is not None:
        return state.options.prefill
    settings = current_settings()
    if settings is None or settings.prefill is None:
        return None
    return options_of(settings, request).prefill


def sharing_method(request: Req) -> PrefillGroups | None:
    """The same, where sharing is restricted."""
    method = method_of(request)
    return None if method is None or method.config.share_partial_groups else method


def share_limit(request: Req, method: PrefillGroups) -> int:
    """Return how many leading tokens of a request have KV that others may share.

    Where SGLang keys pairs of tokens, the last position of a group has its pair within the prompt.
    """
    prompt = len(request.origin_input_ids)
    limit = max(method.boundary(min(method.dense_from(prompt), prompt - keys_pairs())), method.dense_below)
    state = state_of(request)
    split = None if state is None else state.split_group
    return limit if split is None else min(limit, split)


def split_prompt(
    row: int,
    start: int,
    end: int,
    prompt: int,
    method: PrefillGroups | None,
    cuts: tuple[CutPrompt | None, CutPrompt | None] = (None, None),
) -> Iterator[PrefillSpan]:
    """Split a row's query tokens: those of the prompt are the method's, its tail and generated tokens are dense.

    Generated tokens are in a prefill after a retraction. ``cuts``: see ``follow_cuts``.
    """
    dense = prompt if method is None else method.dense_from(prompt)
    if start < min(end, dense):
        goes_on = dense if cuts[1] else 0
        yield PrefillSpan(row, start, min(end, dense), method, before=cuts[0], after=cuts[1], goes_on=goes_on)
    if max(start, dense) < end:
        yield PrefillSpan(row, max(start, dense), end, None)


def note_chunk_end(request: Req, end: int) -> None:
    """Remember that a pass ended within a group: nothing from this group on may be shared."""
    method, state = sharing_method(request), state_of(request)
    if method is None or state is None or end >= len(request.origin_input_ids):
        return
    boundary = method.boundary(end)
    if boundary < end:
        state.split_group = boundary if state.split_group is None else min(boundary, state.split_group)


def follow_cuts(
    state: RequestState, start: int, end: int, prompt: int, method: PrefillGroups | None
) -> tuple[CutPrompt | None, CutPrompt | None]:
    """Return what earlier passes left of a prompt, and what this one leaves, which is in ``state`` then.

    A pass leaves something where it cuts a group, or the next one may cut any. One behind a cached prefix goes on with
    nothing: nothing is kept of the queries before. To be asked once for a pass: asked again it would find that what was
    left no longer ends where the pass begins.
    """
    before = state.cut if state.cut is not None and state.cut.end == start else None
    state.cut = None
    if method is None or end >= method.dense_from(prompt) or end <= method.dense_below:
        return before, None
    if method.boundary(end) < end or method.config.share_partial_groups:
        first, kept = (max(start, method.dense_below), {}) if before is None else (before.start, before.kept)
        state.cut = CutPrompt(first, end, kept)
    return before, state.cut


def limit_match(found: int, request: Req, *_: object) -> int:
    """After ``Req._compute_max_prefix_len``: a prefix ends where its KV is a function of its tokens.

    And before the tokens whose queries a method needs, see ``PromptSelector``.
    """
    method, window = sharing_method(request), window_start(current_settings(), request)
    if window is not None:
        found = min(found, window)
    return found if method is None else method.boundary(min(found, share_limit(request, method)))


def add_request(
    original: Callable[..., object], adder: PrefillAdder, request: Req, *args: object, **kwargs: object
) -> object:
    """Around ``PrefillAdder.add_one_req``: a request's first chunk ends where it may, or waits for more budget.

    And it leaves room for what requests copy of their prompts, see ``room_for_a_copy``.
    """
    if _end_where_allowed(adder, request, matched_len(request)):
        with room_for_a_copy(current_settings(), adder, request), arrivals.noted(request):
            return original(adder, request, *args, **kwargs)
    from sglang.srt.managers.schedule_policy import AddReqResult

    return AddReqResult.OTHER


def add_chunk(original: Callable[..., object], adder: PrefillAdder, request: Req) -> object:
    """Around ``PrefillAdder.add_chunked_req``: further chunks likewise.

    SGLang must be given a chunk here. Where memory for a whole group is lacking it gets what there is, and the request
    shares nothing from that group on; and where the chunk ends within its window, it sees all of its prompt.
    """
    # SGLang may give others a share of the pass (``--schedule-policy shortest-prefill-first``).
    memory = min(int(adder.rem_total_tokens), adder.chunked_req_limit or sys.maxsize)
    _end_where_allowed(adder, request, prefix_len(request), memory if memory > 0 else sys.maxsize)
    return original(adder, request)


def _end_where_allowed(adder: PrefillAdder, request: Req, start: int, memory: int = sys.maxsize) -> bool:
    """Set the chunk budget to what ends a chunk from ``start`` where it may end; returns whether there is any such.

    That is at a boundary of the prefill method, and not within the window of the decode method.

    What the chunk then leaves of the budget is given up: SGLang takes requests on until the budget is used up, and a
    second one that is cut short is more than it can hold.

    SGLang takes the rows that decode within a mixed batch off the budget. Where too little for a group is then left to
    the first prompt of a pass, it gets their share, too, and the pass has as many tokens more than the chunked prefill
    size. Otherwise it would wait for rows to end: with a chunk of one group, for the last of them.
    """
    method, budget = sharing_method(request), adder.rem_chunk_tokens
    window, prompt = window_start(current_settings(), request), len(request.origin_input_ids)
    end, size = len(request.full_untruncated_fill_ids), adder.page_size
    if (method is None and window is None) or budget is None or -(-(end - start) // size) * size <= min(budget, memory):
        return True
    for tokens in (budget, budget + _mixed_rows(adder)):
        boundary = outside(start + min(tokens, memory) // size * size, window, prompt, size)
        # Generated tokens, in a prefill after a retraction, are dense.
        if method is not None and boundary < prompt:
            boundary = method.boundary(boundary)
        if boundary > start:
            adder.rem_chunk_tokens = boundary - start
            return True
    return False


def _mixed_rows(adder: PrefillAdder) -> int:
    """Return the number of rows that will decode with the prompts of a pass that has none yet."""
    from sglang.srt.runtime_context import get_server_args

    running = adder.running_batch
    if adder.can_run_list or running is None or not arguments.of(get_server_args()).enable_mixed_chunk:
        return 0
    return len(running.reqs)


def cache_whole_groups(
    original: Callable[..., None], tree: RadixTree, request: Req, *, up_to: int, **kwargs: object
) -> None:
    """Around ``UnifiedRadixCache.checkpoint``: insert exact KV, by whole groups; the rest stays the request's own."""
    method, state = sharing_method(request), state_of(request)
    if state is not None and state.shareable_len is not None:
        # What a decode server took back of a retracted request has an approximate tail.
        up_to = min(up_to, state.shareable_len)
    limit = up_to if method is None else min(up_to, share_limit(request, method))
    # A key of pairs takes a token more than it has positions.
    pairs = method is not None and tree.tree_core.is_eagle
    return original(tree, request, up_to=limit + pairs, **kwargs)


def begin(backend: SparseAttentionBackend, forward_batch: ForwardBatch, batch: ScheduleBatch) -> None:
    """Tell the backend what of an extend batch is sparse.

    Args:
        batch: the ``ScheduleBatch`` that it was made from.
    """
    if backend.prefill is None:
        return
    spans: list[PrefillSpan] = []
    if batch.forward_mode.is_extend_without_speculative() and not getattr(batch, DENSE_PASS, False):
        # All of a decode step that SGLang has turned into a prefill, see ``disable_prefill_graphs``.
        mixed = batch.forward_mode.is_mixed() or batch.decoding_reqs is batch.reqs
        decoding = {id(request) for request in batch.decoding_reqs or ()} if mixed else set()
        for row, request in enumerate(batch.reqs):
            start, end = batch.prefix_lens[row], batch.prefix_lens[row] + batch.extend_lens[row]
            if id(request) in decoding:
                spans.append(PrefillSpan(row, start, end, None, decodes=True))
                continue
            state, prompt, method = state_of(request), len(request.origin_input_ids), method_of(request)
            cuts = (None, None) if state is None else follow_cuts(state, start, end, prompt, method)
            spans += split_prompt(row, start, end, prompt, method, cuts)
            note_chunk_end(request, end)
    backend.prefill.begin(spans, forward_batch.req_pool_indices)
