"""Prefill in the attention backend: the passes that the method takes over from the dense backend."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sglang_sparse.methods.layers import names_layer
from sglang_sparse.methods.prefill import PrefillInputs, PrefillSpan

if TYPE_CHECKING:
    from sglang_sparse.methods.prefill import PrefillMethod


class PrefillPath:
    """A prefill method at work.

    Args:
        method: the server's method.
        layers: the layers whose prefill is sparse.
        kv_pool: SGLang's KV pool.
        req_to_token: ``[requests, positions]``, SGLang's table of slots.
        page_size: tokens per page.
        q_heads: query heads on this rank.

    Attributes:
        method: the server's method.
        layers: the layers whose prefill is sparse.
        sparse_tokens: query tokens of sparse groups since the server started.
        dense_tokens: query tokens of prefill that attended densely.
        pairs: int64 on the device: query-key pairs attended to, and those that dense attention would have, over the
            query heads of ``layers``. Of all tokens that are counted above, so also of passes that were dense
            throughout. What serves no prompt is left out: rows that decode within a mixed batch, and rectification.
            Behind these two, the method's ``more_counts``.
    """

    def __init__(
        self,
        method: PrefillMethod,
        layers: Sequence[int],
        kv_pool: Any,
        req_to_token: torch.Tensor,
        page_size: int,
        q_heads: int,
    ):
        self.method = method
        self.layers = frozenset(layers)
        self.sparse_tokens = 0
        self.dense_tokens = 0
        self.pairs = torch.zeros(2 + len(method.more_counts), dtype=torch.int64, device=req_to_token.device)
        self._pairs = self.pairs
        self._kv_pool = kv_pool
        self._req_to_token = req_to_token
        self._page_size = page_size
        self._q_heads = q_heads
        self._plan: Any = None
        self._tokens = 0
        self._page_table = torch.zeros(0, 0, dtype=torch.int32)

    def describe(self, name: str, num_layers: int) -> str:
        """Say in a line what runs, by its name, of a model of ``num_layers``."""
        kernels = "reference" if self._req_to_token.device.type == "cpu" else "triton"
        return (
            f"prefill {name}, {len(self.layers)} of {num_layers} layers, groups of {self.method.group_tokens} tokens, "
            f"dense below position {self.method.dense_below}; kernels {kernels}"
        )

    def parts(self) -> list[dict[str, Any]]:
        """Which layers each part of the method has, for the server info."""
        return [
            {
                "method": name,
                "layers": [layer for layer in sorted(self.layers) if names_layer(part.config.layers, layer)],
                "config": part.config.model_dump(mode="json"),
            }
            for name, part in zip(self.method.names, self.method.parts, strict=True)
        ]

    def warm_up(self, dtype: torch.dtype) -> None:
        """Run the method over a group of zeros of ``dtype``, so that no request waits for its kernels' compiler."""
        start = self.method.dense_below
        end = min(start + self.method.group_tokens, self._req_to_token.shape[1])
        if end <= start:
            return
        # The first row of SGLang's table is nobody's yet: all of it is the pool's dummy page.
        slots = torch.zeros(end - start, dtype=torch.int64, device=self._req_to_token.device)
        self.begin([PrefillSpan(0, start, end, self.method)], slots[:1], counted=False)
        for part in self.method.parts or (self.method,):
            self._attend_to_zeros(min(filter(partial(names_layer, part.config.layers), self.layers)), slots, dtype)
        self.begin((), slots[:0], counted=False)

    def _attend_to_zeros(self, layer_id: int, slots: torch.Tensor, dtype: torch.dtype) -> None:
        dims = [buffer(layer_id).shape[2] for buffer in (self._kv_pool.get_key_buffer, self._kv_pool.get_value_buffer)]
        layer = SimpleNamespace(
            layer_id=layer_id,
            tp_q_head_num=self._q_heads,
            qk_head_dim=dims[0],
            v_head_dim=dims[1],
            scaling=dims[0] ** -0.5,
            k_scale_float=None,
            v_scale_float=None,
        )
        query = torch.zeros(len(slots), self._q_heads * dims[0], dtype=dtype, device=slots.device)
        self.attend(query, query, query, layer, slots, save_kv_cache=False)

    def begin(self, spans: Sequence[PrefillSpan], req_pool_indices: torch.Tensor, counted: bool = True) -> None:
        """Decide the pass that runs next.

        Args:
            spans: all its query tokens; none for a pass that is not a prefill, which the dense backend takes.
            req_pool_indices: ``[rows]`` int64, rows of ``req_to_token``.
            counted: False for a pass that serves no request.
        """
        sparse = sum(_sparse_tokens(span) for span in spans)
        self._tokens = sum(span.tokens for span in spans)
        self._plan = None
        self._pairs = self.pairs if counted else torch.zeros_like(self.pairs)
        if counted:
            self._count(spans, sparse)
        if not sparse:
            return
        device = self._req_to_token.device
        self._plan = self.method.plan(spans, device)
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
        return self._plan is not None and layer_id in self.layers

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: Any,
        slots: torch.Tensor,
        save_kv_cache: bool,
    ) -> torch.Tensor:
        """Write K and V, and attend.

        Args:
            query: ``[tokens, q_heads * head_dim]``; a graph pads it.
            key: ``[tokens, kv_heads, head_dim]``.
            value: ``[tokens, kv_heads, v_head_dim]``.
            layer: SGLang's ``RadixAttention``.
            slots: ``[tokens]`` int64, where K and V go.
            save_kv_cache: whether they still have to be written.

        Returns:
            ``[tokens, q_heads * v_head_dim]``, zeros for padding.
        """
        if save_kv_cache:
            self._kv_pool.set_kv_buffer(layer, KVWriteLoc(slots, None), key, value, layer.k_scale, layer.v_scale)
        heads = query.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = heads.new_zeros(heads.shape[0], layer.tp_q_head_num, layer.v_head_dim)
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
            pairs=self._pairs,
        )
        self.method.attend(self._plan, layer.layer_id, inputs)
        return out.reshape(out.shape[0], -1)


def _sparse_tokens(span: PrefillSpan) -> int:
    if span.method is None:
        return 0
    return max(0, span.end - max(span.start, span.method.dense_below))
