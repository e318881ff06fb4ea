"""A verification that runs sparse, through the backend: several tokens of a row over one selection, page by page."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner_utils.capture_mode import _set_capture_attention_variant
from triton_interpreter import INTERPRETED

from sglang_sparse.attention import cuda_graphs
from sglang_sparse.attention.backend import SparseAttentionBackend
from sglang_sparse.attention.batch import view_buffers
from sglang_sparse.attention.decode import DecodePath
from sglang_sparse.attention.plan import PLAN, plan_decode
from sglang_sparse.config.settings import build
from sglang_sparse.methods.aux_buffers import AuxBuffers, page_ends
from sglang_sparse.methods.base import ModelShape
from sglang_sparse.methods.shared_selection import SharedSelection

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
    """What the backend counts."""

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
    backend._decoding = DecodePath(methods, backend._pools, pool, MODEL)
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
    more = {"k_scale": None, "v_scale": None, "k_scale_float": None, "v_scale_float": None}
    return SimpleNamespace(layer_id=layer_id, tp_q_head_num=HEADS, qk_head_dim=DIM, scaling=SCALING, **more)


def verification(backend: Any, held: tuple[int, ...] = HELD) -> Any:
    """The batch of a verification, without its plan, as SGLang makes it up to warm up."""
    table = backend.dense.req_to_token_pool.req_to_token
    return SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=len(held),
        req_pool_indices=torch.arange(len(held)),
        seq_lens=torch.tensor(held),
        seq_lens_cpu=torch.tensor(held),
        out_cache_loc=slots_of(table, held, [length + WIDTH for length in held]),
    )


def run_layer(backend: Any, batch: Any, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and output of a layer, ``[rows, WIDTH, heads, dim]``."""
    tokens = len(batch.out_cache_loc)
    q = torch.randn(tokens, HEADS * DIM)
    k, v = (torch.randn(tokens, KV_HEADS, DIM) for _ in range(2))
    output = backend.forward(q, k, v, layer_of(layer), batch)
    assert output.shape == q.shape
    return q.view(-1, WIDTH, HEADS, DIM), output.view(-1, WIDTH, HEADS, DIM)


