"""DSA in the model: the indexer's selection instead of SGLang's kernels; ``latents.py`` attends to it.

SGLang's ``Indexer`` makes queries and keys, rotated; its KV pool holds the keys, page for page with the latents, so
that prefix hits, chunks and retraction carry them along. Here they are quantised, stored and scored, and the best are
chosen: exactly, and with ties to the lowest position, so that the same logits always give the same selection. Stages
that ``methods/dsa/kernel_choice.py`` leaves to SGLang pass through; see ``native_indexer.py`` for a selection behind
its logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn.functional import pad

from sglang_sparse.attention.protocols import ForwardBatch, KVPool
from sglang_sparse_kernels import index_keys
from sglang_sparse_kernels.index_logits import index_logits
from sglang_sparse_kernels.index_topk.choose import choose_in_parts, queries_at_once, slots_of

if TYPE_CHECKING:
    from sglang_sparse.attention.backend import SparseAttentionBackend

# The first slot of a query that pads a pass: it sees nothing, but SGLang's attention counts one token of it.
NO_TOKEN = 0


@dataclass(frozen=True)
class IndexerBatch:
    """The data that all layers of a pass share: its queries, and how many tokens each of them sees and attends to.

    Attributes:
        page_table: ``[rows, pages]`` int32, SGLang's: pages of 64 tokens.
        rows: ``[tokens]`` int32, the row of each query.
        lengths: ``[tokens]`` int32, tokens that a query sees; 0 for one that pads the pass.
        wanted: ``[tokens]`` int32, tokens that it attends to.
        counts: ``[tokens, 1]`` int32, the same again: each layer's selection writes it.
        chosen: ``[tokens, index_topk]`` int32, positions in ascending order, then -1. To begin with the first
            ``wanted`` ones, which is right where these are all; elsewhere each layer writes its own over them.
        last_slots: ``[tokens]`` int64, zeros: what is attended to are single slots, of which nothing can be missing.
        at_once: queries whose logits are made at a time; 0 where nothing has to be chosen.
        stats: see ``BatchView.stats``; None in prefill.
        slots: ``[tokens, index_topk]`` int32, what ``chosen`` is called in the KV cache, then -1; None where SGLang
            looks it up itself.
        offsets: ``[tokens]``, where each query's tokens begin in the copy of the KV that SGLang attends to; None where
            it attends to its KV pool.
    """

    page_table: torch.Tensor
    rows: torch.Tensor
    lengths: torch.Tensor
    wanted: torch.Tensor
    counts: torch.Tensor
    chosen: torch.Tensor
    last_slots: torch.Tensor
    at_once: int
    stats: torch.Tensor | None
    slots: torch.Tensor | None = None
    offsets: torch.Tensor | None = None

    @property
    def selection(self) -> torch.Tensor:
        """The attention's input, ``[tokens, index_topk]`` int32."""
        return self.chosen if self.slots is None else self.slots

    def look_up(self) -> None:
        """Fill ``slots`` where all tokens are chosen."""
        if self.slots is not None:
            slots_of(self.chosen, self.page_table, self.rows, self.offsets, self.slots)
            self.slots[:, :1].clamp_(min=NO_TOKEN)


def begin_pass(backend: SparseAttentionBackend, forward_batch: ForwardBatch, tokens: int, topk: int) -> IndexerBatch:
    """Make what the layers of a pass share, from what is on the device already.

    By the first layer: within a CUDA graph it is made in every replay, as the lengths differ.

    Args:
        backend: the server's.
        tokens: queries of the pass.
        topk: tokens that a query attends to at most.

    Raises:
        RuntimeError: a decode batch was planned dense, and is too long for that.
    """
    metadata, view = backend.dense.forward_metadata, backend.view
    table = metadata.real_page_table
    width = table.shape[1] * index_keys.PAGE_SIZE
    numbers = torch.arange(max(topk, tokens), dtype=torch.int32, device=table.device)
    # What pads a pass beyond its rows sees nothing, whatever its row.
    rows = numbers[:tokens].clamp(max=len(table) - 1)
    at_once, stats = 0, None
    if view is not None:
        lengths, wanted = (_padded(counts, tokens) for counts in (view.n_pages, view.n_select))
        at_once, stats = tokens, view.stats
    else:
        lengths = _padded(metadata.dsa_seqlens_expanded, tokens)
        wanted = lengths.clamp(max=topk)
        if forward_batch.forward_mode.is_extend_without_speculative():
            rows = _padded(metadata.token_to_batch_idx, tokens).int()
            if int(metadata.max_seq_len_k) > topk:
                at_once = queries_at_once(width, table.device)
        else:
            _require_short(forward_batch, topk - backend.verified)
    # SGLang wants slots where its own selection would give them.
    slots = torch.empty(tokens, topk, dtype=torch.int32, device=table.device) if backend.dense.use_fused_topk else None
    offsets = metadata.topk_indices_offset if slots is not None else None
    batch = IndexerBatch(
        page_table=table,
        rows=rows,
        lengths=lengths,
        wanted=wanted,
        counts=wanted[:, None].clone(),
        chosen=torch.where(numbers[:topk] < wanted[:, None], numbers[:topk], -1),
        last_slots=torch.zeros(tokens, dtype=torch.int64, device=table.device),
        at_once=at_once,
        stats=stats,
        slots=slots,
        offsets=offsets if offsets is None else _padded(offsets, tokens).int(),
    )
    if not at_once:
        batch.look_up()
    return batch


