"""Forward passes over some rows of a decode batch, which the scheduler goes on seeing as one batch."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import torch

from sglang_sparse.attention.protocols import Req, ScheduleBatch
from sglang_sparse.scheduler.request_fields import pool_row, position_shift
from sglang_sparse_kernels.common.launch import to_device

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, PPProxyTensors
    from sglang.srt.model_executor.model_runner import ModelRunnerOutput
    from sglang.srt.state_capturer.base import TopkCaptureOutput

# The attribute of a batch whose pass runs dense, whatever its requests are.
DENSE_PASS = "dense_pass"
# That of a batch whose lengths on the host are bounds, while the device knows them.
BOUNDED = "bounded_lengths"
# That of a draft behind the first one of its round.
LATER = "later_draft"
# That of a batch of spans: what is added to each one's positions, see ``position_info``.
SHIFTS = "position_shifts"
# The attributes of SGLang's output of a model's last stage that have a row for each of the batch.
OF_ROWS = ("next_token_logits", "hidden_states")
# Those of its output of routed experts that have a row for each token.
OF_TOKENS = ("out_cache_loc", "topk")
# The attribute of a ``ForwardBatch`` over spans: the places of their newest tokens, or none if nothing is sampled.
NEWEST = "sglang_sparse_newest"
# The attribute of a batch that all ranks of data-parallel attention have gathered: this rank's Rectification, or the
# JointPass of others, or None.
STEP = "sglang_sparse_step"


@dataclass(frozen=True)
class Span:
    """The tokens of a request that a dense pass encodes again.

    Attributes:
        request: whose tokens they are.
        start: its exact length.
        end: its length with the newest token.
        shift: what M-RoPE adds to the positions of its generated tokens; SGLang forgets it when the request finishes.
    """

    request: Req
    start: int
    end: int
    shift: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shift", position_shift(self.request))

    @property
    def tokens(self) -> int:
        """Tokens of the span."""
        return self.end - self.start


@dataclass(frozen=True)
class JointPass:
    """The dense pass of a step that all ranks whose tokens SGLang counts run together, see ``joint_pass``.

    Attributes:
        tokens: its tokens, by rank.
        rows: its rows, by rank.
        whole_step: whether no rank has rows left for a pass behind it.
        graph: whether SGLang's graph of prefill holds it on every rank.
    """

    tokens: list[int]
    rows: list[int]
    whole_step: bool
    graph: bool

    def set_sizes(self, view: ScheduleBatch) -> ScheduleBatch:
        """Give a batch of this pass the sizes of all ranks; returns the batch."""
        sizes = {"global_num_tokens": self.tokens, "global_num_tokens_for_logprob": self.rows}
        graphs = {"can_run_decode_cuda_graph": False, "can_run_dp_prefill_cuda_graph": self.graph}
        vars(view).update(is_extend_in_batch=True, **sizes, **graphs)
        return view


class Outputs:
    """The outputs of a step's passes, which become one: `OF_ROWS` in the order of rows, or what stages hand on.

    Args:
        rows: rows of the step.
    """

    def __init__(self, rows: int):
        self._rows = rows
        self._found: dict[str, torch.Tensor] = {}
        self._handed: list[PPProxyTensors] = []
        self._routed: list[TopkCaptureOutput] = []
        self._output: ModelRunnerOutput | None = None

    def add(self, rows: Sequence[int], tokens: int, output: ModelRunnerOutput) -> None:
        """Add the output of a pass over ``rows``, of as many tokens; one without any is idle."""
        from sglang.srt.model_executor.forward_batch_info import PPProxyTensors

        if not rows:
            return
        self._output, found = output, output.logits_output
        if output.routed_experts_output is not None:
            self._routed.append(output.routed_experts_output)
        if isinstance(found, PPProxyTensors):
            # A graph hands on its padding, too.
            self._handed.append(PPProxyTensors({name: part[:tokens] for name, part in found.tensors.items()}))
            return
        for name in OF_ROWS:
            part = getattr(found, name)
            if part is None:
                continue
            whole = self._found.setdefault(name, part.new_empty(self._rows, part.shape[1]))
            # Copied out at once: a graph's output is overwritten by its next replay.
            whole.index_copy_(0, to_device(rows, torch.int64, part.device), part[: len(rows)])

    def joined(self) -> ModelRunnerOutput:
        """Return SGLang's output of the last pass, with those of all."""
        output = self._output
        assert output is not None
        if self._handed:
            first = self._handed[0]
            output.logits_output = type(first)(
                {name: torch.cat([part.tensors[name] for part in self._handed]) for name in first.tensors}
            )
        else:
            vars(output.logits_output).update(self._found)
        if self._routed:
            parts = {name: torch.cat([getattr(part, name) for part in self._routed]) for name in OF_TOKENS}
            output.routed_experts_output = replace(self._routed[0], **parts)
        output.can_run_graph = False
        return output


