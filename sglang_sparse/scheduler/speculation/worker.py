"""The worker of SPARSE_SELF: a round is some decode steps under the server's sparse method and one dense pass.

The drafts' keys and values lie in the slots of their positions; the dense pass over the same tokens writes them anew,
and reads only what dense passes wrote. So all KV that stays is exact, and so is every token: the one that the dense
pass chooses. A wrong draft costs the tokens behind it.

Source: self-speculation with sparse attention, MagicDec (arXiv 2408.11049), with a selection of each round or step in
place of a fixed one, and with coupled noise in place of rejection sampling (``sampling.py``).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, cached_property
from typing import TYPE_CHECKING, cast

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_utils import SIMULATE_ACC_LEN, GrammarTree, build_grammar_vocab_mask

from sglang_sparse.attention import memory
from sglang_sparse.attention.plan import plan_decode
from sglang_sparse.config import arguments
from sglang_sparse.scheduler.request_state import state_of
from sglang_sparse.scheduler.speculation.adaptive import LAYER_BYTES, Acceptance, StepBytes, best_steps
from sglang_sparse.scheduler.speculation.algorithm import Carried
from sglang_sparse.scheduler.speculation.sampling import choose, seeds_of, simulated
from sglang_sparse.scheduler.speculation.window import Window
from sglang_sparse_kernels.common.launch import to_device

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    from sglang_sparse.attention.backend import SparseAttentionBackend
    from sglang_sparse.attention.counters import DraftCounts
    from sglang_sparse.attention.protocols import Req
    from sglang_sparse.config.request_options import RequestOptions
    from sglang_sparse.methods.aux_buffers import AuxBuffers
    from sglang_sparse.scheduler.speculation.graphs import DecodeGraphs

logger = logging.getLogger(__name__)

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
        # Of the rounds whose results the scheduler has not seen yet: how many tokens each row drafted, and which rows
        # keep them all.
        self._drafted: deque[tuple[int, list[bool]]] = deque()
        self._graphs: DecodeGraphs | None = None
        self._acceptance = Acceptance()
        if SIMULATE_ACC_LEN > 0:
            if get_parallel().tp_size > 1:
                raise RuntimeError("SGLANG_SIMULATE_ACC_LEN: each tensor-parallel rank would accept other drafts")
            logger.warning(
                "sglang_sparse: SGLANG_SIMULATE_ACC_LEN is set: drafts are accepted at random, and neither answers nor "
                "their cached KV are the model's"
            )

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
        steps = self._steps(batch)
        if steps:
            return self._round(batch, steps, on_publish, grammar_barrier)
        return self._step(batch, on_publish, grammar_barrier)

    def _steps(self, batch: ScheduleBatch) -> int:
        """Return the number of tokens to draft: none if drafts would run dense, at the cost of a verification.

        All that the server may draft where its config says itself from how many tokens on sparse steps pay.
        """
        groups = self._backend.groups
        plan = plan_decode(groups, batch.seq_lens_cpu + 1, _options(batch))
        if not plan.sparse or groups.config.crossover_tokens != "auto":
            return self.speculative_num_steps if plan.sparse else 0
        layers = self._runner.model_config.num_hidden_layers
        costs, tokens = self._step_bytes, int(batch.seq_lens_cpu.sum())
        rows = len(plan.covered)
        draft, choice = costs.draft(plan, groups, tokens, layers), costs.choice(rows, tokens)
        once = costs.verification(rows, self.speculative_num_draft_tokens, tokens)
        if self._backend.shares(plan, rows):
            once += choice
        else:
            draft += choice
        return best_steps(draft, self._acceptance.rate, self.speculative_num_steps, once)

    @cached_property
    def _step_bytes(self) -> StepBytes:
        pool, layers = self._runner.token_to_kv_pool, self._runner.model_config.num_hidden_layers
        summaries: AuxBuffers = getattr(pool, memory.ATTRIBUTE)
        routers = [module for module in self._runner.model.modules() if isinstance(module, FusedMoE)]
        weights = sum(weight.nbytes for weight in self._runner.model.parameters())
        experts = sum(weight.nbytes for module in routers for weight in module.parameters())
        routed = (routers[0].top_k or 0) / routers[0].num_experts if routers else 0.0
        fixed = weights - experts + LAYER_BYTES * layers
        return StepBytes(fixed, summaries.kv_bytes_per_token, summaries.entry_bytes / pool.size, experts, routed)

    def _prefill(self, batch: ScheduleBatch, on_publish: Publish | None) -> GenerationBatchResult:
        sampled = not (batch.sampling_info.is_all_greedy or batch.is_prefill_only)
        result = self._target_worker.forward_batch_generation(batch, is_verify=sampled)
        if sampled:
            output = _output(result)
            self._runner._preprocess_logits(output, batch.sampling_info)
            tokens = self._choose(_logits(output), batch.seq_lens - 1, batch.sampling_info, self._seeds(batch))
            result.next_token_ids = tokens
            if batch.return_logprob:
                compute_spec_logprobs(batch, output, tokens, chain_stride=1)
                assert output.next_token_logprobs is not None
                output.next_token_logprobs = output.next_token_logprobs.view(-1)
        result.new_seq_lens = batch.seq_lens
        first = cast("torch.Tensor", result.next_token_ids).reshape(-1).to(torch.int64)
        result.next_draft_input = Carried(first, batch.seq_lens)
        if on_publish is not None:
            on_publish(batch.seq_lens)
        return result

    def _seeds(self, batch: ScheduleBatch) -> torch.Tensor | None:
        if batch.sampling_info.is_all_greedy:
            return None
        return seeds_of(_requests(batch), self._seed, batch.seq_lens.device)

    def _step(self, batch: ScheduleBatch, on_publish: Publish | None, barrier: Barrier | None) -> GenerationBatchResult:
        """Run a dense decode step: a round without drafts, in as few operations as there can be."""
        window = Window.of(batch, 1, self._seeds(batch))
        # SGLang's backends plan on the host.
        window.settle()
        chain = _last_tokens(batch)[:, None]
        view = window.dense_step(batch, chain)
        lengths = view.seq_lens
        if on_publish is not None:
            # Known beforehand, so that the host prepares the next step while this one runs.
            on_publish(lengths)
        result = self._run(view, window)
        target = self._targets(batch, result, window, chain, barrier).reshape(-1)
        if batch.return_logprob:
            compute_spec_logprobs(batch, _output(result), target, chain_stride=1)
        self._drafted.append((0, [False] * len(target)))
        return GenerationBatchResult(
            logits_output=result.logits_output,
            next_token_ids=target,
            accept_lens=_one_each(len(target), target.device),
            new_seq_lens=lengths,
            next_draft_input=Carried(target, lengths),
            speculative_num_draft_tokens=1,
            can_run_cuda_graph=result.can_run_cuda_graph,
            extra_keep_alive_refs=[window, chain],
        )

    def _round(
        self, batch: ScheduleBatch, steps: int, on_publish: Publish | None, barrier: Barrier | None
    ) -> GenerationBatchResult:
        """Draft ``steps`` tokens a row and verify them.

        A verification has the same width always, for which SGLang's attention backends are made: tokens behind the
        drafts repeat the last one, and may be accepted like any other.
        """
        width = self.speculative_num_draft_tokens
        window = Window.of(batch, width, self._seeds(batch))
        if not self._backend.attends_alone:
            # SGLang's backends plan on the host.
            window.settle()
        chain = self._draft(batch, window, steps)
        result = self._run(window.verification(batch, chain), window)
        target = self._targets(batch, result, window, chain, barrier)
        lossy = [not options.lossless for options in _options(batch)]
        if any(lossy):
            target = _with_drafts(target, chain, steps, to_device(lossy, torch.bool, target.device))
        right = (chain[:, 1:] == target[:, :-1]).to(torch.int32).cumprod(1).sum(1, dtype=torch.int32)
        if SIMULATE_ACC_LEN > 0:
            right = simulated(SIMULATE_ACC_LEN, len(chain), width, chain.device).clamp(max=steps)
        lengths = window.held + right + 1
        if batch.return_logprob:
            compute_spec_logprobs(batch, _output(result), target.reshape(-1), chain_stride=width)
        if on_publish is not None:
            on_publish(lengths)
        self._drafted.append((steps, lossy))
        return GenerationBatchResult(
            logits_output=result.logits_output,
            next_token_ids=target.reshape(-1),
            accept_lens=right + 1,
            new_seq_lens=lengths,
            next_draft_input=Carried(target.gather(1, right[:, None].to(torch.int64))[:, 0], lengths),
            speculative_num_draft_tokens=width,
            can_run_cuda_graph=result.can_run_cuda_graph,
            extra_keep_alive_refs=[window, chain],
        )

    def _targets(
        self,
        batch: ScheduleBatch,
        result: GenerationBatchResult,
        window: Window,
        chain: torch.Tensor,
        barrier: Barrier | None,
    ) -> torch.Tensor:
        """Return what a dense pass over ``[rows, width]`` tokens chooses behind each of them, as many."""
        info, width = batch.sampling_info, chain.shape[1]
        logits = _biased(_logits(_output(result)), info, width)
        if batch.has_grammar:
            tree = GrammarTree.from_linear_chain(chain)
            mask = build_grammar_vocab_mask(
                reqs=batch.reqs, tree=tree, sampling_info=info, device=logits.device, barrier=barrier
            )
            if mask is not None:
                mask.apply(logits)
        return self._choose(logits, window.positions.reshape(-1), info, window.seeds, width).view_as(chain)

    def _draft(self, batch: ScheduleBatch, window: Window, steps: int) -> torch.Tensor:
        """Return each row's last token and what is drafted behind it, ``[rows, width]`` int64."""
        tokens = [_last_tokens(batch)]
        for step in range(steps):
            output = _output(self._run(window.step(batch, tokens[-1], step), window))
            logits = _biased(_logits(output), batch.sampling_info, 1)
            tokens.append(self._choose(logits, window.positions[:, step], batch.sampling_info, window.seeds))
            window.settle()
        return torch.stack(tokens + tokens[-1:] * (window.positions.shape[1] - len(tokens)), 1)

    def _choose(
        self,
        logits: torch.Tensor,
        positions: torch.Tensor,
        info: SamplingBatchInfo,
        seeds: torch.Tensor | None,
        width: int = 1,
    ) -> torch.Tensor:
        """Choose tokens, the same ones on all tensor-parallel ranks: else these would verify different drafts.

        Their logits are equal, but sums over a sorted vocabulary may round differently. See ``choose``.
        """
        tokens = choose(logits, positions, info, seeds, width)
        group = get_parallel().tp_group
        return group.broadcast(tokens, src=0) if group.world_size > 1 else tokens

    def _run(self, view: ScheduleBatch, window: Window) -> GenerationBatchResult:
        """Run a pass of the round."""
        # An event of the pass before says nothing of what this one reads, which may publish none.
        self._runner.shared_read_done_event = None
        forward_batch = ForwardBatch.init_new(view, self._runner, return_hidden_states_before_norm=False)
        window.passes.append(forward_batch)
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
        steps, lossy = self._drafted.popleft()
        right = [count for count, all_kept in zip(num_correct_drafts_per_req, lossy, strict=True) if not all_kept]
        self._counts.add(steps, right)
        self._acceptance.add(steps, right)


