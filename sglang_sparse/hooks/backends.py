"""SGLang's attention backends that methods use for dense attention."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from sglang_sparse.methods.support import soft_cap

if TYPE_CHECKING:
    from sglang_sparse.config.arguments import ModelConfig

# By the method's kind of attention. SGLang's other MLA backends rotate queries and keys themselves, or write the
# latents within their own kernels.
DENSE_BACKENDS = {
    "MHA": ("torch_native", "triton", "flashinfer", "fa3"),
    "MLA": ("torch_native", "triton", "flashinfer", "flashmla", "fa3"),
    "DSA": ("dsa",),
}
# Those whose pass over a row's tokens gives the same bits whoever else is in the pass.
DETERMINISTIC_BACKENDS = ("torch_native", "triton", "fa3")
GPU_ONLY_BACKENDS = {name for names in DENSE_BACKENDS.values() for name in names} - {"torch_native", "dsa"}
# SGLang's torch_native reads a prompt's keys from the pool, which has one latent for all heads of an MLA model: the
# first request ends the server. The CPU platform sends prompts another way.
_CPU_ONLY_BACKENDS = {"MLA": ("torch_native",)}
# Those of SGLang's that compute another attention on a GPU, or none, by what a model has.
_LACKING = {
    "attention sinks": ("flashinfer", "torch_native"),
    # In Triton's, layers with chunks would attend to all tokens, and read their KV in slots of the other pool.
    "chunked attention": ("flashinfer", "torch_native", "triton"),
    "a soft cap": ("torch_native",),
    "heads of more than 256 dimensions": ("flashinfer", "fa3"),
}


def features_of(model_config: ModelConfig, kind: str) -> list[str]:
    """Return what a model has that some of SGLang's backends lack, keys of `_LACKING`."""
    found = {
        "attention sinks": model_config.has_attention_sinks,
        "chunked attention": model_config.is_local_attention_model,
        "a soft cap": soft_cap(model_config) is not None,
        "heads of more than 256 dimensions": kind == "MHA" and (model_config.head_dim or 0) > 256,
    }
    return [feature for feature, present in found.items() if present]


def dense_backends(kind: str, gpu: bool, features: Collection[str] = ()) -> tuple[str, ...]:
    """Return the dense attention backends that methods support.

    Args:
        kind: kind of attention, a key of `DENSE_BACKENDS`.
        gpu: whether the server has a GPU.
        features: of the model, see `features_of`.
    """
    others = {*(_CPU_ONLY_BACKENDS.get(kind, ()) if gpu else GPU_ONLY_BACKENDS)}
    others |= {name for feature in features for name in _LACKING[feature]} if gpu else set()
    return tuple(name for name in DENSE_BACKENDS[kind] if name not in others)
