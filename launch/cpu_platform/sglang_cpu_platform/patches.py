"""Functions of SGLang that assume a GPU, replaced through its hook registry."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

from sglang_cpu_platform import attention, sparse_mla


def limit_threads(*_: Any, **__: Any) -> None:
    """Give PyTorch at most half of the cores this process may use, and at least one.

    HTTP server, scheduler and detokenizer poll. Intra-operator threads that share their cores wait for each other at
    every barrier, which slows a small model tenfold. A smaller ``OMP_NUM_THREADS`` stays in force.
    """
    torch.set_num_threads(min(torch.get_num_threads(), max(1, len(os.sched_getaffinity(0)) // 2)))
    # The replaced function also ties each tensor-parallel rank to a NUMA node and refuses more ranks than nodes.


def no_nccl(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Tensor-parallel ranks talk through gloo alone; SGLang adds an NCCL communicator to every group."""
    return original(*args, **{**kwargs, "use_pynccl": False, "use_custom_allreduce": False})


def device_capability(device: object = None) -> tuple[int, int]:
    """Models with a DeepSeek indexer make SGLang ask without looking for CUDA first; name no special hardware."""
    return 8, 0


def rope_on_cpu(original: Callable[..., torch.nn.Module], *args: Any, **kwargs: Any) -> torch.nn.Module:
    """SGLang's CPU branch knows ``deepseek_yarn`` only; the general one has native code for every kind."""
    return original(*args, **{**kwargs, "device": None})


def no_triton(backend: str) -> bool:
    """SGLang answers by attention backend name; without a GPU no backend can launch Triton."""
    return False


def allocate_bitmask(vocab_size: int, batch_size: int) -> torch.Tensor:
    """Grammar mask ``[batch_size, ceil(vocab_size / 32)]`` int32, all allowed; SGLang's is in pinned memory."""
    from xgrammar import bitmask_dtype, get_bitmask_shape

    return torch.full(get_bitmask_shape(batch_size, vocab_size), -1, dtype=bitmask_dtype)


def apply_bitmask(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
    """SGLang raises for CPU logits ``[batch, vocab]``; xgrammar has a CPU kernel."""
    from xgrammar import apply_token_bitmask_inplace

    apply_token_bitmask_inplace(logits, vocab_mask)


def apply_bitmask_method(grammar: Any, logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
    """``apply_bitmask`` where SGLang has it as a method."""
    apply_bitmask(logits, vocab_mask)


def absorbed_mla(original: Callable[[type, str], Callable], registry: type, backend_name: str) -> Callable:
    """Send MLA prefill on torch_native through the absorbed method.

    Unknown to SGLang's registry, torch_native falls back to Triton's rule, which prefills with multi-head keys; the
    torch_native backend reads keys from the pool instead, where MLA keeps one latent per token.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import _dispatch_mla_subtype

    return _dispatch_mla_subtype if backend_name == "torch_native" else original(registry, backend_name)


def keep_kv_dtype(view: Any) -> dict[str, Any]:
    """SGLang's sparse attention kernels take bfloat16 or float8 latents; those in PyTorch take any."""
    return {}


def keep_dsa_backends(view: Any) -> dict[str, Any]:
    """The platform has chosen; SGLang would by GPU, and refuse float8 latents in the place that PyTorch takes."""
    return {}


_MLA = "sglang.srt.models.deepseek_common.attention_backend_handler"
_NATIVE = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
_DSA = "sglang.srt.layers.attention"
_LATENTS = "sglang.kernels.ops.quantization.dsa_quant_k_cache.quantize_k_cache_separate"
_INDEX = "sglang.kernels.ops.attention.dsa.transform_index"
_XGRAMMAR = "sglang.srt.constrained.xgrammar_backend"
_HOOKS: dict[str, tuple[Callable, HookType]] = {
    "sglang.srt.distributed.bootstrap._bind_threads_if_cpu": (limit_threads, HookType.REPLACE),
    "sglang.srt.distributed.parallel_state.init_model_parallel_group": (no_nccl, HookType.AROUND),
    "torch.cuda.get_device_capability": (device_capability, HookType.REPLACE),
    "sglang.srt.layers.rotary_embedding.factory.get_rope_wrapper": (rope_on_cpu, HookType.AROUND),
    "sglang.srt.utils.common.support_triton": (no_triton, HookType.REPLACE),
    f"{_MLA}.AttentionBackendRegistry.get_handler": (absorbed_mla, HookType.AROUND),
    f"{_NATIVE}._run_sdpa_forward_extend": (attention.extend, HookType.AROUND),
    f"{_NATIVE}._run_sdpa_forward_decode": (attention.decode, HookType.AROUND),
    "sglang.srt.arg_groups.overrides._dsa_kv_cache_dtype_default": (keep_kv_dtype, HookType.REPLACE),
    "sglang.srt.arg_groups.overrides._dsa_split_backend_resolution": (keep_dsa_backends, HookType.REPLACE),
    _LATENTS: (sparse_mla.quantize_latents, HookType.REPLACE),
    "sglang.kernels.ops.kvcache.mla_buffer.set_mla_kv_buffer_triton": (sparse_mla.write_latents, HookType.REPLACE),
    f"{_DSA}.dsa.dsa_indexer.Indexer.forward_native": (sparse_mla.indexer_forward, HookType.REPLACE),
    f"{_DSA}.dsa.dsa_indexer.rotate_activation": (sparse_mla.rotate, HookType.REPLACE),
    f"{_INDEX}.transform_index_page_table_prefill": (sparse_mla.slots_of_extend, HookType.REPLACE),
    f"{_INDEX}.transform_index_page_table_decode": (sparse_mla.slots_of_decode, HookType.REPLACE),
    f"{_DSA}.dsa_backend.DeepseekSparseAttnBackend._forward_tilelang": (sparse_mla.attend, HookType.REPLACE),
    f"{_XGRAMMAR}._allocate_token_bitmask": (allocate_bitmask, HookType.REPLACE),
    f"{_XGRAMMAR}.XGrammarGrammar.apply_vocab_mask": (apply_bitmask_method, HookType.REPLACE),
    f"{_XGRAMMAR}.XGrammarGrammarBackend.apply_vocab_mask": (apply_bitmask, HookType.REPLACE),
}


def register() -> None:
    """Hand the patches to SGLang, which applies them in ``load_plugins()`` of the main and scheduler processes."""
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
