"""Requests behind their prefill, on SGLang's own tree, allocator and token table, with random KV in two layers."""

from array import array
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from plain_rocketkv import DIM, GROUP, HEADS, PAGE, SCALE, SMALL
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_sparse.attention import memory
from sglang_sparse.attention.batch import allocate_view, load_views
from sglang_sparse.attention.counters import RectifyCounts
from sglang_sparse.attention.plan import plan_decode
from sglang_sparse.config import settings as config
from sglang_sparse.methods import aux_buffers
from sglang_sparse.methods.base import ModelShape
from sglang_sparse.methods.rocketkv import Rocketkv
from sglang_sparse.methods.roles import Kept
from sglang_sparse.scheduler import compaction
from sglang_sparse.scheduler.request_state import RequestState, ensure_state, state_of
from sglang_sparse_kernels.sparse_decode import sparse_decode

LAYERS, WIDTH, PLACES = 2, 640, 6
MODEL = ModelShape(LAYERS, HEADS * GROUP, HEADS, DIM, torch.float32)
FIELDS = {**SMALL, "eviction": "compact", "dense_fallback": "never", "kt_cache_dtype": "bfloat16"}
# By the name of the core in its settings, the class of SGLang's that has its nodes.
CORES = {"rust": "RustUnifiedTreeCore", "python": "UnifiedTreeCore"}
# What a server may have: SGLang's tree with either core, or disabled, so that it holds nothing.
TREES = (*CORES, "disabled")


def make_tree(kind: str, allocator: Any, table: Any, page_size: int) -> Any:
    """SGLang's tree, one of ``TREES``."""
    disabled, components = kind == "disabled", (ComponentType.FULL,)
    core = "rust" if disabled else kind
    tree = UnifiedRadixCache(
        CacheInitParams(disabled, table, allocator, page_size, tree_components=components, tree_core_backend=core)
    )
    # It takes the other one where a machine has no such core.
    assert type(tree.tree_core).__name__ == CORES[core]
    return tree