def keep_experts(
    original: Callable[..., TopkCaptureOutput | None],
    capturer: object,
    forward_batch: ForwardBatch,
    *args: object,
    no_copy_to_cpu: bool = False,
    **kwargs: object,
) -> TopkCaptureOutput | None:
    """Around ``BaseTopkCapturer.on_forward_end``: of a span, keep what its newest token was routed to.

    The other tokens keep the experts of their own step.
    """
    newest = getattr(forward_batch, NEWEST, None)
    if newest is None:
        return original(capturer, forward_batch, *args, no_copy_to_cpu=no_copy_to_cpu, **kwargs)
    found = original(capturer, forward_batch, *args, no_copy_to_cpu=True, **kwargs)
    assert found is not None
    places = to_device(newest, torch.int64, found.topk.device)
    found.map_device_tensors(lambda part: part[places] if no_copy_to_cpu else part[places].cpu())
    if no_copy_to_cpu:
        return found
    found.finalize()
    return None


def extend_view(batch: ScheduleBatch, spans: Sequence[Span], newest: torch.Tensor | None = None) -> ScheduleBatch:
    """Make the batch of the dense pass over ``spans``: an extend batch that writes to slots the requests already have.

    Args:
        batch: the ``ScheduleBatch`` that the requests are in.
        spans: one a request.
        newest: ``[len(spans)]`` on the device, the last token of each span: with overlap scheduling only the device
            knows it yet. None takes it from the host as well.

    Returns:
        A ``ScheduleBatch`` of which ``ForwardBatch.init_new`` makes an EXTEND pass. Nothing is sampled from it.

    Raises:
        RuntimeError: the host does not know a token of a span.
    """
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    table = batch.req_to_token_pool.req_to_token
    view = rows_view(batch, [span.request for span in spans])
    view.forward_mode = ForwardMode.EXTEND
    setattr(view, DENSE_PASS, True)
    setattr(view, SHIFTS, [span.shift for span in spans])
    # Its tokens are generated ones: SGLang would look for the images of their prompts.
    view.multimodal_inputs = None
    view.prefix_lens = [span.start for span in spans]
    view.extend_lens = [span.tokens for span in spans]
    view.extend_num_tokens = sum(view.extend_lens)
    view.extend_logprob_start_lens = view.extend_lens
    view.extend_input_logprob_token_ids = None
    ends = [span.end for span in spans]
    view.seq_lens_cpu = torch.tensor(ends, dtype=torch.int64)
    view.seq_lens = to_device(ends, torch.int64, table.device)
    view.orig_seq_lens = to_device(ends, torch.int32, table.device)
    requests = [row for span in spans if (row := pool_row(span.request)) is not None]
    view.req_pool_indices = to_device(requests, torch.int64, table.device)
    slots = [table[request, span.start : span.end] for request, span in zip(requests, spans, strict=True)]
    view.out_cache_loc = torch.cat(slots).to(torch.int64)
    view.input_ids = _input_ids(spans, newest, table.device)
    if _counted_alone(view):
        JointPass([view.extend_num_tokens], [len(spans)], whole_step=False, graph=False).set_sizes(view)
    return view


def _counted_alone(view: ScheduleBatch) -> bool:
    """Whether SGLang has counted the step's tokens, and those of no other rank."""
    return len(view.global_num_tokens or ()) == 1