def _require_short(forward_batch: ForwardBatch, most: int) -> None:
    """Refuse a decode batch without a view that has a row with more tokens than may be chosen: it would see the first.

    By what SGLang knows on the host, which are the lengths without the tokens of a verification.
    """
    lengths = forward_batch.seq_lens_cpu
    if lengths is not None and len(lengths) and (longest := int(lengths.max())) > most:
        raise RuntimeError(f"a decode batch was planned dense and has a row of {longest} tokens; at most {most} may be")


def _padded(values: torch.Tensor, tokens: int) -> torch.Tensor:
    # Padding by nothing would copy, in each decode step.
    return values if len(values) == tokens else pad(values, (0, tokens - len(values)))


def choose(
    original: Callable[..., torch.Tensor | None],
    indexer: Any,
    x: torch.Tensor,
    q_lora: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: ForwardBatch,
    layer_id: int,
    return_indices: bool = True,
    use_cuda_graph: bool = True,
) -> torch.Tensor | None:
    """Around ``Indexer.forward_native`` and ``forward_cuda``: store the keys of a pass and choose what to attend to.

    Args:
        original: SGLang's function, for servers without the method, or with a native indexer.
        x: ``[tokens, hidden]``.
        q_lora: ``[tokens, q_lora_rank]``.
        positions: ``[tokens]`` int64.
        layer_id: the layer.
        return_indices: whether the attention wants them.
        use_cuda_graph: whether SGLang's own function may use a graph that it captured.

    Returns:
        ``[tokens, index_topk]`` int32, positions within each request in ascending order, or slots where SGLang's
        backend takes those; then -1, until the next layer of the pass writes its own there. None where the attention
        wants none.
    """
    backend = served_backend()
    if backend is None or backend.method.native("indexer"):
        if backend is not None and layer_id == backend.first_layer:
            _count_native(backend)
        return original(indexer, x, q_lora, positions, forward_batch, layer_id, return_indices, use_cuda_graph)
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

    pool = cast("KVPool", get_token_to_kv_pool())
    buffer = pool.get_index_k_with_scale_buffer(layer_id)
    query, key, _ = indexer._get_q_k_bf16(q_lora, x, positions, False, forward_batch)
    _store(backend, key, forward_batch, buffer)
    if not return_indices:
        return None
    if backend.indexed is None or layer_id == backend.first_layer:
        backend.indexed = begin_pass(backend, forward_batch, len(x), indexer.index_topk)
    batch = backend.indexed
    if not batch.at_once:
        return batch.selection
    values, scales = index_keys.quantize(query, rotate=False)
    gates = _head_gates(indexer, x) * scales * (indexer.n_heads**-0.5 * indexer.softmax_scale)
    _select(batch, values, gates, buffer)
    return batch.selection


def _count_native(backend: SparseAttentionBackend) -> None:
    """Count what the selections behind SGLang's indexer do in a decode step, whoever makes them."""
    view = backend.view
    if view is not None:
        counts = torch.stack([(view.n_select > 0).sum(), view.n_select.sum(), view.n_pages.sum()])
        view.stats[:3] += counts * backend.counters.sparse_layers


def _store(
    backend: SparseAttentionBackend, key: torch.Tensor, forward_batch: ForwardBatch, buffer: torch.Tensor
) -> None:
    # As SGLang's fused kernel on CUDA, and as its fallback elsewhere.
    quantized = index_keys.quantize(key, rotate=False, powers=not key.is_cuda)
    index_keys.store(*quantized, forward_batch.out_cache_loc, buffer)
    if forward_batch.forward_mode.is_extend_without_speculative():
        # Never inside a graph, see `methods/dsa/kernel_choice.py`.
        backend.counters.index_keys += len(key)


def _head_gates(indexer: Any, x: torch.Tensor) -> torch.Tensor:
    # In float32: which of two tokens is chosen may hang on it. On a GPU a copy of x would be large.
    return indexer._weights_proj_bf16_in_fp32_out(x) if x.is_cuda else x.float() @ indexer.weights_proj.weight.float().T


def _select(batch: IndexerBatch, values: torch.Tensor, gates: torch.Tensor, buffer: torch.Tensor) -> None:
    """The selection of one layer, into ``batch``."""

    def scores(mine: slice) -> torch.Tensor:
        rows = batch.page_table, batch.rows[mine], batch.lengths[mine]
        return index_logits(values[mine], gates[mine], buffer, *rows)

    names = batch.page_table, batch.rows, batch.offsets
    out = batch.chosen, batch.counts.view(-1), batch.slots
    choose_in_parts(scores, batch.at_once, batch.lengths, batch.wanted, names, out, batch.stats, NO_TOKEN)


def served_backend() -> Any | None:
    """The ``SparseAttentionBackend`` of a server whose model chooses; its method is ``Dsa``. None in other servers."""
    from sglang.srt.model_executor.forward_context import get_attn_backend

    from sglang_sparse.attention.backend import SparseAttentionBackend

    backend = get_attn_backend()
    return backend if isinstance(backend, SparseAttentionBackend) and backend.method.selects_in_model else None
