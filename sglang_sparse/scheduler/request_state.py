"""The scheduler's state of a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang_sparse.attention.protocols import Req
from sglang_sparse.config.request_options import RequestOptions, parse_options
from sglang_sparse.config.settings import Settings
from sglang_sparse.methods.prefill import CutPrompt

if TYPE_CHECKING:
    from sglang_sparse.attention.counters import RectifyCounts


# The attributes of SGLang's Req that hold its RequestState and RequestOptions; a request of a dense server has neither.
ATTRIBUTE = "sglang_sparse"
OPTIONS_ATTRIBUTE = "sglang_sparse_options"


@dataclass
class RequestState:
    """The plugin's state on SGLang's ``Req``.

    Attributes:
        options: how it runs.
        counts: where its rectifications are counted.
        shareable_len: KV of positions ``[0, shareable_len)`` is exact; None where all that is committed is, as long as
            nothing is computed too. What a sparse prefill wrote counts as exact here: nothing makes it better.
        split_group: position of the first group of the prompt that a sparse prefill did not see in one piece, if any.
        cut: what its last pass of prefill has left for the next, if the prompt goes on and may cut a group there.
        kept: the prompt tokens that it will hold after compaction, see ``PromptSelector.kept``; (0, 0) also until
            they are chosen.
        verified_from: where its last verification began, if that was one which may run sparse and ran dense for it.
        compacted: it holds this alone, and no longer its prompt, see ``scheduler/compaction.py``.
        approximate_states: the lengths at which recurrent states of its were stored that are not exact.
    """

    options: RequestOptions
    counts: RectifyCounts
    shareable_len: int | None = None
    split_group: int | None = None
    cut: CutPrompt | None = None
    kept: tuple[int, int] = (0, 0)
    compacted: bool = False
    verified_from: int | None = None
    approximate_states: set[int] = field(default_factory=set)


def state_of(request: object) -> RequestState | None:
    """Return what is kept about SGLang's ``Req``, or None on a dense server."""
    return getattr(request, ATTRIBUTE, None)


def options_of(settings: Settings, request: Req) -> RequestOptions:
    """Return what a ``Req`` asks for, read when it is first needed."""
    options = getattr(request, OPTIONS_ATTRIBUTE, None)
    if options is None:
        processor = bool(request.custom_logit_processor)
        options = parse_options(settings, request.sampling_params.custom_params, processor)
        setattr(request, OPTIONS_ATTRIBUTE, options)
    return options


def ensure_state(settings: Settings, counts: RectifyCounts, request: Req) -> RequestState:
    """Return what is kept about a ``Req``, made when it first runs."""
    state = state_of(request)
    if state is None:
        state = RequestState(options_of(settings, request), counts)
        setattr(request, ATTRIBUTE, state)
    return state
