"""Scales of float8 KV, and what a token takes in the KV pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_sparse.attention.protocols import KVPool
from sglang_sparse.config import arguments
from sglang_sparse.config.settings import hooked_settings_of
from sglang_sparse.errors import SparseArgumentError

if TYPE_CHECKING:
    import torch


def is_float8(algo: object) -> bool:
    """Whether a checkpoint's ``kv_cache_quant_algo`` makes its KV float8."""
    return isinstance(algo, str) and algo.upper() == "FP8"


def complete_scales(_: None, *, model: torch.nn.Module, kv_cache_dtype: str) -> None:
    """After ``load_kv_cache_scales``: let all of SGLang's attention read the scales of float8 KV.

    SGLang leaves those of ``--quantization-param-path`` as numbers under the names of the tensors. With such,
    its FA3 and Triton backends end at the first prompt, and FlashInfer's writes keys with the scale and reads them
    without. Those of a checkpoint have both already.

    Raises:
        SparseArgumentError: SGLang has found no scales in the file, of which it says nothing.
    """
    from sglang.srt.runtime_context import get_server_args

    server_args = arguments.of(get_server_args())
    settings = hooked_settings_of(server_args)
    algo = getattr(getattr(model, "quant_config", None), "kv_cache_quant_algo", None)
    quantized = server_args.kv_cache_dtype == "auto" and is_float8(algo)
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
            f"{settings.flag}: SGLang reads no scales for this model from --quantization-param-path {path}",
            field="--quantization-param-path",
            got=path,
            allowed='JSON {"model_type": …, "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": …}} with its '
            f"type, and a mapping for each of {server_args.tp_size} tensor-parallel ranks that has a scale for each "
            "layer",
        )


def attend_in_the_cache(dense: object, model: torch.nn.Module) -> None:
    """Let FlashInfer's prefill attend in the cache alone where that has scales: elsewhere it does not read them.

    Args:
        dense: the server's dense backend over float8 KV.
        model: the loaded model.
    """
    layers = [layer for layer in model.modules() if hasattr(layer, "k_scale_float")]
    if any(getattr(layer, name) not in (None, 1.0) for layer in layers for name in ("k_scale_float", "v_scale_float")):
        # One of layers that attend and one of those with states are in one, too.
        dense = getattr(dense, "full_attn_backend", dense)
        # SGLang puts two into one where prefill and decode differ. FlashInfer's own field of that name is a string.
        backends: tuple[Any, ...] = (dense, getattr(dense, "prefill_backend", None))
        for backend in backends:
            if hasattr(backend, "use_paged"):
                backend.use_paged = True


def kv_bytes_per_token(kv_pool: KVPool) -> int:
    """Bytes of a token in SGLang's pool over all its layers: keys and values or latents, and an indexer's keys."""
    parts = [getattr(kv_pool, name) for name in ("full_kv_pool", "swa_kv_pool") if hasattr(kv_pool, name)]
    if parts:
        return sum(kv_bytes_per_token(part) for part in parts)
    names = ("kv_buffer",) if hasattr(kv_pool, "kv_buffer") else ("k_buffer", "v_buffer")
    # The pool of a model with shared indexers has empty buffers.
    slots = sum(buffer[:1].nbytes for name in names for buffer in getattr(kv_pool, name))
    pages = getattr(kv_pool, "index_k_with_scale_buffer", ())
    return slots + sum(buffer[:1].nbytes for buffer in pages) // kv_pool.page_size
