"""Sparse decode of one layer: write K and V, let the method select, attend to what it selected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sglang_sparse.attention.protocols import KVPool, RadixAttention
from sglang_sparse.methods.aux_buffers import newest_ends, page_ends
from sglang_sparse.methods.roles import AttendsItself
from sglang_sparse.methods.views import LatentQuery
from sglang_sparse_kernels.sparse_decode import sparse_decode
from sglang_sparse_kernels.sparse_mla_decode import sparse_mla_decode

if TYPE_CHECKING:
    from sglang_sparse.attention.batch import Views
    from sglang_sparse.methods.aux_buffers import AuxBuffers
    from sglang_sparse.methods.base import DecodeMethod, ModelShape, SparseIndices
    from sglang_sparse.methods.views import BatchView

# Keys of ``forward``'s arguments: how MLA backends that take the rotary part apart from the latent one get it, and
# where heads have attention sinks.
SPLIT = ("q_rope", "k_rope")
SINKS = "sinks"


class DecodePath:
    """The sparse layers of a decode step.

    Args:
        methods: the decode methods.
        aux: their buffers next to the KV pool.
        kv_pool: SGLang's.
        model: the attention layers of this rank.

    Attributes:
        layers: those that attend here; a model that selects by itself leaves that to the dense backend.
        last_layer: the last layer whose pages have entries in ``aux``; -1 where none have.
    """

    def __init__(self, methods: Sequence[DecodeMethod], aux: AuxBuffers, kv_pool: KVPool, model: ModelShape):
        self._by_layer = {
            layer: (place, method)
            for place, method in enumerate(methods)
            for layer in method.sparse_layers(model.num_layers)
        }
        self.layers = frozenset(layer for layer in aux.layers if not self._by_layer[layer][1].selects_in_model)
        self._aux = aux
        self._kv_pool = kv_pool
        self._rope_dim = model.rope_dim
        self._k_caches = {layer: kv_pool.get_key_buffer(layer) for layer in sorted(aux.layers)}
        self.last_layer = max(aux.layers, default=-1) if aux.specs else -1
        self._expected: torch.Tensor | None = None

    def refresh(self, last_slots: Mapping[int, torch.Tensor]) -> None:
        """Recompute the entries of the pages that a pass has written, in all layers.

        Args:
            last_slots: by tokens of an entry, see ``AuxBuffers.refresh``.
        """
        for entry_tokens, slots in last_slots.items():
            self._aux.refresh(self._k_caches, slots, entry_tokens=entry_tokens)

    def ends(self, slots: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return the last slot of each entry among slots, by the tokens of an entry, see `page_ends`."""
        return {size: page_ends(slots, size) for size in self._aux.entry_sizes}

    def expect(self, slots: torch.Tensor, loading: bool) -> None:
        """Compute the entries of pages that no pass of this server has written.

        Args:
            slots: ``[tokens]`` int64, request after request in the order of positions.
            loading: whether their keys may be on their way from host memory: then the extend pass that runs next waits
                for them, and computes the entries with its own.
        """
        if loading:
            self._expected = slots
        else:
            self.refresh(self.ends(slots))

    def with_arrived(self, ends: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return what an extend pass refreshes, with what has arrived for it; waits for that on the current stream."""
        found, expected = dict(ends), self._expected
        if expected is not None:
            self._expected = None
            for layer in self._k_caches:
                self._kv_pool.get_key_buffer(layer)
            for size, arrived in self.ends(expected).items():
                # A pass over a request whose KV has arrived may end within a page of it, or behind it in one.
                found[size] = newest_ends(torch.cat([found[size], arrived]), size)
        return found

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        slots: torch.Tensor,
        views: Views,
        save_kv_cache: bool,
        more: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Attend sparsely in one layer.

        In a verification a row has several tokens, which stand behind one another. They share one selection.

        Args:
            q: ``[tokens, q_heads * head_dim]``; of MLA without its rotary part if that is in ``more``.
            k: ``[tokens, kv_heads, head_dim]``, likewise.
            v: ``[tokens, kv_heads, v_head_dim]``.
            slots: ``[tokens]`` int64, where k and v belong.
            views: the batch, for each method.
            save_kv_cache: whether they still have to be written there.
            more: of MLA ``q_rope`` ``[tokens, q_heads, rope_dim]`` and ``k_rope`` ``[tokens, 1, rope_dim]``, of others
                ``sinks`` ``[q_heads]``, or nothing.

        Returns:
            ``[tokens, q_heads * v_head_dim]``, of MLA in the latent space.
        """
        if save_kv_cache:
            self._write(k, v, layer, slots, more.get("k_rope"))
        self._aux.refresh({layer.layer_id: self._k_caches[layer.layer_id]}, slots, before_select=True)
        place, method = self._by_layer[layer.layer_id]
        if self._rope_dim:
            output = self._attend_latent(method, q, more.get("q_rope"), layer, slots, views[place])
        else:
            output = self._attend_heads(method, q, layer, slots, views[place], more.get(SINKS))
        return output.reshape(q.shape[0], -1)

    def _write(
        self, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, slots: torch.Tensor, k_rope: torch.Tensor | None
    ) -> None:
        if k_rope is not None:
            self._kv_pool.set_mla_kv_buffer(layer, slots, k, k_rope)
        elif self._rope_dim:
            self._kv_pool.set_kv_buffer(layer, KVWriteLoc(slots, None), k, v)
        else:
            self._kv_pool.set_kv_buffer(layer, KVWriteLoc(slots, None), k, v, layer.k_scale, layer.v_scale)

    def _attend_heads(
        self,
        method: DecodeMethod,
        q: torch.Tensor,
        layer: RadixAttention,
        slots: torch.Tensor,
        view: BatchView,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        keys, values = self._k_caches[layer.layer_id], self._kv_pool.get_value_buffer(layer.layer_id)
        k_scale, v_scale = layer.k_scale_float or 1.0, layer.v_scale_float or 1.0
        if isinstance(method, AttendsItself):
            scales = (layer.scaling, k_scale, v_scale)
            # Methods of others may know neither sinks nor soft caps, which few models have.
            attend = method.attend if sinks is None else partial(method.attend, sinks=sinks)
            attend = partial(attend, soft_cap=layer.logit_cap) if layer.logit_cap else attend
            return attend(view, layer.layer_id, query, keys, values, slots, *scales)
        queries, asking, newest = view.queries, query, slots
        if queries > 1:
            # One selection for all, by the one token that is sure to stay: with others, wrong drafts would choose too.
            asking = query.unflatten(0, (-1, queries))[:, 0].contiguous()
            newest = slots.view(-1, queries)[:, -1].contiguous()
            query = _by_kv_head(query, queries, keys.shape[1])
            if sinks is not None:
                sinks = _by_kv_head(sinks[None, :, None].expand(queries, -1, 1), queries, keys.shape[1]).flatten()
        asked = replace(view, logit_scale=layer.scaling * k_scale, last_slots=newest)
        selected = self._select(method, asked, layer.layer_id, asking, slots)
        size, usual = _unit(selected, view)
        output = sparse_decode(
            query,
            keys,
            values,
            selected.indices,
            selected.counts,
            newest,
            page_size=size,
            sm_scale=layer.scaling,
            k_scale=k_scale,
            v_scale=v_scale,
            usual_pages=usual,
            arrivals=view.arrivals,
            queries=queries,
            sinks=sinks,
            soft_cap=layer.logit_cap or None,
        )
        return output if queries == 1 else _by_token(output, queries, keys.shape[1])

    def _select(
        self, method: DecodeMethod, view: BatchView, layer_id: int, query: torch.Tensor, slots: torch.Tensor
    ) -> SparseIndices:
        """Select for a layer, or return what the first draft of the round selected."""
        shared = self._aux.shared
        if shared is not None and shared.reused:
            return shared.read(layer_id, slots)
        selected = method.select(view, layer_id, query, self._aux)
        if shared is not None:
            shared.store(layer_id, selected)
        return selected

    def _attend_latent(
        self,
        method: DecodeMethod,
        q: torch.Tensor,
        q_rope: torch.Tensor | None,
        layer: RadixAttention,
        slots: torch.Tensor,
        view: BatchView,
    ) -> torch.Tensor:
        heads = q.reshape(q.shape[0], layer.tp_q_head_num, -1)
        if q_rope is None:
            heads, q_rope = heads[..., : -self._rope_dim], heads[..., -self._rope_dim :]
        cache = self._k_caches[layer.layer_id][:, 0]
        # Backends differ in whether they divide what they store by a checkpoint's scales, so those are refused.
        query = LatentQuery(heads, q_rope, cache, slots, layer.scaling, 1.0, _mean_over_ranks)
        if isinstance(method, AttendsItself):
            return method.attend_latents(view, layer.layer_id, query)
        selected = method.select(replace(view, last_slots=slots), layer.layer_id, query, self._aux)
        size, usual = _unit(selected, view)
        return sparse_mla_decode(
            heads,
            q_rope,
            cache,
            selected.indices,
            selected.counts,
            slots,
            block_size=size,
            sm_scale=layer.scaling,
            kv_scale=query.kv_scale,
            usual_blocks=usual,
            # Selections are in ascending order of position.
            newest_last=True,
        )


def _by_kv_head(query: torch.Tensor, queries: int, heads: int) -> torch.Tensor:
    """Bring ``[rows * queries, q_heads, dim]`` into the order of ``sparse_decode``: ``[rows, queries * q_heads, dim]``.

    There each KV head has the query heads of its group for one token after the other.
    """
    return query.view(-1, queries, heads, query.shape[1] // heads, query.shape[2]).transpose(1, 2).flatten(1, 3)


def _by_token(output: torch.Tensor, queries: int, heads: int) -> torch.Tensor:
    """Undo `_by_kv_head`: return ``[rows * queries, q_heads, dim]``."""
    return output.unflatten(1, (heads, queries, -1)).transpose(1, 2).flatten(2, 3).flatten(0, 1)


def _unit(selected: SparseIndices, view: BatchView) -> tuple[int, int]:
    """The slots that an index names, and how many indices most rows have at most."""
    if selected.unit == "page":
        return view.page_size, view.usual_select
    return 1, view.usual_select * view.page_size


def _mean_over_ranks(values: torch.Tensor) -> torch.Tensor:
    from sglang.srt.distributed.parallel_state import get_attn_tp_group

    group = get_attn_tp_group()
    return values if group.world_size == 1 else group.all_reduce(values).div_(group.world_size)


def require_known(layer: RadixAttention, k: torch.Tensor | None, kwargs: Mapping[str, object], latent: bool) -> None:
    """Check that a layer asks for nothing but what a loaded model shows, see ``hooks/layer_checks.py``."""
    arguments = sorted(set(kwargs).difference(SPLIT if latent else (SINKS,)))
    if k is None or arguments:
        asked = f"arguments {arguments}" if arguments else "KV shared with another layer"
        raise RuntimeError(
            f"layer {layer.layer_id} uses {asked}, which the check of the loaded model should have refused: a bug of "
            'sglang_sparse; leave the layer dense with the config field "layers"'
        )
