"""Requests behind their prefill, on SGLang's own tree, allocator and token table, with random KV in two layers."""

from array import array
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from plain_rocketkv import DIM, GROUP, HEADS, PAGE, SCALE, SMALL
from sglang.srt.managers.schedule_batch import Range
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache

from sglang_sparse import compact, pools
from sglang_sparse.config import settings as config
from sglang_sparse.keep_method import Kept
from sglang_sparse.method import ModelShape
from sglang_sparse.methods.rocketkv import Rocketkv
from sglang_sparse.plan import plan_decode
from sglang_sparse.requests import RequestState, ensure_state, state_of
from sglang_sparse.stats import RectifyCounts
from sglang_sparse.view import allocate_view
from sglang_sparse_kernels.sparse_decode import sparse_decode

LAYERS, WIDTH, PLACES = 2, 640, 6
MODEL = ModelShape(LAYERS, HEADS * GROUP, HEADS, DIM, torch.float32)
FIELDS = {**SMALL, "eviction": "compact", "dense_fallback": "never", "kt_cache_dtype": "bfloat16"}


class Server:
    """What a scheduler has of a server that compacts.

    Args:
        pages: of the KV pool.
        tree: "radix"; "disabled": SGLang's tree that holds nothing; or "none": what SGLang has in its place.
        **fields: of the config.
    """

    def __init__(self, pages: int = 100, tree: str = "radix", **fields: Any):
        torch.manual_seed(pages)
        self.args: Any = SimpleNamespace(sparse_method="rocketkv", sparse_config=None)
        self.settings = config.build("rocketkv", {**FIELDS, **fields})
        method = self.settings.method
        assert isinstance(method, Rocketkv)
        self.method, self.pages = method, pages
        self.aux = pools.AuxPools(
            method.aux_specs(MODEL), tuple(range(LAYERS)), pages + 1, PAGE, "cpu", method.entry_tokens
        )
        self.keys = [torch.randn((pages + 1) * PAGE, HEADS, DIM).bfloat16().float() for _ in range(LAYERS)]
        self.values = [torch.randn_like(keys) for keys in self.keys]
        self.kv_pool = SimpleNamespace(get_key_buffer=self.keys.__getitem__, get_value_buffer=self.values.__getitem__)
        setattr(self.kv_pool, pools.ATTRIBUTE, self.aux)
        blocks = {layer: torch.zeros(PLACES, HEADS, method.max_kept, dtype=torch.int32) for layer in range(LAYERS)}
        counts = torch.zeros(PLACES, dtype=torch.int32)
        self.aux.kept = (Kept(blocks, counts, counts.clone()),)
        self.table = ReqToTokenPool(PLACES - 1, WIDTH, "cpu", False)
        self.allocator = PagedTokenToKVPoolAllocator(pages * PAGE, PAGE, torch.float32, "cpu", None, False)  # pyright: ignore
        params = CacheInitParams(tree == "disabled", self.table, self.allocator, PAGE)
        self.tree: Any = ChunkCache(params) if tree == "none" else RadixCache(params)
        self.compaction = compact.Compaction(method, self.aux, self.kv_pool)
        counters = SimpleNamespace(rectify=RectifyCounts())
        backend = SimpleNamespace(method=method, keeps=SimpleNamespace(compaction=self.compaction), counters=counters)
        runner = SimpleNamespace(attn_backend=backend)
        self.scheduler: Any = SimpleNamespace(
            server_args=self.args, tree_cache=self.tree, tp_worker=SimpleNamespace(model_runner=runner)
        )

    def prefill(self, prompt: int, generated: int = 0, tokens: int = 0, **options: Any) -> Any:
        """Return a request whose prompt and output are prefilled, and in the tree; equal ``tokens`` share a prompt."""
        end, place = prompt + generated, self.table.free_slots.pop(0)
        ids = array("q", [tokens * 1000 + i for i in range(end)])
        matched = self.tree.match_prefix(SimpleNamespace(key=_key(ids[: prompt - 8]))) if self.tree else None
        found = matched.device_indices
        self.tree.inc_lock_ref(matched.last_device_node)
        fresh = self.allocator.alloc(-(-(end - len(found)) // PAGE) * PAGE)
        assert fresh is not None
        self.table.write((place, slice(0, end)), torch.cat([found, fresh])[:end])
        request = SimpleNamespace(
            rid=str(place),
            origin_input_ids=ids[:prompt],
            output_ids=ids[prompt:],
            get_fill_ids=lambda: ids,
            extra_key=None,
            req_pool_idx=place,
            kv=SimpleNamespace(kv_allocated_len=end),
            kv_committed_len=end,
            cache_protected_len=len(found),
            prefix_indices=found,
            last_node=matched.last_device_node,
            extend_range=Range(len(found), end),
            sampling_params=SimpleNamespace(custom_params=options or None),
            finished=lambda: True,
        )
        state = ensure_state(
            self.settings, self.scheduler.tp_worker.model_runner.attn_backend.counters.rectify, request
        )
        state.exact_len = end
        self._keep(request, state)
        return request

    def _keep(self, request: Any, state: RequestState) -> None:
        (kept,) = self.aux.kept
        place, prompt = request.req_pool_idx, len(request.origin_input_ids)
        state.kept = self.method.kept(prompt) if state.options.sparse else (0, 0)
        count, first_visible = state.kept
        kept.counts[place], kept.first_visible[place] = state.kept
        for blocks in kept.blocks.values():
            for head in range(HEADS):
                blocks[place, head, :count] = torch.randperm(max(1, first_visible))[:count].sort().values
        slots = self.row(request)
        self.aux.refresh(dict(enumerate(self.keys)), pools.page_ends(slots, self.method.entry_tokens))

    def cached(self, *requests: Any) -> None:
        """Let SGLang process the results of their prefill."""
        for request in requests:
            self.tree.cache_unfinished_req(request)

    def row(self, request: Any) -> torch.Tensor:
        """The slots of its tokens."""
        return self.table.req_to_token[request.req_pool_idx, : request.kv_committed_len].long()

    def let_go(self, request: Any, reserve: int = 0) -> bool:
        """Let go of its prompt, without a word to ``compact_running``."""
        state = state_of(request)
        assert state is not None
        span = self.compaction.span(request, state)
        assert span is not None
        state.compacted = self.compaction.let_go(request, span, self.tree, reserve)
        return state.compacted

    def attend(self, request: Any) -> list[torch.Tensor]:
        """What a decode step of its newest token attends to in each layer, as its output."""
        state, slots = state_of(request), self.row(request)
        assert state is not None
        plan = plan_decode(self.method, torch.tensor([len(slots)]), [state.options])
        stats = torch.zeros(4, dtype=torch.int64)
        view = allocate_view(1, HEADS, WIDTH // self.method.block_size, 6, self.method.block_size, stats)
        batch = SimpleNamespace(req_pool_indices=torch.tensor([request.req_pool_idx]))
        view.load(plan, batch, self.table.req_to_token)
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
        own = sum(-(-r.kv.kv_allocated_len // PAGE) * PAGE - r.cache_protected_len for r in requests)
        tree = 0 if self.tree.disable else self.tree.evictable_size() + self.tree.protected_size()
        assert self.allocator.available_size() + tree + own == self.pages * PAGE
        free = set(self.allocator.free_pages.tolist())
        for request in requests:
            assert free.isdisjoint((self.row(request) // PAGE).tolist())


def _key(ids: array) -> Any:
    from sglang.srt.mem_cache.radix_cache import RadixKey

    return RadixKey(ids)
