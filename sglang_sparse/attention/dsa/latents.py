"""DSA's latents: written to SGLang's KV pool in float8, and attended to where the indexer has chosen.

A float8 pool holds rows of bytes with scales, see ``latent_rows``. SGLang's writer of them does not compile for GPUs
without float8, and its readers are for Hopper and Blackwell alone (on desktop Blackwell FlashInfer's, its backend
``flashinfer_sparse_mla``); those here run wherever the portable attention does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_sparse.attention.dsa.indexer import served_backend
from sglang_sparse.attention.protocols import KVPool, ModelConfig
from sglang_sparse.config.settings import hooked_settings_of
from sglang_sparse.methods.dsa.decode import Dsa
from sglang_sparse_kernels.latent_rows import row_bytes, write_latents
from sglang_sparse_kernels.sparse_mla_decode import sparse_mla_decode

# Queries whose attention is one launch: its grid has room for 65,535.
ATTENDED = 1 << 15


def row_width(original: Callable[..., int], *, model_config: ModelConfig, kv_cache_dtype: torch.dtype) -> int:
    """Around ``calculate_mla_kv_cache_dim``: return what the KV pool keeps of a token in a layer, in elements.

    SGLang keeps float8 latents without scales for the kernel in whose place the portable attention stands.

    Args:
        original: SGLang's function, for servers without the method, with native attention, or with another dtype.
        kv_cache_dtype: of the pool.
    """
    from sglang.srt.runtime_context import get_server_args

    settings = hooked_settings_of(get_server_args())
    portable = settings is not None and isinstance(settings.method, Dsa) and not settings.method.native("attention")
    if not portable or kv_cache_dtype != torch.float8_e4m3fn:
        return original(model_config=model_config, kv_cache_dtype=kv_cache_dtype)
    return row_bytes(model_config.kv_lora_rank, model_config.qk_rope_head_dim)


def write(
    original: Callable[..., None],
    pool: KVPool,
    cache: torch.Tensor,
    slots: torch.Tensor,
    latent: torch.Tensor,
    rotated: torch.Tensor,
) -> None:
    """Around ``MLATokenToKVPool._write_mla_kv_buffer``: store the new tokens of a layer.

    Args:
        original: SGLang's function, for servers without the method, with native attention, or with KV in the model's
            own dtype.
        pool: SGLang's KV pool.
        cache: ``[slots, 1, bytes]`` uint8 if it is float8.
        slots: ``[tokens]`` int64.
        latent: ``[tokens, 1, rank]``.
        rotated: ``[tokens, 1, rope]``, keys after RoPE.
    """
    backend = served_backend() if pool.dsa_kv_cache_store_fp8 else None
    if backend is None or backend.method.native("attention"):
        return original(pool, cache, slots, latent, rotated)
    write_latents(latent.squeeze(1), rotated.squeeze(1), slots, cache.squeeze(1))


def attend(
    original: Callable[..., torch.Tensor],
    dense: object,
    q_all: torch.Tensor,
    kv_cache: torch.Tensor,
    v_head_dim: int,
    page_table_1: torch.Tensor,
    sm_scale: float,
) -> torch.Tensor:
    """Around ``DeepseekSparseAttnBackend._forward_tilelang``: attend to the chosen slots.

    Args:
        original: SGLang's function, for servers without the method, or with native attention.
        dense: SGLang's backend.
        q_all: ``[tokens, heads, rank + rope]``, absorbed.
        kv_cache: ``[slots, 1, rank + rope]``; rows of bytes with scales, ``[slots, 1, bytes]``, if it is float8.
        v_head_dim: rank.
        page_table_1: ``[tokens, index_topk]`` int32 slots, then -1.
        sm_scale: of the logits.

    Returns:
        ``[tokens, heads, rank]``.

    Raises:
        RuntimeError: nothing was chosen in this pass.
    """
    backend = served_backend()
    if backend is None or backend.method.native("attention"):
        return original(dense, q_all, kv_cache, v_head_dim, page_table_1, sm_scale)
    batch = backend.indexed
    if batch is None:
        raise RuntimeError("the attention of a layer was asked for before its indexer")
    cache = kv_cache.squeeze(1)
    if cache.dtype == torch.float8_e4m3fn:
        cache = cache.view(torch.uint8)
    out = q_all.new_empty(*q_all.shape[:2], v_head_dim)
    for first in range(0, len(q_all), ATTENDED):
        mine = slice(first, first + ATTENDED)
        sparse_mla_decode(
            q_all[mine, :, :v_head_dim],
            q_all[mine, :, v_head_dim:],
            cache,
            page_table_1[mine, None].contiguous(),
            batch.counts[mine],
            batch.last_slots[mine],
            block_size=1,
            sm_scale=sm_scale,
            out=out[mine],
        )
    return out