def _input_ids(spans: Sequence[Span], newest: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    unknown = 0 if newest is None else 1
    tokens: list[int] = []
    last: list[int] = []
    for span in spans:
        known = _tokens(span.request, span.start, span.end - unknown)
        tokens += known + [0] * unknown
        last.append(len(tokens) - 1)
    input_ids = to_device(tokens, torch.int64, device)
    if newest is not None:
        input_ids[to_device(last, torch.int64, device)] = newest.to(torch.int64)
    return input_ids


def _tokens(request: Req, start: int, end: int) -> list[int]:
    prompt = len(request.origin_input_ids)
    tokens = [*request.origin_input_ids[start:end]]
    tokens += request.output_ids[max(0, start - prompt) : max(0, end - prompt)]
    if len(tokens) != end - start:
        known = prompt + len(request.output_ids)
        raise RuntimeError(f"request {request.rid}: the host knows {known} tokens and a dense pass needs {end}")
    return tokens


def position_info(view: Any, mrope: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Return the positions of a batch of spans for ``ForwardBatch.init_new``; None where SGLang finds them itself.

    SGLang's own, for models with M-RoPE, are those of prompts. Those of generated tokens are alike in time, height and
    width, and behind media differ from the token's index.

    Args:
        view: the batch of any pass.
        mrope: whether the model has M-RoPE.

    Returns:
        positions ``[tokens]`` int64, beginnings of the rows ``[rows]`` int32, rotary positions ``[3, tokens]`` int64.
    """
    if not mrope or not hasattr(view, SHIFTS):
        return None

    def numbered(starts: Iterable[int]) -> torch.Tensor:
        rows = zip(starts, view.extend_lens, strict=True)
        return to_device([*chain.from_iterable(range(at, at + tokens) for at, tokens in rows)], torch.int64, device)

    device = view.seq_lens.device
    begins = to_device([*accumulate(view.extend_lens[:-1], initial=0)], torch.int32, device)
    shifted = map(operator.add, view.prefix_lens, getattr(view, SHIFTS))
    return numbered(view.prefix_lens), begins, numbered(shifted).repeat(3, 1)


def decode_view(batch: ScheduleBatch, rows: Sequence[int]) -> ScheduleBatch:
    """Make the decode batch of some rows of a decode batch.

    Args:
        batch: the ``ScheduleBatch``, its ``input_ids`` resolved.
        rows: ascending.
    """
    view = rows_view(batch, [batch.reqs[row] for row in rows])
    if batch.multimodal_inputs is not None:
        view.multimodal_inputs = [batch.multimodal_inputs[row] for row in rows]
    host = torch.tensor(rows, dtype=torch.int64)
    device = to_device(rows, torch.int64, batch.seq_lens.device)
    view.seq_lens_cpu = batch.seq_lens_cpu[host]
    names = ["seq_lens", "orig_seq_lens", "req_pool_indices", "out_cache_loc", "input_ids"]
    # Where rows store recurrent states for the prefix cache, and whether.
    names += ["mamba_track_indices", "mamba_track_mask"] if batch.mamba_track_mask_cpu is not None else []
    for name in names:
        setattr(view, name, getattr(batch, name)[device])
    if _counted_alone(view):
        view.global_num_tokens = view.global_num_tokens_for_logprob = [len(rows)]
    return view


def idle_view(batch: ScheduleBatch) -> ScheduleBatch:
    """Make a batch without rows, for a pass of the others."""
    view = rows_view(batch, [])
    view.multimodal_inputs = None
    view.prepare_for_idle()
    return view


def rows_view(batch: ScheduleBatch, requests: list[Req]) -> Any:
    """Copy a batch for a pass over some of its requests; what belongs to rows is the caller's to set."""
    view = without_sampling(batch)
    view.reqs = requests
    view.seq_lens_sum = None
    view.req_pool_indices_cpu = None
    view.spec_info = None
    view.mamba_track_indices = view.mamba_track_mask = None
    # Left over from the prefill that this batch once was.
    view.input_embeds = view.replace_embeds = view.replace_positions = None
    return view


def without_sampling(batch: Any) -> Any:
    """Copy a ``ScheduleBatch`` for a pass within its step.

    Log-probabilities, grammars and penalties belong to sampling, which sees the whole batch.
    """
    view = copy.copy(batch)
    view.return_logprob = False
    view.top_logprobs_nums = None
    view.token_ids_logprobs = None
    view.sampling_info = None
    view.has_grammar = False
    return view