class Server:
    """Stub of a server that compacts, with the parts that a scheduler uses.

    Args:
        pages: of the KV pool.
        tree: one of ``TREES``.
        **fields: of the config.
    """

    def __init__(self, pages: int = 100, tree: str = "rust", **fields: Any):
        torch.manual_seed(pages)
        self.args: Any = SimpleNamespace(sparse_method="rocketkv", sparse_config=None)
        self.settings = config.build("rocketkv", {**FIELDS, **fields})
        method = self.settings.method
        assert isinstance(method, Rocketkv)
        self.method, self.pages = method, pages
        self.aux = aux_buffers.AuxBuffers(method.aux_specs(MODEL), tuple(range(LAYERS)), pages + 1, PAGE, "cpu")
        self.keys = [torch.randn((pages + 1) * PAGE, HEADS, DIM).bfloat16().float() for _ in range(LAYERS)]
        self.values = [torch.randn_like(keys) for keys in self.keys]
        self.kv_pool = SimpleNamespace(get_key_buffer=self.keys.__getitem__, get_value_buffer=self.values.__getitem__)
        setattr(self.kv_pool, memory.ATTRIBUTE, self.aux)
        blocks = {layer: torch.zeros(PLACES, HEADS, method.max_kept, dtype=torch.int32) for layer in range(LAYERS)}
        counts = torch.zeros(PLACES, dtype=torch.int32)
        self.aux.kept = (Kept(blocks, counts, counts.clone()),)
        self.table = ReqToTokenPool(PLACES - 1, WIDTH, "cpu", False)
        self.allocator = PagedTokenToKVPoolAllocator(pages * PAGE, PAGE, torch.float32, "cpu", None, False)  # pyright: ignore
        self.tree = make_tree(tree, self.allocator, self.table, PAGE)
        self.compaction = compaction.Compaction(method, self.aux, self.kv_pool)
        counters = SimpleNamespace(rectify=RectifyCounts())
        keeps = (SimpleNamespace(compaction=self.compaction),)
        backend = SimpleNamespace(groups=self.settings.decode, keeps=keeps, counters=counters)
        runner = SimpleNamespace(attn_backend=backend)
        self.scheduler: Any = SimpleNamespace(
            server_args=self.args,
            chunked_req=None,
            tree_cache=self.tree,
            tp_worker=SimpleNamespace(model_runner=runner),
        )

    def prefill(self, prompt: int, generated: int = 0, tokens: int = 0, **options: Any) -> Any:
        """Return a request whose prompt and output are prefilled, and in the tree; equal ``tokens`` share a prompt."""
        end, place = prompt + generated, self.table.free_slots.pop(0)
        ids = array("q", [tokens * 1000 + i for i in range(end)])
        matched = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(ids[: prompt - 8])))
        found = self.tree.path_device_indices(matched.last_device_node)[: matched.device_prefix_len]
        fresh = self.allocator.alloc(-(-(end - len(found)) // PAGE) * PAGE)
        assert fresh is not None
        self.table.write((place, slice(0, end)), torch.cat([found, fresh])[:end])
        request: Any = Req(str(place), "", ids[:prompt], SamplingParams(custom_params=options or None))
        request.output_ids = ids[prompt:]
        request.refresh_fill_ids()
        request.prefix_len, request.extend_end = len(found), end
        request.last_node, request.lock = matched.last_device_node, self.tree.lock(matched.last_device_node)
        request.kv.req_pool_idx, request.kv.cache_protected_len = place, len(found)
        request.kv.kv_committed_len = request.kv.kv_allocated_len = end
        counts = self.scheduler.tp_worker.model_runner.attn_backend.counters.rectify
        state = ensure_state(self.settings, counts, request)
        state.shareable_len = end
        self._keep(request, state)
        return request

    def _keep(self, request: Any, state: RequestState) -> None:
        (kept,) = self.aux.kept
        place, prompt = request.kv.req_pool_idx, len(request.origin_input_ids)
        state.kept = self.method.kept(prompt) if state.options.sparse else (0, 0)
        count, first_visible = state.kept
        kept.counts[place], kept.first_visible[place] = state.kept
        for blocks in kept.blocks.values():
            for head in range(HEADS):
                blocks[place, head, :count] = torch.randperm(max(1, first_visible))[:count].sort().values
        slots = self.row(request)
        self.aux.refresh(dict(enumerate(self.keys)), aux_buffers.page_ends(slots, self.method.block_size))

    def cached(self, *requests: Any) -> None:
        """Let SGLang process the results of their prefill."""
        for request in requests:
            checkpoint_kv_cache(request, self.tree)

    def release(self, request: Any) -> None:
        """Let SGLang end it."""
        request.finished_reason = FINISH_LENGTH(len(request.output_ids))
        release_kv_cache(request, self.tree, checkpoint=True)

    def row(self, request: Any) -> torch.Tensor:
        """The slots of its tokens."""
        return self.table.req_to_token[request.kv.req_pool_idx, : request.kv.kv_committed_len].long()

    def release_prompt(self, request: Any, reserve: int = 0) -> bool:
        """Let go of its prompt, without a word to ``compact_running``."""
        state = state_of(request)
        assert state is not None
        span = self.compaction.span(request, state)
        assert span is not None
        state.compacted = self.compaction.release_prompt(request, span, self.tree, reserve)
        return state.compacted

    def attend(self, request: Any) -> list[torch.Tensor]:
        """Return the attention output of a decode step of a request's newest token, for each layer."""
        state, slots = state_of(request), self.row(request)
        assert state is not None
        plan = plan_decode(self.settings.decode, torch.tensor([len(slots)]), [state.options])
        stats = torch.zeros(4, dtype=torch.int64)
        view = allocate_view(1, HEADS, WIDTH // self.method.block_size, 6, self.method.block_size, stats)
        batch = SimpleNamespace(req_pool_indices=torch.tensor([request.kv.req_pool_idx]))
        load_views((view,), plan, batch, self.table.req_to_token)
        query = torch.randn(1, HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(3))
        found = []
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            selected = self.method.select(replace(view, logit_scale=SCALE), layer, query, self.aux)
            asked = (query, keys, values, selected.indices, selected.counts, slots[-1:])
            found.append(sparse_decode(*asked, self.method.block_size, SCALE, usual_pages=view.usual_select))
        assert stats[1] < stats[2]
        return found

    def require_all_pages_owned(self, *requests: Any) -> None:
        """SGLang's own count while it is busy, over the requests that hold KV."""
        own = sum(-(-r.kv.kv_allocated_len // PAGE) * PAGE - r.kv.cache_protected_len for r in requests)
        tree = 0 if self.tree.disable else self.tree.evictable_size() + self.tree.protected_size()
        assert self.allocator.available_size() + tree + own == self.pages * PAGE
        free = set(self.allocator.free_pages.tolist())
        for request in requests:
            assert free.isdisjoint((self.row(request) // PAGE).tolist())
