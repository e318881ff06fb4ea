"""Hooks of SGLang's DSA."""

from __future__ import annotations

from sglang_sparse.hooks.hook import Hook

DSA_HOOKS = (
    Hook(
        "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer.forward_native",
        "self, *args, **kwargs",
        "AROUND",
        "attention.dsa.indexer:choose",
        "DSA without a GPU: choose the tokens to attend to",
        "dsa",
        gpu=False,
    ),
    Hook(
        "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer.forward_cuda",
        "self, x, q_lora, positions, forward_batch, layer_id, return_indices=True, use_cuda_graph=True",
        "AROUND",
        "attention.dsa.indexer:choose",
        "DSA on a GPU: choose the tokens to attend to",
        "dsa",
        gpu=True,
    ),
    Hook(
        "sglang.srt.layers.attention.dsa.dsa_indexer_metadata.DSAIndexerMetadata.topk_transform",
        (
            "self, logits, topk, ks=None, cu_seqlens_q=None, ke_offset=None, batch_idx_list=None, "
            "topk_indices_offset_override=None"
        ),
        "AROUND",
        "attention.dsa.native_indexer:choose",
        "DSA on a GPU: always choose the same tokens from SGLang's own logits",
        "dsa",
        gpu=True,
    ),
    Hook(
        "sglang.srt.layers.attention.dsa.utils.resolve_paged_mqa_logits_metadata_fn",
        "",
        "AFTER",
        "attention.dsa.native_indexer:schedule",
        "DSA on a GPU: skip the schedule of SGLang's logits if other logits are used; it fails on GPUs without them",
        "dsa",
        gpu=True,
    ),
    Hook(
        "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend._build_topk_v2_plan",
        "self, seqlens_expanded",
        "AROUND",
        "attention.dsa.native_indexer:plan",
        "DSA on a GPU: skip the plan of SGLang's selection if another one runs",
        "dsa",
        gpu=True,
    ),
    Hook(
        "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend._forward_tilelang",
        "self, q_all, kv_cache, v_head_dim, page_table_1, sm_scale",
        "AROUND",
        "attention.dsa.latents:attend",
        "DSA: attend to the chosen tokens",
        "dsa",
    ),
    Hook(
        "sglang.srt.mem_cache.kv_cache_configurator.calculate_mla_kv_cache_dim",
        "*, model_config, kv_cache_dtype",
        "AROUND",
        "attention.dsa.latents:row_width",
        "DSA: keep scales of float8 latents in the KV pool when the portable attention replaces a backend without them",
        "dsa",
    ),
    Hook(
        "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool._write_mla_kv_buffer",
        "self, dst_buffer, loc, cache_k_nope, cache_k_rope",
        "AROUND",
        "attention.dsa.latents:write",
        "DSA: write float8 latents, which SGLang does on GPUs that have float8",
        "dsa",
    ),
    Hook(
        "sglang.srt.arg_groups.overrides._dsa_split_backend_resolution",
        "view",
        "AROUND",
        "hooks.dsa_flags:keep_replaced_backend",
        "DSA on a GPU: allow float8 latents with the backend that the portable attention replaces",
        gpu=True,
        process="main",
    ),
)
