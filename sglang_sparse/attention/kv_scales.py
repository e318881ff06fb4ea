"""Which dtypes of model and KV cache a server may have, and what a token takes in it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_sparse.config import arguments
from sglang_sparse.config.settings import Settings, SparseArgumentError, settings_of
from sglang_sparse.hooks.limits import DENSE_BACKENDS, GPU_ONLY_BACKENDS, Gpu, capability, on_gpu

if TYPE_CHECKING:
    from sglang_sparse.config.arguments import Arguments

# NVIDIA's number of the first GPUs on which kernels read float8.
FLOAT8 = (8, 9)


def require_dtypes(args: Arguments, settings: Settings, gpu: Gpu = None) -> None:
    """Refuse KV caches that a method's kernels do not read, or read wrongly.

    Args:
        args: the server's.
        settings: its methods.
        gpu: its GPU; None for this machine's.

    Raises:
        SparseArgumentError: names the dtypes, and what is allowed.
    """
    dtype = str(args.get_model_config().dtype).removeprefix("torch.")
    quantized = args.kv_cache_dtype == "auto" and any(map(_makes_float8, _quantizations(args)))
    plain, auto = ("bf16", "fp8_e4m3") if quantized else ("auto", dtype)
    cache = {"auto": auto, "bf16": "bfloat16"}.get(args.kv_cache_dtype, args.kv_cache_dtype)
    if cache not in (dtype, *(("fp8_e4m3",) if settings.method.fp8_kv else ())):
        given = f"{args.kv_cache_dtype}{', which this checkpoint makes fp8_e4m3,' if quantized else ''}"
        raise SparseArgumentError(
            f"{settings.flag}: the KV cache dtype is {given} and the model's is {dtype}; "
            f"allowed: {f'{plain}, fp8_e4m3' if settings.method.fp8_kv else plain}"
        )
    kind = settings.method.kind_of(args.get_model_config())
    if cache == "fp8_e4m3" and "torch_native" in args.get_attention_backends():
        allowed = [name for name in DENSE_BACKENDS[kind] if name in GPU_ONLY_BACKENDS]
        raise SparseArgumentError(
            f"{settings.flag}: the attention backend torch_native writes fp8 KV without its scales; "
            f"allowed with --kv-cache-dtype fp8_e4m3: {', '.join(allowed)}"
        )
    if cache == "fp8_e4m3" and kind != "MHA" and args.quantization_param_path is not None:
        raise SparseArgumentError(
            f"{settings.flag}: no model of SGLang with {kind} reads --quantization-param-path; allowed: none"
        )
    if cache == "fp8_e4m3" and settings.prefill and not _has_scales(args):
        raise SparseArgumentError(
            f"{settings.flag}: fp8 KV without scales cuts off keys and values beyond 448, and the checkpoint names "
            f"none; allowed with --sparse-prefill-method: --kv-cache-dtype {plain}, a checkpoint with scales of its KV "
            "(kv_cache_scheme or kv_cache_quant_algo of its quantization), or --quantization-param-path FILE"
        )
    if cache == "fp8_e4m3" and settings.method.needs_float8:
        _require_float8(settings, capability(gpu), plain)
    if dtype == "float32" and on_gpu(gpu):
        raise SparseArgumentError(
            f"{settings.flag}: float32 models run on the CPU only; allowed: --dtype bfloat16, float16"
        )


def _has_scales(args: Arguments) -> bool:
    """Whether scales of the KV are given, or a checkpoint's quantization says that it has some."""
    if args.quantization_param_path is not None:
        return True
    return any(each.get(name) for each in _quantizations(args) for name in ("kv_cache_scheme", "kv_cache_quant_algo"))


