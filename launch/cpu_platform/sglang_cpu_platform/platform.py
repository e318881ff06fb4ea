"""The platform class: SGLang's device interface for a plain CPU."""

from __future__ import annotations

import logging
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from sglang.srt.environ import envs
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from sglang_cpu_platform import adapters, attention, gated_delta, invariant, patches, speculation, stand_ins

# SGLang makes the platform while most of its modules are half imported, so methods import them when called.
if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PretrainedConfig

SUPPORTED_SGLANG = "0.5.23"

# SGLang sizes these from the device's memory; host memory is large and shared, so it would take nearly all of it.
MAX_TOTAL_TOKENS = 32768
MEM_FRACTION = 0.7
MAX_RUNNING_REQUESTS = 32
CHUNKED_PREFILL_SIZE = 2048

# Flags that select a kernel for a stage of DeepSeek Sparse Attention, and the KV dtypes that PyTorch reads there.
DSA_BACKENDS = (
    "dsa_prefill_backend",
    "dsa_decode_backend",
    "dsa_topk_backend",
    "dsa_paged_mqa_logits_backend",
)
DSA_KV_DTYPES = ("auto", "bfloat16", "bf16", "fp8_e4m3")
# Fields of a model's config that ask for more than `sparse_mla` does, and the values that do not.
INDEXER_FIELDS = {
    "index_init_tokens": 0,
    "index_local_tokens": 0,
    "indexer_rope_interleave": False,
    "index_kpool": 1,
}

logger = logging.getLogger(__name__)


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Out-of-tree platform that runs every operator in plain PyTorch.

    Raises:
        RuntimeError: on construction, if the installed SGLang is not the version the patches were written for.
    """

    # SGLang's own CPU engine (PlatformEnum.CPU) needs sgl-kernel built for AMX; out-of-tree takes the native operators.
    _enum = PlatformEnum.OOT

    def __init__(self) -> None:
        found = version("sglang")
        if found != SUPPORTED_SGLANG:
            raise RuntimeError(f"sglang-cpu-platform supports sglang {SUPPORTED_SGLANG}, found sglang {found}")
        patches.register()

    def get_device(self, device_id: int | None = None) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the device's name without an index; ServerArgs calls this when the user gives no ``--device``."""
        return "cpu"

    def get_torch_profiler_activity_str(self) -> str:
        """Return no activity of torch's profiler: what runs here is its "CPU", which SGLang knows by itself."""
        return "none"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        """Return an activity for that name; SGLang asks for one, and nobody profiles it."""
        return torch.profiler.ProfilerActivity.CPU

    def support_mamba_cache_extra_buffer(self) -> bool:
        """Whether states of linear attention are stored at the ends of prefixes."""
        return True

    def get_default_attention_backend(self) -> str:
        """Return the one attention backend of SGLang that is plain PyTorch."""
        return "torch_native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        """Return torch.compile's backend that compiles nothing."""
        return "eager"

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """Whether an algorithm of SGLang runs, with chains of drafts."""
        return algorithm in speculation.ALGORITHMS

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        """Return what names the slots of a verification."""
        return speculation.extend_slots

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Prove the patches, and set what no patch can.

        Each scheduler process calls this once, after its plugins were loaded and before the first forward pass.

        Raises:
            RuntimeError: if a patch is missing in this process.
        """
        patches.require_applied()
        stand_ins.install()

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Fill what the user left open, and say once that this is no place for production.

        Args:
            server_args: records assigned fields as declarations; an object behind a field belongs to others.

        Raises:
            ValueError: if the user asked for a device other than the CPU, for a GGUF file, or for what only kernels do.
        """
        from sglang.srt.configs.model_config import ModelConfig, is_deepseek_dsa
        from sglang.srt.model_executor.cuda_graph_config import with_phase
        from sglang.srt.server_args import ServerArgs

        if server_args.device != "cpu":
            raise ValueError(f"--device {server_args.device}: no CUDA device was found; use --device cpu or drop it")
        if server_args.load_format == "gguf" or Path(server_args.model_path).suffix == ".gguf":
            raise ValueError(
                f"--model-path {server_args.model_path}: SGLang reads GGUF files with kernels of a GPU alone; without "
                "a CUDA device give the folder, or the hub's name, of the same model in safetensors"
            )
        # SGLang would keep what its `model_config_of` returns, and the dtype is not settled yet.
        model = ModelConfig.from_server_args(server_args)
        # SGLang has just filled an open --attention-backend with its AMX kernels, which its CUDA wheels lack. A model
        # with a trained indexer would run dense on any other backend than its own, and not say so.
        if server_args.attention_backend == "intel_amx":
            sparse = is_deepseek_dsa(model.hf_config)
            server_args.attention_backend = "dsa" if sparse else self.get_default_attention_backend()
        defaults = {field.name: field.default for field in msgspec.structs.fields(ServerArgs)}  # pyright: ignore[reportArgumentType]
        _allow_torch_native()
        if server_args.attention_backend == "dsa":
            _use_torch_dsa(server_args, model.hf_text_config, defaults)
        if server_args.enable_hierarchical_cache:
            stand_ins.use_host_cache(server_args, defaults)
        adapters.use_torch(server_args, defaults)
        if server_args.speculative_algorithm:
            speculation.use_chains(server_args)
        if server_args.dtype == "auto":
            server_args.dtype = "float32"
        gated_delta.keep_dtype(server_args.dtype)
        if server_args.max_total_tokens is None and server_args.mem_fraction_static is None:
            server_args.max_total_tokens = MAX_TOTAL_TOKENS
        if server_args.mem_fraction_static is None:
            server_args.mem_fraction_static = MEM_FRACTION
        if server_args.max_running_requests is None:
            server_args.max_running_requests = MAX_RUNNING_REQUESTS
        if server_args.chunked_prefill_size is None:
            server_args.chunked_prefill_size = CHUNKED_PREFILL_SIZE
        # An idle scheduler polls its sockets without a pause, on a core that others could use.
        server_args.sleep_on_idle = True
        server_args.disable_custom_all_reduce = True
        graphs = with_phase(server_args.cuda_graph_config, "prefill", backend="disabled")
        server_args.cuda_graph_config = with_phase(graphs, "decode", backend="disabled")
        logger.warning(
            "No CUDA device: serving on the CPU in plain PyTorch (%s attention, %s), for trying, testing and CI only.",
            server_args.attention_backend,
            server_args.dtype,
        )


