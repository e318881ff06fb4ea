"""A general SGLang plugin that forbids the CPU platform's own writing and reading of float8 latents.

A server with it serves them by somebody else's code, or not at all.
"""

from typing import Any


def refuse(*_: Any) -> None:
    raise RuntimeError("the CPU platform's own code of float8 latents was called")


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target in (
        "sglang.kernels.ops.quantization.dsa_quant_k_cache.quantize_k_cache_separate",
        "sglang_cpu_platform.sparse_mla.expand",
    ):
        HookRegistry.register(target, refuse, HookType.AROUND)
