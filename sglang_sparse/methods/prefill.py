"""The contract between a sparse prefill method and the rest of the plugin."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from sglang_sparse.methods.base import ModelShape
from sglang_sparse.methods.config import Crossover, SparseConfig

if TYPE_CHECKING:
    import torch

    from sglang_sparse.methods.support import Architecture, ModelConfig


# What "auto" means. On an H200 prompts of 32k are faster sparse, and those up to here were measured dense alone.
DEFAULT_DENSE_BELOW = 8192


class PrefillConfig(SparseConfig):
    """Fields that every prefill method has; a method adds its own by subclassing."""

    request_fields: ClassVar[tuple[str, ...]] = ("exact_prefix",)

    layers: str | list[int] = Field(
        "all",
        description='Layers that run sparse: "all", a range "2-", or a list; a mapping has rules for layers, '
        "see docs/layers.md.",
    )
    crossover_tokens: Crossover = Field(
        "auto",
        description="Prompt tokens below this position attend densely, whatever the prompt's length, so that shorter "
        f"prompts are cached and shared as always; auto: {DEFAULT_DENSE_BELOW}.",
    )
    dense_tail: int = Field(
        128,
        ge=0,
        description="Last tokens of a prompt that attend densely: they often hold the question, in a few words that "
        "the mean over a block of queries would hide.",
    )
    exact_prefix: bool = Field(
        False, description="Prefill densely; meant for single requests that need an exact cached prefix."
    )
    share_partial_groups: bool = Field(
        False,
        description="Cache a prompt's incomplete last group too, and let chunks end anywhere. Its KV depends on the "
        "end of the prompt or the chunk.",
    )


@dataclass(frozen=True)
class CutPrompt:
    """A prompt of which a pass ended where the next ones may cut a group, until the pass that goes on with it.

    Attributes:
        start: position of the first of the query tokens that passes have run sparse, one after the other.
        end: position behind the last.
        kept: what the method keeps of them, by layer: it puts it there, nobody else reads it, and it ends with the
            prompt or the request, or with the group if the prompt goes on in whole groups.
    """

    start: int
    end: int
    kept: dict[int, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Query tokens that passes have run sparse."""
        return self.end - self.start


@dataclass(frozen=True)
class PrefillSpan:
    """Consecutive query tokens of one row of an extend batch that are treated alike.

    Attributes:
        row: row of the batch, which is the row of its page table.
        start: position of the first query token.
        end: position behind the last.
        method: the method with this request's config, of the scheduler's spans ``PrefillGroups``; None attends densely.
        decodes: the one token of a row that decodes within a mixed batch. It is no prefill's, and is not counted.
        before: what earlier passes have left of the prompt for the span to go on with, if they have.
        after: what it leaves for the next, if it does; what is kept of it goes where ``before`` keeps it.
        goes_on: position behind the last token of the prompt that the method will run sparse, where ``after`` is there.
    """

    row: int
    start: int
    end: int
    method: Any
    decodes: bool = False
    before: CutPrompt | None = None
    after: CutPrompt | None = None
    goes_on: int = 0

    @property
    def tokens(self) -> int:
        """Query tokens."""
        return self.end - self.start

    @property
    def causal_pairs(self) -> int:
        """Query-key pairs of dense attention, in one layer and query head."""
        return self.tokens * (self.start + 1 + self.end) // 2


@dataclass(frozen=True)
class PrefillInputs:
    """The inputs of a layer's attention: the queries of an extend batch and SGLang's paged KV.

    Attributes:
        query: ``[tokens, q_heads, head_dim]``, after RoPE, row after row in the order of positions.
        key_cache: ``[slots, kv_heads, head_dim]``, with the pass's own keys.
        value_cache: ``[slots, kv_heads, v_head_dim]``.
        page_table: ``[rows, pages]`` int32, physical pages; what lies beyond a row's pages is undefined.
        page_size: tokens per page.
        scaling: softmax scale.
        k_scale: factor of the stored keys.
        v_scale: factor of the stored values.
        out: ``[tokens, q_heads, v_head_dim]``, written.
        pairs: int64 ``[2 + len(more_counts)]`` on the device; the method adds the query-key pairs that it attended to,
            those that dense attention would have, of all query tokens and heads, and its own ``more_counts``.
        sinks: ``[q_heads]`` bfloat16 or float32, what each head's softmaxes have in their denominator besides, as a
            logit in natural units; None for models without.
        soft_cap: logits become ``soft_cap * tanh(logits / soft_cap)``, in natural units; None for models without.
    """

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    page_table: torch.Tensor
    page_size: int
    scaling: float
    k_scale: float
    v_scale: float
    out: torch.Tensor
    pairs: torch.Tensor
    sinks: torch.Tensor | None = None
    soft_cap: float | None = None


