"""One real SGLang scheduler in this process: random tiny model, CPU, no peers."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pairs
import sessions
from checkpoints import random_eagle3, random_qwen3
from compaction import Compactions
from sglang.srt.arg_groups import speculative_hook
from sglang.srt.environ import envs
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers.io_struct import AbortReq, BatchTokenIDOutput, TokenizedGenerateReqInput
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs

from sglang_sparse.scheduler.inserted_keys import remember_inserts

VOCABULARY = 300
CONTEXT = 512
# Tokens of a group of sparse prefill.
GROUP = 32
RUNNING = 8


class StopLoop(BaseException):
    """Leaves SGLang's event loop; no handler in between may swallow it."""


@dataclass(frozen=True)
class EngineOptions:
    """Options that the scheduler is started with.

    Attributes:
        overlap: SGLang's overlap schedule.
        page_size: tokens per page.
        slots: tokens of the KV pool; few, so that requests are retracted and prefixes evicted.
        chunk: chunked prefill size; small, so that most prompts are chunked.
        config: further fields of ``--sparse-config``.
        prefill: further fields of ``--sparse-prefill-config``; None for dense prefill.
        mixed: SGLang's mixed chunk: rows decode within the batches of prompts.
        method: the decode method.
        radix: whether there is a radix tree.
        apart: rectify each row in a pass of its own, as long rows are on a GPU.
        core: the core of SGLang's radix tree.
        drafts: tokens that the sparse method drafts a round, for a dense pass to verify; 0 for none.
        host: tokens of the host memory behind the KV pool, in sizes of that; 0 for none.
        pair: it is the decode server of a pair, to which the KV of prompts comes from elsewhere.
        sessions: some requests are turns of streaming sessions.
        drafter: an algorithm of SGLang that drafts instead, with a random drafter. Without a decode method its
            verifications are dense.
    """

    overlap: bool
    page_size: int = 4
    slots: int = 144
    chunk: int = 16
    config: dict[str, Any] = field(default_factory=dict)
    prefill: dict[str, Any] | None = None
    mixed: bool = False
    method: str | None = "resa"
    radix: bool = True
    apart: bool = False
    core: str = "rust"
    drafts: int = 0
    drafter: str | None = None
    host: int = 0
    pair: bool = False
    sessions: bool = False

    @property
    def pages(self) -> int:
        """Pages of the KV pool, enough for a few requests of any page size."""
        return max(self.slots // self.page_size, 12)

    @property
    def sparse_config(self) -> dict[str, Any]:
        """The complete config: nearly every decode step is sparse."""
        base = {"page_size": self.page_size, "dense_fallback": "never"}
        if self.keeps:
            # A few blocks of most prompts, by each KV head, and a step attends to some of them.
            own = {"window_size": 6, "prompt_budget": 18, "kernel_size": 5, "topk": 4, "kt_cache_dtype": "bfloat16"}
        elif self.skips:
            # About half of the blocks that may be skipped, in both phases.
            own = {"threshold_scale_factor": {"prefill": 300, "decode": 200}}
        else:
            own = {"active_ratio": 0.1, "min_pages": 2}
        return {**base, **own, **self.config}

    @property
    def prefill_flags(self) -> dict[str, str]:
        """Groups are small, and about half of what is outside the anchor is left out."""
        if self.prefill is None:
            return {}
        config = {"block_size": GROUP // 2, "step": 2, "theta": 2.0, "dense_tail": 0, "dense_fallback": "never"}
        return {"sparse_prefill_method": "anchor", "sparse_prefill_config": json.dumps({**config, **self.prefill})}

    def draft_flags(self, model: Path) -> dict[str, Any]:
        """For lossless decoding, or a drafter beside the model's folder."""
        if not self.drafts:
            return {}
        flags = {"speculative_algorithm": self.drafter or "SPARSE_SELF", "speculative_num_steps": self.drafts}
        if self.drafter is None:
            return flags
        more = {"speculative_eagle_topk": 1, "speculative_num_draft_tokens": self.drafts + 1}
        return {**flags, **more, "speculative_draft_model_path": str(DRAFTERS[self.drafter](model))}

    @property
    def keeps(self) -> bool:
        """Whether requests keep a part of their prompts only."""
        return self.method == "rocketkv"

    @property
    def skips(self) -> bool:
        """Whether blocks of keys are skipped, of prefill as well."""
        return self.method == "skip_softmax"

    @property
    def prefills_sparse(self) -> bool:
        """Whether prompts are prefilled sparse, by groups."""
        return self.skips or self.prefill is not None

    @property
    def compared(self) -> bool:
        """Whether a twin's answers are the same.

        Its requests are alone, and compact nothing and draft nothing.
        """
        if self.drafts:
            return self.drafter is None or self.method is None
        if self.sessions:
            # What a turn keeps does not show in its answer; when a row is rectified does.
            return not self.rectifies and self.config.get("dense_fallback", "never") == "never"
        return self.config.get("eviction") == "compact" and self.config.get("dense_fallback", "never") == "never"

    @property
    def repeats_greedy(self) -> bool:
        """Whether a twin answers the same where tokens are not drawn; lossless decoding draws alike, too."""
        return self.compared and (not self.drafts or self.drafter is not None)

    @property
    def reserved(self) -> int:
        """Tokens that others have: sessions, and what SGLang allocates for two rounds of drafts, in whole pages."""
        if self.sessions:
            return sessions.MOST * (sessions.LONGEST + self.page_size)
        return 2 * (self.drafts + 1) + self.page_size if self.drafts else 0

    @property
    def rectifies(self) -> bool:
        """Whether dense passes make approximate KV exact again."""
        return bool(self.config.get("rectify_interval"))


def tiny_model(path: Path) -> Path:
    """Save the checkpoint: two layers, so that approximate attention in the first shows in the KV of the second."""
    return random_qwen3(
        path,
        layers=2,
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        # Large weights make attention sharp, so that what it misses matters.
        initializer_range=0.3,
    )


# The drafters: the model itself, whose prompts are dense here, so that it is not always right; and one that seldom is.
DRAFTERS: dict[str, Callable[[Path], Path]] = {
    "STANDALONE": lambda model: model,
    "EAGLE3": lambda model: random_eagle3(model.with_name("eagle3"), model),
}


class Engine:
    """A scheduler whose requests come from ``run`` and whose outputs end in ``outputs``. One a process.

    Args:
        options: how it is started.
        model: what ``tiny_model`` made.

    Attributes:
        scheduler: SGLang's ``Scheduler``.
        outputs: output tokens of every request, by id.
        logprobs: likewise the log-probabilities of those of requests that asked for them.
        ended: why each request ended, by id.
        cached_tokens: prompt tokens that came from the tree.
        drafted: tokens of SGLang's drafters, of requests that ended.
        accepted: those of them that the model chose, too.
        compaction: what requests must hold that have let go of their prompts; None where none do.
        evicted_tokens: of the tree, by whomever.
        divided: passes of rows that were rectified in one step.
    """

    def __init__(self, options: EngineOptions, model: Path):
        self.options = options
        envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.set(options.core)
        args = ServerArgs(  # pyright: ignore[reportCallIssue]
            model_path=str(model),
            skip_tokenizer_init=True,
            page_size=options.page_size,
            max_total_tokens=options.pages * options.page_size,
            max_running_requests=RUNNING,
            chunked_prefill_size=options.chunk,
            disable_overlap_schedule=not options.overlap,
            enable_mixed_chunk=options.mixed,
            enable_streaming_session=options.sessions,
            disable_radix_cache=not options.radix,
            enable_hierarchical_cache=options.host > 0,
            hicache_ratio=options.host or 2.0,
            # Admits more than fits, which is what makes the pool run full in the middle of decoding.
            schedule_conservativeness=0.1,
            log_level="error",
            sparse_method=options.method,
            sparse_config=json.dumps(options.sparse_config) if options.method else None,
            # Of a request that has no seed.
            random_seed=1,
            **options.prefill_flags,
            **options.draft_flags(model),
            **(pairs.flags(options.radix) if options.pair else {}),
        )
        if options.drafter:
            # As on a GPU: SGLang would not overlap rounds of its own drafters, and keep the lengths on the host.
            speculative_hook._disable_overlap_schedule_for_cpu = lambda _: None
            TorchNativeAttnBackend.needs_cpu_seq_lens = not options.overlap
            TorchNativeAttnBackend.max_context_len = CONTEXT  # pyright: ignore[reportAttributeAccessIssue]
        args.resolve_once()
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        self.scheduler: Any = scheduler_module.Scheduler(args, PortArgs.init_new(args))
        if options.pair:
            pairs.deliver(self.scheduler)
        self.compaction = Compactions.of(self.runner)
        self.divided = 0
        self.evicted_tokens = 0
        tree: Any = self.scheduler.tree_cache
        remember_inserts(tree)
        tree.evict, tree.evict_for_alloc = self._counting(tree.evict), self._counting(tree.evict_for_alloc)
        if options.apart:
            self.runner.attn_backend.divide = self._apart
        self.forget()
        self._detach()

    def _apart(self, rows: Sequence[tuple[int, int]]) -> list[list[int]]:
        self.divided += len(rows) if len(rows) > 1 else 0
        # Not in the order of the batch, as by length.
        return [[row] for row in reversed(range(len(rows)))]

    def _counting(self, evict: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            result = evict(*args, **kwargs)
            self.evicted_tokens += result.num_tokens_evicted
            return result

        return counted

    def forget(self) -> None:
        """Empty the sink."""
        self.outputs: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[float]] = {}
        self.ended: dict[str, str] = {}
        self.cached_tokens = self.drafted = self.accepted = 0

    def _detach(self) -> None:
        channels = self.scheduler.ipc_channels
        for sender in (channels.send_to_tokenizer, channels.send_to_detokenizer):
            sender.send_output = self._collect
        # It would poll sockets on which nobody writes.
        self.scheduler.idle_sleeper = None
        self.scheduler.load_snapshot_writer = None

    @property
    def runner(self) -> Any:
        """SGLang's ``ModelRunner``."""
        return self.scheduler.tp_worker.model_runner

    def _collect(self, output: Any, *_: Any) -> None:
        if isinstance(output, AbortReq):
            self.ended[output.rid] = "abort"
        elif isinstance(output, BatchTokenIDOutput):
            self.cached_tokens += sum(output.cached_tokens)
            for rid, tokens, reason in zip(output.rids, output.output_ids, output.finished_reasons, strict=True):
                self.outputs.setdefault(rid, []).extend(tokens)
                if reason is not None:
                    self.ended[rid] = reason["type"]
            self.drafted += sum(self.options.drafts * count for count in output.spec_verify_ct or ())
            self.accepted += sum(output.spec_num_correct_drafts or ())
            for rid, logprobs in zip(output.rids, output.output_token_logprobs_val or (), strict=False):
                self.logprobs.setdefault(rid, []).extend(logprobs)

    def run(self, receive: Callable[[], list[Any]]) -> None:
        """Run SGLang's own event loop until ``receive``, called at each iteration, raises ``StopLoop``."""
        self.scheduler.request_receiver = SimpleNamespace(recv_requests=lambda *_, **__: receive())
        with suppress(StopLoop):
            self.scheduler.run_event_loop()


def request(
    rid: str, tokens: list[int], sampling: dict[str, Any], logprob: bool, **more: Any
) -> TokenizedGenerateReqInput:
    """A tokenized request as the tokenizer process would send it."""
    params = SamplingParams(**sampling)
    params.normalize(None)
    return TokenizedGenerateReqInput(
        rid=rid,
        input_text=None,
        input_ids=array("q", tokens),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=params,
        return_logprob=logprob,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
        **more,
    )


def force_retraction(on: bool) -> None:
    """Make the next decode step retract a request, as SGLang's own test switch does."""
    scheduler_module.TEST_RETRACT = on
    scheduler_module.TEST_RETRACT_INTERVAL = 1