def _allow_torch_native() -> None:
    invariant.allow("torch_native")
    attention.allow_windows()


def _use_torch_dsa(server_args: Any, model: PretrainedConfig, defaults: dict[str, Any]) -> None:
    """Let SGLang's backend for sparse MLA call the functions of `sparse_mla` instead of its kernels.

    Raises:
        ValueError: another kernel is asked for, a KV cache that only kernels read, or another kind of indexer.
    """
    for name in DSA_BACKENDS:
        if (got := getattr(server_args, name)) not in (None, defaults[name]):
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} {got}: without a CUDA device DeepSeek Sparse Attention runs in plain PyTorch")
    if (got := server_args.kv_cache_dtype) not in DSA_KV_DTYPES:
        raise ValueError(
            f"--kv-cache-dtype {got}: DeepSeek Sparse Attention in plain PyTorch takes auto, bfloat16 or fp8_e4m3"
        )
    for name, allowed in INDEXER_FIELDS.items():
        if (got := getattr(model, name, None)) not in (None, allowed):
            raise ValueError(f"the model's {name} is {got}: its indexer is not served without a CUDA device")
    if "shared" in (getattr(model, "indexer_types", None) or ()):
        raise ValueError("some of the model's indexer_types are shared: not served without a CUDA device")
    # With the variable set to true, another plugin selects slots itself, as on a GPU.
    if not (envs.SGLANG_DSA_FUSE_TOPK.is_set() and envs.SGLANG_DSA_FUSE_TOPK.get()):
        envs.SGLANG_DSA_FUSE_TOPK.set(False)
        server_args.dsa_topk_backend = "torch"
    server_args.dsa_prefill_backend = server_args.dsa_decode_backend = "tilelang"
