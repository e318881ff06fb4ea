"""Further roles of decode methods: select prompt tokens when a prompt ends, or compute the attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_sparse.methods.base import DecodeMethod, ModelShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from sglang_sparse.methods.base import ModelShape
    from sglang_sparse.methods.views import BatchView, LatentQuery


@dataclass(frozen=True)
class Prompts:
    """Prompts whose prefill a pass completes, as one layer sees them.

    Attributes:
        lengths: ``[n]`` int32 on the device, tokens of each prompt.
        window: ``[n, window_tokens, q_heads, head_dim]``, the queries of each prompt's last tokens, after RoPE.
        key_cache: ``[slots, kv_heads, head_dim]``, with the keys of the whole prompts.
        page_table: ``[n, pages]`` int32, physical pages; what lies beyond a prompt's pages is undefined.
        page_size: tokens per page.
        scaling: softmax scale.
        k_scale: factor of the stored keys.
    """

    lengths: torch.Tensor
    window: torch.Tensor
    key_cache: torch.Tensor
    page_table: torch.Tensor
    page_size: int
    scaling: float
    k_scale: float


@dataclass(frozen=True)
class Kept:
    """The prompt tokens that requests keep in one method's layers, by their row in SGLang's request pool.

    From ``first_visible`` on a request sees every block, the prompt's last tokens and what it generates; of the blocks
    before, those that it keeps. 0 means that it sees everything.

    Attributes:
        blocks: by sparse layer ``[requests, kv_heads, max_kept]`` int32, logical blocks in ascending order.
        counts: ``[requests]`` int32, how many of them are meant.
        first_visible: ``[requests]`` int32, a logical block.
    """

    blocks: dict[int, torch.Tensor]
    counts: torch.Tensor
    first_visible: torch.Tensor


def prompt_selectors(methods: Sequence[DecodeMethod]) -> tuple[PromptSelector, ...]:
    """Return those of the methods that have a first stage, in their order."""
    return tuple(method for method in methods if isinstance(method, PromptSelector))


class PromptSelector(DecodeMethod, ABC):
    """A decode method with two stages: one where a prompt ends, whose choice is the request's own, and one a step.

    The first stage is what TensorRT-LLM calls ``sparse_kv_predict``, and what it returns its ``sparse_kv_indices``;
    the second one is ``select``. What is left out stays in the KV pool and in the radix tree: it is invisible to this
    request's decode steps, while rectification and other requests see it. A method that ``compacts`` releases
    it, see ``scheduler/compaction.py``: this request never reads it again, and the tree may evict it.

    The first stage needs the queries of the prompt's last tokens in one pass, so a cached prefix is used up to these
    tokens only, and no chunk ends among them (``attention/prompt_selection.py``). What it chooses is then a function of
    the prompt alone, whatever was cached, however the prompt was cut, and also when a retracted request is prefilled
    again.
    """

    @property
    @abstractmethod
    def window_tokens(self) -> int:
        """Tokens at a prompt's end whose queries choose."""

    @property
    @abstractmethod
    def max_kept(self) -> int:
        """Blocks that a request keeps at most of what lies before its window."""

    @property
    def compacts(self) -> bool:
        """Whether what a request keeps moves to separate pages, so that the prompt's may be evicted."""
        return False

    @abstractmethod
    def kept(self, prompt: int) -> tuple[int, int]:
        """Say how much a prompt of so many tokens keeps.

        Returns:
            How many blocks, at most ``max_kept``, and the first block from which on all are visible, which is not
            beyond the window; (0, 0) for a prompt that is visible throughout.
        """

    @abstractmethod
    def keep(self, prompts: Prompts) -> torch.Tensor:
        """Choose, in one layer, what the prompts keep.

        Args:
            prompts: some that do not keep everything; their methods may differ in the fields that a request may
                override.

        Returns:
            ``[n, kv_heads, max_kept]`` int32: the logical blocks of each KV head in ascending order, as many as
            ``kept`` says, all below its ``first_visible``. What lies behind them is not read.
        """

    @abstractmethod
    def keep_scratch_bytes(self, model: ModelShape, prompts: int, max_context: int) -> int:
        """Return an upper bound of the GPU memory that ``keep`` takes in addition to its inputs, in bytes.

        Args:
            model: the model.
            prompts: how many at once.
            max_context: tokens of the longest one.
        """


class AttendsItself(DecodeMethod, ABC):
    """A decode method that chooses nothing beforehand: its kernel looks at every key.

    TensorRT-LLM calls it kernel-level sparse attention: prediction is bypassed, config and dispatch are shared. So
    there are no indices; a row runs with its ``row_threshold``, and one of 0 attends densely. That is what makes a row
    dense here, as its pages tell nothing: those whose config says 0, and those that are dense in a sparse batch
    (asked for, or short), whose value is set to 0. All pages count as attended to.
    """

    decides_on_device = True
    view_buffers = ("page_table",)

    @abstractmethod
    def attend(
        self,
        view: BatchView,
        layer_id: int,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        last_slots: torch.Tensor,
        scaling: float,
        k_scale: float,
        v_scale: float,
        sinks: torch.Tensor | None = None,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        """Attend in one layer, of which K and V of the newest tokens are written.

        Runs inside CUDA graphs: no host synchronisation, no shape that depends on data.

        Args:
            view: the batch; ``row_thresholds`` has that of each row, 0 for those that attend densely, and what lies in
                ``stats`` behind its own four counts is for ``more_counts``.
            layer_id: the layer.
            query: ``[rows, q_heads, head_dim]``, after RoPE.
            k_cache: ``[slots, kv_heads, head_dim]``.
            v_cache: ``[slots, kv_heads, v_head_dim]``.
            last_slots: ``[rows]`` int64, the slot of each row's newest token.
            scaling: softmax scale.
            k_scale: factor of the stored keys.
            v_scale: factor of the stored values.
            sinks: ``[q_heads]`` bfloat16 or float32, what each head's softmax has in its denominator besides, as a
                logit in natural units; None for models without.
            soft_cap: logits become ``soft_cap * tanh(logits / soft_cap)``, in natural units; None for models without.

        Returns:
            ``[rows, q_heads, v_head_dim]``; zeros for rows that pad a graph.
        """

    def attend_latents(self, view: BatchView, layer_id: int, query: LatentQuery) -> torch.Tensor:
        """Attend in one layer of an MLA model; of methods with `latents`.

        Runs inside CUDA graphs, see `attend`.

        Args:
            view: the batch.
            layer_id: the layer.
            query: both parts of the query, and the layer's latents, of which the newest tokens' are written.

        Returns:
            ``[rows, q_heads, latent_dim]``; zeros for rows that pad a graph.

        Raises:
            NotImplementedError: the method has no `latents`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not attend to latents")