def _quantizations(args: Arguments) -> list[Mapping[str, Any]]:
    """What a checkpoint says of its quantization, in its config and beside it."""
    config = getattr(args.get_model_config(), "hf_config", None)
    found = [getattr(config, name, None) for name in ("quantization_config", "compression_config")]
    # Where ModelOpt keeps it.
    beside = Path(args.model_path) / "hf_quant_config.json"
    if beside.is_file():
        found.append(json.loads(beside.read_text()).get("quantization"))
    return [each if isinstance(each, Mapping) else each.to_dict() for each in found if each]


def _makes_float8(quantization: Mapping[str, Any]) -> bool:
    """Whether SGLang makes a KV cache of dtype auto float8: for ModelOpt's quantization alone, which names an algo."""
    if "quant_algo" not in quantization:
        return False
    scheme = quantization.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        return (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
    return _is_float8(quantization.get("kv_cache_quant_algo"))


def _is_float8(algo: Any) -> bool:
    return isinstance(algo, str) and algo.upper() == "FP8"


def _require_float8(settings: Settings, found: tuple[int, int] | None, plain: str) -> None:
    """Refuse fp8 KV on a GPU for which Triton does not compile it: the first request would end the server."""
    if found is not None and found < FLOAT8:
        raise SparseArgumentError(
            f"{settings.flag}: fp8 KV needs a GPU of compute capability {FLOAT8[0]}.{FLOAT8[1]} or later, and this one "
            f"has {found[0]}.{found[1]}; allowed: --kv-cache-dtype {plain}"
        )


def complete_scales(_: None, *, model: Any, kv_cache_dtype: str) -> None:
    """After ``load_kv_cache_scales``: let all of SGLang's attention read the scales of float8 KV.

    SGLang leaves those of ``--quantization-param-path`` as numbers under the names of the tensors. With such,
    its FA3 and Triton backends end at the first prompt, and FlashInfer's writes keys with the scale and reads them
    without. Those of a checkpoint have both already. Neither are read by FlashInfer's prefill where it attends to a
    prefix apart from the chunk; so it attends to both in the cache.

    Raises:
        SparseArgumentError: SGLang has found no scales in the file, of which it says nothing.
    """
    from sglang.srt.runtime_context import get_server_args

    server_args = arguments.of(get_server_args())
    settings = settings_of(server_args)
    algo = getattr(getattr(model, "quant_config", None), "kv_cache_quant_algo", None)
    quantized = server_args.kv_cache_dtype == "auto" and _is_float8(algo)
    if settings is None or not (quantized or server_args.kv_cache_dtype == "fp8_e4m3"):
        return
    import torch

    device = next(model.parameters()).device
    layers = [layer for layer in model.modules() if hasattr(layer, "k_scale_float")]
    given = 0
    for layer in layers:
        for name in ("k_scale", "v_scale"):
            scale = getattr(layer, name)
            if isinstance(scale, float):
                given += 1
                setattr(layer, name, torch.tensor(scale, dtype=torch.float32, device=device))
                setattr(layer, f"{name}_float", scale)
    path = server_args.quantization_param_path
    if path is not None and not given:
        raise SparseArgumentError(
            f"{settings.flag}: SGLang reads no scales for this model from --quantization-param-path {path}; allowed: "
            'JSON {"model_type": …, "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": …}} with its type, and a '
            f"mapping for each of {server_args.tp_size} tensor-parallel ranks that has a scale for each layer"
        )
    if any(getattr(layer, f"{name}_float") not in (None, 1.0) for layer in layers for name in ("k_scale", "v_scale")):
        os.environ["SGLANG_FLASHINFER_USE_PAGED"] = "1"


def kv_bytes_per_token(kv_pool: Any) -> int:
    """Bytes of a token in SGLang's pool over all its layers: keys and values or latents, and an indexer's keys."""
    names = ("kv_buffer",) if hasattr(kv_pool, "kv_buffer") else ("k_buffer", "v_buffer")
    slots = sum(buffer[0].nbytes for name in names for buffer in getattr(kv_pool, name))
    pages = getattr(kv_pool, "index_k_with_scale_buffer", ())
    return slots + sum(buffer[0].nbytes for buffer in pages) // kv_pool.page_size
