"""The contracts between a sparse attention method and the rest of the plugin."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from sglang_sparse.methods.config import MethodConfig
from sglang_sparse.methods.layers import parse_layers

if TYPE_CHECKING:
    import torch

    from sglang_sparse.methods.aux_buffers import AuxBuffers
    from sglang_sparse.methods.support import Architecture, FlagLimit, ModelConfig
    from sglang_sparse.methods.views import BatchView

# What of a view grows with rows times context.
ViewBuffer = Literal["page_table", "scores", "selected", "visible"]
VIEW_BUFFERS: tuple[ViewBuffer, ...] = get_args(ViewBuffer)


@dataclass(frozen=True)
class ModelShape:
    """The attention layers of one rank, as a method may know them.

    Attributes:
        num_layers: attention layers of the model.
        num_q_heads: query heads of this rank.
        num_kv_heads: KV heads of this rank; 1 for MLA, whose heads share what is cached.
        head_dim: dimension of a query and key head, as they meet: for MLA the latent and the rotary part.
        kv_dtype: dtype of the KV cache.
        rope_dim: for MLA how much of it is rotary, the end; 0 for MHA and GQA.
        stage: layers, from and to, that this rank's stage of pipeline parallelism has; None for all.
    """

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: torch.dtype
    rope_dim: int = 0
    stage: tuple[int, int] | None = None

    def here(self, layers: Iterable[int]) -> tuple[int, ...]:
        """Return those of some layers that this rank has."""
        return tuple(layer for layer in layers if self.stage is None or layer in range(*self.stage))


@dataclass(frozen=True)
class AuxSpec:
    """A buffer that stands next to the KV pool and shares its page ids, one a sparse layer.

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
        remedy: the config that helps where ``dtype`` cannot hold a key.
        layers: the layers that have it; None: all sparse ones.
        entry_tokens: tokens whose keys an entry summarises: the unit of ``refresh``'s ``last_slots``; None: a page's.
    """

    name: str
    page_shape: tuple[int, ...]
    dtype: torch.dtype
    refresh: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], torch.Tensor, int, torch.Tensor], None]
    before_select: bool = False
    remedy: str = '{"summary_dtype": "bf16"}'
    layers: Collection[int] | None = None
    entry_tokens: int | None = None

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page's entry in one layer."""
        elements = 1
        for size in self.page_shape:
            elements *= size
        return elements * self.dtype.itemsize


