"""The decode step of the kernel benchmark is a server's, and what outputs over it are worth."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_layers import OWN, SHAPE, exact

from eval.lab.kernels import kernel_inputs
from eval.lab.kernels.harness import Implementation
from eval.lab.kernels.kernel_inputs import WHOLE, Step, View
from eval.lab.kernels.kernel_quality import quality, samples
from sglang_sparse.attention.batch import allocate_view
from sglang_sparse.attention.plan import usual_selection
from sglang_sparse.methods.resa import Resa, ResaConfig
from sglang_sparse.methods.views import SELECT_STATS
from sglang_sparse_kernels.common.testing import paged_batch, seeded
from sglang_sparse_kernels.page_topk import page_topk
from sglang_sparse_kernels.sparse_decode import sparse_decode

BY = {one.op: one for one in OWN}


@pytest.fixture(scope="module")
def step() -> Step:
    return Step(SHAPE, "cpu", 2)


def judged(step: Step, op: str, output: torch.Tensor | None) -> dict[str, float]:
    """Return the quality of an output, as one of dense attention by a library or of this project's operation."""
    one = BY.get(op) or Implementation(op, "somebody", exact)
    return quality(step, samples(step), one, output)


def test_quality_against_float64(step: Step) -> None:
    over = samples(step)
    assert [(s.row, s.head) for s in over] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    layer = step.layers[0]
    sparse = judged(step, WHOLE, step.whole(layer))
    assert sparse["relative_l2"] < 1e-2 < sparse["dense_l2"] and 0.3 < sparse["recall"] < 0.9
    assert judged(step, "sparse_decode", step.attend(layer)) == {k: v for k, v in sparse.items() if k != "agreement"}
    assert judged(step, "dense_decode", exact(step)[0]())["relative_l2"] < 1e-2
    assert judged(step, "page_topk", step.select(layer)) == {"recall": sparse["recall"], "agreement": 1.0}
    worse = step.select(layer).clone()
    worse[:, :, 0] = worse[:, :, 1]
    found = judged(step, "page_topk", worse)
    assert found["agreement"] == 1 - 1 / SHAPE.n_select and found["recall"] < sparse["recall"]
    assert 0 <= judged(step, "page_score", step.score(layer))["score_error"] < 1e-6
    assert judged(step, "page_summary", None) == {}


def test_what_is_wrong_is_refused(step: Step) -> None:
    layer, held = step.layers[0], SHAPE.n_pages
    for op, output in (("sparse_decode", step.attend(layer)), ("dense_decode", exact(step)[0]())):
        assert output is not None
        for spoiled in (output.roll(1, 0), torch.full_like(output, torch.nan)):
            with pytest.raises(
                ValueError, match=r"its output is wrong: relative L2 .* from float64 \(allowed: 0\.02\)"
            ):
                judged(step, op, spoiled)
    scores = step.score(layer).clone()
    for spoiled, says in (
        (scores * 1.001, r"its scores are off by .* \(allowed: 1e-05\)"),
        (scores.roll(1, 1), "its scores are off by"),
        (torch.full_like(scores, torch.nan), "the newest pages do not score infinity"),
        (scores.masked_fill(scores.isinf() & (torch.arange(scores.shape[2]) == held - 2), 9.0), "the newest pages"),
        (scores.masked_fill(torch.arange(scores.shape[2]) == 3, torch.nan), "its scores are off by nan"),
    ):
        with pytest.raises(ValueError, match=says):
            judged(step, "page_score", spoiled)


