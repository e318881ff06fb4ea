"""Refuse KV caches of a dtype that a method's kernels or SGLang's backends cannot read correctly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_sparse.attention.kv_scales import is_float8
from sglang_sparse.config.machine import Gpu, capability, on_gpu
from sglang_sparse.config.settings import Settings
from sglang_sparse.errors import SparseArgumentError
from sglang_sparse.hooks.backends import DENSE_BACKENDS, GPU_ONLY_BACKENDS

if TYPE_CHECKING:
    from sglang_sparse.config.arguments import Arguments

# Compute capability of the first GPUs on which kernels read float8.
FLOAT8 = (8, 9)


def require_dtypes(args: Arguments, settings: Settings, gpu: Gpu = None) -> None:
    """Refuse KV caches that a method's kernels cannot read correctly.

    Args:
        args: the server's.
        settings: its methods.
        gpu: its GPU; None for this machine's.

    Raises:
        SparseArgumentError: names the dtypes and the allowed ones.
    """
    dtype = str(args.get_model_config().dtype).removeprefix("torch.")
    quantized = args.kv_cache_dtype == "auto" and any(map(_makes_float8, _quantizations(args)))
    plain, auto = ("bf16", "fp8_e4m3") if quantized else ("auto", dtype)
    cache = {"auto": auto, "bf16": "bfloat16"}.get(args.kv_cache_dtype, args.kv_cache_dtype)
    fp8_kv = all(method.fp8_kv for method in settings.decode.methods)
    flag, got = "--kv-cache-dtype", args.kv_cache_dtype
    if cache not in (dtype, *(("fp8_e4m3",) if fp8_kv else ())):
        given = f"{got}{', which this checkpoint makes fp8_e4m3,' if quantized else ''}"
        message = f"{settings.flag}: the KV cache dtype is {given} and the model's is {dtype}"
        raise SparseArgumentError(message, field=flag, got=got, allowed=(plain, "fp8_e4m3") if fp8_kv else plain)
    kind = settings.method.kind_of(args.get_model_config())
    if cache == "fp8_e4m3" and "torch_native" in args.get_attention_backends():
        allowed = [name for name in DENSE_BACKENDS[kind] if name in GPU_ONLY_BACKENDS]
        message = f"{settings.flag}: the attention backend torch_native writes fp8 KV without its scales"
        where = "with --kv-cache-dtype fp8_e4m3"
        raise SparseArgumentError(
            message, field="--attention-backend", got="torch_native", allowed=allowed, where=where
        )
    if cache == "fp8_e4m3" and kind != "MHA" and args.quantization_param_path is not None:
        message, flag = f"{settings.flag}: no model of SGLang with {kind} reads ", "--quantization-param-path"
        raise SparseArgumentError(message + flag, field=flag, got=args.quantization_param_path, allowed="none")
    if cache == "fp8_e4m3" and settings.prefill and not _has_scales(args):
        raise SparseArgumentError(
            f"{settings.flag}: fp8 KV without scales cuts off keys and values beyond 448, and the checkpoint names "
            "none",
            field=flag,
            got=got,
            allowed=f"--kv-cache-dtype {plain}, a checkpoint with scales of its KV (kv_cache_scheme or "
            "kv_cache_quant_algo of its quantization), or --quantization-param-path FILE",
            where="with --sparse-prefill-method",
        )
    if cache == "fp8_e4m3" and any(method.needs_float8 for method in settings.decode.methods):
        _require_float8(settings, capability(gpu), plain, got)
    if dtype == "float32" and on_gpu(gpu):
        message, allowed = f"{settings.flag}: float32 models run on the CPU only", "--dtype bfloat16, float16"
        raise SparseArgumentError(message, field="--dtype", got=dtype, allowed=allowed)


def _has_scales(args: Arguments) -> bool:
    """Whether scales of the KV are given, or a checkpoint's quantization has some."""
    if args.quantization_param_path is not None:
        return True
    return any(each.get(name) for each in _quantizations(args) for name in ("kv_cache_scheme", "kv_cache_quant_algo"))


def _quantizations(args: Arguments) -> list[Mapping[str, object]]:
    """Return a checkpoint's quantizations, from its config and from ModelOpt's file."""
    config = getattr(args.get_model_config(), "hf_config", None)
    found = [getattr(config, name, None) for name in ("quantization_config", "compression_config")]
    modelopt = Path(args.model_path) / "hf_quant_config.json"
    if modelopt.is_file():
        found.append(json.loads(modelopt.read_text()).get("quantization"))
    return [each if isinstance(each, Mapping) else each.to_dict() for each in found if each]


def _makes_float8(quantization: Mapping[str, object]) -> bool:
    """Whether SGLang makes a KV cache of dtype auto float8: only for ModelOpt's quantization, which names an algo."""
    if "quant_algo" not in quantization:
        return False
    scheme = quantization.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        return (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
    return is_float8(quantization.get("kv_cache_quant_algo"))


def _require_float8(settings: Settings, found: tuple[int, int] | None, plain: str, got: str) -> None:
    """Refuse fp8 KV on a GPU without Triton support for it: the first request would end the server."""
    if found is not None and found < FLOAT8:
        raise SparseArgumentError(
            f"{settings.flag}: fp8 KV needs a GPU of compute capability {FLOAT8[0]}.{FLOAT8[1]} or later, and this one "
            f"has {found[0]}.{found[1]}",
            field="--kv-cache-dtype",
            got=got,
            allowed=f"--kv-cache-dtype {plain}",
        )
