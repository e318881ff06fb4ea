"""The controls compute what they say they do."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from sglang_sparse.keep_method import Prompts
from sglang_sparse.methods.rocketkv import RocketkvConfig
from sglang_sparse_kernels.page_score import page_score
from sglang_sparse_kernels.page_summary import update_page_summary

CONTROLS = Path(__file__).parent.parent.parent / "eval" / "controls"


@pytest.fixture
def controls(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(CONTROLS))
    yield importlib.import_module
    for name in ("true_mass", "random_pages", "random_kept", "definition"):
        sys.modules.pop(name, None)


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


def test_random_kept_keeps_as_many_blocks_of_each_prompt_as_rocketkv(controls) -> None:
    method = controls("random_kept").RandomKept(RocketkvConfig(prompt_budget=72, window_size=32, page_size=16))
    lengths = torch.tensor([400, 76, 90], dtype=torch.int32)
    cache = torch.zeros(16, 3, 8)
    prompts = Prompts(lengths, torch.zeros(3, 32, 6, 8), cache, torch.zeros(3, 25, dtype=torch.int32), 16, 1.0, 1.0)
    torch.manual_seed(0)
    drawn, again = method.keep(prompts), method.keep(prompts)
    assert drawn.shape == (3, 3, method.max_kept) and not drawn.equal(again)
    for row, length in enumerate(lengths.tolist()):
        count, first_visible = method.kept(length)
        kept = drawn[row, :, :count]
        assert (kept.diff() > 0).all() and kept.min() >= 0 and kept.max() < first_visible
