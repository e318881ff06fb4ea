"""A DSA selection as SGLang's attention takes it, shared by layers, by the kernels, or not made here at all."""

from typing import Any

import pytest
import torch
from dsa_passes import (
    LATENT,
    LAYERS,
    PAGE,
    PAGES,
    PASSES,
    ROPE,
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


@pytest.mark.parametrize("implementation", ["native", "auto"])
def test_a_native_indexer_is_left_alone_and_counted(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(**PASSES["decode within a graph"])
    backend = rows.backend({"implementation": implementation})
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
