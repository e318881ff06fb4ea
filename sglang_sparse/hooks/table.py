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
        method: the only method that it is for; None for several. Where there is a GPU it is hooked in the servers of
            that method alone.
        gpu: whether it acts where there is a GPU, or where there is none; None in both.
    """

    target: str
    kind: Literal["AFTER", "AROUND"]
    function: str
    process: Literal["main", "scheduler", "both"]
    purpose: str
    method: str | None = None
    gpu: bool | None = None


DSA_SEAMS = (
    Seam(
        "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer.forward_native",
        "AROUND",
        "indexer:choose",
        "scheduler",
        "DSA without a GPU: choose the tokens to attend to",
        "dsa",
        gpu=False,
    ),
    Seam(
        "sglang.srt.model_executor.model_runner.ModelRunner.load_model",
        "AROUND",
        "hooks.apply:hook_method",
        "scheduler",
        "DSA: judge weights that were not at hand before; on a GPU hook the next ones first, in its servers only",
    ),
    Seam(
        "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer.forward_cuda",
        "AROUND",
        "indexer:choose",
        "scheduler",
        "DSA on a GPU: choose the tokens to attend to",
        "dsa",
        gpu=True,
    ),
    Seam(
        "sglang.srt.layers.attention.dsa.dsa_indexer_metadata.DSAIndexerMetadata.topk_transform",
        "AROUND",
        "native_indexer:choose",
        "scheduler",
        "DSA on a GPU: the same tokens every time of SGLang's own logits",
        "dsa",
        gpu=True,
    ),
    Seam(
        "sglang.srt.layers.attention.dsa.utils.resolve_paged_mqa_logits_metadata_fn",
        "AFTER",
        "native_indexer:schedule",
        "scheduler",
        "DSA on a GPU: no schedule of SGLang's logits, which GPUs that it does not serve refuse, where others are made",
        "dsa",
        gpu=True,
    ),
    Seam(
        "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend._build_topk_v2_plan",
        "AROUND",
        "native_indexer:plan",
        "scheduler",
        "DSA on a GPU: no plan of SGLang's selection where another one runs",
        "dsa",
        gpu=True,
    ),
    Seam(
        "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend._forward_tilelang",
        "AROUND",
        "dsa_latents:attend",
        "scheduler",
        "DSA: attend to them",
        "dsa",
    ),
    Seam(
        "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool._write_mla_kv_buffer",
        "AROUND",
        "dsa_latents:write",
        "scheduler",
        "DSA: write float8 latents, which SGLang does on GPUs that have float8",
        "dsa",
    ),
    Seam(
        "sglang.srt.arg_groups.overrides._dsa_split_backend_resolution",
        "AROUND",
        "dsa_flags:keep_slot",
        "main",
        "DSA on a GPU: float8 latents go with the backend in whose place the portable attention stands",
        gpu=True,
    ),
)

SEAMS = (
    Seam(
        "sglang.srt.arg_groups.model_path_hook.handle_model_source_paths",
        "AFTER",
        "hooks.server_args:refuse_model",
        "main",
        "refuse a model before SGLang resolves arguments for it",
    ),
    Seam(
        "sglang.srt.server_args.prepare_server_args",
        "AROUND",
        "hooks.server_args:prepare_server_args",
        "main",
        "a refusal on the command line is one message and exit status 2",
    ),
    Seam(
        "sglang.srt.arg_groups.overrides.post_capture_kv_sizing_planned",
        "AROUND",
        "graphs:no_post_capture_sizing",
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
        "sglang.srt.model_executor.model_runner.load_kv_cache_scales",
        "AFTER",
        "kv_dtypes:complete_scales",
        "scheduler",
        "scales of --quantization-param-path in both forms that attention reads",
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
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner._resolve_attention_variant",
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
        "compact_running:compact_running",
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
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint",
        "AROUND",
        "prefill:cache_whole_groups",
        "scheduler",
        "sparse prefill: only complete groups enter the radix tree",
    ),
    Seam(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.match_prefix",
        "AROUND",
        "group_keys:mark_key",
        "scheduler",
        "sparse prefill: prompts that part within a group share nothing of it",
    ),
    Seam(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.insert",
        "AROUND",
        "group_keys:mark_key",
        "scheduler",
        "the same, for what enters the tree",
    ),
    Seam(
        "sglang.srt.managers.schedule_batch.Req.owned_kv_len",
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
    *DSA_SEAMS,
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
