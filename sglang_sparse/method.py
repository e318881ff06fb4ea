"""The contracts between a sparse attention method and the rest of the plugin."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from sglang_sparse.layers import parse_layers

if TYPE_CHECKING:
    import torch

    from sglang_sparse.indices import SparseIndices
    from sglang_sparse.limits import FlagLimit
    from sglang_sparse.pools import AuxPools
    from sglang_sparse.view import BatchView

PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64)
# What "auto" means where no measurement of the GPU and the shape is at hand, see ``crossover.py``.
DEFAULT_CROSSOVER = 16384
# What of a view grows with rows times context.
ViewBuffer = Literal["page_table", "scores", "selected"]
VIEW_BUFFERS: tuple[ViewBuffer, ...] = get_args(ViewBuffer)


@dataclass(frozen=True)
class ModelShape:
    """The attention layers of one tensor-parallel rank, as a method may know them.

    Attributes:
        num_layers: attention layers of the model.
        num_q_heads: query heads of this rank.
        num_kv_heads: KV heads of this rank; 1 for MLA, whose heads share what is cached.
        head_dim: dimension of a query and key head, as they meet: for MLA the latent and the rotary part.
        kv_dtype: dtype of the KV cache.
        rope_dim: for MLA how much of it is rotary, the end; 0 for MHA and GQA.
    """

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: torch.dtype
    rope_dim: int = 0


@dataclass(frozen=True)
class AuxSpec:
    """A buffer that stands beside the KV pool and shares its page ids, one a sparse layer.

    Attributes:
        name: how ``select`` asks for it.
        page_shape: shape of one page's entry.
        dtype: element type.
        refresh: ``refresh(k_caches, buffers, last_slots, page_size, overflow)`` recomputes from the K caches of some
            layers, in their buffers, the entries of the pages whose last written slots are ``last_slots`` (-1: skip),
            and adds to ``overflow`` (int32 ``[1]``) the values that ``dtype`` cannot hold. It runs once at the end of
            a pass, for all layers: what ``select`` reads of the newest page, which the pass writes, is out of date,
            and may be what the page's last owner left. An entry must be a pure function of its page's keys: then
            whoever holds the page holds a valid entry, and prefix reuse, forks, retraction and eviction need no code.
        before_select: ``select`` reads the newest page's entries too: a decode step then refreshes each layer's before
            it, which is one more launch a layer.
    """

    name: str
    page_shape: tuple[int, ...]
    dtype: torch.dtype
    refresh: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], torch.Tensor, int, torch.Tensor], None]
    before_select: bool = False

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page's entry in one layer."""
        elements = 1
        for size in self.page_shape:
            elements *= size
        return elements * self.dtype.itemsize


def _crossover_is_a_count(value: object) -> object:
    if value != "auto" and (type(value) is not int or value < 0):
        raise ValueError('must be "auto" or an integer of at least 0')
    return value


Crossover = Annotated[int | Literal["auto"], BeforeValidator(_crossover_is_a_count)]


class SparseConfig(BaseModel):
    """Fields that every method has, of decode or prefill.

    Attributes:
        request_fields: the fields that a single request may override.
        limits: the fields below which something runs dense; ``dense_fallback: never`` makes them 0.
    """

    request_fields: ClassVar[tuple[str, ...]] = ()
    limits: ClassVar[tuple[str, ...]] = ("crossover_tokens",)

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    layers: str | list[int] = Field("all", description='Layers that run sparse: "all", a range "2-", or a list.')
    dense_fallback: Literal["auto", "never"] = Field(
        "auto", description='"never" is for tests: nothing runs dense for being short, as if every such limit were 0.'
    )
    check_exactness: bool = Field(
        False, description="Debug: an idle server proves by recomputation that the prefix cache is exact."
    )

    @field_validator("layers")
    @classmethod
    def _layers_parse(cls, value: str | list[int]) -> str | list[int]:
        parse_layers(value, num_layers=None)
        return value

    @model_validator(mode="before")
    @classmethod
    def _never_means_no_limits(cls, data: object) -> object:
        if isinstance(data, dict) and data.get("dense_fallback") == "never":
            return {**data, **dict.fromkeys(cls.limits, 0)}
        return data


class MethodConfig(SparseConfig):
    """Fields that every decode method has; a method adds its own by subclassing."""

    limits: ClassVar[tuple[str, ...]] = ("min_seq_len", "crossover_tokens")

    page_size: int = Field(16, description="Tokens per KV page, which is the block of the selection: 1, 2, 4, … 64.")
    min_seq_len: int = Field(4096, ge=0, description="Rows with fewer KV tokens attend to all of them.")
    crossover_tokens: Crossover = Field(
        "auto",
        description="A batch whose sparse rows hold fewer KV tokens in total runs dense; "
        f"auto: as measured for this GPU, else {DEFAULT_CROSSOVER}.",
    )

    @field_validator("page_size")
    @classmethod
    def _page_size_is_a_power_of_two(cls, value: int) -> int:
        if value not in PAGE_SIZES:
            raise ValueError(f"must be a power of two from 1 to {PAGE_SIZES[-1]}")
        return value


