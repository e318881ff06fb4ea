"""Streaming sessions: a turn begins behind exact KV of the turn before, with the same kind of prefill.

A session of SGLang keeps all KV that a turn has committed, and the next turn goes on behind it without a lookup in the
radix tree. What sparse decode wrote is approximate, and a sparse prefill may only go on at the end of a group, so what
a session keeps ends where the tree would let others share it. The next turn prefills the rest again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang_sparse.attention.protocols import RadixTree
from sglang_sparse.config.settings import current_settings
from sglang_sparse.scheduler.request_state import state_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.session.session_controller import Session

# The attribute of SGLang's SessionSlot with the radix namespace of the turn that wrote its KV.
NAMESPACE = "sglang_sparse_namespace"


def keep_exact(original: Callable[..., bool], tree: RadixTree, request: Req) -> bool:
    """Around ``UnifiedRadixCache.claim_kv_row``: what a session keeps of a finished or retracted turn is exact."""
    slot, state, session = tree.session.borrowed_slot(request), state_of(request), request.session
    exact = 0 if slot is None else request.owned_kv_len()
    if not original(tree, request):
        return False
    if slot is not None and state is not None:
        if request.finished():
            state.counts.tail_tokens_dropped += max(0, slot.kv.kv_committed_len - exact)
        elif session is not None:
            # SGLang takes a retracted turn for one that has ended: it would run another beside it, on the same KV, and
            # take the session from a turn that is retracted twice.
            request.session, session._inflight = session, True
        slot.kv.kv_committed_len = min(slot.kv.kv_committed_len, exact)
        setattr(slot, NAMESPACE, request.extra_key)
    return True


def runs_turn(session: Session | None) -> bool:
    """Return whether a turn of a streaming session runs, or waits, so that SGLang refuses another."""
    return session is not None and session.streaming and session._inflight


def continues_session(tree: RadixTree, params: MatchPrefixParams) -> bool:
    """Return whether a request goes on behind what its session keeps, so that nothing is looked up.

    A session gives up what it keeps where the request may not go on behind it: if it prefills otherwise than the turn
    before, or if it has to compute tokens again that the tree holds, which SGLang would not survive.
    """
    request, session = params.req, tree.session
    if current_settings() is None:
        return session.will_lend_record(request)
    if request is None or request.session is None or not session.will_lend_record(request):
        return False
    name = request.session.session_id
    slot = session.slots[name]
    if slot.kv is not request.kv:
        found = min(slot.kv.kv_committed_len, len(params.key))
        if found < slot.kv.cache_protected_len or getattr(slot, NAMESPACE, None) != request.extra_key:
            session.release_session(name)
            return False
    return True