def _requests(batch: ScheduleBatch) -> list[Req]:
    return cast("list[Req]", batch.reqs)


def _options(batch: ScheduleBatch) -> list[RequestOptions]:
    states = [state_of(request) for request in _requests(batch)]
    options = [state.options for state in states if state is not None]
    assert len(options) == len(states), "made by the passes of the prompts"
    return options


def _last_tokens(batch: ScheduleBatch) -> torch.Tensor:
    return cast("Carried", batch.spec_info).bonus_tokens.reshape(-1).to(torch.int64)


@cache
def _one_each(rows: int, device: torch.device) -> torch.Tensor:
    return torch.ones(rows, dtype=torch.int32, device=device)


def _with_drafts(target: torch.Tensor, chain: torch.Tensor, steps: int, rows: torch.Tensor) -> torch.Tensor:
    """Return the tokens of a round in which some rows keep their drafts, and the dense pass's token behind them.

    Their KV is as exact as any: the dense pass wrote it.

    Args:
        target: ``[rows, width]`` int64, what the dense pass chose.
        chain: ``[rows, width]`` int64, see ``_draft``.
        steps: drafts of a row.
        rows: ``[rows]`` bool, those that keep theirs.
    """
    kept = target.clone()
    kept[:, :steps] = chain[:, 1 : steps + 1]
    return torch.where(rows[:, None], kept, target)


def _output(result: GenerationBatchResult) -> LogitsProcessorOutput:
    assert result.logits_output is not None
    return result.logits_output


def _logits(output: LogitsProcessorOutput) -> torch.Tensor:
    assert output.next_token_logits is not None
    return output.next_token_logits


def _biased(logits: torch.Tensor, info: SamplingBatchInfo, width: int) -> torch.Tensor:
    """Add the requests' biases to logits, in place."""
    if info.logit_bias is not None:
        logits.view(-1, width, logits.shape[1]).add_(info.logit_bias[:, None])
    return logits