class PrefillMethod(ABC):
    """A prefill method: which keys each query of a prompt attends to.

    The KV that a prompt's sparse prefill leaves is a function of the tokens before it only at the ends of complete
    groups of ``group_tokens``, aligned to absolute positions: within a group a token's output may depend on later
    tokens of the group. Prefixes are therefore matched, cached and cut into chunks at these ends alone, see
    ``scheduler/prefill_chunks.py``. Positions below ``dense_below`` are dense for every prompt, and there any page end
    will do. To share a model with other methods (``PrefillGroups``) a method begins where ``crossover_tokens`` says if
    that is the end of a group, and leaves ``boundary`` and ``dense_from`` as they are.

    Attributes:
        config: the configuration.
        more_counts: names of what ``attend`` counts in addition to pairs, for the server info; dense attention adds
            nothing to it.
    """

    config_class: ClassVar[type[PrefillConfig]] = PrefillConfig
    more_counts: tuple[str, ...] = ()

    def __init__(self, config: PrefillConfig):
        self.config = config

    @property
    @abstractmethod
    def group_tokens(self) -> int:
        """Tokens of a group."""

    @property
    def dense_below(self) -> int:
        """Tokens before this position attend densely; a multiple of the group."""
        asked = self.config.crossover_tokens
        tokens = DEFAULT_DENSE_BELOW if asked == "auto" else asked
        return -(-tokens // self.group_tokens) * self.group_tokens

    def boundary(self, position: int) -> int:
        """Return the last position, up to ``position``, at which the KV before it is a function of its tokens."""
        if position <= self.dense_below:
            return position
        return position // self.group_tokens * self.group_tokens

    def dense_from(self, prompt: int) -> int:
        """Return the position from which on the tokens of a prompt of ``prompt`` tokens attend densely.

        Their KV depends on where the prompt ends, and so does that of their group.
        """
        return max(0, prompt - self.config.dense_tail)

    def refuse(self, model_config: Architecture) -> str | None:
        """Say why this method cannot serve a model, or None when it can."""
        return None

    def refuse_weights(self, model_config: ModelConfig) -> str | None:
        """Say why this config is not for a model's weights, or None; asked only if these are available."""
        return None

    def refuse_page_size(self, page_size: int) -> str | None:
        """Say why this config does not fit pages of ``page_size`` tokens, or None when it does."""
        return None

    def warnings(self) -> tuple[str, ...]:
        """Return warnings for the user at start, about the config as given."""
        asked = self.config.crossover_tokens
        if asked in ("auto", self.dense_below) or self.config.dense_fallback == "never":
            return ()
        groups = f"sparse prefill begins at the end of a group of {self.group_tokens}"
        return (f"crossover_tokens: got {asked}, and prompt tokens below {self.dense_below} run dense: {groups}",)

    @abstractmethod
    def scratch_bytes(self, model: ModelShape, max_tokens: int, max_context: int) -> int:
        """Return an upper bound of the GPU memory that a layer's ``attend`` takes in addition to its inputs, in bytes.

        SGLang's KV pool is made smaller by it, see ``attention/memory.py``.

        Args:
            model: the model; values have at most its ``head_dim``.
            max_tokens: query tokens of a pass.
            max_context: tokens of a row, its prefix included.
        """

    def kept_bytes(self, model: ModelShape, layers: int, dtype: torch.dtype) -> int:
        """Return how much GPU memory the method keeps of a ``CutPrompt``, in bytes; charged as scratch is.

        Args:
            model: the model.
            layers: that run sparse.
            dtype: of queries.
        """
        return 0

    @abstractmethod
    def plan(self, spans: Sequence[PrefillSpan], device: torch.device) -> Any:
        """Prepare a pass, once for all layers.

        Args:
            spans: all query tokens of the pass, row after row in the order of positions. Their methods are of this
                class and differ in the fields that a request may override.
            device: where the pass runs.
        """

    @abstractmethod
    def attend(self, plan: Any, layer_id: int, inputs: PrefillInputs) -> None:
        """Attend in one layer; fills ``inputs.out``.

        Args:
            plan: what ``plan`` returned.
            layer_id: the layer.
            inputs: queries and KV.
        """