class DecodeMethod:
    """A decode method: what it keeps for every page, and how it turns a query into indices.

    A method is one file with one subclass of this class; ``methods/registry.py`` or an entry point of group
    ``sglang_sparse.methods`` names it. Nothing else needs to know it.

    The class itself attends to everything: decode of a server that has a prefill method alone.

    Attributes:
        attention: the kind of attention it serves, which says what dense backends there are for it: "MHA", which GQA is
            one of, "MLA", or "DSA", which is MLA of a model that has an indexer.
        latents: it serves MLA models as well as those that `attention` says.
        exact: what it computes is what the model was trained to do, so that its KV is exact.
        decides_on_device: `n_select` is a bound, and how many blocks a row takes is known on the device alone.
        selects_in_model: the model chooses before it attends, and the method hooks into that. `select` is never called,
            and every layer goes to the dense backend, which attends to what was chosen. Models that select by
            themselves are served by such methods only, and no request may ask to run dense.
        passes_through: SGLang computes all of it with its own kernels, so that no pass is hooked and SGLang alone
            judges flags and models; what it did is counted.
        view_buffers: what `select`, or what takes its place, uses of the view's large buffers; others are not
            allocated. Where that depends on the server, see `buffers`.
        fp8_kv: it serves a KV cache of float8_e4m3fn.
        needs_float8: that takes a GPU that has float8.
        flag_limits: server flags that it refuses in addition to those that no method serves.
        combines: its layers may be combined with those of another method for this kind of attention, or config.
            It is told all it needs by each call, and its config is a ``RectifyConfig``. See `alone`, too.
        verifies: it verifies drafts. Where the model chooses, each draft is a row of its own; else several tokens of a
            row share its selection, see ``BatchView.queries``, and its own drafts share the first one's: none of its
            `aux_specs` is ``before_select``, which takes one token a row, and it selects pages.
        more_counts: names of what it counts on the device itself, in ``BatchView.method_stats``.
        config: the configuration.
    """

    config_class: ClassVar[type[MethodConfig]] = MethodConfig
    attention: Literal["MHA", "MLA", "DSA"] = "MHA"
    latents: bool = False
    exact: bool = False
    decides_on_device: ClassVar[bool] = False
    selects_in_model: ClassVar[bool] = False
    passes_through: bool = False
    view_buffers: ClassVar[tuple[ViewBuffer, ...]] = ("page_table", "scores", "selected")
    fp8_kv: bool = True
    needs_float8: bool = True
    flag_limits: tuple[FlagLimit, ...] = ()
    combines: ClassVar[bool] = False
    verifies: ClassVar[bool] = False
    more_counts: tuple[str, ...] = ()

    def __init__(self, config: MethodConfig):
        self.config = config

    def kind_of(self, model_config: Architecture) -> str:
        """The kind of attention as which it serves a model."""
        return "MLA" if self.latents and model_config.attention_arch.name == "MLA" else self.attention

    @property
    def block_size(self) -> int:
        """Tokens of a block, the unit of the selection; a power of two, at most a KV page."""
        return self.config.page_size

    @property
    def local_blocks(self) -> int:
        """The newest blocks of a row that are always selected, as `verifies` needs them."""
        return 0

    @property
    def row_threshold(self) -> float:
        """The threshold of the config that `select` needs of every row, see ``BatchView.row_thresholds``."""
        return 0.0

    @property
    def alone(self) -> str | None:
        """Return the reason why this config combines with dense layers only, or None; for methods that ``combines``."""
        return None

    def sparse_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers that run sparse in a model of so many, ascending.

        Raises:
            ValueError: the config names layers that the model does not have.
        """
        return parse_layers(self.config.layers, num_layers)

    def refuse(self, model_config: Architecture) -> str | None:
        """Say why this method cannot serve a model, or None when it can."""
        return None

    def refuse_weights(self, model_config: ModelConfig) -> str | None:
        """Say why this config is not for a model's weights, or None; asked only if these are available."""
        return None

    def adopt(self, model_config: ModelConfig) -> None:
        """Take from the model what the config does not say; called when a scheduler starts, perhaps twice.

        A request's own copy of the method is not told: a method that needs this has no ``request_fields``.

        Args:
            model_config: SGLang's ``ModelConfig``, of a model that was not refused.
        """
        return

    def kernels(self, usual: str) -> str:
        """Say in the start-up line which kernels run.

        Args:
            usual: what this project's are on the device: "triton" or "reference".
        """
        return usual

    def warnings(self) -> tuple[str, ...]:
        """Return warnings for the user at start."""
        return ()

    def prefill_fields(self) -> dict[str, object] | None:
        """Return the config of the prefill method of the same name, which runs unless another one is asked for.

        None where prefill is dense then, as for methods of decode alone.
        """
        return None

    def decode_alone(self) -> DecodeMethod:
        """Return the method without `prefill_fields`: in its `phase_fields` prefill has 0."""
        fields = {name: {**getattr(self.config, name), "prefill": 0.0} for name in self.config.phase_fields}
        return type(self)(self.config.model_copy(update=fields))

    def aux_specs(self, model: ModelShape) -> tuple[AuxSpec, ...]:
        """Return the buffers to keep next to the KV pool; none where nothing but the KV itself is read."""
        return ()

    def n_select(self, n_pages: torch.Tensor) -> torch.Tensor:
        """Return how many blocks a row that holds ``n_pages`` blocks attends to, or at most where the data decides.

        Args:
            n_pages: ``[rows]`` int32, on the CPU or the GPU.

        Returns:
            ``[rows]`` int32; a value of ``n_pages`` or more means that the row is dense, and
            so are all rows of a method that does not say otherwise.
        """
        return n_pages.clone()

    def select(self, view: BatchView, layer_id: int, query: Any, pools: AuxBuffers) -> SparseIndices:
        """Choose what each KV head of each row attends to.

        Runs inside CUDA graphs: no host synchronisation, no shape that depends on data.

        Args:
            view: the batch.
            layer_id: the layer.
            query: ``[rows, q_heads, head_dim]``, after RoPE; a method for MLA gets a ``LatentQuery``.
            pools: the buffers that ``aux_specs`` asked for.

        Raises:
            NotImplementedError: the method selects no pages.
        """
        raise NotImplementedError(f"{type(self).__name__} selects no pages")

    def buffers(
        self, model: ModelShape, width: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[ViewBuffer, ...]:
        """Return those of `view_buffers` that are used on a server of these; others are not allocated.

        Args:
            model: the model.
            width: blocks of the longest row.
            dtype: of the query.
            device: where batches run.
        """
        return self.view_buffers

    def scratch_bytes(self, model: ModelShape, view: BatchView, dtype: torch.dtype, device: torch.device) -> int:
        """Return the bytes that a sparse layer of a decode step takes and a dense one would not, at most.

        Args:
            model: the model.
            view: a batch without memory, on the meta device; it is not counted, and see ``memory.of_decode``.
            dtype: of the query.
            device: where the batch runs.
        """
        return 0

    def selection_bytes(self, queries: int, width: int, device: torch.device) -> int:
        """Return the bytes that choosing takes for a moment in prefill, of a method whose model chooses there.

        Args:
            queries: tokens of the largest pass.
            width: tokens of a row, at most.
            device: where the pass runs.
        """
        return 0


@dataclass(frozen=True)
class SparseIndices:
    """The pages (or tokens) each KV head of each decode row attends to.

    Attributes:
        indices: ``[rows, kv_heads, width]`` int32, physical ids in the KV pool in ascending order of position; a
            static shape, so that the buffer can live in a CUDA graph. What lies beyond the counts is not read.
        counts: ``[rows, kv_heads]`` int32, how many entries of each list are meant.
        unit: what an id names: a block of the method's, a page of the pool in most, of which what lies behind the row's
            newest token is not attended to; or a token slot, of which all are.
    """

    indices: torch.Tensor
    counts: torch.Tensor
    unit: Literal["page", "token"] = "page"
