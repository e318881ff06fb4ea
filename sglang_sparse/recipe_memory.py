"""What one GPU holds of a recipe's model, estimated from its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang_sparse.implementation import FLOAT8_LATENT, raw_latents
from sglang_sparse.method import ModelShape
from sglang_sparse.methods.dsa import PORTABLE, DsaConfig
from sglang_sparse_kernels.latent_rows import row_bytes

if TYPE_CHECKING:
    from sglang_sparse.method_config import MethodConfig
    from sglang_sparse.recipes import Recipe

GIB = 2**30
# An indexer's key is float8 with one float32 scale.
_INDEX_SCALE = 4


@dataclass(frozen=True)
class Memory:
    """What one GPU holds, estimated.

    Attributes:
        weights: bytes of weights.
        kv: bytes of a token's KV and indexer keys.
        summaries: bytes of what the decode method keeps for a token.
        tokens: KV tokens that fit beside the weights.
        formulas: how each of them is computed.
    """

    weights: float
    kv: int
    summaries: float
    tokens: int
    formulas: tuple[str, str, str, str]


def memory(recipe: Recipe) -> Memory:
    """Estimate what one GPU holds, by the sizes of the model and what the method keeps beside the KV.

    Tensor parallelism splits weights and KV heads evenly; what MLA caches is on every GPU.
    """
    sizes, method = recipe.sizes, recipe.settings().method
    heads = -(-sizes.kv_heads // recipe.gpus)
    copies = 2 if recipe.attention == "MHA/GQA" else 1
    fp8 = recipe.flags.get("kv-cache-dtype") == "fp8_e4m3"
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    index = sizes.index_dim + _INDEX_SCALE if sizes.index_dim else 0
    row = copies * heads * sizes.head_dim * dtype.itemsize
    elements = f"{copies} x {heads} heads x {sizes.head_dim} x {dtype.itemsize} B"
    if fp8 and recipe.attention == "DSA" and not _raw(recipe, method.config):
        row = row_bytes(*FLOAT8_LATENT)
        elements = f"{row} B of values, scales and a rotated key"
    kv = sizes.layers * (row + index)
    shape = ModelShape(sizes.layers, -(-sizes.q_heads // recipe.gpus), heads, sizes.head_dim, dtype)
    layers = method.sparse_layers(sizes.layers)
    pages = sum(
        spec.bytes_per_page * len(layers if spec.layers is None else spec.layers) for spec in method.aux_specs(shape)
    )
    page = pages / max(1, len(layers))
    summaries = pages / method.config.page_size
    weights = sizes.parameters * sizes.weight_bytes / recipe.gpus
    room = recipe.gpu_memory_gib * GIB * recipe.mem_fraction_static - weights
    formulas = (
        f"{sizes.parameters:.4g} parameters x {sizes.weight_bytes:g} B / {recipe.gpus}",
        f"{sizes.layers} layers x ({elements}{f' + {index} B of the indexer' if index else ''})",
        f"{len(layers)} layers x {page:g} B a page / {method.config.page_size} tokens",
        f"({recipe.gpu_memory_gib:g} GiB x {recipe.mem_fraction_static:g} - weights) / (KV + summaries)",
    )
    return Memory(weights, kv, summaries, int(room / (kv + summaries)), formulas)


def _raw(recipe: Recipe, config: MethodConfig) -> bool:
    """Whether SGLang keeps float8 latents without scales, which portable attention does not read."""
    portable = isinstance(config, DsaConfig) and config.implementation["attention"] == PORTABLE
    backends = [recipe.flags.get(f"dsa-{phase}-backend") for phase in ("prefill", "decode")]
    return not portable and raw_latents(backends, blackwell=recipe.gpu in ("B200", "B300", "GB200", "GB300"))
