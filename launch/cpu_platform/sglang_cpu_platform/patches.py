"""Functions of SGLang that assume a GPU, replaced through its hook registry."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

from sglang_cpu_platform import adapters, attention, gated_delta, invariant, sparse_mla, speculation


def limit_threads(**_: Any) -> None:
    """Give PyTorch at most half of the cores this process may use, and at least one.

    HTTP server, scheduler and detokenizer poll. Intra-operator threads that share their cores wait for each other at
    every barrier, which slows a small model tenfold. A smaller ``OMP_NUM_THREADS`` stays in force.
    """
    torch.set_num_threads(min(torch.get_num_threads(), max(1, len(os.sched_getaffinity(0)) // 2)))
    # The replaced function also ties each tensor-parallel rank to a NUMA node and refuses more ranks than nodes.


def device_capability(device: object = None) -> tuple[int, int]:
    """Name the least capability that takes float8 latents, where SGLang asks without looking for CUDA first.

    It does so for models with a DeepSeek indexer.
    """
    return 8, 9


def keep_kv_dtype(view: Any) -> dict[str, Any]:
    """Declare nothing: SGLang's sparse attention kernels take bfloat16 or float8 latents, those in PyTorch take any."""
    return {}


def rope_on_cpu(original: Callable[..., torch.nn.Module], *args: Any, **kwargs: Any) -> torch.nn.Module:
    """Build rotary embeddings as for any device: SGLang's CPU branch knows ``deepseek_yarn`` only."""
    return original(*args, **{**kwargs, "device": None})


