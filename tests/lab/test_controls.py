"""The controls compute what they say they do."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_sparse.attention.batch import allocate_view
from sglang_sparse.methods.anchor import Anchor, AnchorConfig
from sglang_sparse.methods.prefill import PrefillInputs, PrefillSpan
from sglang_sparse.methods.robsa.decode import RobsaConfig
from sglang_sparse_kernels.page_score import page_score
from sglang_sparse_kernels.page_summary import update_page_summary

CONTROLS = Path(__file__).parent.parent.parent / "eval" / "lab" / "controls"


@pytest.fixture
def controls(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(CONTROLS))
    yield importlib.import_module
    for path in CONTROLS.glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_mass_of_a_half_filled_page(controls) -> None:
    true_mass = controls("true_mass")
    torch.manual_seed(0)
    page_size, kv_heads, group, dim = 4, 2, 3, 8
    k_cache = torch.randn(40, kv_heads, dim)
    buffer = torch.zeros(10, page_size, kv_heads, dim)
    # Logical pages 7, 2, 5; 10 tokens: the last page holds two.
    pages, length = [7, 2, 5], 10
    true_mass.copy_keys([k_cache], [buffer], torch.tensor([31, -1, 11, 21]), page_size, torch.zeros(1))
    query = torch.randn(2, kv_heads * group, dim)
    table = torch.tensor([[*pages, 0], [0, 0, 0, 0]], dtype=torch.int32)
    mass = true_mass.page_mass(query, buffer, table, torch.tensor([3, 0], dtype=torch.int32))
    slots = [page * page_size + i for page in pages for i in range(page_size)][:length]
    for head in range(kv_heads):
        queries = query[0, head * group : (head + 1) * group]
        weights = (queries @ k_cache[slots, head].T * dim**-0.5).softmax(-1)
        expected = torch.stack([part.sum(-1) for part in weights.split(page_size, -1)], -1).mean(0)
        torch.testing.assert_close(mass[0, head, :3], expected)
    assert mass[0, :, 3].eq(0).all() and mass[1].eq(0).all()


def test_the_definition_scores_as_resa_does(controls) -> None:
    definition, true_mass = controls("definition"), controls("true_mass")
    torch.manual_seed(0)
    page_size, kv_heads, group, dim = 4, 2, 3, 8
    k_cache = torch.randn(40, kv_heads, dim)
    keys, summary = torch.zeros(10, page_size, kv_heads, dim), torch.zeros(10, kv_heads, 2, dim)
    last_slots = torch.tensor([31, 11, 21])
    true_mass.copy_keys([k_cache], [keys], last_slots, page_size, torch.zeros(1))
    update_page_summary(k_cache, summary, last_slots, page_size)
    query = torch.randn(1, kv_heads * group, dim)
    table, n_pages = torch.tensor([[7, 2, 5]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    expected = page_score(query, summary, table, n_pages, local_pages=0)
    torch.testing.assert_close(definition.page_bound(query, keys, table), expected)


def test_controls_of_robsa_read_the_share_that_a_request_asks_for(controls) -> None:
    n_blocks = torch.tensor([500, 123, 0], dtype=torch.int32)
    config = RobsaConfig(page_size=16, allow_uncalibrated=True)
    view = allocate_view(3, 1, 500, 250, 16, torch.zeros(4, dtype=torch.int64))
    view.n_pages.copy_(n_blocks)
    view.n_select.copy_(n_blocks // 2)
    view.row_thresholds.fill_(0.12)
    view.page_table.copy_(torch.arange(view.page_table.shape[1]))
    torch.manual_seed(0)
    found = {}
    for name, kind in (("random_blocks", "RandomBlocks"), ("sink_window", "SinkWindow")):
        method = getattr(controls("robsa_controls"), kind)(config)
        # Neither looks at the query or at any key.
        mass = method.mass(view, 0, None, None)
        torch.testing.assert_close(mass.sum(-1), torch.tensor([1.0, 1.0, 0.0]))
        assert mass[1, 123:].eq(0).all()
        query = SimpleNamespace(mean_over_ranks=lambda mean: mean)
        chosen = method.select(view, 0, query, None)
        assert [round(0.12 * n) for n in (500, 123, 0)] == pytest.approx(chosen.counts[:, 0].tolist(), abs=1)
        found[name] = [set(row[:n].tolist()) for row, n in zip(chosen.indices[:, 0], chosen.counts[:, 0], strict=True)]
    assert found["sink_window"][0] == {0, *range(500 - len(found["sink_window"][0]) + 1, 500)}
    assert 499 in found["random_blocks"][0] and len(found["random_blocks"][0] & found["sink_window"][0]) < 20
    assert method.mass(view, 0, None, None).equal(mass)


FIRST, LAST = 32, 16


def found_keys() -> torch.Tensor:
    """Of three heads that find nothing, some and everything; the first and the last ones stay."""
    torch.manual_seed(0)
    active = torch.rand(2, 3, 400) < torch.tensor([0.0, 0.3, 1.0])[:, None]
    active[..., :FIRST] = active[..., -LAST:] = True
    return active


@pytest.mark.parametrize(
    ("function", "first", "last"), [("redraw", FIRST, LAST), ("redraw_all", 0, 0), ("newest", FIRST, LAST)]
)
def test_other_keys_are_as_many_as_were_found(controls, function: str, first: int, last: int) -> None:
    choose, active = getattr(controls("anchor_controls"), function), found_keys()
    chosen = choose(active, FIRST, LAST)
    assert chosen.sum(-1).equal(active.sum(-1)) and chosen.shape == active.shape
    assert chosen[..., :first].all() and chosen[..., chosen.shape[2] - last :].all()
    assert not chosen[:, 1].equal(active[:, 1]) and chosen[:, 2].all()
    # Where nothing is left out, there is nothing to choose.
    nearest = active[..., :FIRST].contiguous()
    assert choose(nearest, FIRST, 0).equal(nearest)


@pytest.mark.parametrize("function", ["redraw", "redraw_all"])
def test_random_keys_are_drawn_anew(controls, function: str) -> None:
    choose, active = getattr(controls("anchor_controls"), function), found_keys()
    chosen = choose(active, FIRST, LAST)
    assert not chosen[:, 1].equal(choose(active, FIRST, LAST)[:, 1])
    # The head that finds nothing has the first block, or as many keys from anywhere.
    assert chosen[:, 0, :FIRST].all() == (function == "redraw")


def test_newest_stripes_stand_together(controls) -> None:
    taken = controls("anchor_controls").newest(found_keys(), FIRST, LAST)[..., FIRST:]
    # Once a key is taken, all newer ones are.
    assert not (taken[..., :-1] & ~taken[..., 1:]).any()


@pytest.mark.parametrize("kind", ["RandomStripes", "RandomKeys", "NewestStripes"])
def test_other_keys_leave_out_what_anchor_leaves_out_elsewhere(controls, kind: str) -> None:
    config = AnchorConfig(theta=0.5, step=2, block_size=16, crossover_tokens=0, dense_tail=0)
    torch.manual_seed(0)
    tokens, heads, kv_heads, dim = 256, 4, 2, 8
    query, pages = torch.randn(tokens, heads, dim), torch.arange(16, dtype=torch.int32)[None]
    caches = torch.randn(tokens, kv_heads, dim), torch.randn(tokens, kv_heads, dim)
    outs, counts = [], []
    for made in (Anchor, getattr(controls("anchor_controls"), kind)):
        method = made(config)
        out, pairs = torch.empty(tokens, heads, dim), torch.zeros(2, dtype=torch.int64)
        plan = method.plan([PrefillSpan(0, 0, tokens, method)], torch.device("cpu"))
        method.attend(plan, 0, PrefillInputs(query, *caches, pages, 16, dim**-0.5, 1.0, 1.0, out, pairs))
        outs.append(out)
        counts.append(pairs.tolist())
    attended, causal = counts[0]
    assert counts[0] == counts[1] and 0.3 * causal < attended < 0.9 * causal
    # The first group attends to all keys, and so does the second one, of which the first block and the one before stay.
    near = 2 * config.step * config.block_size
    torch.testing.assert_close(outs[0][:near], outs[1][:near])
    assert not torch.allclose(outs[0][near:], outs[1][near:], atol=1e-3)
