"""Prefill in the attention backend: the passes that the methods take over from the dense backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sglang_sparse.attention.protocols import KVPool, RadixAttention
from sglang_sparse.attention.selection_counts import sum_counts
from sglang_sparse.methods.layers import listed, names_layer
from sglang_sparse.methods.prefill import PrefillInputs, PrefillSpan

if TYPE_CHECKING:
    from sglang_sparse.methods.groups import PrefillGroups

# What every prefill method counts on the device.
PAIRS = ("pairs_attended", "pairs_causal")


class PrefillPath:
    """The prefill methods at work.

    Args:
        groups: the server's methods.
        layers: the layers whose prefill is sparse.
        kv_pool: SGLang's KV pool.
        req_to_token: ``[requests, positions]``, SGLang's table of slots.
        page_size: tokens per page.
        q_heads: query heads on this rank.

    Attributes:
        groups: the server's methods.
        layers: the layers whose prefill is sparse.
        sparse_tokens: query tokens of sparse groups since the server started.
        dense_tokens: query tokens of prefill that attended densely.
        pairs: int64 on the device: query-key pairs attended to, and those that dense attention would have, over the
            query heads of ``layers``. Of all tokens that are counted above, so also of passes that were dense
            throughout. What serves no prompt is left out: rows that decode within a mixed batch, and rectification.
            Behind these two, the method's ``more_counts``; all of one method after the other.
    """

    def __init__(
        self,
        groups: PrefillGroups,
        layers: Sequence[int],
        kv_pool: KVPool,
        req_to_token: torch.Tensor,
        page_size: int,
        q_heads: int,
    ):
        self.groups = groups
        self.layers = frozenset(layers)
        self._places = {
            layer: next(place for place, config in enumerate(groups.configs) if names_layer(config.layers, layer))
            for layer in sorted(layers)
        }
        self.sparse_tokens = 0
        self.dense_tokens = 0
        self._counted = [(*PAIRS, *method.more_counts) for method in groups.methods]
        self.pairs = torch.zeros(sum(map(len, self._counted)), dtype=torch.int64, device=req_to_token.device)
        self._pairs = (self.pairs,)
        self._kv_pool = kv_pool
        self._req_to_token = req_to_token
        self._page_size = page_size
        self._q_heads = q_heads
        self._plans: list[Any] = []
        self._tokens = 0
        self._page_table = torch.zeros(0, 0, dtype=torch.int32)

    def describe(self, num_layers: int) -> str:
        """Say in a line what runs of a model of ``num_layers``."""
        kernels = "reference" if self._req_to_token.device.type == "cpu" else "triton"
        groups, layers = self.groups, listed(self.layers, num_layers)
        return (
            f"prefill {groups.described}, {layers}, groups of {groups.group_tokens} tokens, "
            f"dense below position {groups.dense_below}; kernels {kernels}"
        )

    def parts(self) -> list[dict[str, object]]:
        """Return the layers of each method, for ``/server_info``."""
        return [
            {
                "method": name,
                "layers": [layer for layer, own in self._places.items() if own == place],
                "config": config.model_dump(mode="json"),
            }
            for place, (name, config) in enumerate(zip(self.groups.names, self.groups.configs, strict=True))
        ]

    def device_totals(self, counted: Sequence[int]) -> dict[str, int]:
        """Name what is counted in ``pairs``, of which ``counted`` is a copy, and add it up over the methods."""
        left = iter(counted)
        return sum_counts([dict(zip(names, islice(left, len(names)), strict=True)) for names in self._counted])

    def warm_up(self, dtype: torch.dtype, sinks: torch.Tensor | None = None, soft_cap: float | None = None) -> None:
        """Run the methods over a group of zeros of ``dtype``, so that no request waits for its kernels' compiler.

        Args:
            dtype: of the model.
            sinks: those of a layer, if it has any.
            soft_cap: that of the model's logits, if it has one.
        """
        start = self.groups.dense_below
        end = min(start + self.groups.group_tokens, self._req_to_token.shape[1])
        if end <= start:
            return
        # The first row of SGLang's table is nobody's yet: all of it is the pool's dummy page.
        slots = torch.zeros(end - start, dtype=torch.int64, device=self._req_to_token.device)
        self.begin([PrefillSpan(0, start, end, self.groups)], slots[:1], counted=False)
        for place in range(len(self.groups.methods)):
            layer = min(layer for layer, own in self._places.items() if own == place)
            self._attend_to_zeros(layer, slots, dtype, sinks, soft_cap)
        self.begin((), slots[:0], counted=False)

    def _attend_to_zeros(
        self,
        layer_id: int,
        slots: torch.Tensor,
        dtype: torch.dtype,
        sinks: torch.Tensor | None,
        soft_cap: float | None,
    ) -> None:
        dims = [buffer(layer_id).shape[2] for buffer in (self._kv_pool.get_key_buffer, self._kv_pool.get_value_buffer)]
        layer: Any = SimpleNamespace(
            layer_id=layer_id,
            tp_q_head_num=self._q_heads,
            qk_head_dim=dims[0],
            v_head_dim=dims[1],
            scaling=dims[0] ** -0.5,
            logit_cap=soft_cap or 0.0,
            k_scale_float=None,
            v_scale_float=None,
        )
        query = torch.zeros(len(slots), self._q_heads * dims[0], dtype=dtype, device=slots.device)
        self.attend(query, query, query, layer, slots, save_kv_cache=False, sinks=sinks)

    def begin(self, spans: Sequence[PrefillSpan], req_pool_indices: torch.Tensor, counted: bool = True) -> None:
        """Decide the pass that runs next.

        Args:
            spans: all its query tokens; none for a pass that is not a prefill, which the dense backend takes.
            req_pool_indices: ``[rows]`` int64, rows of ``req_to_token``.
            counted: False for a pass that serves no request.
        """
        sparse = sum(_sparse_tokens(span) for span in spans)
        self._tokens = sum(span.tokens for span in spans)
        self._plans = []
        pairs = self.pairs if counted else torch.zeros_like(self.pairs)
        self._pairs = pairs.split([len(names) for names in self._counted])
        if counted:
            self._count(spans, sparse)
        if not sparse:
            return
        device = self._req_to_token.device
        self._plans = [
            method.plan([replace(span, method=span.method and span.method.methods[place]) for span in spans], device)
            for place, method in enumerate(self.groups.methods)
        ]
        ends = self._req_to_token[req_pool_indices, : max(span.end for span in spans) : self._page_size]
        self._page_table = (ends // self._page_size).to(torch.int32).contiguous()

    def _count(self, spans: Sequence[PrefillSpan], sparse: int) -> None:
        prompts = [span for span in spans if not span.decodes]
        self.sparse_tokens += sparse
        self.dense_tokens += sum(span.tokens for span in prompts) - sparse
        # The method counts the pairs of a pass with a sparse token, those of decoding rows among them.
        if sparse:
            pairs = -sum(span.causal_pairs for span in spans if span.decodes)
        else:
            pairs = sum(span.causal_pairs for span in prompts)
        if pairs:
            self.pairs[:2] += pairs * self._q_heads * len(self.layers)

    def takes(self, layer_id: int) -> bool:
        """Whether the pass is sparse in this layer."""
        return bool(self._plans) and layer_id in self.layers

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: RadixAttention,
        slots: torch.Tensor,
        save_kv_cache: bool,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write K and V, and attend.

        Args:
            query: ``[tokens, q_heads * head_dim]``; a graph pads it.
            key: ``[tokens, kv_heads, head_dim]``.
            value: ``[tokens, kv_heads, v_head_dim]``.
            slots: ``[tokens]`` int64, where K and V go.
            save_kv_cache: whether they still have to be written.
            sinks: ``[q_heads]``, or None.

        Returns:
            ``[tokens, q_heads * v_head_dim]``, zeros for padding.
        """
        if save_kv_cache:
            self._kv_pool.set_kv_buffer(layer, KVWriteLoc(slots, None), key, value, layer.k_scale, layer.v_scale)
        heads = query.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = heads.new_zeros(heads.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        place = self._places[layer.layer_id]
        inputs = PrefillInputs(
            query=heads[: self._tokens],
            key_cache=self._kv_pool.get_key_buffer(layer.layer_id),
            value_cache=self._kv_pool.get_value_buffer(layer.layer_id),
            page_table=self._page_table,
            page_size=self._page_size,
            scaling=layer.scaling,
            k_scale=layer.k_scale_float or 1.0,
            v_scale=layer.v_scale_float or 1.0,
            out=out[: self._tokens],
            pairs=self._pairs[place],
            sinks=sinks,
            soft_cap=layer.logit_cap or None,
        )
        self.groups.methods[place].attend(self._plans[place], layer.layer_id, inputs)
        return out.reshape(out.shape[0], -1)


def _sparse_tokens(span: PrefillSpan) -> int:
    if span.method is None:
        return 0
    return max(0, span.end - max(span.start, span.method.dense_below))
