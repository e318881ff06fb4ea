"""The windows at prompts' ends, for methods that choose there what of a prompt stays visible: see ``PromptSelector``.

A cached prefix is used up to the window only, and no chunk ends within it. Where another server has prefilled a prompt,
its window is encoded once more, densely, before the first decode step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sglang_sparse.attention.prompt_selection import KeepPath, PromptEnd
from sglang_sparse.attention.protocols import ForwardBatch, Req, ScheduleBatch
from sglang_sparse.methods.roles import PromptSelector, prompt_selectors
from sglang_sparse.scheduler import arrivals
from sglang_sparse.scheduler.partial_batch import DENSE_PASS, Span
from sglang_sparse.scheduler.request_state import options_of, state_of

if TYPE_CHECKING:
    from sglang_sparse.attention.backend import SparseAttentionBackend
    from sglang_sparse.config.request_options import RequestOptions
    from sglang_sparse.config.settings import Settings


def choosing(options: RequestOptions) -> tuple[PromptSelector, ...]:
    """Return the methods that choose for a request, each for its layers; none where it sees all of its prompt."""
    return prompt_selectors(options.decode.methods) if options.sparse else ()


def window_start(settings: Settings | None, request: Req) -> int | None:
    """Return the position of the first token of a request's window, or None where it needs none.

    Where several methods have one, that of the longest: the others are within it.

    Args:
        settings: the server's.
    """
    if settings is None or not prompt_selectors(settings.decode.methods):
        return None
    state = state_of(request)
    options = options_of(settings, request) if state is None else state.options
    prompt = len(request.origin_input_ids)
    windows = [method.window_tokens for method in choosing(options) if method.kept(prompt)[1]]
    return prompt - max(windows) if windows else None


def outside(position: int, start: int | None, prompt: int, page_size: int) -> int:
    """Return the last end of a chunk, up to ``position``, that is not within the window.

    Args:
        position: where a chunk would end, at a page's end.
        start: of the window; None without one.
        prompt: tokens of the prompt, where the window ends.
        page_size: tokens per page.
    """
    if start is None or not start < position < prompt:
        return position
    return start // page_size * page_size


def arrived(settings: Settings, batch: ScheduleBatch) -> list[Span]:
    """Return what to encode again of prompts that another server has prefilled, so that methods may choose.

    Of a prompt without a choice the last token: its row may hold that of an earlier request.
    """
    if not prompt_selectors(settings.decode.methods):
        return []
    spans = []
    for request in filter(arrivals.expected, batch.reqs):
        start, prompt = window_start(settings, request), len(request.origin_input_ids)
        spans.append(Span(request, prompt - 1 if start is None else start, prompt))
    return spans


def begin(backend: SparseAttentionBackend, forward_batch: ForwardBatch, batch: ScheduleBatch) -> None:
    """Tell the backend which prompts a pass completes; copies that are due are launched before it.

    Args:
        batch: the ``ScheduleBatch`` that it was made from.
    """
    prefills = batch.forward_mode.is_extend_without_speculative()
    for path in backend.keeps:
        if path.compaction is not None:
            path.compaction.run()
        path.begin(list(_prompt_ends(path, batch)) if prefills else [], forward_batch.req_pool_indices)


def _prompt_ends(path: KeepPath, batch: ScheduleBatch) -> Iterator[PromptEnd]:
    first, again = 0, getattr(batch, DENSE_PASS, False)
    for row, request in enumerate(batch.reqs):
        if again and not arrivals.expected(request):
            first += batch.extend_lens[row]
            continue
        start, prompt = batch.prefix_lens[row], len(request.origin_input_ids)
        state = state_of(request)
        methods = choosing(state.options) if state else ()
        method = methods[path.place] if methods else None
        kept = method.kept(prompt) if method else (0, 0)
        window = prompt - method.window_tokens if method else prompt
        if not kept[1]:
            # In any pass: a cached prefix may reach beyond the prompt, where an earlier owner of the row is remembered.
            yield PromptEnd(row, prompt, kept, first)
        elif state is not None and start < prompt <= start + batch.extend_lens[row]:
            if window < start:
                path.note_whole()
                kept = (0, 0)
            if path.compaction is not None:
                state.kept = kept
            yield PromptEnd(row, prompt, kept, first + window - start)
        first += batch.extend_lens[row]