def rotate_in_place(
    original: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    rotary: torch.nn.Module,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys where they are, as kernels do: Llama 4 leaves unread what is returned."""
    found = original(rotary, positions, query, key, *args, **kwargs)
    return query.copy_(found[0]), key.copy_(found[1])


def apply_bitmask(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
    """Mask CPU logits, which SGLang does for requests with a grammar only, not with ``--enable-strict-thinking``."""
    from xgrammar import apply_token_bitmask_inplace

    apply_token_bitmask_inplace(logits, vocab_mask)


def keep_pageable(*_: Any) -> None:
    """Leave host memory as it is, which SGLang pins and unpins for a GPU."""


def unchecked(*_: Any, **__: Any) -> None:
    """Leave out the check of the order in which the KV canary's own kernels run, which is another kernel."""


def no_kv_copy(pool: Any) -> None:
    """Leave out the kernel that moves KV of draft trees, which every pool compiles for speculative decoding."""
    pool._kv_copy_config = None


def assign_slots(
    rows: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    batch_size: int,
) -> None:
    """Write each request's new slots to its row of ``req_to_token``, from its start to its end; SGLang's is Triton."""
    done = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = slots[done : done + end - start].to(table.dtype)
        done += end - start


def hash_noise(seeds: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return SGLang's hash of seed, position and token, MurmurHash3's, ``[rows, columns]`` below 2**32 as int64."""
    seeds = seeds.to(torch.int64)
    blocks = (seeds & _BITS, (seeds >> 32) & _BITS, positions.to(torch.int64) & _BITS)
    found = torch.zeros_like(seeds)
    for block in blocks:
        found = _mixed(found, block)
    found = _mixed(found[:, None], columns.to(torch.int64)) ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        found = ((found ^ (found >> shift)) * factor) & _BITS
    return found ^ (found >> 16)


_BITS = 2**32 - 1


def _mixed(found: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    block = _rotated((block * 0xCC9E2D51) & _BITS, 15)
    return (_rotated(found ^ ((block * 0x1B873593) & _BITS), 13) * 5 + 0xE6546B64) & _BITS


def _rotated(values: torch.Tensor, bits: int) -> torch.Tensor:
    return ((values << bits) | (values >> (32 - bits))) & _BITS


_NATIVE = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
_DSA = "sglang.srt.layers.attention"
_GDN = "sglang.srt.layers.attention.linear"
_FLA = "sglang.kernels.ops.attention.fla"
_LATENTS = "sglang.kernels.ops.quantization.dsa_quant_k_cache.quantize_k_cache_separate"
_INDEX = "sglang.kernels.ops.attention.dsa.transform_index"
_XGRAMMAR = "sglang.srt.constrained.xgrammar_backend.XGrammarGrammarBackend"
_HOST = "sglang.srt.mem_cache.pool_host.common"
_DRAFTS = "sglang.kernels.ops.speculative"
_LORA = "sglang.srt.lora.deepseek_mla_correction"
_BACKENDS = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
_HOOKS: dict[str, tuple[Callable, HookType]] = {
    "sglang.srt.distributed.bootstrap._bind_threads_if_cpu": (limit_threads, HookType.REPLACE),
    "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode": (invariant.enable, HookType.REPLACE),
    "torch.cuda.get_device_capability": (device_capability, HookType.REPLACE),
    "torch.cuda.current_device": (gated_delta.no_device, HookType.REPLACE),
    "sglang.srt.arg_groups.overrides._dsa_kv_cache_dtype_default": (keep_kv_dtype, HookType.REPLACE),
    "sglang.srt.layers.rotary_embedding.factory.get_rope_wrapper": (rope_on_cpu, HookType.AROUND),
    "sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_native": (rotate_in_place, HookType.AROUND),
    f"{_NATIVE}.__init__": (attention.note_chunks, HookType.AROUND),
    f"{_NATIVE}.forward_extend": (attention.note_layer, HookType.AROUND),
    f"{_NATIVE}.forward_decode": (attention.note_layer, HookType.AROUND),
    f"{_NATIVE}._run_sdpa_forward_extend": (attention.extend, HookType.AROUND),
    f"{_NATIVE}._run_sdpa_forward_decode": (attention.decode, HookType.AROUND),
    "sglang.srt.mem_cache.kv_cache_configurator.calculate_mla_kv_cache_dim": (sparse_mla.row_width, HookType.AROUND),
    _LATENTS: (sparse_mla.quantize_latents, HookType.REPLACE),
    f"{_DSA}.dsa.dsa_indexer.Indexer.forward_native": (sparse_mla.indexer_forward, HookType.REPLACE),
    f"{_DSA}.dsa.dsa_indexer.rotate_activation": (sparse_mla.rotate, HookType.REPLACE),
    f"{_INDEX}.transform_index_page_table_prefill": (sparse_mla.slots_of_extend, HookType.REPLACE),
    f"{_INDEX}.transform_index_page_table_decode": (sparse_mla.slots_of_decode, HookType.REPLACE),
    f"{_DSA}.dsa_backend.DeepseekSparseAttnBackend._forward_tilelang": (sparse_mla.attend, HookType.REPLACE),
    f"{_GDN}.gdn_backend.fused_gdn_gating": (gated_delta.gates, HookType.REPLACE),
    f"{_GDN}.gdn_backend.causal_conv1d_fn": (gated_delta.convolve_prompts, HookType.REPLACE),
    f"{_GDN}.gdn_backend.causal_conv1d_update": (gated_delta.convolve_step, HookType.REPLACE),
    f"{_GDN}.kernels.gdn_triton.TritonGDNKernel.extend": (gated_delta.extend, HookType.REPLACE),
    f"{_GDN}.kernels.gdn_triton.TritonGDNKernel.packed_decode": (gated_delta.decode, HookType.REPLACE),
    f"{_DSA}.hybrid_linear_attn_backend.track_mamba_states_all_layers": (gated_delta.track_layers, HookType.REPLACE),
    f"{_FLA}.fused_norm_gate.FusedRMSNormGated.forward": (gated_delta.gated_norm, HookType.REPLACE),
    f"{_FLA}.layernorm_gated.RMSNorm.forward": (gated_delta.gated_norm, HookType.REPLACE),
    "sglang.kernels.ops.elementwise.elementwise.fused_sigmoid_mul": (gated_delta.gate_heads, HookType.REPLACE),
    "sglang.kernels.ops.elementwise.elementwise._launch_fused_gate_sigmoid_mul": (
        gated_delta.add_shared_expert,
        HookType.REPLACE,
    ),
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup": (no_kv_copy, HookType.REPLACE),
    "sglang.srt.utils.phase_checker.SimplePhaseChecker.update": (unchecked, HookType.REPLACE),
    f"{_HOST}._cuda_host_register": (keep_pageable, HookType.REPLACE),
    f"{_HOST}._cuda_host_unregister": (keep_pageable, HookType.REPLACE),
    "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func": (assign_slots, HookType.REPLACE),
    "sglang.kernels.ops.sampling.murmur_hash.murmur_hash32": (hash_noise, HookType.REPLACE),
    "sglang.kernels.ops.memory.common.get_last_loc_triton": (speculation.last_slots, HookType.REPLACE),
    "sglang.kernels.ops.attention.pad.seqlens_expand_triton": (speculation.seen_lengths, HookType.REPLACE),
    f"{_DRAFTS}.cache_locs.assign_draft_cache_locs_contiguous_func": (speculation.draft_slots, HookType.REPLACE),
    f"{_DRAFTS}.gather_spec_extras.gather_spec_extras": (speculation.carried, HookType.REPLACE),
    f"{_DRAFTS}.spec_tree.build_tree_kernel_efficient_func": (speculation.build_chain, HookType.REPLACE),
    f"{_DRAFTS}.spec_tree.verify_tree_greedy_func": (speculation.verify_chain, HookType.REPLACE),
    f"{_DRAFTS}.eagle.fill_bonus_tokens_func": (speculation.last_accepted, HookType.REPLACE),
    f"{_BACKENDS}.create_decode_backend": (speculation.draft_backends, HookType.REPLACE),
    f"{_BACKENDS}.create_draft_extend_backend": (speculation.no_extend_backend, HookType.REPLACE),
    f"{_LORA}.apply_q_correction": (adapters.correct_queries, HookType.REPLACE),
    f"{_LORA}.apply_v_correction": (adapters.correct_values, HookType.REPLACE),
    f"{_XGRAMMAR}.apply_vocab_mask": (apply_bitmask, HookType.REPLACE),
}


def register() -> None:
    """Hand the patches to SGLang, which applies them in ``load_plugins()`` of each of its processes."""
    source = HookSource(plugin_name="torch_cpu", dist_name="sglang-cpu-platform")
    for target, (hook, kind) in _HOOKS.items():
        HookRegistry.register(target, hook, kind, source=source)


def require_applied() -> None:
    """Stop where SGLang only logs a patch that failed.

    Raises:
        RuntimeError: naming the targets that are not patched in this process.
    """
    missing = sorted(set(_HOOKS) - HookRegistry._patched)
    if missing:
        raise RuntimeError(f"sglang-cpu-platform could not patch {missing}; was load_plugins() called?")
