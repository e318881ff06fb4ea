"""Names of SGLang's modules that only a GPU fills, which no hook reaches: they are set once the model is loaded."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from sglang_cpu_platform import adapters, speculation

# The one way of moving pages to host memory and back that is a plain copy.
HOST_CACHE = {"hicache_io_backend": "direct", "hicache_mem_layout": "layer_first"}


def install() -> None:
    """Set what the schedulers of this process need.

    That is for drafts, adapters, host memory, data-parallel attention, and the KV canary.
    """
    from sglang.srt.distributed import parallel_state
    from sglang.srt.kv_canary.runner import canary_manager, future_tensor
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.sampler import top_p_normalize_probs_torch
    from sglang.srt.mem_cache.pool_host import base, dsa, mha, mla
    from sglang.srt.model_executor import forward_batch_info
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers
    from sglang.srt.speculative import eagle_utils

    adapters.install()
    canary: Any = canary_manager
    copies: Any = future_tensor.FutureTensors
    canary.create_device_stream = lambda _: None
    copies.device_to_host = lambda found, d2h_stream: HostCopy(found)
    # None without a GPU, which no hook replaces: it would replace every None.
    eagle_utils.tree_speculative_sampling_target_only = speculation.sample_chain
    eagle_utils.top_k_renorm_prob = speculation.keep_top_k
    eagle_utils.top_p_renorm_prob = top_p_normalize_probs_torch
    # Unknown to SGLang's registry, torch_native falls back to Triton's rule, which prefills with multi-head keys;
    # it reads keys from the pool instead, where MLA keeps one latent per token.
    handlers.AttentionBackendRegistry.register("torch_native", handlers._dispatch_mla_subtype)
    hosts: tuple[Any, ...] = (dsa, mha, mla)
    for module in hosts:
        module.transfer_kv_direct = copy_slots
    # Nothing can be pinned without a driver, and what fetches pages from storage would fail, and compute them instead.
    pools: Any = base.HostKVCache
    pools.pin_memory = property(lambda _: False, lambda _, asked: None)
    # SGLang leaves so many bytes of host memory free, more than a small machine has.
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 1 << 30
    # Whether collectives and padding are those of its own CPU engine, which has no kernels either.
    parallel_state._is_cpu = forward_batch_info._is_cpu = True
    dp_attention.memcpy_func = dp_attention.memcpy_cpu
    backends: Any = AttentionBackend
    backends.get_cpu_graph_seq_len_fill_value = lambda _: 1


class HostCopy:
    """A copy of what the canary has found, made at once: SGLang's is pinned, and made on another stream."""

    def __init__(self, found: Any):
        self._found = copy.deepcopy(found)

    def wait(self) -> Any:
        """Return the copy."""
        return self._found


def copy_slots(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy rows of each layer; SGLang's kernel wants whole pages of so many rows, this one does not."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def use_host_cache(server_args: Any, defaults: dict[str, Any]) -> None:
    """Let a hierarchical cache move its pages by `copy_slots`.

    Raises:
        ValueError: another way is asked for.
    """
    for name, served in HOST_CACHE.items():
        if (got := getattr(server_args, name)) not in (defaults[name], served):
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} {got}: without a CUDA device pages are copied in PyTorch; allowed: {served}")
        setattr(server_args, name, served)
