"""A DSA pass layer by layer: what each chooses, against the definition, and what all of them share."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_sparse import indexer
from sglang_sparse.config import build
from sglang_sparse.plan import plan_decode
from sglang_sparse.view import BatchView, allocate_view
from sglang_sparse_kernels import index_keys

PAGE, TOPK, HEADS, DIM, HIDDEN, PAGES = 64, 32, 4, 128, 48, 12
LAYERS = (0, 1, 2)
LATENT, ROPE = 64, 16


def no_original(*_: Any) -> torch.Tensor:
    raise AssertionError("SGLang's own function ran")


class Rows:
    """Requests of some lengths in a pool, of which the last tokens are the queries of a pass.

    Args:
        lengths: tokens of each row, with the new ones.
        new: how many of them are new; None for a decode step of one each.
        padding: queries that pad the pass.
    """

    def __init__(self, lengths: list[int], new: list[int] | None = None, padding: int = 0):
        self.generator = torch.Generator().manual_seed(sum(lengths))
        table = 1 + torch.randperm(PAGES, generator=self.generator).int()
        widest = -(-max(lengths) // PAGE)
        self.page_table = torch.stack([table[row * widest : (row + 1) * widest] for row in range(len(lengths))])
        decodes = new is None
        taken = [1] * len(lengths) if new is None else new
        ends = [range(length - some + 1, length + 1) for length, some in zip(lengths, taken, strict=True)]
        self.rows = [row for row, some in enumerate(taken) for _ in range(some)]
        self.seen = [end for row in ends for end in row]
        self.tokens, self.padding = len(self.seen) + padding, padding
        slots = [self.slot(row, seen - 1) for row, seen in zip(self.rows, self.seen, strict=True)]
        mode = SimpleNamespace(is_decode=lambda: decodes, is_extend=lambda: not decodes)
        self.batch = SimpleNamespace(forward_mode=mode, out_cache_loc=torch.tensor(slots + [0] * padding))
        self.metadata = SimpleNamespace(
            real_page_table=self.page_table,
            dsa_seqlens_expanded=torch.tensor(self.seen, dtype=torch.int32),
            token_to_batch_idx=None if decodes else torch.tensor(self.rows, dtype=torch.int32),
            max_seq_len_k=max(lengths),
            topk_indices_offset=None,
        )
        self.pool = {layer: torch.zeros(PAGES + 1, PAGE * (DIM + 4), dtype=torch.uint8) for layer in LAYERS}
        for buffer in self.pool.values():
            keys = torch.randn((PAGES + 1) * PAGE, DIM, generator=self.generator)
            index_keys.store(*index_keys.quantize(keys), torch.arange(len(keys)), buffer)
        self.view = self._view(lengths) if decodes else None

    def slot(self, row: int, position: int) -> int:
        return int(self.page_table[row, position // PAGE]) * PAGE + position % PAGE

    def _view(self, lengths: list[int]) -> BatchView | None:
        method: Any = build("dsa", {}).method
        method.index_topk = TOPK
        plan = plan_decode(method, torch.tensor(lengths))
        if not plan.sparse:
            return None
        stats = torch.zeros(4, dtype=torch.int64)
        view = allocate_view(self.tokens, 1, PAGES * PAGE, TOPK, 1, stats, method.view_buffers)
        requests = SimpleNamespace(req_pool_indices=torch.arange(self.tokens))
        view.load(plan, requests, torch.zeros(self.tokens, 1, dtype=torch.int32))
        return view

    def backend(self, config: dict[str, Any] | None = None, fused: bool = False) -> Any:
        dense = SimpleNamespace(forward_metadata=self.metadata, use_fused_topk=fused)
        counters = SimpleNamespace(reuse=torch.zeros(2, dtype=torch.int64), sparse_layers=len(LAYERS))
        method = build("dsa", config or {}).method
        return SimpleNamespace(
            view=self.view, dense=dense, first_layer=LAYERS[0], indexed=None, method=method, counters=counters
        )


class Model:
    """An indexer whose queries and keys are random, a new set for every call; keeps them."""

    n_heads, softmax_scale, index_topk = HEADS, DIM**-0.5, TOPK

    def __init__(self, rows: Rows):
        self.generator, self.calls = rows.generator, []
        self.weights_proj = SimpleNamespace(weight=torch.randn(HEADS, HIDDEN, generator=rows.generator))

    def _get_q_k_bf16(self, q_lora: torch.Tensor, x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
        query = torch.randn(len(x), HEADS, DIM, generator=self.generator)
        self.calls.append((query, x))
        return query, torch.randn(len(x), DIM, generator=self.generator), None


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    """Runs the indexer of one layer; returns what it chose, a copy."""

    def layer(rows: Rows, backend: Any, model: Model, layer_id: int) -> torch.Tensor:
        pool = SimpleNamespace(get_index_k_with_scale_buffer=rows.pool.__getitem__)
        monkeypatch.setattr("sglang.srt.model_executor.forward_context.get_token_to_kv_pool", lambda: pool)
        monkeypatch.setattr(indexer, "served_backend", lambda: backend)
        x = torch.randn(rows.tokens, HIDDEN, generator=rows.generator)
        positions = torch.zeros(rows.tokens, dtype=torch.int64)
        chosen = indexer.choose(no_original, model, x, x, positions, rows.batch, layer_id)
        assert chosen is not None
        return chosen.clone()

    return layer


def defined(rows: Rows, model: Model, layer_id: int) -> torch.Tensor:
    """What the last call should have chosen, from the stored keys, query by query."""
    (query, x), buffer = model.calls[-1], rows.pool[layer_id]
    values, scales = index_keys.quantize(query, rotate=False)
    gates = x.double() @ model.weights_proj.weight.double().T * scales * (HEADS**-0.5 * model.softmax_scale)
    stored, key_scales = index_keys.reference.parts(buffer)
    keys = stored.view(torch.float8_e4m3fn).flatten(0, 1).double() * key_scales.flatten()[:, None].double()
    expected = torch.full((rows.tokens, TOPK), -1, dtype=torch.int32)
    for token, (row, seen) in enumerate(zip(rows.rows, rows.seen, strict=True)):
        slots = [rows.slot(row, position) for position in range(seen)]
        logits = ((values[token].double() @ keys[slots].T).relu() * gates[token][:, None]).sum(0)
        best = logits.float().sort(descending=True, stable=True).indices[:TOPK].sort().values
        expected[token, : len(best)] = best.int()
    return expected


# Arguments of `Rows`.
PASSES: dict[str, dict[str, Any]] = {
    "decode": {"lengths": [200, 20, 33]},
    "decode within a graph": {"lengths": [200, 20], "padding": 2},
    "dense decode": {"lengths": [32, 20]},
    "prefill": {"lengths": [150, 70], "new": [40, 70]},
    "prefill of a padded batch": {"lengths": [150, 20], "new": [30, 20], "padding": 5},
    "prefill of short prompts": {"lengths": [32, 9], "new": [10, 9]},
}


@pytest.mark.parametrize("logits_bytes", [indexer.LOGITS_BYTES, 4 * 3 * PAGE * 7], ids=["all at once", "7 at once"])
@pytest.mark.parametrize("kind", PASSES)
def test_each_layer_chooses_by_its_own_logits(
    kind: str, logits_bytes: int, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the layer before it has chosen in the same place."""
    monkeypatch.setattr(indexer, "LOGITS_BYTES", logits_bytes)
    rows = Rows(**PASSES[kind])
    backend, model = rows.backend(), Model(rows)
    found = []
    for layer in LAYERS:
        found.append(run(rows, backend, model, layer))
        assert torch.equal(found[-1], defined(rows, model, layer))
    chooses = max(rows.seen) > TOPK
    assert torch.equal(*found[:2]) != chooses, "layers have queries and keys of their own"
    seen = torch.tensor(rows.seen + [0] * rows.padding)
    assert backend.indexed.counts[:, 0].tolist() == seen.clamp(max=TOPK).tolist()


