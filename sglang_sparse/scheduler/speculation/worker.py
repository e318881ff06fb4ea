"""The worker of SPARSE_SELF: a round is some decode steps under the server's sparse method and one dense pass.

The drafts' keys and values lie in the slots of their positions; the dense pass over the same tokens writes them anew,
and reads only what dense passes wrote. So all KV that stays is exact, and so is every token: the one that the dense
pass chooses. A wrong draft costs the tokens behind it.

Source: self-speculation with sparse attention, MagicDec (arXiv 2408.11049), section 3, with the selection of each step
in place of a fixed one, and with coupled noise in place of rejection sampling (``sampling.py``).
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.spec_utils import SIMULATE_ACC_LEN, GrammarTree, build_grammar_vocab_mask

from sglang_sparse.attention import memory
from sglang_sparse.attention.plan import plan_decode
from sglang_sparse.config import arguments
from sglang_sparse.scheduler.request_state import state_of
from sglang_sparse.scheduler.speculation.adaptive import LAYER_BYTES, Acceptance, StepBytes, best_steps
from sglang_sparse.scheduler.speculation.algorithm import Carried
from sglang_sparse.scheduler.speculation.sampling import choose, seeds_of, simulated

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_sparse.attention.backend import SparseAttentionBackend
    from sglang_sparse.attention.counters import DraftCounts
    from sglang_sparse.methods.aux_buffers import AuxBuffers
    from sglang_sparse.scheduler.speculation.graphs import DecodeGraphs

Publish = Callable[[torch.Tensor], None]
Barrier = Callable[[], None]


class SparseSelfWorker(BaseSpecWorker):
    """SGLang's worker of a model that drafts for itself.

    Args:
        server_args: the server's.
        gpu_id: not used; the target's.
        nccl_port: likewise.
        target_worker: runs the passes, drafts and verifications alike.
    """

    topk = 1

    def __init__(self, server_args: object, gpu_id: int, nccl_port: int, target_worker: TpModelWorker):
        super().__init__()
        self.server_args = server_args
        self._target_worker, self._draft_worker = target_worker, None
        self.speculative_num_steps = int(get_spec().speculative_num_steps)
        self.speculative_num_draft_tokens = self.speculative_num_steps + 1
        self._seed = int(arguments.of(server_args).random_seed or 0)
        # Of the rounds whose results the scheduler has not seen yet, how many tokens each row drafted.
        self._drafted: deque[int] = deque()
        self._graphs: DecodeGraphs | None = None
        self._acceptance = Acceptance()

    def __getattr__(self, name: str) -> object:
        # Whatever else the scheduler asks of its worker, the target's answers.
        if name == "_target_worker":
            raise AttributeError(name)
        return getattr(self._target_worker, name)

    @property
    def _runner(self) -> ModelRunner:
        return self._target_worker.model_runner

    @property
    def _backend(self) -> SparseAttentionBackend:
        backend: SparseAttentionBackend = self._runner.attn_backend  # type: ignore[assignment]
        return backend

    @property
    def _counts(self) -> DraftCounts:
        counts = self._backend.counters.drafts
        assert counts is not None, "made with the backend of a server that drafts"
        return counts

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Publish | None = None,
        grammar_barrier: Barrier | None = None,
        pp_proxy_tensors: None = None,
    ) -> GenerationBatchResult:
        """Run a prefill, or a round of decode.

        Args:
            batch: SGLang's, isolated from the scheduler's.
            on_publish: with overlap scheduling, takes the new lengths as soon as they are launched.
            grammar_barrier: with overlap scheduling, brings the grammars up to the last round's tokens.
            pp_proxy_tensors: None: pipeline parallelism is refused at start.
        """
        if batch.forward_mode.is_extend():
            return self._prefill(batch, on_publish)
        return self._round(batch, self._steps(batch), on_publish, grammar_barrier)

    def _steps(self, batch: ScheduleBatch) -> int:
        """How many tokens to draft: none where drafts would run dense, and cost as much as a verification.

        All that the server may draft where its config says itself from how many tokens on sparse steps pay.
        """
        groups, states = self._backend.groups, [state_of(request) for request in batch.reqs]
        options = [state.options for state in states if state is not None]
        plan = plan_decode(groups, batch.seq_lens_cpu + 1, options)
        if not plan.sparse or groups.config.crossover_tokens != "auto":
            return self.speculative_num_steps if plan.sparse else 0
        layers = self._runner.model_config.num_hidden_layers
        draft = self._step_bytes.draft(plan, groups, int(batch.seq_lens_cpu.sum()), layers)
        return best_steps(draft, self._acceptance.rate, self.speculative_num_steps)

    @cached_property
    def _step_bytes(self) -> StepBytes:
        pool, layers = self._runner.token_to_kv_pool, self._runner.model_config.num_hidden_layers
        summaries: AuxBuffers = getattr(pool, memory.ATTRIBUTE)
        weights = sum(weight.nbytes for weight in self._runner.model.parameters())
        return StepBytes(weights + LAYER_BYTES * layers, summaries.kv_bytes_per_token, summaries.nbytes / pool.size)

    def _prefill(self, batch: ScheduleBatch, on_publish: Publish | None) -> GenerationBatchResult:
        sampled = not (batch.sampling_info.is_all_greedy or batch.is_prefill_only)
        result = self._target_worker.forward_batch_generation(batch, is_verify=sampled)
        if sampled:
            output, info = result.logits_output, batch.sampling_info
            self._runner._preprocess_logits(output, info)
            seeds = seeds_of(batch.reqs, self._seed, batch.seq_lens.device)
            result.next_token_ids = choose(output.next_token_logits, batch.seq_lens - 1, info, seeds)
            if batch.return_logprob:
                compute_spec_logprobs(batch, output, result.next_token_ids, chain_stride=1)
                output.next_token_logprobs = output.next_token_logprobs.view(-1)
        result.new_seq_lens = batch.seq_lens
        result.next_draft_input = Carried(result.next_token_ids.reshape(-1).to(torch.int64), batch.seq_lens)
        if on_publish is not None:
            on_publish(batch.seq_lens)
        return result

    def _round(
        self, batch: ScheduleBatch, steps: int, on_publish: Publish | None, barrier: Barrier | None
    ) -> GenerationBatchResult:
        """Draft ``steps`` tokens a row and verify them; without drafts this is a dense decode step.

        A verification has the same width always, for which SGLang's attention backends are made: tokens behind the
        drafts repeat the last one, and may be accepted like any other.
        """
        width = self.speculative_num_draft_tokens if steps else 1
        rows, info = len(batch.reqs), batch.sampling_info
        held, host = batch.seq_lens.to(torch.int64), batch.seq_lens_cpu.to(torch.int64)
        seeds = None if info.is_all_greedy else seeds_of(batch.reqs, self._seed, held.device)
        positions = held[:, None] + torch.arange(width, device=held.device)
        table = batch.req_to_token_pool.req_to_token
        slots = table[batch.req_pool_indices.to(torch.int64)[:, None], positions].to(torch.int64)
        tokens = [batch.spec_info.bonus_tokens.reshape(-1).to(torch.int64)]
        passes = []
        for step in range(steps):
            view = _view(batch, tokens[-1], slots[:, step].contiguous(), held + step + 1, host + step + 1)
            output = self._run(view, passes).logits_output
            _add_bias(output, info, 1)
            tokens.append(choose(output.next_token_logits, positions[:, step], info, seeds))
        tokens += tokens[-1:] * (width - len(tokens))
        chain = torch.stack(tokens, 1)
        if steps:
            view = _verify_view(batch, chain, positions, slots, held, host)
        else:
            view = _view(batch, tokens[0], slots[:, 0].contiguous(), held + 1, host + 1)
            # Also where drafts would run sparse, and only do not pay.
            view.dense_pass = True
        tree = GrammarTree.from_linear_chain(chain) if batch.has_grammar else None
        result = self._run(view, passes)
        output = result.logits_output
        _add_bias(output, info, width)
        if tree is not None:
            mask = build_grammar_vocab_mask(
                reqs=batch.reqs, tree=tree, sampling_info=info, device=held.device, barrier=barrier
            )
            if mask is not None:
                mask.apply(output.next_token_logits)
        target = choose(output.next_token_logits, positions.reshape(-1), info, seeds, width).view(rows, width)
        right = (chain[:, 1:] == target[:, :-1]).to(torch.int32).cumprod(1).sum(1, dtype=torch.int32)
        if SIMULATE_ACC_LEN > 0 and steps:
            right = simulated(SIMULATE_ACC_LEN, rows, width, held.device)
        lengths = held + right + 1
        if batch.return_logprob:
            compute_spec_logprobs(batch, output, target.reshape(-1), chain_stride=width)
        if on_publish is not None:
            on_publish(lengths)
        self._drafted.append(steps)
        last = target.gather(1, right[:, None].to(torch.int64))[:, 0]
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=target.reshape(-1),
            accept_lens=right + 1,
            new_seq_lens=lengths,
            next_draft_input=Carried(last, lengths),
            speculative_num_draft_tokens=width,
            can_run_cuda_graph=result.can_run_cuda_graph,
            extra_keep_alive_refs=[passes, chain, positions, slots, seeds],
        )

    def _run(self, view: ScheduleBatch, passes: list[object]) -> GenerationBatchResult:
        """Run a pass of the round. ``passes`` keeps what it reads alive."""
        # An event of the pass before says nothing of what this one reads, which may publish none.
        self._runner.shared_read_done_event = None
        forward_batch = ForwardBatch.init_new(view, self._runner, return_hidden_states_before_norm=False)
        passes.append(forward_batch)
        with self._graphs.replayed() if self._graphs and view.forward_mode.is_decode() else nullcontext():
            return self._target_worker.forward_batch_generation(None, forward_batch=forward_batch, is_verify=True)

    def init_cuda_graphs(self) -> None:
        """Record the graphs of decode steps, where SGLang has recorded those of the verification."""
        if self._runner.decode_cuda_graph_runner is None:
            return
        from sglang_sparse.scheduler.speculation.graphs import DecodeGraphs

        self._graphs = DecodeGraphs(self._runner)
        self._additional_graph_memory_usage["draft_decode"] = self._graphs.gigabytes
        self._additional_graph_time_usage["draft_decode"] = self._graphs.seconds

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        """Count a round, once its results are on the host."""
        steps = self._drafted.popleft()
        self._counts.add(steps, num_correct_drafts_per_req)
        self._acceptance.add(steps, num_correct_drafts_per_req)


def _view(
    batch: ScheduleBatch, tokens: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, host: torch.Tensor
) -> ScheduleBatch:
    """Make the batch of a decode step of the round.

    Args:
        batch: the round's.
        tokens: ``[rows]`` int64.
        slots: ``[rows]`` int64, where their KV goes.
        lengths: ``[rows]`` int64, with the new token.
        host: the same on the CPU.
    """
    view = copy.copy(batch)
    view.forward_mode, view.spec_info = ForwardMode.DECODE, None
    view.input_ids, view.out_cache_loc = tokens, slots
    view.seq_lens, view.seq_lens_cpu, view.seq_lens_sum = lengths, host, int(host.sum())
    view.orig_seq_lens = lengths.to(torch.int32)
    # Log-probabilities, grammars and penalties belong to sampling, which follows.
    view.return_logprob, view.top_logprobs_nums, view.token_ids_logprobs = False, None, None
    view.sampling_info, view.has_grammar = None, False
    return view


def _verify_view(
    batch: ScheduleBatch,
    chain: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    held: torch.Tensor,
    host: torch.Tensor,
) -> ScheduleBatch:
    """Make the batch of the verification, of ``[rows, width]`` tokens; see ``_view``.

    SGLang's attention backends take the lengths without these tokens on the device and, for a chain, with them on the
    host.
    """
    view = _view(batch, chain.reshape(-1), slots.reshape(-1), held, host)
    width = chain.shape[1]
    view.forward_mode, view.seq_lens_cpu = ForwardMode.TARGET_VERIFY, host + width
    view.spec_info = DFlashVerifyInput(
        view.input_ids, positions.reshape(-1), width, capture_hidden_mode=CaptureHiddenMode.NULL
    )
    return view


def _add_bias(output: LogitsProcessorOutput, info: object, width: int) -> None:
    bias = getattr(info, "logit_bias", None)
    if bias is not None:
        output.next_token_logits.add_(bias.repeat_interleave(width, 0))
