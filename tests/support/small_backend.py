"""A sparse backend over a small pool whose rows hold random keys, with a dense backend that only writes."""

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_sparse.attention.backend import SparseAttentionBackend
from sglang_sparse.attention.batch import view_buffers
from sglang_sparse.attention.decode import DecodePath
from sglang_sparse.config.settings import build
from sglang_sparse.methods.aux_buffers import AuxBuffers
from sglang_sparse.methods.base import ModelShape

LAYERS, PAGE, KV_HEADS, GROUP, DIM, WIDTH = (0, 1), 8, 2, 4, 64, 4
HEADS, SCALING, CONTEXT = KV_HEADS * GROUP, 0.2, 160
# The window is in one page, crosses the end of one, begins a page, and ends with one.
HELD = (100, 126, 64, 44)
PAGES = 1 + len(HELD) * CONTEXT // PAGE
ALL = {"active_ratio": 1.0, "dense_fallback": "never"}
SOME = {"active_ratio": 0.25, "min_pages": 4, "dense_fallback": "never"}
PAPER = {**SOME, "summary": "minmax", "group": "mean_query"}
MODEL = ModelShape(len(LAYERS), HEADS, KV_HEADS, DIM, torch.float32)


class Pool:
    """K and V of every layer."""

    def __init__(self) -> None:
        shape = (len(LAYERS), PAGES * PAGE, KV_HEADS, DIM)
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)

    def set_kv_buffer(self, layer: Any, location: Any, k: torch.Tensor, v: torch.Tensor, *scales: Any) -> None:
        self.keys[layer.layer_id][location.loc] = k
        self.values[layer.layer_id][location.loc] = v

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.keys[layer_id]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.values[layer_id]


class Dense:
    """The dense backend: writes K and V, and is asked for nothing else of a batch that runs sparse."""

    def __init__(self, pool: Pool, table: torch.Tensor) -> None:
        self.token_to_kv_pool = pool
        self.req_to_token_pool = SimpleNamespace(req_to_token=table)
        self.attended = 0

    def init_forward_metadata(self, batch: Any) -> None:
        pass

    def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
        pass

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, batch: Any, *_: Any) -> Any:
        self.attended += 1
        self.token_to_kv_pool.set_kv_buffer(layer, SimpleNamespace(loc=batch.out_cache_loc), k, v)
        return q


class Counted:
    """Stub of the backend's counters."""

    def __init__(self) -> None:
        self.select_stats, self.decodes, self.extends = torch.zeros(4, dtype=torch.int64), [], 0

    def add_decode(self, plan: Any) -> None:
        self.decodes.append(plan)

    def add_extend(self, last_slots: torch.Tensor) -> None:
        self.extends += 1


def slots_of(table: torch.Tensor, starts: Any, ends: Any) -> torch.Tensor:
    return torch.cat([table[row, start:end] for row, (start, end) in enumerate(zip(starts, ends, strict=True))]).long()


def make_backend(fields: dict[str, Any]) -> SparseAttentionBackend:
    """A backend whose rows hold `HELD` tokens, written and summarised by a prefill."""
    torch.manual_seed(0)
    pool = Pool()
    pages = torch.randperm(PAGES - 1)[: len(HELD) * CONTEXT // PAGE].view(len(HELD), -1) + 1
    table = (pages[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1).to(torch.int32)
    backend: Any = object.__new__(SparseAttentionBackend)
    object.__setattr__(backend, "dense", Dense(pool, table))
    backend.groups = build("resa", {"page_size": PAGE, "rectify_interval": 0, **fields}).decode
    methods = backend.groups.methods
    backend._pools = AuxBuffers(backend.groups.aux_specs(MODEL), LAYERS, PAGES, PAGE, "cpu")
    backend.decoding = DecodePath(methods, backend._pools, pool, MODEL)
    backend._kv_heads, backend._tokens = KV_HEADS, CONTEXT
    backend._buffers = view_buffers(methods, MODEL, CONTEXT, torch.float32, torch.device("cpu"))
    backend._latent, backend.keeps, backend.verified, backend.counters = False, (), WIDTH, Counted()
    backend.prefill = backend._captured = backend._planned = backend._last_slots = backend._views = None
    backend._graph_views = backend._eager_views = backend.indexed = None
    prompts = SimpleNamespace(forward_mode=ForwardMode.EXTEND, out_cache_loc=slots_of(table, [0] * len(HELD), HELD))
    for layer in LAYERS:
        k, v = (torch.randn(sum(HELD), KV_HEADS, DIM) for _ in range(2))
        backend.forward(torch.zeros(sum(HELD), HEADS * DIM), k, v, layer_of(layer), prompts)
    assert backend.counters.extends == 1
    backend.dense.attended = backend.counters.extends = 0
    return backend


def layer_of(layer_id: int) -> Any:
    more = {"k_scale": None, "v_scale": None, "k_scale_float": None, "v_scale_float": None, "logit_cap": 0.0}
    return SimpleNamespace(layer_id=layer_id, tp_q_head_num=HEADS, qk_head_dim=DIM, scaling=SCALING, **more)


def attention(
    backend: Any,
    row: int,
    token: int,
    query: torch.Tensor,
    layer: int,
    pages: Any = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token's attention in float64, over what of its row's selected pages is not behind it; all if none are."""
    table, pool = backend.dense.req_to_token_pool.req_to_token, backend.dense.token_to_kv_pool
    found = torch.zeros(HEADS, DIM, dtype=torch.float64)
    for head in range(HEADS):
        seen = table[row, : HELD[row] + token + 1].long()
        if pages is not None:
            seen = seen[torch.isin(seen // PAGE, pages[head // GROUP])]
        keys, values = (cache[layer][seen, head // GROUP].double() for cache in (pool.keys, pool.values))
        sink = torch.full((1,), float("-inf")) if sinks is None else sinks[head, None]
        found[head] = torch.cat([keys @ query[head].double() * SCALING, sink.double()]).softmax(0)[:-1] @ values
    return found


def selected_pages(backend: Any) -> list[list[torch.Tensor]]:
    indices, counts = backend.view.selected
    return [[indices[row, head, : counts[row, head]].long() for head in range(KV_HEADS)] for row in range(len(indices))]