def test_a_chain_attends_to_what_it_selected_itself(step: Step) -> None:
    """Right attention to the wrong pages is refused, unless their scores are equal."""

    def other(scores: torch.Tensor, *rest: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        scores = scores.clone()
        lightest = scores[0, 0].masked_fill(~chosen, torch.inf).argmin()
        scores[0, 0, lightest], scores[0, 0, left_out] = -100.0, 100.0
        return page_topk(scores, *rest, **more)

    layer, (first, *others) = step.layers[0], samples(step)
    chosen = torch.nn.functional.pad(first.attended, (0, step.view.max_select - SHAPE.n_pages))
    left_out = int((~first.attended).nonzero()[0])
    output = step.whole(layer, selecting=other)
    with pytest.raises(ValueError, match="it selects 6 pages of which 1 are not among the 6 highest, and 1 are off"):
        quality(step, [first, *others], BY[WHOLE], output)
    first.scores[left_out] = first.scores[first.attended].min()
    found = quality(step, [first, *others], BY[WHOLE], output)
    assert found["relative_l2"] < 1e-2 and found["agreement"] == 1 - 1 / (6 * SHAPE.n_select)


def test_a_selection_of_all_pages_is_dense() -> None:
    every = Step(replace(SHAPE, active_ratio=1.0), "cpu", 1)
    found = judged(every, WHOLE, every.whole(every.layers[0]))
    assert found["recall"] == pytest.approx(1.0) and found["dense_l2"] == found["relative_l2"] < 1e-2


@pytest.mark.parametrize("tokens", [118, 400, 2048 + 131072])
@pytest.mark.parametrize("n_min", [1, 2, 16])
def test_tables_are_those_of_a_server(tokens: int, n_min: int) -> None:
    shape = replace(SHAPE, n_min=n_min, context_length=tokens, active_ratio=0.1)
    view = View(shape, paged_batch((118, 118), 8, "cpu", seeded("cpu", 0)))
    method = Resa(ResaConfig.model_validate({"page_size": 8, "active_ratio": 0.1, "min_pages": n_min}))
    pages = -(-tokens // 8)
    served = allocate_view(2, 3, pages, usual_selection(method, pages), 8, torch.zeros(SELECT_STATS, dtype=torch.int64))
    for name in ("page_table", "n_pages", "n_select", "scores", "arrivals", "stats"):
        mine, theirs = getattr(view, name), getattr(served, name)
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), name
    assert [made.shape for made in view.selected] == [made.shape for made in served.selected]
    assert (view.max_select, shape.usual_select) == (served.max_select, served.usual_select)
    assert view.n_select.equal(method.n_select(view.n_pages).minimum(view.n_pages))
    assert shape.local_pages == method.config.local_pages


def test_the_step_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = Step(SHAPE, "cpu", 2), []

    def spy(*arguments: Any, **more: Any) -> torch.Tensor:
        calls.append((arguments[3].shape, more["usual_pages"], more["arrivals"].shape))
        return sparse_decode(*arguments, **more)

    monkeypatch.setattr(kernel_inputs, "sparse_decode", spy)
    outputs = [step.whole(layer) for layer in step.layers]
    # 50 pages are the longest context's, of which 20 are selected; a row of the buffers has whole lines of 16.
    assert calls == [((2, 3, 64), 20, (2, 3))] * 2 and step.view.scores.shape == (2, 3, 64)
    # Selected for twice, for each row and KV head: 6 pages of 15.
    assert step.view.stats.tolist() == [12, 12 * 6, 12 * 15, 0]
    assert step.layers[0].scores[..., :15].isinf().sum(2).eq(2).all() and SHAPE.facts()["local_pages"] == 2
    assert all(torch.isin(step.batch.page_table[0, -2:], layer.indices[0, 0]).all() for layer in step.layers)
    assert replace(SHAPE, n_min=1).facts()["local_pages"] == 1
    alone = Step(replace(SHAPE, context_length=0), "cpu", 2)
    assert alone.view.max_select == 16 and alone.shape.usual_select == SHAPE.n_select == 6
    assert alone.shape.facts()["context_length"] == 118
    for layer, output in zip(alone.layers, outputs, strict=True):
        torch.testing.assert_close(alone.whole(layer), output, rtol=1e-2, atol=1e-2)
