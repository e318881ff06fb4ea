"""Rectification: approximate KV is made exact again by dense passes within SGLang's own scheduling.

Source: "Rectified Sparse Attention" (ReSA), section 2.3. The scheduler keeps seeing one decode batch. Where some of its
rows are due, the one decode forward becomes an extend pass over their approximate tokens and the newest one, dense and
in the slots they already have (several, where that is faster: ``scheduler/fa3_packing.py``), and a decode pass over the
other rows; their logits are put together in the order of the batch. The newest token is not forwarded yet, so the
extend pass *is* the due rows' decode step: f tokens cost f - 1 sparse steps and one dense pass. (The paper re-encodes
after the step; here the two are merged.)
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import torch

from sglang_sparse.attention.protocols import ModelRunner, ModelWorker, RadixTree, Req, ScheduleBatch, Scheduler
from sglang_sparse.config.settings import hooked_settings_of
from sglang_sparse.scheduler import prompt_windows
from sglang_sparse.scheduler.due_rows import Rectification, due_rows, grouped, pass_tokens, plan_step
from sglang_sparse.scheduler.partial_batch import (
    NEWEST,
    STEP,
    JointPass,
    Outputs,
    Span,
    decode_view,
    extend_view,
    idle_view,
    position_info,
    rows_view,
)
from sglang_sparse.scheduler.request_fields import committed_len, pool_row
from sglang_sparse.scheduler.request_state import state_of
from sglang_sparse_kernels.common.launch import to_device

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, PPProxyTensors

    from sglang_sparse.attention.counters import RectifyCounts
    from sglang_sparse.config.settings import Settings
    from sglang_sparse.methods.config import RectifyConfig

logger = logging.getLogger(__name__)

# The attribute of the radix cache that holds back releases while a step's results are processed.
HELD = "sglang_sparse_held"


def run_step(
    original: Callable[..., object], worker: ModelWorker, batch: ScheduleBatch | None, *args: object, **kwargs: object
) -> object:
    """Around ``TpModelWorker.forward_batch_generation``: launch a step, with rectification where due."""
    settings = hooked_settings_of(worker.server_args)
    if settings is None or worker.is_draft_worker or batch is None:
        return original(worker, batch, *args, **kwargs)
    runner, most = worker.model_runner, pass_tokens(worker.server_args)
    backend, step = runner.attn_backend, getattr(batch, STEP, None)
    if isinstance(step, JointPass):
        _run_along(runner, batch, step)
    elif batch.forward_mode.is_mixed():
        _rectify_before_mixed(settings, runner, batch, most)
    elif hasattr(batch, STEP):
        backend.rectifying = step
    elif batch.forward_mode.is_decode():
        together = settings.rectify.rectify_max_batch if settings.rectify else 1
        for spans in grouped(prompt_windows.arrived(settings, batch), together, most):
            _encode(runner, extend_view(batch, spans))
        backend.rectifying = plan_step(settings, batch, most, backend.divide)
    try:
        return original(worker, batch, *args, **kwargs)
    finally:
        backend.rectifying = None


def _rectify_before_mixed(settings: Settings, runner: ModelRunner, batch: ScheduleBatch, max_tokens: int) -> None:
    """Encode the due rows that decode within a mixed batch, in a pass before it.

    The mixed pass is dense itself, so that it makes a row's newest token exact, which the host may not know yet.
    """
    decoding = {id(request) for request in batch.decoding_reqs or ()}
    rows = [row for row, request in enumerate(batch.reqs) if id(request) in decoding and pool_row(request) is not None]
    view = rows_view(batch, [batch.reqs[row] for row in rows])
    view.seq_lens_cpu = batch.seq_lens_cpu[rows]
    if plan := plan_step(settings, view, max_tokens):
        spans = [Span(span.request, span.start, span.end - 1) for span in plan.spans]
        _count(runner.attn_backend.counters.rectify, spans, plan.late)
        _encode(runner, extend_view(batch, spans))


def _run_along(runner: ModelRunner, batch: ScheduleBatch, joint: JointPass) -> None:
    """Run an idle pass while other ranks rectify, before what this rank prepares for its own pass.

    Where no rank has rows left behind it, the joint pass is the step.
    """
    if joint.whole_step:
        joint.set_sizes(batch)
    else:
        _encode(runner, joint.set_sizes(idle_view(batch)))


def run_passes(original: Callable[..., Any], runner: Any, forward_batch: Any, *args: object, **kwargs: object) -> Any:
    """Around ``ModelRunner.forward``: the extend passes over due rows, then the decode pass over the others.

    In this order, because a decode graph publishes that the step has read ``req_to_token`` before it is replayed.

    Returns:
        SGLang's output of the last pass, with logits and hidden states of all rows, or what the next stage gets of all
        of them.
    """
    if hooked_settings_of(runner.server_args) is None or runner.is_draft_worker:
        return original(runner, forward_batch, *args, **kwargs)
    backend = runner.attn_backend
    backend.begin(forward_batch)
    step = backend.rectifying

    def run(view: ScheduleBatch, **handed: object) -> Any:
        wanted = forward_batch.capture_hidden_mode
        # Hidden states of a rectifying pass, too, are the newest token's alone: the others have been returned.
        inner = _forward_batch(view, runner, wanted and min(wanted, type(wanted).LAST), sampled=True)
        backend.begin(inner)
        # An event of the pass before says nothing of what this one reads, which may publish none.
        runner.shared_read_done_event = None
        return original(runner, inner, *args, **{**kwargs, **handed})

    # Whatever runs a forward within these passes must not be split again.
    backend.rectifying = None
    if not isinstance(step, Rectification):
        return original(runner, forward_batch, *args, **kwargs)
    counts = backend.counters.rectify
    counts.second_passes += bool(step.rest)
    _count(counts, step.spans, step.late)
    handed = cast("PPProxyTensors | None", kwargs.get("pp_proxy_tensors"))
    outputs, first = Outputs(len(step.outer_batch.reqs)), 0
    # A rank without due rows leaves all without a graph.
    graphless = step.joint is not None and not step.joint.graph
    for rows, view in _views(step):
        tokens = len(view.input_ids)
        ran = run(view, **({"pp_proxy_tensors": handed[first : first + tokens]} if handed else {}))
        first += tokens
        if view.forward_mode.is_extend() and backend.exact_states:
            backend.exact_states.store(step.outer_batch, rows)
        if view.forward_mode.is_extend() and view.seq_lens.is_cuda and not (ran.can_run_graph or graphless):
            _warn_eager()
        outputs.add(rows, tokens, ran)
    return outputs.joined()


def _views(step: Rectification) -> Iterator[tuple[list[int], ScheduleBatch]]:
    """Yield the rows of each pass of a step, and its batch; one without rows is for the other ranks."""
    batch = step.outer_batch
    for part in step.parts:
        due = [step.due[index] for index in part]
        newest = batch.input_ids[to_device(due, torch.int64, batch.seq_lens.device)]
        view = extend_view(batch, [step.spans[index] for index in part], newest)
        yield due, step.joint.set_sizes(view) if step.joint else view
    if step.rest:
        yield step.rest, decode_view(batch, step.rest)
    elif step.joint and not step.joint.whole_step:
        yield [], idle_view(batch)


def _forward_batch(view: Any, runner: Any, capture_hidden_mode: Any, sampled: bool) -> ForwardBatch:
    from sglang.srt.model_executor import forward_batch_info

    made = forward_batch_info.ForwardBatch.init_new(
        view,
        runner,
        capture_hidden_mode=capture_hidden_mode,
        return_hidden_states_before_norm=False,
        extend_position_info=position_info(view, runner.model_config.model_is_mrope),
    )
    if view.forward_mode.is_extend():
        setattr(made, NEWEST, [end - 1 for end in accumulate(view.extend_lens)] if sampled else [])
    return made


@functools.cache
def _warn_eager() -> None:
    """Once: where SGLang leaves out graphs of prefill, the host is slower than the GPU."""
    logger.warning(
        "sglang_sparse: a rectifying pass ran without a CUDA graph, which takes longer; SGLang's lines at start say "
        "which graphs it has for prefill: none where memory is short, and with pipeline parallelism none without "
        "--cuda-graph-backend-prefill breakable"
    )


def _count(counts: RectifyCounts, spans: Sequence[Span], late: Sequence[int]) -> None:
    counts.passes += 1
    counts.requests += len(spans)
    counts.tokens += sum(span.tokens for span in spans)
    counts.delay_steps += sum(late)
    counts.max_delay_steps = max(counts.max_delay_steps, *late)


def follow_results(original: Callable[..., None], scheduler: Scheduler, batch: ScheduleBatch, result: object) -> None:
    """Around ``Scheduler.process_batch_result``: rectify what a step without drafts cannot.

    With ``rectify_on_finish`` these are finished requests, to the end, and with SGLang's drafts the rows that are due.
    """
    settings = hooked_settings_of(scheduler.server_args)
    config = settings.rectify if settings else None
    if config is None or not (batch.forward_mode.is_decode() or batch.forward_mode.is_mixed()):
        return original(scheduler, batch, result)
    if config.rectify_on_finish:
        _finish_exactly(original, scheduler, batch, result, config)
    else:
        original(scheduler, batch, result)
    if scheduler.tp_worker.model_runner.attn_backend.verified:
        _rectify_committed(scheduler, batch, config)
    return None


def _finish_exactly(
    original: Callable[..., None], scheduler: Scheduler, batch: ScheduleBatch, result: object, config: RectifyConfig
) -> None:
    """Process results, and make the requests that finish exact to the end.

    Their release is held back until this step's results are processed, then all their tails are re-encoded, at most
    ``rectify_max_batch`` of them in a pass, and they are released. The passes are only launched here: whoever reads
    this KV next does so later on the same stream.
    """
    held: list[tuple[Span, Callable[[], None]]] = []
    setattr(scheduler.tree_cache, HELD, held)
    try:
        original(scheduler, batch, result)
    except BaseException:
        # As they are: what of them is exact is known.
        for _, release in held:
            release()
        raise
    finally:
        delattr(scheduler.tree_cache, HELD)
    for spans in grouped([span for span, _ in held], config.rectify_max_batch, pass_tokens(scheduler.server_args)):
        _rectify_tails(scheduler, batch, spans)
    for _, release in held:
        release()


def _rectify_committed(scheduler: Scheduler, batch: ScheduleBatch, config: RectifyConfig) -> None:
    """Encode again the full pages that due rows have committed, in a pass behind the round that runs.

    That round writes behind what is committed, and the summary of a page that has tokens of both would lack its keys.
    Deadlines are in rounds: each may commit as many tokens as it verifies.
    """
    backend = scheduler.tp_worker.model_runner.attn_backend
    width = backend.verified
    page = scheduler.tree_cache.token_to_kv_pool_allocator.page_size
    rows = [(request, state) for request in batch.reqs if (state := state_of(request)) and not request.finished()]
    spans = []
    for request, state in rows:
        end = committed_len(request) // page * page
        spans.append(Span(request, end if state.shareable_len is None else min(end, state.shareable_len), end))
    asked = [state.options.rectify_interval for _, state in rows]
    intervals = [max(2, interval // width) if interval else 0 for interval in asked]
    # As in a step without drafts, where the newest token counts.
    pending = [-(-(span.tokens + 1) // width) for span in spans]
    due = due_rows(pending, intervals, config.rectify_max_batch, pass_tokens(scheduler.server_args) // width)
    if due:
        spans = [spans[row] for row in due]
        late = [max(0, pending[row] - intervals[row]) for row in due]
        _count(backend.counters.rectify, spans, late)
        _launch(scheduler, batch, spans)


def hold_release(original: Callable[..., None], request: Req, tree_cache: RadixTree, *, checkpoint: bool) -> None:
    """Around ``release_kv_cache``: hold back a finished request whose last tokens are not exact yet.

    One that is compacted has nothing to insert: its row no longer begins with its prompt.
    """
    held = getattr(tree_cache, HELD, None)
    state = state_of(request)
    checkpoint = checkpoint and not (state is not None and state.compacted)
    if (
        held is None
        or state is None
        or state.shareable_len is None
        or not checkpoint
        or not state.options.rectify_interval
    ):
        return original(request, tree_cache, checkpoint=checkpoint)
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    span = Span(request, state.shareable_len, committed_len(request))
    if span.tokens <= 0 or isinstance(request.finished_reason, FINISH_ABORT):
        return original(request, tree_cache, checkpoint=checkpoint)
    held.append((span, lambda: original(request, tree_cache, checkpoint=checkpoint)))
    return None


def _rectify_tails(scheduler: Scheduler, batch: ScheduleBatch, spans: list[Span]) -> None:
    counts = scheduler.tp_worker.model_runner.attn_backend.counters.rectify
    counts.finish_passes += 1
    counts.finish_tokens += sum(span.tokens for span in spans)
    _launch(scheduler, batch, spans)


def _launch(scheduler: Scheduler, batch: ScheduleBatch, spans: list[Span]) -> None:
    """Encode spans again, in a pass behind all that was launched."""
    with scheduler.forward_stream_ctx if scheduler.enable_overlap else nullcontext():
        if scheduler.enable_overlap:
            scheduler.forward_stream.wait_stream(scheduler.schedule_stream)
            _keep_unsampled_logits(scheduler)
        _encode(scheduler.tp_worker.model_runner, extend_view(batch, spans))
    if scheduler.enable_overlap:
        # Rows of req_to_token are free for others as soon as their requests are released or preempted.
        scheduler._apply_war_barrier()


def _encode(runner: Any, view: ScheduleBatch) -> None:
    """Run a pass of its own from which nothing is sampled and nothing is returned."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

    runner.forward(_forward_batch(view, runner, CaptureHiddenMode.NULL, sampled=False))
    # Whatever it published, it may not be the last pass of its step that reads req_to_token.
    runner.shared_read_done_event = None


def _keep_unsampled_logits(scheduler: Scheduler) -> None:
    """Copy the logits of a step in flight whose sampling waits for a grammar: they are in a graph's output buffer."""
    for _, result in scheduler.result_queue:
        if result.delay_sample_func is not None and result.logits_output is not None:
            result.logits_output.next_token_logits = result.logits_output.next_token_logits.clone()
