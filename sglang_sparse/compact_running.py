"""When requests let go of their prompts, and the room that is kept for it. How is ``scheduler/compaction.py``'s to say.

A prompt and its private copy exist side by side for a moment. Room for one copy is enough for a whole batch, as each
prompt that is let go makes room for the next, so SGLang is made to leave that much free where it admits a request
beside others. Where there is no room all the same the request goes on as it is and tries again at its next step: nobody
waits for it, and a request alone is admitted as always. A copy leaves a page for each row's next token, so that it is
not what a request is retracted for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sglang_sparse.attention.plan import plan_decode
from sglang_sparse.config.request_options import ensure_state, options_of, state_of
from sglang_sparse.config.settings import settings_of
from sglang_sparse.methods.roles import KeepMethod
from sglang_sparse.scheduler.request_fields import locked_node, prefill_end, prefix_len, protected_len

if TYPE_CHECKING:
    from sglang_sparse.config.request_options import RequestState
    from sglang_sparse.config.settings import Settings
    from sglang_sparse.scheduler.compaction import Compaction, Span


def compact_running(running: Any, scheduler: Any, *_: Any) -> None:
    """After ``Scheduler.update_running_batch``: let requests go of prompts that are in the tree by now.

    A request does so at the first step at which it would attend to a part of what it sees: in none that follows it
    could attend to all, as it only grows, and from then on its batches run sparse whatever the crossover says.
    """
    settings = settings_of(scheduler.server_args)
    if running is None:
        # Where memory is short SGLang leaves a step out.
        return
    if settings is None or not (isinstance(settings.method, KeepMethod) and settings.method.compacts):
        return
    backend, tree = scheduler.tp_worker.model_runner.attn_backend, scheduler.tree_cache
    compaction: Compaction = backend.keeps.compaction
    states = [ensure_state(settings, backend.counters.rectify, request) for request in running.reqs]
    ready = {
        row: span
        for row, (request, state) in enumerate(zip(running.reqs, states, strict=True))
        if _prefilled(request, state, tree) and (span := compaction.span(request, state)) is not None
    }
    if not ready:
        return
    forced = any(state.compacted for state in states)
    plan = plan_decode(backend.method, running.seq_lens_cpu, [state.options for state in states], forced)
    if not plan.sparse:
        return
    reserve = len(states) * tree.page_size
    holders = None
    for row, span in ready.items():
        if plan.n_select[row] >= plan.n_pages[row]:
            continue
        holders = holders or _holders([*running.reqs, *filter(None, [scheduler.chunked_req])], tree)
        if not _pays(running.reqs[row], span, holders, tree):
            continue
        if compaction.let_go(running.reqs[row], span, tree, reserve):
            states[row].compacted, holders = True, None
            # There may be room for who waits.
            running.batch_is_full = False
        else:
            compaction.waits += 1


def _holders(requests: list[Any], tree: Any) -> Counter[tuple[int, int]]:
    """Count who holds each node of the tree, by its id and length."""
    locks = [node for request in requests if (node := locked_node(request)) is not None]
    paths = tree.tree_core.collect_path_info(locks)
    return Counter(node for path in paths for node in _nodes(path))


def _nodes(path: Any) -> list[tuple[int, int]]:
    return [(info.node_id, info.path_end - info.path_start) for info in path]


def _pays(request: Any, span: Span, holders: Counter[tuple[int, int]], tree: Any) -> bool:
    """Whether less KV is held where all who hold this prompt let go of it.

    Of what others hold too nothing is free until the last of them lets go, while each takes a copy.
    """
    node = locked_node(request)
    own = () if node is None else tree.tree_core.collect_path_info([node])[0]
    shared = sum(length // holders[node_id, length] for node_id, length in _nodes(own))
    # The pages up to ``span.end`` that are its own are given back, and as many are taken from ``span.start`` on.
    return shared + span.start > protected_len(request)


def _prefilled(request: Any, state: RequestState, tree: Any) -> bool:
    """Whether the results of a request's prefill are processed, which is when SGLang puts its prompt into the tree."""
    end = prefill_end(request)
    if state.compacted or not state.kept[1] or end is None:
        return False
    return tree.disable or end <= prefix_len(request)


@contextmanager
def room_for_a_copy(settings: Settings | None, adder: Any, request: Any) -> Iterator[None]:
    """Let SGLang believe, while it decides on a request, that less memory is left: by the largest copy to come.

    Without it a few prompts that fill the pool would hold it until one of them ends.

    Args:
        settings: the server's.
        adder: SGLang's ``PrefillAdder``.
        request: that would run beside those that are admitted already.
    """
    method = settings.method if settings else None
    if settings is None or not (isinstance(method, KeepMethod) and method.compacts):
        yield
        return
    room, sampling = _room(settings, method, adder, request), request.sampling_params
    adder.memory_budget.total_offset += room
    adder.memory_budget.current_offset += room
    ignores_eos = sampling.ignore_eos
    # Without a radix tree SGLang would look ahead to where such requests end, and count whole prompts as given back.
    sampling.ignore_eos = False
    try:
        yield
    finally:
        sampling.ignore_eos = ignores_eos
        adder.memory_budget.total_offset -= room
        adder.memory_budget.current_offset -= room


def _room(settings: Settings, method: KeepMethod, adder: Any, request: Any) -> int:
    page = adder.page_size
    others = [*adder.can_run_list, *(adder.running_batch.reqs if adder.running_batch is not None else ())]
    # To a request that takes the place of others SGLang has promised theirs, and forgets them where it does not fit.
    if not others or adder.preempt_list:
        return 0
    most = method.max_kept * method.block_size + method.window_tokens + 2 * page
    copies = [most + len(other.output_ids) for other in (request, *others) if _will_let_go(settings, method, other)]
    return max(copies) + (len(others) + 1) * page if copies else 0


def _will_let_go(settings: Settings, method: KeepMethod, request: Any) -> bool:
    state = state_of(request)
    if state is not None and state.compacted:
        return False
    return options_of(settings, request).sparse and method.kept(len(request.origin_input_ids))[1] > 0
