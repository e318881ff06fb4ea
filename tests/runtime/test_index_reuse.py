"""Selections of decode steps that serve later ones: step by step, against the definition."""

from types import SimpleNamespace
from typing import Any

import dsa_passes
import pytest
import torch
from dsa_passes import LAYERS, TOPK, Model, Rows, defined, runner

from sglang_sparse.index_reuse import StepReuse, state_bytes
from sglang_sparse.methods.dsa import Dsa, DsaConfig

STEPS = 3
KEPT = TOPK - STEPS + 1


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    return runner(monkeypatch)


def kept_by(rows: Rows, model: Model, layer: int, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """What a step that chooses keeps, by the definition."""
    with monkeypatch.context() as patch:
        patch.setattr(dsa_passes, "TOPK", KEPT)
        return [[place for place in row if place >= 0] for row in defined(rows, model, layer).tolist()]


def grow(rows: Rows, lengths: list[int]) -> None:
    """To the next step, in the same buffers, as where a CUDA graph is replayed."""
    assert rows.view is not None
    counts = torch.tensor(lengths + [0] * rows.padding, dtype=torch.int32)
    rows.view.n_pages.copy_(counts)
    rows.view.n_select.copy_(counts.clamp(max=TOPK))
    rows.seen = lengths
    slots = [rows.slot(row, length - 1) for row, length in enumerate(lengths)]
    rows.batch.out_cache_loc = torch.tensor(slots + [0] * rows.padding)


def places(chosen: torch.Tensor) -> list[list[int]]:
    for row in chosen.tolist():
        used = [place for place in row if place >= 0]
        assert used == sorted(set(used)) and row == used + [-1] * (len(row) - len(used))
    return [[place for place in row if place >= 0] for row in chosen.tolist()]


def backend_of(rows: Rows, config: dict[str, Any] | None = None, fused: bool = False) -> Any:
    rows.steps = StepReuse(8, LAYERS, TOPK, STEPS, torch.device("cpu"))
    return rows.backend({"index_reuse_steps": STEPS, **(config or {})}, fused)


@pytest.mark.parametrize("padding", [0, 2])
def test_a_selection_serves_the_steps_after_it(padding: int, run, monkeypatch: pytest.MonkeyPatch) -> None:
    first = [150, 20, 33, 90]
    rows = Rows(first, padding=padding)
    backend, model = backend_of(rows), Model(rows)
    begun = {0: 0, 2: 0, 3: 0}
    kept: dict[tuple[int, int], list[int]] = {}
    for step in range(5):
        lengths = [length + step for length in first]
        grow(rows, lengths)
        if step == 1:
            # Another request has come to this row of the pool.
            rows.steps.forget(torch.tensor([3]))
            begun[3] = 1
        for layer in LAYERS:
            found = places(run(rows, backend, model, layer))
            fresh = kept_by(rows, model, layer, monkeypatch)
            for row, since in begun.items():
                if (step - since) % STEPS == 0:
                    kept[row, layer] = fresh[row]
                newest = [lengths[row] - 1 - age for age in range((step - since) % STEPS)]
                assert found[row] == kept[row, layer] + newest[::-1]
            assert found[1] == list(range(lengths[1])) and found[4:] == [[]] * padding
        attended = [len(row) for row in found]
        assert backend.indexed.counts[:, 0].tolist() == attended and max(attended) <= TOPK
    assert len({tuple(kept[0, layer]) for layer in LAYERS}) == len(LAYERS)


def test_what_reuses_is_counted_as_it_attends(run) -> None:
    rows = Rows([200, 20])
    backend, model = backend_of(rows), Model(rows)
    expected = torch.zeros(3, dtype=torch.int64)
    for step in range(STEPS):
        grow(rows, [200 + step, 20 + step])
        for layer in LAYERS:
            run(rows, backend, model, layer)
        expected += len(LAYERS) * torch.tensor([2, KEPT + step + 20 + step, 220 + 2 * step])
    assert rows.view is not None and rows.view.stats[:3].tolist() == expected.tolist()
    assert backend.counters.reuse.tolist() == [0, 0]


def test_slots_are_looked_up_in_every_step(run) -> None:
    rows = Rows([200, 70])
    backend, model = backend_of(rows, fused=True), Model(rows)
    for step in range(2):
        grow(rows, [200 + step, 70 + step])
        found = run(rows, backend, model, 0)
        for row, used in enumerate(places(backend.indexed.chosen)):
            assert found[row, : len(used)].tolist() == [rows.slot(row, place) for place in used]
            assert (found[row, len(used) :] == -1).all()


def test_a_prompt_that_is_read_lets_its_row_choose_anew(run, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows([200, 90])
    backend, model = backend_of(rows), Model(rows)
    run(rows, backend, model, 0)
    read = Rows(lengths=[70], new=[40])
    read.steps = rows.steps
    read.batch.req_pool_indices = torch.tensor([1])
    run(read, read.backend({"index_reuse_steps": STEPS}), Model(read), 0)
    grow(rows, [201, 91])
    found = places(run(rows, backend, model, 0))
    assert len(found[0]) == KEPT + 1 and found[1] == kept_by(rows, model, 0, monkeypatch)[1]


def test_how_much_of_their_own_choice_rows_were_given(run, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows([200, 90])
    backend, model = backend_of(rows, {"measure_reuse": True}), Model(rows)
    run(rows, backend, model, 0)
    assert backend.counters.reuse.tolist() == [0, 0]
    grow(rows, [201, 91])
    found = places(run(rows, backend, model, 0))
    with monkeypatch.context() as patch:
        patch.setattr(dsa_passes, "TOPK", KEPT + 1)
        own = [[place for place in row if place >= 0] for row in defined(rows, model, 0).tolist()]
    held = sum(len({*mine} & {*theirs}) for mine, theirs in zip(found, own, strict=True))
    assert backend.counters.reuse.tolist() == [2 * (KEPT + 1), held]


def test_layers_share_what_a_step_took_over(run) -> None:
    rows = Rows([200, 90])
    rows.steps = StepReuse(8, LAYERS[::2], TOPK, STEPS, torch.device("cpu"))
    backend, model = rows.backend({"index_reuse_steps": STEPS, "index_share_layers": 2}), Model(rows)
    for step in range(2):
        grow(rows, [200 + step, 90 + step])
        own, shared, other = (run(rows, backend, model, layer) for layer in LAYERS)
        assert torch.equal(own, shared) and not torch.equal(own, other)


def test_a_step_begins_without_waiting_for_the_device() -> None:
    """Tensors without values: reading one on the host is an error."""
    device = torch.device("meta")
    steps = StepReuse(8, LAYERS, TOPK, STEPS, device)
    lengths = torch.zeros(4, dtype=torch.int32, device=device)
    choice = steps.begin(torch.zeros(4, dtype=torch.int64, device=device), lengths, lengths)
    chosen = torch.zeros(4, TOPK, dtype=torch.int32, device=device)
    steps.complete(LAYERS[0], choice, chosen, lengths)
    assert chosen.is_meta and choice.attended.shape == (4,)


def test_what_it_takes_is_what_is_charged() -> None:
    method = Dsa(DsaConfig(index_reuse_steps=STEPS, index_share_layers=2))
    method.adopt(SimpleNamespace(hf_text_config=SimpleNamespace(index_topk=TOPK)))
    steps = StepReuse(8, LAYERS[::2], TOPK, STEPS, torch.device("cpu"))
    held = (*steps._chosen.values(), steps._since)
    assert state_bytes(method, 8, len(LAYERS)) == sum(tensor.nbytes for tensor in held)
    assert state_bytes(Dsa(DsaConfig()), 8, len(LAYERS)) == 0
