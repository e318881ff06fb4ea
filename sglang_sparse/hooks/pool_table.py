"""Hooks of SGLang's memory pools."""

from __future__ import annotations

from sglang_sparse.hooks.hook import Hook

POOL_HOOKS = (
    Hook(
        "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
        "self, kvc, num_layers",
        "AFTER",
        "attention.memory:charge_aux_bytes",
        "count the page summaries in SGLang's memory sizing",
    ),
    Hook(
        "sglang.srt.model_executor.pool_configurator.HybridSWAPoolConfigurator.__init__",
        "self, kvc",
        "AROUND",
        "attention.memory:note_aux_bytes",
        "windowed layers with a KV pool of their own: know the page summaries before memory is divided",
    ),
    Hook(
        "sglang.srt.model_executor.pool_configurator.HybridSWAPoolConfigurator._full_cell_bytes",
        "self",
        "AFTER",
        "attention.memory:charge_full_pool",
        "count the page summaries in the pool of the layers of full attention",
    ),
    Hook(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._handle_max_mamba_cache",
        "self, total_rest_memory",
        "AFTER",
        "attention.exact_states:charge_copies",
        "keep memory for copies of recurrent states, from which rectification goes on",
    ),
    Hook(
        "sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache.evict_sliding_windows",
        "self, req, pre_len, *, eviction_interval=1",
        "AROUND",
        "scheduler.exact_kv:keep_windows",
        "keep the KV of windows that rectification reads",
    ),
    Hook(
        "sglang.srt.model_executor.model_runner.load_kv_cache_scales",
        "*, model, kv_cache_dtype",
        "AFTER",
        "attention.kv_scales:complete_scales",
        "provide the scales of --quantization-param-path in both forms that attention reads",
    ),
    Hook(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes",
        "self, pre_model_load_memory",
        "AFTER",
        "attention.memory:charge_scratch",
        "leave memory free for the temporary buffers of sparse passes",
    ),
    Hook(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_token_to_kv_pool",
        "self, *, sizes, is_dsa_model, is_dsv4_model, req_to_token_pool",
        "AFTER",
        "attention.memory:attach_aux_pools",
        "allocate the page summaries next to the KV pool",
    ),
)
