"""Select which tokens of its prompt a request keeps, by the queries of its last tokens: see ``PromptSelector``.

The layers of a pass that completes prompts hand their windows' queries to the method, and its choice is kept for
each request.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from sglang_sparse.attention.protocols import ModelRunner, RadixAttention
from sglang_sparse.methods.roles import Kept, Prompts, PromptSelector, prompt_selectors
from sglang_sparse_kernels.common.launch import to_device

if TYPE_CHECKING:
    from sglang_sparse.methods.aux_buffers import AuxBuffers
    from sglang_sparse.methods.base import DecodeMethod, ModelShape

logger = logging.getLogger(__name__)
# Prompts whose scores are made at once, and their tokens, if each were as long as the longest.
PROMPTS_AT_ONCE, TOKENS_AT_ONCE = 64, 1 << 20


@dataclass(frozen=True)
class PromptEnd:
    """A prompt whose last token is in an extend pass, or one that is visible throughout, in any pass.

    Attributes:
        row: of the batch.
        prompt: tokens of the prompt.
        kept: see ``PromptSelector.kept``; (0, 0) too where the pass lacks a part of the window.
        query: which of the pass's query tokens is the window's first.
    """

    row: int
    prompt: int
    kept: tuple[int, int]
    query: int


class Compacting(Protocol):
    """The scheduler's part of compaction, for methods that ``compacts``."""

    def run(self) -> None:
        """Copy what is due, before a pass."""

    def snapshot(self) -> dict[str, int]:
        """Return the counts."""
        ...


class KeepPath:
    """The first stage of a method at work, in its layers.

    Args:
        method: one of the server's.
        model: the attention layers of this rank.
        page_size: tokens per page.
        place: of the method among those of the server's that choose.

    Attributes:
        method: see above, as for ``place``.
        kept: what the requests keep in the layers of this method, to begin with nothing.
        prompts: whose KV was cut.
        whole_prompts: that would have been cut, but whose window came in two passes for want of memory: they are
            visible throughout.
        compaction: given by the scheduler, releases the prompt tokens that a method which ``compacts`` does not keep.
    """

    def __init__(
        self,
        method: PromptSelector,
        runner: ModelRunner,
        model: ModelShape,
        page_size: int,
        place: int,
    ):
        self.place = place
        self.prompts = 0
        self.whole_prompts = 0
        self.compaction: Compacting | None = None
        self.method = method
        self._kv_pool = runner.token_to_kv_pool
        self._req_to_token: torch.Tensor = runner.req_to_token_pool.req_to_token
        self._page_size = page_size
        numbers = torch.zeros(len(self._req_to_token), dtype=torch.int32, device=self._req_to_token.device)
        layers = model.here(method.sparse_layers(model.num_layers))
        sizes = (len(numbers), model.num_kv_heads, method.max_kept)
        self.kept = Kept({layer: numbers.new_zeros(sizes) for layer in layers}, numbers, numbers.clone())
        self._last_layer = max(layers, default=-1)
        self._groups: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def begin(self, ends: Sequence[PromptEnd], req_pool_indices: torch.Tensor) -> None:
        """Prepare a pass.

        Args:
            ends: the prompts that it completes, also those that stay visible throughout.
            req_pool_indices: ``[rows]`` int64, rows of ``req_to_token``.
        """
        self._groups = []
        if not ends:
            return
        device = self._req_to_token.device
        slots = req_pool_indices[to_device([end.row for end in ends], torch.int64, device)]
        self.kept.counts[slots] = to_device([end.kept[0] for end in ends], torch.int32, device)
        self.kept.first_visible[slots] = to_device([end.kept[1] for end in ends], torch.int32, device)
        cut = sorted((end for end in ends if end.kept[1]), key=lambda end: end.prompt)
        self.prompts += len(cut)
        window = torch.arange(self.method.window_tokens, device=device)
        while cut:
            # The longest first: how many go with it depends on its length.
            count = max(1, min(PROMPTS_AT_ONCE, TOKENS_AT_ONCE // cut[-1].prompt))
            group, cut = cut[-count:], cut[:-count]
            slots = req_pool_indices[to_device([end.row for end in group], torch.int64, device)]
            lengths = to_device([end.prompt for end in group], torch.int32, device)
            queries = to_device([end.query for end in group], torch.int64, device)[:, None] + window
            starts = self._req_to_token[slots, : group[-1].prompt : self._page_size]
            self._groups.append((slots, lengths, queries, (starts // self._page_size).to(torch.int32).contiguous()))

    def keep(self, query: torch.Tensor, layer: RadixAttention) -> None:
        """Let the method choose in one layer whose keys are written, if it is one of its layers.

        Args:
            query: ``[tokens, q_heads * head_dim]`` of the whole pass; a graph pads it.
        """
        if layer.layer_id not in self.kept.blocks:
            return
        for slots, lengths, queries, page_table in self._groups:
            heads = query.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
            prompts = Prompts(
                lengths=lengths,
                window=heads[queries],
                key_cache=self._kv_pool.get_key_buffer(layer.layer_id),
                page_table=page_table,
                page_size=self._page_size,
                scaling=layer.scaling,
                k_scale=layer.k_scale_float or 1.0,
            )
            self.kept.blocks[layer.layer_id][slots] = self.method.keep(prompts)
        if layer.layer_id == self._last_layer:
            # What runs without a batch of the scheduler's would take them for its own.
            self._groups = []

    def note_whole(self) -> None:
        """Count a prompt that stays visible throughout though it would have been cut; the first is worth a warning."""
        if not self.whole_prompts:
            logger.warning(
                "a prompt stays visible throughout, as its last %d tokens came in two passes for want of memory; "
                "/server_info counts such prompts (whole_prompts)",
                self.method.window_tokens,
            )
        self.whole_prompts += 1

    def totals(self) -> dict[str, int]:
        """Return what only grows."""
        counts = {"prompts": self.prompts, "whole_prompts": self.whole_prompts}
        return counts | (self.compaction.snapshot() if self.compaction else {})

    def snapshot(self) -> dict[str, int]:
        """Return the counts, and the bytes of what is kept."""
        held = (*self.kept.blocks.values(), self.kept.counts, self.kept.first_visible)
        return {**self.totals(), "bytes": sum(tensor.nbytes for tensor in held)}


def kept_bytes(method: PromptSelector, model: ModelShape, requests: int) -> int:
    """Return the bytes of ``Kept`` for so many rows of SGLang's request pool, on this rank."""
    layers = len(model.here(method.sparse_layers(model.num_layers)))
    return 4 * requests * (layers * model.num_kv_heads * method.max_kept + 2)


def make_paths(
    methods: Sequence[DecodeMethod], pools: AuxBuffers, runner: ModelRunner, model: ModelShape
) -> tuple[KeepPath, ...]:
    """Allocate ``Kept``, where nobody keeps anything yet, for each method that is a ``PromptSelector``.

    Args:
        methods: the server's.
        pools: where ``Kept`` goes.
        model: the attention layers of this rank.
    """
    selectors = enumerate(prompt_selectors(methods))
    paths = tuple(KeepPath(method, runner, model, pools.page_size, place) for place, method in selectors)
    pools.kept = tuple(path.kept for path in paths)
    return paths
