"""A DSA pass layer by layer: what each chooses, against the definition, and how SGLang's attention gets it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from dsa_passes import (
    HIDDEN,
    LATENT,
    LAYERS,
    PAGE,
    PAGES,
    PASSES,
    ROPE,
    TOPK,
    Model,
    Rows,
    defined,
    no_original,
    runner,
)

from sglang_sparse.attention.dsa import indexer, latents
from sglang_sparse_kernels.index_topk import choose


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    """Runs the indexer of one layer; returns what it chose, a copy."""
    return runner(monkeypatch)


@pytest.mark.parametrize("logits_bytes", [32 * 2**20, 4 * 3 * PAGE * 7], ids=["all at once", "7 at once"])
@pytest.mark.parametrize("kind", PASSES)
def test_each_layer_chooses_by_its_own_logits(
    kind: str, logits_bytes: int, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the layer before it has chosen in the same place."""
    monkeypatch.setattr(choose, "LOGITS_BYTES", logits_bytes)
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


def test_tokens_that_pad_a_verification_see_nothing(run) -> None:
    """The tokens of a verification are not a multiple of the drafts where ranks share them."""
    rows = Rows([101, 102, 103], padding=1)
    assert rows.view is not None
    rows.view = rows.view.rows(3)
    backend, model = rows.backend(), Model(rows)
    assert torch.equal(run(rows, backend, model, 0), defined(rows, model, 0))
    assert backend.indexed.counts.tolist() == [[TOPK]] * 3 + [[0]]


def test_no_table_of_a_pass_is_repeated_for_each_query(run) -> None:
    rows = Rows(**PASSES["prefill"])
    backend = rows.backend()
    run(rows, backend, Model(rows), 0)
    batch = backend.indexed
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


def test_a_decode_step_that_was_planned_dense_is_not_longer_than_that() -> None:
    """Nothing is chosen there: the first tokens are all."""
    rows = Rows([TOPK, 20])
    assert rows.view is None
    batch = indexer.begin_pass(rows.backend(), rows.batch, rows.tokens, TOPK)
    assert batch.wanted.tolist() == [TOPK, 20]
    rows = Rows([20, TOPK + 1])
    rows.view = None
    with pytest.raises(RuntimeError, match=f"was planned dense and has a row of {TOPK + 1} tokens; at most {TOPK} may"):
        indexer.begin_pass(rows.backend(), rows.batch, rows.tokens, TOPK)


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
def test_attention_reads_what_was_chosen_and_no_more(kind: str, run, monkeypatch: pytest.MonkeyPatch) -> None:
    # A long prefill in one piece takes several launches.
    monkeypatch.setattr(latents, "ATTENDED", 7)
    rows = Rows(**PASSES[kind])
    backend = rows.backend()
    chosen = run(rows, backend, Model(rows), 0)
    table = torch.full_like(chosen, -1)
    for token, row in enumerate(rows.rows):
        places = chosen[token][chosen[token] >= 0].tolist()
        table[token, : len(places)] = torch.tensor([rows.slot(row, place) for place in places])
    query = torch.randn(rows.tokens, 2, LATENT + ROPE, generator=rows.generator)
    cache = torch.randn((PAGES + 1) * PAGE, 1, LATENT + ROPE, generator=rows.generator)
    output = latents.attend(no_original, None, query, cache, LATENT, table, 0.3)
    for token in range(rows.tokens):
        held = cache[table[token][table[token] >= 0].long(), 0].double()
        weights = (query[token].double() @ held.T * 0.3).softmax(-1)
        assert torch.allclose(output[token].double(), weights @ held[:, :LATENT], atol=1e-5)


def test_attention_before_a_choice_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latents, "served_backend", Rows(**PASSES["prefill"]).backend)
    with pytest.raises(RuntimeError, match="before its indexer"):
        latents.attend(no_original, None, torch.zeros(1, 1, 80), torch.zeros(1, 1, 80), 64, torch.zeros(1, 8), 1.0)


def test_layers_whose_attention_wants_nothing_store_their_keys_only(run, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(**PASSES["prefill of short prompts"])
    backend, model = rows.backend(), Model(rows)
    run(rows, backend, model, 0)
    backend.indexed, before = None, rows.pool[1].clone()
    x = torch.zeros(rows.tokens, HIDDEN)
    assert indexer.choose(no_original, model, x, x, x, rows.batch, 1, return_indices=False) is None
    assert backend.indexed is None and not torch.equal(rows.pool[1], before)


def named(rows: Rows, chosen: torch.Tensor) -> torch.Tensor:
    """The slots of positions, one by one; SGLang's attention counts a token of what pads a pass, which is slot 0."""
    table = torch.full_like(chosen, -1)
    table[len(rows.rows) :, 0] = 0
    for token, row in enumerate(rows.rows):
        for place, position in enumerate(chosen[token].tolist()):
            table[token, place] = rows.slot(row, position) if position >= 0 else -1
    return table


@pytest.mark.parametrize("kind", PASSES)
def test_slots_are_given_where_the_backend_takes_them(kind: str, run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "LOGITS_BYTES", 4 * 3 * PAGE * 7)
    monkeypatch.setattr(choose, "LOOKED_UP", 3)
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


def test_a_native_indexer_is_left_alone_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(**PASSES["decode within a graph"])
    backend = rows.backend({"implementation": "auto"})
    for module in (indexer, latents):
        monkeypatch.setattr(module, "served_backend", lambda: backend)
    asked: list[Any] = []
    for layer in LAYERS:
        assert indexer.choose(lambda *args: asked.append(args[-3]), None, *[None] * 4, layer, True) is None
    assert asked == list(LAYERS) and rows.view is not None
    assert rows.view.stats.tolist() == [2 * 3, (32 + 20) * 3, 220 * 3, 0]
    assert latents.attend(lambda *args: args[-1], None, *[None] * 4, 0.3) == 0.3


@pytest.mark.parametrize("kind", ["decode within a graph", "prefill of a padded batch"])
def test_the_portable_kernels_are_the_reference(kind: str, run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through Triton's interpreter: what is chosen is the same, and what is attended to nearly."""
    found = []
    for interpreted in (False, True):
        if interpreted:
            monkeypatch.setenv("TRITON_INTERPRET", "1")
        rows = Rows(**PASSES[kind])
        backend, model = rows.backend(fused=True), Model(rows)
        chosen = [run(rows, backend, model, layer) for layer in LAYERS]
        query = torch.randn(rows.tokens, 2, LATENT + ROPE, generator=rows.generator)
        cache = torch.randn((PAGES + 1) * PAGE, 1, LATENT + ROPE, generator=rows.generator)
        output = latents.attend(no_original, None, query, cache, LATENT, backend.indexed.selection, 0.3)
        found.append((torch.stack(chosen), output, rows.pool[0]))
    (chosen, output, keys), (chosen_again, output_again, keys_again) = found
    assert torch.equal(chosen, chosen_again) and torch.equal(keys, keys_again)
    assert torch.allclose(output, output_again, atol=1e-5)
