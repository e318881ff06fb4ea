"""DSA in the model: the indexer's selection, and attention over it, in place of SGLang's kernels.

SGLang's ``Indexer`` makes queries and keys, rotated; its KV pool holds the keys, page for page with the latents, so
that prefix hits, chunks and retraction carry them along. Here they are quantised, stored and scored, and the best are
chosen: exactly, and with ties to the lowest position, so that the same logits always give the same selection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sglang_sparse_kernels import index_keys
from sglang_sparse_kernels.index_logits import index_logits
from sglang_sparse_kernels.page_topk import page_topk
from sglang_sparse_kernels.sparse_mla_decode import sparse_mla_decode

if TYPE_CHECKING:
    from sglang_sparse.backend import SparseAttentionBackend

# Of the logits of a prefill, which are made for as many queries at a time as fit. Choosing from them takes several
# times as much on a CPU.
LOGITS_BYTES = 32 * 2**20


def choose(
    original: Callable[..., torch.Tensor | None],
    indexer: Any,
    x: torch.Tensor,
    q_lora: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: Any,
    layer_id: int,
    return_indices: bool = True,
) -> torch.Tensor | None:
    """Around ``Indexer.forward_native``: store the keys of a pass and choose what to attend to.

    Args:
        original: SGLang's function, for servers without the method.
        indexer: SGLang's ``Indexer``.
        x: ``[tokens, hidden]``.
        q_lora: ``[tokens, q_lora_rank]``.
        positions: ``[tokens]`` int64.
        forward_batch: SGLang's ``ForwardBatch``.
        layer_id: the layer.
        return_indices: whether the attention wants them.

    Returns:
        ``[tokens, index_topk]`` int32, positions within each request in ascending order, then -1. None where the
        attention wants none.
    """
    backend = _backend()
    if backend is None:
        return original(indexer, x, q_lora, positions, forward_batch, layer_id, return_indices)
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

    pool: Any = get_token_to_kv_pool()
    buffer = pool.get_index_k_with_scale_buffer(layer_id)
    query, key, _ = indexer._get_q_k_bf16(q_lora, x, positions, False, forward_batch)
    index_keys.store(*index_keys.quantize(key, rotate=False), forward_batch.out_cache_loc, buffer)
    if not return_indices:
        return None
    values, scales = index_keys.quantize(query, rotate=False)
    # In float32: which of two tokens is chosen may hang on it.
    gates = x.float() @ indexer.weights_proj.weight.float().T
    gates = gates * scales * (indexer.n_heads**-0.5 * indexer.softmax_scale)
    chosen = torch.full((len(x), indexer.index_topk), -1, dtype=torch.int32, device=x.device)
    metadata = backend.dense.forward_metadata
    if forward_batch.forward_mode.is_decode():
        _choose_decode(backend, metadata, values, gates, buffer, chosen)
    elif forward_batch.forward_mode.is_extend():
        _choose_extend(metadata, values, gates, buffer, chosen)
    return chosen


def _choose_decode(
    backend: SparseAttentionBackend,
    metadata: Any,
    values: torch.Tensor,
    gates: torch.Tensor,
    buffer: torch.Tensor,
    chosen: torch.Tensor,
) -> None:
    """One query a row. A batch without a view has no row with more tokens than may be chosen."""
    view = backend.view
    if view is None:
        _take_all(metadata.dsa_seqlens_expanded, chosen)
        return
    rows = torch.arange(len(chosen), device=chosen.device)
    scores = index_logits(values, gates, buffer, metadata.real_page_table, rows, view.n_pages)
    counts = (view.n_pages, view.n_select, chosen.shape[1])
    _keep(*page_topk(scores[:, None], _places(scores), *counts, stats=view.stats), chosen)


def _choose_extend(
    metadata: Any, values: torch.Tensor, gates: torch.Tensor, buffer: torch.Tensor, chosen: torch.Tensor
) -> None:
    """Many queries a row, as many at a time as their logits have room for."""
    lengths, longest, topk = metadata.dsa_seqlens_expanded, int(metadata.max_seq_len_k), chosen.shape[1]
    if longest <= topk:
        _take_all(lengths, chosen)
        return
    at_once = max(1, LOGITS_BYTES // (4 * longest))
    for first in range(0, len(lengths), at_once):
        mine = slice(first, first + at_once)
        rows, seen = metadata.token_to_batch_idx[mine], lengths[mine]
        scores = index_logits(values[mine], gates[mine], buffer, metadata.real_page_table, rows, seen)
        _keep(*page_topk(scores[:, None], _places(scores), seen, seen.clamp(max=topk), topk), chosen[mine])


def _places(scores: torch.Tensor) -> torch.Tensor:
    """A page table that names positions."""
    return torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device).expand(len(scores), -1)


def _keep(indices: torch.Tensor, counts: torch.Tensor, chosen: torch.Tensor) -> None:
    """Write a selection ``[queries, 1, topk]``; what lies beyond the counts stays -1."""
    places = torch.arange(chosen.shape[1], device=chosen.device)
    torch.where(places < counts, indices[:, 0], chosen, out=chosen)


def _take_all(lengths: torch.Tensor, chosen: torch.Tensor) -> None:
    """Every token of queries that see no more than may be chosen."""
    places = torch.arange(chosen.shape[1], dtype=torch.int32, device=chosen.device)
    chosen[: len(lengths)] = torch.where(places < lengths[:, None], places, -1)


def attend(
    original: Callable[..., torch.Tensor],
    dense: Any,
    q_all: torch.Tensor,
    kv_cache: torch.Tensor,
    v_head_dim: int,
    page_table_1: torch.Tensor,
    sm_scale: float,
) -> torch.Tensor:
    """Around ``DeepseekSparseAttnBackend._forward_tilelang``: attend to the chosen slots.

    Args:
        original: SGLang's function, for servers without the method.
        dense: SGLang's backend.
        q_all: ``[tokens, heads, rank + rope]``, absorbed.
        kv_cache: ``[slots, 1, rank + rope]``.
        v_head_dim: rank.
        page_table_1: ``[tokens, index_topk]`` int32 slots, then -1.
        sm_scale: of the logits.

    Returns:
        ``[tokens, heads, rank]``.
    """
    if _backend() is None:
        return original(dense, q_all, kv_cache, v_head_dim, page_table_1, sm_scale)
    counts = (page_table_1 >= 0).sum(1, keepdim=True, dtype=torch.int32)
    # A block is one slot, of which nothing can be missing.
    last_slots = torch.zeros(len(q_all), dtype=torch.int64, device=q_all.device)
    query = q_all[..., :v_head_dim], q_all[..., v_head_dim:]
    indices = page_table_1[:, None].contiguous()
    return sparse_mla_decode(*query, kv_cache[:, 0], indices, counts, last_slots, block_size=1, sm_scale=sm_scale)


def _backend() -> SparseAttentionBackend | None:
    """The backend of a server that runs the method."""
    from sglang.srt.model_executor.forward_context import get_attn_backend

    from sglang_sparse.backend import SparseAttentionBackend

    backend: Any = get_attn_backend()
    return backend if isinstance(backend, SparseAttentionBackend) and backend.method.attention == "DSA" else None