class RectifyConfig(MethodConfig):
    """Fields of a method whose approximate KV dense passes make exact again."""

    request_fields: ClassVar[tuple[str, ...]] = ("rectify_interval",)

    rectify_interval: int = Field(
        32, ge=0, description="A dense pass re-encodes a request's last tokens when they are this many; 0: never."
    )
    rectify_max_batch: int = Field(
        8, ge=1, description="Requests that one step rectifies; more only where this many could not keep up."
    )
    rectify_on_finish: bool = Field(
        False, description="Rectify a finished request's last tokens too, so that all its pages can be shared."
    )

    @field_validator("rectify_interval")
    @classmethod
    def _one_token_is_no_interval(cls, value: int) -> int:
        if value == 1:
            raise ValueError("must be 0 (never) or at least 2: at 1 every step would be dense")
        return value

    @field_validator("rectify_on_finish")
    @classmethod
    def _on_finish_needs_an_interval(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("rectify_interval") == 0:
            raise ValueError("needs rectification, and rectify_interval is 0 (never)")
        return value


class DecodeMethod(ABC):
    """A decode method: what it keeps for every page, and how it turns a query into indices.

    A method is one file with one subclass of this class; ``registry.py`` or an entry point of group
    ``sglang_sparse.methods`` names it. Nothing else needs to know it.

    Attributes:
        attention: the kind of attention it serves, which says what dense backends there are for it: "MHA", which GQA is
            one of, "MLA", or "DSA", which is MLA of a model that has an indexer.
        exact: what it computes is what the model was trained to do, so that its KV is exact. No request may ask for
            anything else.
        decides_on_device: `n_select` is a bound, and how many blocks a row takes is known on the device alone.
        selects_in_model: the model chooses before it attends, where the method's seams are. `select` is never called,
            and every layer goes to the dense backend, which attends to what was chosen. Models that select by
            themselves are served by such methods only.
        view_buffers: what `select`, or what takes its place, uses of the view's large buffers; others are not
            allocated.
        fp8_kv: it serves a KV cache of float8_e4m3fn.
        flag_limits: server flags that it refuses beside those that no method serves.
        config: the configuration.
        crossover_tokens: the config's number, or what "auto" stands for; a server that starts puts here what was
            measured for its GPU and its model.
    """

    config_class: ClassVar[type[MethodConfig]] = MethodConfig
    attention: ClassVar[Literal["MHA", "MLA", "DSA"]] = "MHA"
    exact: ClassVar[bool] = False
    decides_on_device: ClassVar[bool] = False
    selects_in_model: ClassVar[bool] = False
    view_buffers: ClassVar[tuple[ViewBuffer, ...]] = VIEW_BUFFERS
    fp8_kv: ClassVar[bool] = True
    flag_limits: ClassVar[tuple[FlagLimit, ...]] = ()

    def __init__(self, config: MethodConfig):
        self.config = config
        asked = config.crossover_tokens
        self.crossover_tokens = DEFAULT_CROSSOVER if asked == "auto" else asked

    @property
    def block_size(self) -> int:
        """Tokens of a block, the unit of the selection; a power of two, at most a KV page."""
        return self.config.page_size

    @property
    def row_value(self) -> float:
        """A number of the config that `select` needs of every row, see ``BatchView.values``."""
        return 0.0

    @property
    def has_crossover(self) -> bool:
        """Whether small batches run dense, so that a measured number takes the place of "auto"."""
        return "crossover_tokens" in self.config.limits

    def sparse_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers that run sparse in a model of so many, ascending.

        Raises:
            ValueError: the config names layers that the model does not have.
        """
        return parse_layers(self.config.layers, num_layers)

    def refuse(self, model_config: object) -> str | None:
        """Say why this method cannot serve a model, or None when it can.

        Args:
            model_config: SGLang's ``ModelConfig``.
        """
        return None

    def adopt(self, model_config: object) -> None:
        """Take from the model what the config does not say; called once, when a scheduler starts.

        A request's own copy of the method is not told: a method that needs this has no ``request_fields``.

        Args:
            model_config: SGLang's ``ModelConfig``, of a model that was not refused.
        """
        return

    def warnings(self) -> tuple[str, ...]:
        """What to tell the user at start."""
        return ()

    @abstractmethod
    def aux_specs(self, model: ModelShape) -> tuple[AuxSpec, ...]:
        """Return the buffers to keep beside the KV pool."""

    @abstractmethod
    def n_select(self, n_pages: torch.Tensor) -> torch.Tensor:
        """Return how many blocks a row that holds ``n_pages`` blocks attends to, or at most where the data decides.

        Args:
            n_pages: ``[rows]`` int32, on the CPU or the GPU.

        Returns:
            ``[rows]`` int32; a value of ``n_pages`` or more means that the row is dense.
        """

    @abstractmethod
    def select(self, view: BatchView, layer_id: int, query: Any, pools: AuxPools) -> SparseIndices:
        """Choose what each KV head of each row attends to.

        Runs inside CUDA graphs: no host synchronisation, no shape that depends on data.

        Args:
            view: the batch.
            layer_id: the layer.
            query: ``[rows, q_heads, head_dim]``, after RoPE; a method for MLA gets a ``LatentQuery``.
            pools: the buffers that ``aux_specs`` asked for.
        """

    def scratch_bytes(self, model: ModelShape, view: BatchView, dtype: torch.dtype, device: torch.device) -> int:
        """Return the bytes that a sparse layer of a decode step takes and a dense one would not, at most.

        Args:
            model: the model.
            view: a batch without memory, on the meta device; it is not counted, and see ``scratch.of_decode``.
            dtype: of the query.
            device: where the batch runs.
        """
        return 0