@pytest.mark.parametrize("kind", PASSES)
def test_layers_share_what_a_pass_has_once(kind: str, run, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the first one makes it anew, since lengths change in place where a CUDA graph is replayed."""
    rows = Rows(**PASSES[kind])
    backend, model, begun = rows.backend(), Model(rows), []
    begin = indexer.begin_pass
    monkeypatch.setattr(indexer, "begin_pass", lambda *args: begun.append(begin(*args)) or begun[-1])
    for _ in range(2):
        for layer in LAYERS:
            run(rows, backend, model, layer)
            assert backend.indexed is begun[-1]
    assert len(begun) == 2


def test_a_longer_step_in_the_same_buffers_is_seen(run) -> None:
    rows = Rows([100, 90])
    backend, model = rows.backend(), Model(rows)
    run(rows, backend, model, 0)
    assert rows.view is not None
    rows.view.n_pages.copy_(torch.tensor([102, 20]))
    rows.view.n_select.copy_(torch.tensor([TOPK, 20]))
    rows.seen = [102, 20]
    assert torch.equal(run(rows, backend, model, 0), defined(rows, model, 0))
    assert backend.indexed.counts.tolist() == [[TOPK], [20]]


def test_no_table_of_a_pass_is_repeated_for_each_query(run) -> None:
    rows = Rows(**PASSES["prefill"])
    backend = rows.backend()
    run(rows, backend, Model(rows), 0)
    batch = backend.indexed
    assert batch.positions.tolist() == list(range(3 * PAGE))
    assert batch.page_table is rows.page_table
    assert len(batch.rows) == len(batch.lengths) == len(batch.wanted) == len(batch.last_slots) == rows.tokens


@pytest.mark.parametrize("kind", PASSES)
def test_a_pass_begins_without_waiting_for_the_device(kind: str) -> None:
    """Tensors without values: reading one on the host is an error."""
    rows = Rows(**PASSES[kind])
    metadata = vars(rows.metadata)
    metadata |= {name: value.to("meta") for name, value in metadata.items() if isinstance(value, torch.Tensor)}
    if rows.view is not None:
        counts = {name: getattr(rows.view, name).to("meta") for name in ("n_pages", "n_select")}
        rows.view = replace(rows.view, **counts)
    batch = indexer.begin_pass(rows.backend(), rows.batch, rows.tokens, TOPK)
    assert batch.chosen.is_meta and batch.chosen.shape == (rows.tokens, TOPK)
    assert bool(batch.at_once) == (max(rows.seen) > TOPK)


def test_decode_is_counted_and_prefill_is_not(run) -> None:
    rows = Rows([200, 20, 33])
    backend, model = rows.backend(), Model(rows)
    for layer in LAYERS:
        run(rows, backend, model, layer)
    assert rows.view is not None
    assert rows.view.stats.tolist() == [3 * 3, (32 + 20 + 32) * 3, (200 + 20 + 33) * 3, 0]
    rows = Rows(**PASSES["prefill"])
    backend = rows.backend()
    run(rows, backend, Model(rows), 0)
    assert backend.indexed.stats is None


@pytest.mark.parametrize("kind", PASSES)
def test_attention_reads_what_was_chosen_and_no_more(kind: str, run) -> None:
    rows = Rows(**PASSES[kind])
    backend = rows.backend()
    chosen = run(rows, backend, Model(rows), 0)
    table = torch.full_like(chosen, -1)
    for token, row in enumerate(rows.rows):
        places = chosen[token][chosen[token] >= 0].tolist()
        table[token, : len(places)] = torch.tensor([rows.slot(row, place) for place in places])
    query = torch.randn(rows.tokens, 2, LATENT + ROPE, generator=rows.generator)
    cache = torch.randn((PAGES + 1) * PAGE, 1, LATENT + ROPE, generator=rows.generator)
    output = indexer.attend(no_original, None, query, cache, LATENT, table, 0.3)
    for token in range(rows.tokens):
        held = cache[table[token][table[token] >= 0].long(), 0].double()
        weights = (query[token].double() @ held.T * 0.3).softmax(-1)
        assert torch.allclose(output[token].double(), weights @ held[:, :LATENT], atol=1e-5)


def test_attention_before_a_choice_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer, "served_backend", Rows(**PASSES["prefill"]).backend)
    with pytest.raises(RuntimeError, match="before its indexer"):
        indexer.attend(no_original, None, torch.zeros(1, 1, 80), torch.zeros(1, 1, 80), 64, torch.zeros(1, 8), 1.0)


def test_layers_whose_attention_wants_nothing_store_their_keys_only(run, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(**PASSES["prefill of short prompts"])
    backend, model = rows.backend(), Model(rows)
    run(rows, backend, model, 0)
    backend.indexed, before = None, rows.pool[1].clone()
    x = torch.zeros(rows.tokens, HIDDEN)
    assert indexer.choose(no_original, model, x, x, x, rows.batch, 1, return_indices=False) is None
    assert backend.indexed is None and not torch.equal(rows.pool[1], before)


def named(rows: Rows, chosen: torch.Tensor) -> torch.Tensor:
    """The slots of positions, one by one."""
    table = torch.full_like(chosen, -1)
    for token, row in enumerate(rows.rows):
        for place, position in enumerate(chosen[token].tolist()):
            table[token, place] = rows.slot(row, position) if position >= 0 else -1
    return table


@pytest.mark.parametrize("kind", PASSES)
def test_slots_are_given_where_the_backend_takes_them(kind: str, run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer, "LOGITS_BYTES", 4 * 3 * PAGE * 7)
    monkeypatch.setattr(indexer, "LOOKED_UP", 3)
    rows = Rows(**PASSES[kind])
    backend, model = rows.backend(fused=True), Model(rows)
    for layer in LAYERS:
        found = run(rows, backend, model, layer)
        assert torch.equal(found, named(rows, defined(rows, model, layer)))
        assert backend.indexed.selection.data_ptr() == backend.indexed.slots.data_ptr()


@pytest.mark.parametrize("kind", ["prefill", "prefill of short prompts"])
def test_tokens_of_a_copied_cache_are_numbered_from_where_their_row_begins(kind: str, run) -> None:
    rows = Rows(**PASSES[kind])
    starts = torch.tensor([0, 1000], dtype=torch.int32)[torch.tensor(rows.rows)]
    rows.metadata.topk_indices_offset = starts
    backend, model = rows.backend(fused=True), Model(rows)
    expected = run(rows, backend, model, 0), defined(rows, model, 0)
    assert torch.equal(expected[0], torch.where(expected[1] < 0, -1, expected[1] + starts[:, None]))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", PASSES)
def test_layers_share_a_selection_in_decode_alone(kind: str, fused: bool, run) -> None:
    rows = Rows(**PASSES[kind])
    backend, model = rows.backend({"index_share_layers": 2}, fused), Model(rows)
    found, keys = [], []
    for layer in LAYERS:
        before = rows.pool[layer].clone()
        found.append(run(rows, backend, model, layer))
        keys.append(not torch.equal(rows.pool[layer], before))
        own = defined(rows, model, layer)
        reused = rows.view is not None and layer == 1
        assert torch.equal(found[-1], found[0] if reused else named(rows, own) if fused else own)
    assert all(keys), "every layer's keys are stored: the next step may choose by them"
    if rows.view is not None:
        lengths = torch.tensor(rows.seen)
        each = [len(lengths), int(lengths.clamp(max=TOPK).sum()), int(lengths.sum())]
        assert rows.view.stats[:3].tolist() == [3 * number for number in each]


def test_what_reuse_costs_is_measured_and_changes_nothing(run) -> None:
    plain = Rows(**PASSES["decode"])
    backend, model = plain.backend({"index_share_layers": 3}), Model(plain)
    without = [run(plain, backend, model, layer) for layer in LAYERS]
    assert backend.counters.reuse.tolist() == [0, 0]
    rows = Rows(**PASSES["decode"])
    backend, model = rows.backend({"index_share_layers": 3, "measure_reuse": True}), Model(rows)
    held = 0
    for layer in LAYERS:
        assert torch.equal(run(rows, backend, model, layer), without[layer])
        own = defined(rows, model, layer)
        held += sum(len(set(own[row].tolist()) & set(without[0][row].tolist())) for row in (0, 2) if layer)
    # The row of 20 tokens leaves nothing out.
    assert backend.counters.reuse.tolist() == [2 * 2 * TOPK, held] and 0 < held < 4 * TOPK
    assert rows.view is not None and plain.view is not None and torch.equal(rows.view.stats, plain.view.stats)


def test_a_native_indexer_is_left_alone_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(**PASSES["decode within a graph"])
    backend = rows.backend({"implementation": "native"})
    monkeypatch.setattr(indexer, "served_backend", lambda: backend)
    asked: list[Any] = []
    for layer in LAYERS:
        assert indexer.choose(lambda *args: asked.append(args[-2]), None, *[None] * 4, layer, True) is None
    assert asked == list(LAYERS) and rows.view is not None
    assert rows.view.stats.tolist() == [2 * 3, (32 + 20) * 3, 220 * 3, 0]
    assert indexer.attend(lambda *args: args[-1], None, *[None] * 4, 0.3) == 0.3