def attention(backend: Any, row: int, token: int, query: torch.Tensor, layer: int, pages: Any = None) -> torch.Tensor:
    """One token's attention in float64, over what of its row's selected pages is not behind it; all if none are."""
    table, pool = backend.dense.req_to_token_pool.req_to_token, backend.dense.token_to_kv_pool
    found = torch.zeros(HEADS, DIM, dtype=torch.float64)
    for head in range(HEADS):
        seen = table[row, : HELD[row] + token + 1].long()
        if pages is not None:
            seen = seen[torch.isin(seen // PAGE, pages[head // GROUP])]
        keys, values = (cache[layer][seen, head // GROUP].double() for cache in (pool.keys, pool.values))
        found[head] = (keys @ query[head].double() * SCALING).softmax(0) @ values
    return found


def assert_attends(backend: Any, q: torch.Tensor, output: torch.Tensor, layer: int, pages: Any = None) -> None:
    for row in range(len(HELD)):
        for token in range(WIDTH):
            chosen = None if pages is None else pages[row]
            expected = attention(backend, row, token, q[row, token], layer, chosen)
            torch.testing.assert_close(output[row, token].double(), expected, rtol=1e-4, atol=1e-5)


def selected_pages(backend: Any) -> list[list[torch.Tensor]]:
    indices, counts = backend.view.selected
    return [[indices[row, head, : counts[row, head]].long() for head in range(KV_HEADS)] for row in range(len(indices))]


@pytest.fixture(params=["reference", "triton"])
def kernels(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "triton":
        if not INTERPRETED:
            pytest.skip("the interpreter needs a machine without a GPU")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    return request.param


@pytest.mark.usefixtures("kernels")
def test_all_pages_are_dense_causal_attention() -> None:
    backend: Any = make_backend(ALL)
    batch = verification(backend)
    backend.init_forward_metadata(batch)
    for layer in LAYERS:
        q, output = run_layer(backend, batch, layer)
        assert_attends(backend, q, output, layer)
    assert backend.dense.attended == 0 and backend.counters.extends == 0
    (plan,) = backend.counters.decodes
    assert plan.groups[0].n_pages.tolist() == [-(-(length + WIDTH) // PAGE) for length in HELD]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("fields", [SOME, PAPER], ids=["votes", "paper"])
def test_a_selection_is_shared_by_the_tokens_of_a_row(fields: dict[str, Any]) -> None:
    """Each sees of the pages what is not behind it; the newest two are among them, which the tokens are in."""
    backend: Any = make_backend(fields)
    batch = verification(backend)
    backend.init_forward_metadata(batch)
    table = backend.dense.req_to_token_pool.req_to_token
    for layer in LAYERS:
        q, output = run_layer(backend, batch, layer)
        pages = selected_pages(backend)
        for row, length in enumerate(HELD):
            last = -(-(length + WIDTH) // PAGE)
            newest = table[row, [(last - 2) * PAGE, (last - 1) * PAGE]].long() // PAGE
            assert all(
                mine[-2:].tolist() == newest.tolist() and len(mine) == max(4, -(-last // 4)) for mine in pages[row]
            )
        assert_attends(backend, q, output, layer, pages)
        # What a step of one token would choose, that asks with the mean of these.
        view = replace(backend.view, logit_scale=SCALING)
        asked = backend.groups.methods[0].select(view, layer, q.mean(1), backend._pools)
        assert [[mine.tolist() for mine in row] for row in pages] == [
            [asked.indices[row, head, : asked.counts[row, head]].tolist() for head in range(KV_HEADS)]
            for row in range(len(HELD))
        ]


def test_the_pages_that_it_wrote_are_summarised() -> None:
    backend: Any = make_backend(SOME)
    batch = verification(backend)
    backend.init_forward_metadata(batch)
    for layer in LAYERS:
        run_layer(backend, batch, layer)
    (spec,) = backend._pools.specs
    found = {layer: backend._pools.buffer(spec.name, layer).clone() for layer in LAYERS}
    table = backend.dense.req_to_token_pool.req_to_token
    held = slots_of(table, [0] * len(HELD), [length + WIDTH for length in HELD])
    backend._decoding.refresh({PAGE: page_ends(held, PAGE)})
    for layer in LAYERS:
        assert torch.equal(found[layer], backend._pools.buffer(spec.name, layer))


def test_short_rows_are_left_to_the_dense_backend() -> None:
    """Their lengths count with the drafts; what the scheduler has planned goes before what is made up here."""
    backend: Any = make_backend({"crossover_tokens": 0, "min_seq_len": max(HELD) + WIDTH + 1})
    batch = verification(backend)
    backend.init_forward_metadata(batch)
    assert backend.view is None and not backend.counters.decodes[-1].sparse
    run_layer(backend, batch, 0)
    assert backend.dense.attended == 1
    backend.groups = build("resa", {"page_size": PAGE, "crossover_tokens": 0, "min_seq_len": max(HELD) + WIDTH}).decode
    backend.init_forward_metadata(batch)
    assert backend.counters.decodes[-1].groups[0].covered.tolist() == [True, False, True, True]
    setattr(batch, PLAN, plan_decode(backend.groups, torch.tensor(HELD)))
    backend.begin(batch)
    backend.init_forward_metadata(batch)
    assert backend.view is None


def test_a_server_that_verifies_densely_selects_nothing() -> None:
    """As with lossless decoding, whose drafts are the sparse steps."""
    backend: Any = make_backend(ALL)
    backend.verified = 0
    batch = verification(backend)
    backend.init_forward_metadata(batch)
    assert backend.view is None and backend.counters.decodes == []
    run_layer(backend, batch, 0)
    assert backend.dense.attended == 1


def draft(backend: Any, step: int, rows: int = len(HELD)) -> Any:
    """The batch of a draft of a round, whose first is 0, with its plan and padded to `rows`."""
    held, table = HELD[:rows], backend.dense.req_to_token_pool.req_to_token
    lengths = torch.tensor([length + step + 1 for length in held])
    batch = SimpleNamespace(
        forward_mode=ForwardMode.DECODE,
        batch_size=rows,
        num_padding=rows - len(held),
        req_pool_indices=torch.arange(len(held)),
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        out_cache_loc=torch.nn.functional.pad(slots_of(table, lengths - 1, lengths), (0, rows - len(held))),
    )
    plan = backend.plan_later() if step else None
    setattr(batch, PLAN, plan or plan_decode(backend.groups, lengths)._replace(later=step > 0))
    backend.begin(batch)
    return batch


@pytest.mark.parametrize("padding", [0, 1])
def test_later_drafts_attend_to_what_the_first_one_selected(padding: int) -> None:
    """And to the page that they begin: of the second row with the third draft, of the last with the fifth."""
    backend: Any = make_backend(SOME)
    backend.verified, rows = 0, len(HELD) + padding
    backend._pools.shared = SharedSelection(LAYERS, KV_HEADS, 2 * PAGES, PAGE, WIDTH, "cpu")
    labels = cuda_graphs.GraphVariants(backend, build("resa", {"rectify_interval": 0}))
    assert labels.capture_labels == (cuda_graphs.DENSE, cuda_graphs.SPARSE, cuda_graphs.LATER_DRAFT)
    chosen: list[Any] = []
    table = backend.dense.req_to_token_pool.req_to_token
    for step in range(WIDTH + 1):
        batch = draft(backend, step, rows)
        assert labels.select(batch) == (cuda_graphs.LATER_DRAFT if step else cuda_graphs.SPARSE)
        backend.init_forward_metadata(batch)
        for layer in LAYERS:
            q, k, v = (torch.randn(rows, heads * DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
            backend._views[0].scores.fill_(float("nan"))
            output = backend.forward(q, k.view(rows, -1, DIM), v.view(rows, -1, DIM), layer_of(layer), batch)
            if step == 0:
                chosen.append(selected_pages(backend))
            assert output[len(HELD) :].count_nonzero() == 0
            for row, length in enumerate(HELD):
                begun = table[row, length : length + step + 1].long() // PAGE
                pages = [torch.cat([mine, begun]) for mine in chosen[layer][row]]
                expected = attention(backend, row, step, q[row].view(HEADS, DIM), layer, pages)
                torch.testing.assert_close(output[row].view(HEADS, DIM).double(), expected, rtol=1e-4, atol=1e-5)
    assert backend.counters.select_stats[0] == len(LAYERS) * len(HELD) * KV_HEADS, "the first drafts alone selected"


def test_lists_that_do_not_fit_are_not_shared() -> None:
    """Each draft then selects for itself: a row that attends to all its pages leaves the others no room."""
    backend: Any = make_backend(ALL)
    backend.verified = 0
    backend._pools.shared = SharedSelection(LAYERS, KV_HEADS, PAGES, PAGE, WIDTH, "cpu")
    labels = cuda_graphs.GraphVariants(backend, build("resa", {"rectify_interval": 0}))
    for step in range(2):
        batch = draft(backend, step)
        assert labels.select(batch) == cuda_graphs.SPARSE
        backend.init_forward_metadata(batch)
        q, k = torch.randn(len(HELD), HEADS * DIM), torch.randn(len(HELD), KV_HEADS, DIM)
        backend.forward(q, k, k, layer_of(0), batch)
        assert backend.counters.select_stats[0] == (step + 1) * len(HELD) * KV_HEADS


def test_the_graph_of_later_drafts_is_recorded_over_padding() -> None:
    backend: Any = make_backend(SOME)
    backend.verified, backend._pools.shared = 0, SharedSelection(LAYERS, KV_HEADS, PAGES, PAGE, WIDTH, "cpu")
    backend.init_forward_metadata(draft(backend, 0))
    backend._pools.shared._memory.fill_(3)
    recorded = []
    # Of 30 rows none has room for a list: their graph selects.
    for rows in (len(HELD), 30):
        _set_capture_attention_variant(cuda_graphs.LATER_DRAFT)
        try:
            batch = SimpleNamespace(forward_mode=ForwardMode.DECODE, batch_size=rows)
            backend.init_forward_metadata_out_graph(batch, in_capture=True)
        finally:
            _set_capture_attention_variant(None)
        batch.out_cache_loc = torch.zeros(rows, dtype=torch.int64)
        q, k = torch.randn(rows, HEADS * DIM), torch.randn(rows, KV_HEADS, DIM)
        assert backend.forward(q, k, k, layer_of(0), batch).count_nonzero() == 0
        recorded.append(backend._pools.shared.reused)
    assert recorded == [True, False]


def test_both_graphs_of_a_verification() -> None:
    """A replay takes the graph of its plan; padding rows attend to nothing, and their slot 0 summarises nothing."""
    backend: Any = make_backend(ALL)
    backend.dense.init_cuda_graph_state = lambda *_: None
    backend._graph_tokens = 0
    backend.init_cuda_graph_state(len(HELD) + 1, (len(HELD) + 1) * WIDTH)
    variants = cuda_graphs.GraphVariants(backend, build("resa", {"rectify_interval": 0}))
    assert variants.capture_labels == (cuda_graphs.DENSE, cuda_graphs.SPARSE)
    batch = verification(backend)
    assert variants.select(batch) == cuda_graphs.SPARSE
    for label, sparse in ((cuda_graphs.DENSE, False), (cuda_graphs.SPARSE, True)):
        _set_capture_attention_variant(label)
        try:
            backend.init_forward_metadata_out_graph(batch, in_capture=True)
        finally:
            _set_capture_attention_variant(None)
        assert (backend.view is not None) == sparse
    assert backend.view.n_pages.count_nonzero() == 0 and backend.view.queries == WIDTH
    padding = torch.zeros(WIDTH, dtype=torch.int64)
    padded = SimpleNamespace(
        **{**vars(batch), "batch_size": len(HELD) + 1, "num_padding": 1},
    )
    padded.out_cache_loc = torch.cat([batch.out_cache_loc, padding])
    backend.init_forward_metadata_out_graph(padded)
    q, output = run_layer(backend, padded, LAYERS[-1])
    assert output[-1].count_nonzero() == 0
    assert_attends(backend, q[:-1], output[:-1], LAYERS[-1])
