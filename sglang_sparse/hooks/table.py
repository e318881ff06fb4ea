"""The one table of SGLang's functions that the plugin changes."""

from __future__ import annotations

from sglang_sparse.hooks.dsa_table import DSA_HOOKS
from sglang_sparse.hooks.hook import Hook
from sglang_sparse.hooks.pool_table import POOL_HOOKS

HOOKS = (
    Hook(
        "sglang.srt.server_args.prepare_server_args",
        "argv",
        "AROUND",
        "hooks.server_args:prepare_server_args",
        "print a refusal on the command line as one message, with exit status 2",
        process="main",
    ),
    Hook(
        "sglang.srt.arg_groups.overrides.post_capture_kv_sizing_planned",
        "server_args",
        "AROUND",
        "attention.cuda_graphs:no_post_capture_sizing",
        "switch off post-capture KV sizing, which would charge the page summaries twice",
        process="both",
    ),
    Hook(
        "sglang.srt.arg_groups.cuda_graph_hook.apply_cuda_graph_disaggregation_roles",
        "server_args",
        "AROUND",
        "hooks.server_args:keep_prefill_graphs",
        "keep a decode server's CUDA graphs of prefill if it rectifies, and of both roles where a server changes it",
        process="main",
    ),
    *POOL_HOOKS,
    Hook(
        "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper",
        "runner, full_attn_backend",
        "AROUND",
        "hooks.model_runner:wrap_attention_backend",
        "wrap the dense attention backend; compare the ranks of a server that has several",
    ),
    Hook(
        "sglang.srt.layers.attention.graph_variants.create_attention_graph_variants",
        "hf_config",
        "AFTER",
        "attention.cuda_graphs:add_variants",
        "capture dense and sparse decode graphs for every batch size, and choose between them for each batch",
    ),
    Hook(
        "sglang.srt.model_executor.model_runner.ModelRunner._decode_cuda_graph_runner_cls",
        "self",
        "AFTER",
        "scheduler.speculation.graphs:verify_runner",
        "lossless decoding: record the graphs of the dense verification",
        gpu=True,
    ),
    Hook(
        "sglang.srt.speculative.spec_info.create_dummy_verify_input",
        "spec_algorithm, custom_mask, num_tokens_per_req, is_draft_worker",
        "AFTER",
        "scheduler.speculation.graphs:dummy_input",
        "lossless decoding: make the input of warm-up passes at the width of a verification",
        gpu=True,
    ),
    Hook(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
        (
            "cls, batch, model_runner, *, capture_hidden_mode=None, return_hidden_states_before_norm, "
            "extend_position_info=None, spec_mrope_positions=None, kv_loc_plan=None, write_cols=None"
        ),
        "AFTER",
        "scheduler.exact_kv:begin_pass",
        "decide which rows run sparse, and track how much of each request's KV is exact",
    ),
    Hook(
        "sglang.srt.state_capturer.base.BaseTopkCapturer.on_forward_end",
        "self, forward_batch, can_run_graph, cuda_graph_batch, no_copy_to_cpu=False",
        "AROUND",
        "scheduler.partial_batch:keep_experts",
        "return a token's experts from the step that computed it, and not from a rectifying pass behind it",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
        "self, obj, request=None",
        "AROUND",
        "hooks.requests:carry_options",
        "keep custom_params of requests whose HTTP entry would drop them, such as /v1/responses",
        process="main",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object",
        "self, obj, input_text, input_ids, input_embeds=None, mm_inputs=None, token_type_ids=None",
        "AROUND",
        "hooks.requests:refuse_bad_options",
        "answer a bad field in a request's custom_params with HTTP status 400 before a stream begins",
        process="main",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler._create_generation_req",
        "self, recv_req, *args, **kwargs",
        "AROUND",
        "hooks.requests:admit",
        "refuse bad fields of requests that no tokenizer with the plugin has seen; give requests their radix namespace",
    ),
    Hook(
        "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
        (
            "self, batch, forward_batch=None, pp_proxy_tensors=None, is_verify=False, "
            "skip_attn_backend_init=None, *, capture_hidden_mode=None, return_kv_loc_plan=False"
        ),
        "AROUND",
        "scheduler.rectification:run_step",
        "decide which rows of a decode step are rectified",
    ),
    Hook(
        "sglang.srt.model_executor.model_runner.ModelRunner.forward",
        (
            "self, forward_batch, skip_attn_backend_init=None, pp_proxy_tensors=None, reinit_attn_backend=False, "
            "split_forward_count=1"
        ),
        "AROUND",
        "scheduler.rectification:run_passes",
        "run the dense extend pass over due rows, then the decode pass over the others",
    ),
    Hook(
        "sglang.srt.model_executor.model_runner.ModelRunner.sample",
        "self, logits_output, forward_batch",
        "AROUND",
        "scheduler.forced_tokens:sample",
        "force the output tokens that a request asks for",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.dp_attn.prepare_mlp_sync_batch_raw",
        (
            "local_batch, model_runner, get_idle_batch, disable_cuda_graph, require_mlp_tp_gather, "
            "disable_overlap_schedule, offload_tags, draft_require_mlp_tp_gather=None, dwdp=False, sync_wait_carry=None"
        ),
        "AROUND",
        "scheduler.joint_pass:plan_first",
        "data-parallel attention: plan which rows this rank rectifies before all ranks gather their sizes",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.dp_attn._local_prefill_cuda_graph_vote",
        (
            "*, local_batch, num_tokens, prefill_graph_runner, coordinated_prefill, breakable_prefill, spec_algorithm, "
            "model_config"
        ),
        "AROUND",
        "scheduler.joint_pass:keep_decode",
        "data-parallel attention: keep sparse decode from becoming part of a prefill, which is dense",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.dp_attn.MLPSyncBatchInfo._get_local_tensor",
        "self, device, dtype=torch.int64",
        "AFTER",
        "scheduler.joint_pass:append_plan",
        "data-parallel attention: gather how many tokens and rows each rank rectifies",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.dp_attn.MLPSyncBatchInfo._get_fallback_tensor",
        "self, device, dtype=torch.int64",
        "AFTER",
        "scheduler.joint_pass:append_zeros",
        "the same for a rank that is missing",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.dp_attn._update_gather_batch",
        ("batch, mlp_sync_info, require_mlp_tp_gather, draft_require_mlp_tp_gather=None, skip_global_metadata=False"),
        "AFTER",
        "scheduler.joint_pass:attach",
        "data-parallel attention: attach the joint dense pass to the batch",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.process_batch_result",
        "self, batch, result",
        "AROUND",
        "scheduler.rectification:follow_results",
        "rectify_on_finish: run dense passes over the tails of finished requests; speculative decoding: over due rows",
    ),
    Hook(
        "sglang.srt.mem_cache.common.release_kv_cache",
        "req, tree_cache, *, checkpoint",
        "AROUND",
        "scheduler.rectification:hold_release",
        "rectify_on_finish: hold the release back until the pass is launched",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.update_running_batch",
        "self, batch",
        "AFTER",
        "scheduler.compaction:compact_running",
        "rocketkv: move the kept blocks of a prompt to private pages and release the prompt",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.Req.reset_for_retract",
        "self",
        "AFTER",
        "scheduler.exact_kv:forget_exact_length",
        "forget the exact length of a retracted request, which is prefilled again",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode",
        "self",
        "AFTER",
        "scheduler.exact_kv:abort_retracted",
        "deterministic inference: abort a retracted request, whose prefill would make its sparse KV exact",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len",
        "self, input_len",
        "AFTER",
        "scheduler.prefill_chunks:limit_match",
        "sparse prefill, rocketkv: end the cached prefix where the method allows it",
    ),
    Hook(
        "sglang.srt.disaggregation.decode_schedule_batch_mixin.ScheduleBatchDisaggregationDecodeMixin.prepare_for_prebuilt",
        "self",
        "AFTER",
        "scheduler.arrivals:note_transferred",
        "prefill-decode disaggregation: summarise the pages of a prompt that another server has prefilled",
    ),
    Hook(
        "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req",
        "self, req, has_chunked_req, truncation_align_size",
        "AROUND",
        "scheduler.prefill_chunks:add_request",
        "sparse prefill, rocketkv: end a request's first chunk where the method allows it",
    ),
    Hook(
        "sglang.srt.managers.schedule_policy.PrefillAdder.add_chunked_req",
        "self, req",
        "AROUND",
        "scheduler.prefill_chunks:add_chunk",
        "sparse prefill, rocketkv: the same for further chunks",
    ),
    Hook(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint",
        "self, req, *, up_to, **kwargs",
        "AROUND",
        "scheduler.prefill_chunks:cache_whole_groups",
        "insert only exact KV into the radix tree before a request ends; sparse prefill: only complete groups",
    ),
    Hook(
        "sglang.srt.mem_cache.unified_cache.components.mamba.MambaComponent._select_finished_checkpoint",
        "self, req, token_ids_len",
        "AROUND",
        "scheduler.exact_kv:exact_checkpoint",
        "models with recurrent states: keep what comes after a sparse step out of the radix tree",
    ),
    Hook(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.match_prefix",
        "self, params",
        "AROUND",
        "scheduler.prefix_keys:mark_lookup",
        "sparse prefill: keep prompts that differ within a group from sharing any of it",
    ),
    Hook(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.insert",
        "self, params",
        "AROUND",
        "scheduler.prefix_keys:mark_insert",
        "the same for inserts into the tree; check_exactness: record them",
    ),
    Hook(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.take_events",
        "self",
        "AFTER",
        "scheduler.prefix_keys:name_tokens",
        "sparse prefill: name tokens in the events of the KV cache",
    ),
    Hook(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.claim_kv_row",
        "self, req",
        "AROUND",
        "scheduler.sessions:keep_exact",
        "streaming sessions: keep only exact KV for the next turn",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.Req.owned_kv_len",
        "self",
        "AROUND",
        "scheduler.exact_kv:exact_committed_len",
        "insert only exact KV into the radix tree",
    ),
    Hook(
        "sglang.srt.mem_cache.common._release_overallocated_kv_indices",
        "req, start_p, end_p, tree_cache",
        "AROUND",
        "scheduler.exact_kv:release_inexact_tail",
        "free the approximate tail of a finished request",
    ),
    Hook(
        "sglang.srt.model_executor.model_runner.ModelRunner.load_model",
        "self",
        "AROUND",
        "hooks.model_runner:hook_method",
        (
            "refuse layers that are not served; DSA: check weights that SGLang has just downloaded; on a GPU first "
            "install the hooks below, for DSA only"
        ),
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.update_weights_from_disk",
        "self, recv_req",
        "AROUND",
        "hooks.model_runner:refuse_other_weights",
        (
            "refuse an update to weights that the calibration was not made on, or, with this project's kernels of DSA, "
            "that have no indexer"
        ),
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.on_idle",
        "self",
        "AFTER",
        "debug.tree_check:check_when_idle",
        "check_exactness: prove by recomputation that the radix tree is exact",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_init_info",
        "self",
        "AFTER",
        "hooks.server_info:report_active",
        "create the sparse Prometheus metrics, and tell the main process that the scheduler runs sparse",
    ),
    Hook(
        "sglang.srt.entrypoints.engine.Engine._launch_subprocesses",
        (
            "cls, server_args, init_tokenizer_manager_func, run_scheduler_process_func, "
            "run_detokenizer_process_func, port_args=None, placement_group=None"
        ),
        "AFTER",
        "hooks.server_info:require_active_schedulers",
        "end the start when a scheduler runs dense",
        process="main",
    ),
    Hook(
        "sglang.srt.managers.data_parallel_controller.DataParallelController.get_init_info",
        "self",
        "AFTER",
        "hooks.server_info:report_replicas",
        "data parallelism: pass on to the main process what each scheduler has told the controller",
        process="controller",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter.report_decode_stats",
        "self, can_run_cuda_graph, running_batch=None, num_generated_tokens=0",
        "AFTER",
        "hooks.prometheus:follow",
        "write a log line and metrics for each decode report",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        "self, recv_req",
        "AFTER",
        "hooks.server_info:add_internal_state",
        "add counters to /server_info",
    ),
    *DSA_HOOKS,
)
