"""The platform class: what SGLang asks a device for, answered for a plain CPU."""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import TYPE_CHECKING

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from sglang_cpu_platform import patches

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

SUPPORTED_SGLANG = "0.5.23"

# SGLang sizes these from the device's memory; host memory is large and shared, so it would take nearly all of it.
MAX_TOTAL_TOKENS = 32768
MEM_FRACTION = 0.7
MAX_RUNNING_REQUESTS = 32
CHUNKED_PREFILL_SIZE = 2048

logger = logging.getLogger(__name__)


def _default(name: str) -> object:
    import msgspec
    from sglang.srt.server_args import ServerArgs

    return next(field.default for field in msgspec.structs.fields(ServerArgs) if field.name == name)


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
        """Device name without an index; ServerArgs calls this when the user gives no ``--device``."""
        return "cpu"

    def is_pin_memory_available(self, device: object = None) -> bool:
        """Pinned memory is for copies to a GPU."""
        return False

    def get_torch_profiler_activity_str(self) -> str:
        """No activity of torch's profiler: what runs here is its "CPU", which SGLang knows by itself."""
        return "none"

    def get_default_attention_backend(self) -> str:
        """The one attention backend of SGLang that is plain PyTorch."""
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        """Makes every operator of SGLang take its ``forward_native``."""
        return "native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        """No compilation."""
        return "eager"

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        """SGLang's own pools, that of an indexer written without Triton."""
        if kind != "dsa":
            return None
        from sglang_cpu_platform.pools import IndexedLatentPool

        return IndexedLatentPool

    def get_paged_allocator_cls(self) -> type:
        """The page allocator without Triton, for every page size.

        Raises:
            RuntimeError: if a patch is missing in this process.
        """
        from sglang_cpu_platform.pools import TorchPagedAllocator

        # The scheduler asks this once, after its plugins were loaded: the right moment to notice a failed patch.
        patches.require_applied()
        return TorchPagedAllocator

    def apply_server_args_defaults(self, server_args: ServerArgs) -> None:
        """Fill what the user left open, and say once that this is no place for production.

        Raises:
            ValueError: if the user asked for a device other than the CPU.
        """
        if server_args.device != "cpu":
            raise ValueError(f"--device {server_args.device}: no CUDA device was found; use --device cpu or drop it")
        # SGLang has just filled an open --attention-backend with its AMX kernels, which its CUDA wheels lack.
        if server_args.attention_backend == "intel_amx":
            server_args.attention_backend = self._default_backend(server_args)
        if server_args.attention_backend == "dsa":
            self._use_torch_indexer(server_args)
        if server_args.dtype == "auto":
            server_args.dtype = "float32"
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
        assert server_args.cuda_graph_config is not None  # filled in one step earlier
        from sglang.srt.model_executor.cuda_graph_config import with_phase

        graphs = with_phase(server_args.cuda_graph_config, "decode", backend="disabled")
        server_args.cuda_graph_config = with_phase(graphs, "prefill", backend="disabled")
        logger.warning(
            "No CUDA device: serving on the CPU in plain PyTorch (%s attention, %s), for trying, testing and CI only.",
            server_args.attention_backend,
            server_args.dtype,
        )

    def _default_backend(self, server_args: ServerArgs) -> str:
        """A model with a trained indexer would run dense on any other backend than its own, and not say so."""
        from sglang.srt.configs.model_config import ModelConfig, is_deepseek_dsa

        if server_args.model_path.lower() in ("none", "dummy"):
            return self.get_default_attention_backend()
        # SGLang would keep what its ``get_model_config`` returns, and the dtype is not settled yet.
        model = ModelConfig.from_server_args(server_args).hf_config
        return "dsa" if is_deepseek_dsa(model) else self.get_default_attention_backend()

    @staticmethod
    def _use_torch_indexer(server_args: ServerArgs) -> None:
        """Let SGLang's backend for sparse MLA call what `sparse_mla` has put in place of its kernels.

        Raises:
            ValueError: another kernel is asked for, a KV cache that only kernels read, or another kind of indexer.
        """
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.environ import envs

        backends = ("prefill", "decode", "topk", "paged_mqa_logits")
        for name in (f"dsa_{backend}_backend" for backend in backends):
            if getattr(server_args, name) not in (None, _default(name)):
                flag, got = f"--{name.replace('_', '-')}", getattr(server_args, name)
                raise ValueError(f"{flag} {got}: without a CUDA device DeepSeek Sparse Attention runs in plain PyTorch")
        if server_args.kv_cache_dtype not in ("auto", "bfloat16", "bf16", "fp8_e4m3"):
            got = server_args.kv_cache_dtype
            raise ValueError(
                f"--kv-cache-dtype {got}: DeepSeek Sparse Attention in plain PyTorch takes auto, bfloat16 or fp8_e4m3"
            )
        model = ModelConfig.from_server_args(server_args).hf_text_config
        for name in ("index_init_tokens", "index_local_tokens", "indexer_rope_interleave"):
            if value := getattr(model, name, None):
                raise ValueError(f"the model's {name} is {value}: its indexer is not served without a CUDA device")
        # Whoever leaves it on chooses slots by other means than SGLang's, as on a GPU.
        if not (envs.SGLANG_DSA_FUSE_TOPK.is_set() and envs.SGLANG_DSA_FUSE_TOPK.get()):
            envs.SGLANG_DSA_FUSE_TOPK.set(False)
            server_args.dsa_topk_backend = "torch"
        server_args.dsa_prefill_backend = server_args.dsa_decode_backend = "tilelang"
