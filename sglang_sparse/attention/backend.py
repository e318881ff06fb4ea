"""The attention backend: the dense one that SGLang chose, with sparse layers routed to a method."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.runner_utils.capture_mode import get_capture_attention_variant

from sglang_sparse.attention import crossover, memory
from sglang_sparse.attention.batch import (
    RowViews,
    Views,
    allocate_views,
    clear_views,
    count_sizes,
    real_rows,
    rows_and_queries,
    view_buffers,
    views_nbytes,
)
from sglang_sparse.attention.counters import Counters
from sglang_sparse.attention.cuda_graphs import LATER_DRAFT, SPARSE
from sglang_sparse.attention.decode import SINKS, DecodePath, require_known
from sglang_sparse.attention.delegation import DelegatingBackend
from sglang_sparse.attention.exact_states import make_copies
from sglang_sparse.attention.plan import PLAN, DecodePlan, plan_decode
from sglang_sparse.attention.prefill import PrefillPath
from sglang_sparse.attention.prompt_selection import make_paths
from sglang_sparse.attention.protocols import ForwardBatch, ModelRunner
from sglang_sparse.config import arguments
from sglang_sparse.methods import aux_buffers
from sglang_sparse.methods.layers import parse_layers
from sglang_sparse.methods.support import soft_cap
from sglang_sparse.methods.views import BatchView

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from sglang_sparse.attention.dsa.indexer import IndexerBatch
    from sglang_sparse.config.settings import Settings
    from sglang_sparse.methods.base import ModelShape

logger = logging.getLogger(__name__)


class SparseAttentionBackend(DelegatingBackend):
    """Wrap a dense backend and keep its name and everything it offers.

    Args:
        dense: the backend that SGLang built.
        settings: the sparse methods and their configs.

    Attributes:
        first_layer: the first sparse layer of a pass.
        attends_alone: whether all layers are sparse, so that the dense backend has no part in a sparse decode step.
        indexed: what a selection in the model keeps for the layers of a pass.
        divide: given by the scheduler, divides rows among rectifying passes; None where one pass is as good.
        verified: tokens of a row in a verification that runs sparse, whose lengths are without them; 0: none does.
        rows_each: rows that a request has in a plan and its views: one for each draft where the model chooses, else 1.
    """

    # Dense or sparse is decided on the host.
    needs_cpu_seq_lens: bool = True
    verified: int = 0
    rows_each: int = 1
    attends_alone: bool = False
    # The mode and batch size that the dense backend is prepared to capture.
    _captured: tuple[ForwardMode, int] | None = None
    _cut: RowViews | None = None

    def __init__(self, dense: Any, runner: ModelRunner, settings: Settings):
        super().__init__(dense)
        # But for a server that only prefills sparse, which may leave the lengths of drafts to the device.
        self.needs_cpu_seq_lens = settings.name is not None or getattr(dense, "needs_cpu_seq_lens", True)
        self.groups, self.method = settings.decode, settings.method
        for method in self.groups.methods:
            method.adopt(runner.model_config)
        self._config = settings.config
        self.verified = arguments.verified_tokens(arguments.of(runner.server_args))
        self.rows_each, _ = rows_and_queries(self.groups.methods[0], self.verified)
        self.indexed: IndexerBatch | None = None
        self._pools: aux_buffers.AuxBuffers = getattr(runner.token_to_kv_pool, memory.ATTRIBUTE)
        self.first_layer = min(self._pools.layers, default=-1)
        model = memory.model_shape(runner.model_config, runner.token_to_kv_pool.dtype)
        self._latent = self.method.kind_of(runner.model_config) == "MLA"
        self.decoding = DecodePath(self.groups.methods, self._pools, runner.token_to_kv_pool, model)
        self.attends_alone = self.decoding.layers == {*model.here(range(model.num_layers))}
        self._kv_heads, self._tokens = model.num_kv_heads, runner.req_to_token_pool.req_to_token.shape[1]
        device = self._pools.overflow.device
        self._buffers = view_buffers(self.groups.methods, model, self._tokens, runner.dtype, device)
        self.divide: Callable[[Sequence[tuple[int, int]]], list[list[int]]] | None = None
        self.groups.deterministic = arguments.deterministic(arguments.of(runner.server_args))
        self._set_crossover(settings, model)
        self.prefill: PrefillPath | None = None
        if settings.prefill:
            layers = model.here(parse_layers(settings.prefill.config.layers, model.num_layers))
            pool, table, page = runner.token_to_kv_pool, runner.req_to_token_pool.req_to_token, self._config.page_size
            self.prefill = PrefillPath(settings.prefill, layers, pool, table, page, model.num_q_heads)
            if device.type == "cuda":
                parameters = runner.model.named_parameters()
                sinks = next((of for name, of in parameters if name.endswith(SINKS)), None)
                self.prefill.warm_up(runner.dtype, sinks, soft_cap(runner.model_config))
            logger.info("sglang_sparse: %s", self.prefill.describe(model.num_layers))
        self.exact_states = make_copies(runner.req_to_token_pool, settings)
        self.keeps = make_paths(self.groups.methods, self._pools, runner, model)
        select_stats = torch.zeros(sum(count_sizes(self.groups.methods)), dtype=torch.int64, device=device)
        self.counters = Counters(settings, self._pools, model, select_stats, self.prefill, self.keeps)
        self._views: Views | None = None
        self._graph_tokens = 0
        self._graph_views: Views | None = None
        self._eager_views: Views | None = None
        self._last_slots: dict[int, torch.Tensor] | None = None
        self._captured = self._cut = None
        # Of the pass that runs, or ran last.
        self._planned: DecodePlan | None = None
        # The scheduler's, while a step that rectifies is launched.
        self.rectifying: object | None = None
        self.seal()

    def _set_crossover(self, settings: Settings, model: ModelShape) -> None:
        if self.groups.deterministic:
            self.groups.crossover_tokens = 0
        elif settings.name and "crossover_tokens" in self._config.limits:
            found = crossover.find(settings, model, self._pools.overflow.device)
            self.groups.crossover_tokens = found.tokens
            logger.info(
                "sglang_sparse: batches of fewer than %d sparse KV tokens run dense (%s)", found.tokens, found.source
            )

    @property
    def view(self) -> BatchView | None:
        """The decode batch that runs sparse, as its first method sees it; None for a dense one, and in prefill."""
        return self._views[0] if self._views else None

    def begin(self, forward_batch: ForwardBatch) -> None:
        """Take the plan of the batch that runs next, which the scheduler has left on it."""
        self._planned = getattr(forward_batch, PLAN, None)

    def plan(self, seq_lens: torch.Tensor) -> DecodePlan:
        """Return what was decided for the batch that runs, of these KV lengths, ``[rows]`` on the CPU.

        A batch that SGLang makes up for itself, to warm up, has no requests and is decided here.
        """
        return self._planned or plan_decode(self.groups, self.lengths(seq_lens))

    def lengths(self, seq_lens: torch.Tensor) -> torch.Tensor:
        """Return the KV lengths of a plan's rows, with what a verification writes, from those of a batch's."""
        if self.rows_each == 1:
            return seq_lens + self.verified
        return (seq_lens[:, None] + torch.arange(1, self.rows_each + 1)).flatten()

    @property
    def may_share(self) -> bool:
        """Whether drafts of a round may share a selection on this server."""
        return self._pools.shared is not None

    def shares(self, plan: DecodePlan, rows: int) -> bool:
        """Whether a batch of so many rows, those that pad among them, has room for what its first draft selects."""
        shared = self._pools.shared
        if shared is None or not plan.sparse:
            return False
        return shared.fits(rows, max(int(group.n_select.max()) for group in plan.groups))

    def reuses(self, plan: DecodePlan) -> bool:
        """Whether a batch attends to what an earlier draft of its round has selected."""
        shared = self._pools.shared
        return shared is not None and plan.sparse and plan.later and shared.rows > 0

    def plan_later(self) -> DecodePlan | None:
        """Return the last draft's plan for the next one of its round, if that attends to the same selection; else None.

        One more token changes no selection, and planning takes the host as long as a short draft takes a GPU.
        """
        later = self._planned._replace(bounded=False, later=True) if self._planned else None
        return later if later and self.reuses(later) else None

    def decodes(self, mode: ForwardMode) -> bool:
        """Whether a pass is one that may run sparse: a decode step, or a verification where that takes its place."""
        return mode.is_target_verify() if self.verified else mode.is_decode()

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the static buffers of the decode graphs, the dense backend's and ours."""
        if self._graph_tokens >= max_num_tokens:
            # A second set of graphs, of fewer tokens: they share what is there.
            return
        self._graph_tokens = max_num_tokens
        self.dense.init_cuda_graph_state(max_bs, max_num_tokens)
        if not self._pools.layers:
            return
        self._graph_views = self._allocate(max_bs * self.rows_each)
        message = "sglang_sparse: %.1f MiB of static buffers for decode graphs up to batch size %d, next to the KV pool"
        logger.info(message, views_nbytes(self._graph_views) / 2**20, max_bs)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare an eager forward pass."""
        self._prepare(forward_batch)
        if self._dense_has_part:
            self.dense.init_forward_metadata(forward_batch)

    @property
    def _dense_has_part(self) -> bool:
        """Whether the dense backend has a layer in the pass that was prepared."""
        return self._views is None or not self.attends_alone

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare a graph's capture (the variant is set by then) or a replay."""
        rows, self._last_slots = forward_batch.batch_size, None
        if not in_capture:
            self._captured = None
            self._prepare(forward_batch)
            if self._dense_has_part:
                self.dense.init_forward_metadata_out_graph(forward_batch, in_capture)
            return
        # FlashInfer plans a replay in what it allocated last for a size. Allocating again for the second graph of a
        # size would leave the first one the plan of its capture, of a token a row.
        captured = (forward_batch.forward_mode, rows)
        if self._captured != captured:
            self.dense.init_forward_metadata_out_graph(forward_batch, in_capture)
        self._captured = captured
        self._begin_capture(rows)

    def prepare_forward_metadata_for_breakable_cuda_graph_replay(self, *args: object, **kwargs: object) -> None:
        """Prepare the replay of a prefill graph, whose attention runs eagerly between the captured pieces."""
        self.dense.prepare_forward_metadata_for_breakable_cuda_graph_replay(*args, **kwargs)
        self._last_slots = None

    def _rows(self, rows: int) -> Views:
        """Return views of ``rows`` rows, of static buffers if a graph can have that many."""
        found = self._graph_views
        if found is None or rows > len(found[0].n_pages):
            if self._eager_views is None or rows > len(self._eager_views[0].n_pages):
                # Never two at once.
                self._eager_views = self._cut = None
                self._eager_views = self._allocate(rows)
            found = self._eager_views
        if self._cut is None or self._cut.views is not found:
            self._cut = RowViews(found)
        return self._cut[rows]

    def _allocate(self, rows: int) -> Views:
        stats = self.counters.select_stats
        _, queries = rows_and_queries(self.groups.methods[0], self.verified)
        return allocate_views(self.groups.methods, rows, self._kv_heads, self._tokens, stats, self._buffers, queries)

    def _begin_capture(self, rows: int) -> None:
        """Choose the path that the next captured decode graph records, the sparse one over padding rows only."""
        self._views = self.indexed = self._cut = None
        variant = get_capture_attention_variant()
        if variant in (SPARSE, LATER_DRAFT):
            self._views = self._rows(rows * self.rows_each)
            clear_views(self._views, self.dense.req_to_token_pool.req_to_token)
        if self._pools.shared is not None:
            self._pools.shared.begin_capture(rows, reused=variant == LATER_DRAFT)

    def _prepare(self, forward_batch: ForwardBatch) -> None:
        self._pools.warn_of_overflow()
        self._last_slots = None
        # Of a long prefill it is large.
        self.indexed = None
        if not self.decodes(forward_batch.forward_mode):
            self._views = None
            return
        rows = forward_batch.batch_size
        real = real_rows(forward_batch)
        plan = self.plan(forward_batch.seq_lens_cpu[:real])
        if real:
            # A rank of data-parallel attention without requests runs along with the others.
            self.counters.add_decode(plan)
        shared = self._pools.shared
        if shared is not None:
            shared.reused = self.reuses(plan)
            if shared.reused:
                return
            # A dense draft stores nothing, so that the next one has to select.
            shared.rows = rows if self.shares(plan, rows) else 0
        # Or they would be kept while larger ones are allocated.
        self._views = None
        if not plan.sparse:
            return
        self._views = self._rows(rows * self.rows_each)
        assert self._cut is not None
        self._cut.load(self._views, plan, forward_batch, self.dense.req_to_token_pool.req_to_token)

    def forward(
        self,
        q: torch.Tensor | None = None,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        layer: Any = None,
        forward_batch: Any = None,
        save_kv_cache: bool = True,
        **kwargs: torch.Tensor,
    ) -> torch.Tensor:
        """Attend, and in the last sparse layer refresh the summaries of the pages whose keys this pass wrote.

        Once for all layers; what a selection may read of the pages that its own step writes, see ``AuxSpec``.

        Args:
            q: ``[tokens, q_heads * head_dim]``.
            k: ``[tokens, kv_heads, head_dim]``.
            v: ``[tokens, kv_heads, v_head_dim]``.
            save_kv_cache: whether k and v still have to be written to the pool.
            **kwargs: passed to the dense backend; ``q_rope`` and ``k_rope`` of MLA, which q and k then lack; ``sinks``
                ``[q_heads]`` of others, see ``sparse_decode``; and the arguments of layers with a recurrent state,
                which have no q, k and v.

        Returns:
            ``[tokens, q_heads * v_head_dim]``.

        Raises:
            RuntimeError: a sparse layer asks for more than a loaded model shows; a bug of this package.
        """
        mode, prefill = forward_batch.forward_mode, self.prefill
        decodes_sparse = layer.layer_id in self.decoding.layers
        if q is None or mode.is_idle() or not (decodes_sparse or (prefill and layer.layer_id in prefill.layers)):
            return self.dense.forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        require_known(layer, k, kwargs, latent=self._latent)
        assert k is not None and v is not None
        prefills = mode.is_extend_without_speculative()
        if prefill and prefills and prefill.takes(layer.layer_id):
            output = prefill.attend(q, k, v, layer, forward_batch.out_cache_loc, save_kv_cache, kwargs.get(SINKS))
        elif decodes_sparse and self._views is not None and self.decodes(mode):
            output = self.decoding.attend(
                q, k, v, layer, forward_batch.out_cache_loc, self._views, save_kv_cache, kwargs
            )
        else:
            output = self.dense.forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        if self.keeps and prefills:
            for path in self.keeps:
                path.keep(q, layer)
        if layer.layer_id == self.decoding.last_layer:
            self.decoding.refresh(self._written(forward_batch))
        return output

    def _written(self, forward_batch: ForwardBatch) -> Mapping[int, torch.Tensor]:
        """The last slot of each entry that this pass writes, by the tokens of an entry; of an extend worked out once.

        Anew in a verification: a graph must not read what the passes before its recording found.
        """
        slots: torch.Tensor = forward_batch.out_cache_loc
        if forward_batch.forward_mode.is_decode():
            return dict.fromkeys(self._pools.entry_sizes, slots)
        if forward_batch.forward_mode.is_target_verify():
            return self.decoding.ends(slots)
        if (ends := self._last_slots) is None:
            ends = self.decoding.ends(slots)
            for last_slots in ends.values():
                self.counters.add_extend(last_slots)
            ends = self._last_slots = self.decoding.with_arrived(ends)
        return ends
