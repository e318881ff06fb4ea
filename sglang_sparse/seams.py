"""The one table of SGLang's functions that the plugin changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Seam:
    """One hooked function of SGLang.

    Attributes:
        target: dotted path in SGLang.
        kind: SGLang's hook type.
        function: ``module:function`` of this package, imported at its first call: a server without a sparse flag
            loads no more than this table and the flags.
        process: where it acts.
        purpose: what it is for.
        method: the only method that it is for; None for several.
    """

    target: str
    kind: Literal["AFTER", "AROUND"]
    function: str
    process: Literal["main", "scheduler", "both"]
    purpose: str
    method: str | None = None


SEAMS = (
    Seam(
        "sglang.srt.server_args.ServerArgs.__post_init__",
        "AROUND",
        "cli:validated_post_init",
        "main",
        "validate flags and refuse what cannot be served, before memory is taken",
    ),
    Seam(
        "sglang.srt.server_args.ServerArgs._handle_model_source_paths",
        "AFTER",
        "cli:refuse_model",
        "main",
        "refuse a model before SGLang resolves arguments for it",
    ),
    Seam(
        "sglang.srt.server_args.prepare_server_args",
        "AROUND",
        "cli:prepare_server_args",
        "main",
        "a refusal on the command line is one message and exit status 2",
    ),
    Seam(
        "sglang.srt.server_args.ServerArgs.post_capture_kv_sizing_planned",
        "AROUND",
        "pools:no_post_capture_sizing",
        "both",
        "post-capture KV sizing would charge the page summaries twice",
    ),
    Seam(
        "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
        "AFTER",
        "pools:charge_aux_bytes",
        "scheduler",
        "count the page summaries in SGLang's memory sizing",
    ),
    Seam(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes",
        "AFTER",
        "pools:charge_scratch",
        "scheduler",
        "leave memory free for the scratch of sparse passes",
    ),
    Seam(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_token_to_kv_pool",
        "AFTER",
        "pools:attach_aux_pools",
        "scheduler",
        "allocate the page summaries beside the KV pool",
    ),
    Seam(
        "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper",
        "AROUND",
        "backend:wrap_attention_backend",
        "scheduler",
        "wrap the dense attention backend",
    ),
    Seam(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.capture_one_shape",
        "AROUND",
        "graphs:capture_both",
        "scheduler",
        "capture a dense and a sparse decode graph for every batch size",
    ),
    Seam(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner._resolve_lora_variant",
        "AROUND",
        "graphs:graph_variant",
        "scheduler",
        "choose between the two decode graphs for each batch",
    ),
    Seam(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
        "AFTER",
        "exactness:begin_pass",
        "scheduler",
        "decide which rows run sparse, and know how much of each request's KV is exact",
    ),
    Seam(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object",
        "AROUND",
        "requests:refuse_bad_options",
        "main",
        "a bad field in a request's custom_params is HTTP status 400",
    ),
    Seam(
        "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
        "AROUND",
        "rectify:run_step",
        "scheduler",
        "decide which rows of a decode step are rectified",
    ),
    Seam(
        "sglang.srt.model_executor.model_runner.ModelRunner.forward",
        "AROUND",
        "rectify:run_passes",
        "scheduler",
        "the dense extend pass over due rows, then the decode pass over the others",
    ),
    Seam(
        "sglang.srt.model_executor.model_runner.ModelRunner.sample",
        "AROUND",
        "forcing:sample",
        "scheduler",
        "forced decoding",
    ),
    Seam(
        "sglang.srt.managers.scheduler.Scheduler.process_batch_result",
        "AROUND",
        "rectify:finish_exactly",
        "scheduler",
        "rectify_on_finish: dense passes over the tails of finished requests",
    ),
    Seam(
        "sglang.srt.mem_cache.common.release_kv_cache",
        "AROUND",
        "rectify:hold_release",
        "scheduler",
        "rectify_on_finish: hold the release back until the pass is launched",
    ),
    Seam(
        "sglang.srt.managers.scheduler.Scheduler.update_running_batch",
        "AFTER",
        "compact:compact_running",
        "scheduler",
        "rocketkv: a request lets go of its prompt and holds what it keeps of it",
    ),
    Seam(
        "sglang.srt.managers.schedule_batch.Req.reset_for_retract",
        "AFTER",
        "exactness:forget_exact_length",
        "scheduler",
        "a retracted request is prefilled again",
    ),
    Seam(
        "sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len",
        "AFTER",
        "prefill:limit_match",
        "scheduler",
        "sparse prefill, rocketkv: a cached prefix is used up to where the method allows",
    ),
    Seam(
        "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req",
        "AROUND",
        "prefill:add_request",
        "scheduler",
        "sparse prefill, rocketkv: a request's first chunk ends where the method allows",
    ),
    Seam(
        "sglang.srt.managers.schedule_policy.PrefillAdder.add_chunked_req",
        "AROUND",
        "prefill:add_chunk",
        "scheduler",
        "sparse prefill, rocketkv: further chunks likewise",
    ),
    Seam(
        "sglang.srt.mem_cache.radix_cache.RadixCache.cache_unfinished_req",
        "AROUND",
        "prefill:cache_whole_groups",
        "scheduler",
        "sparse prefill: only complete groups enter the radix tree",
    ),
    Seam(
        "sglang.srt.mem_cache.radix_cache.RadixCache.match_prefix",
        "AROUND",
        "group_keys:mark_key",
        "scheduler",
        "sparse prefill: prompts that part within a group share nothing of it",
    ),
    Seam(
        "sglang.srt.mem_cache.radix_cache.RadixCache.insert",
        "AROUND",
        "group_keys:mark_key",
        "scheduler",
        "the same, for what enters the tree",
    ),
    Seam(
        "sglang.srt.managers.schedule_batch.Req.effective_kv_committed_len",
        "AROUND",
        "exactness:exact_committed_len",
        "scheduler",
        "only exact KV enters the radix tree",
    ),
    Seam(
        "sglang.srt.mem_cache.common._release_overallocated_kv_indices",
        "AROUND",
        "exactness:release_inexact_tail",
        "scheduler",
        "free the approximate tail of a finished request",
    ),
    Seam(
        "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer.forward_native",
        "AROUND",
        "indexer:choose",
        "scheduler",
        "DSA: choose the tokens to attend to",
        "dsa",
    ),
    Seam(
        "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend._forward_tilelang",
        "AROUND",
        "indexer:attend",
        "scheduler",
        "DSA: attend to them",
        "dsa",
    ),
    Seam(
        "sglang.srt.managers.scheduler.Scheduler.on_idle",
        "AFTER",
        "tree_check:check_when_idle",
        "scheduler",
        "check_exactness: prove by recomputation that the radix tree is exact",
    ),
    Seam(
        "sglang.srt.managers.scheduler.Scheduler.get_init_info",
        "AFTER",
        "stats:report_active",
        "scheduler",
        "tell the main process that the scheduler runs sparse",
    ),
    Seam(
        "sglang.srt.entrypoints.engine.Engine._launch_subprocesses",
        "AFTER",
        "stats:require_active_schedulers",
        "main",
        "end the start when a scheduler runs dense",
    ),
    Seam(
        "sglang.srt.managers.scheduler.Scheduler.get_init_info",
        "AFTER",
        "metrics:start",
        "scheduler",
        "create the sparse Prometheus metrics",
    ),
    Seam(
        "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter.report_decode_stats",
        "AFTER",
        "metrics:follow",
        "scheduler",
        "a log line and metrics for each decode report",
    ),
    Seam(
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        "AFTER",
        "stats:add_internal_state",
        "scheduler",
        "counters in /server_info",
    ),
)
