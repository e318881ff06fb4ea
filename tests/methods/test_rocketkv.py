"""RocketKV: its config and refusals, and both of its stages against plain formulations."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peak_memory import Peak, collect_after
from plain_rocketkv import (
    BLOCK,
    DIM,
    GROUP,
    HEADS,
    MODEL,
    PAGE,
    SCALE,
    SMALL,
    Rows,
    exact_keys,
    only,
    plain_keep,
    prompts_of,
    rocketkv,
)

from sglang_sparse.attention import memory, prompt_selection
from sglang_sparse.attention.batch import allocate_view
from sglang_sparse.attention.plan import plan_decode
from sglang_sparse.config.request_options import parse_options
from sglang_sparse.config.settings import build
from sglang_sparse.debug.kv_compare import stale_summaries
from sglang_sparse.methods import rocketkv as methods
from sglang_sparse.methods.aux_buffers import AuxBuffers, page_ends
from sglang_sparse.methods.base import ModelShape
from sglang_sparse.methods.rocketkv import KT_CACHE, Rocketkv
from sglang_sparse_kernels.kt_select import triton as kt_select_triton
from sglang_sparse_kernels.sparse_decode import sparse_decode


def model(arch: str = "MHA", head_dim: int = 128) -> Any:
    configs = {"hf_config": SimpleNamespace(), "hf_text_config": SimpleNamespace()}
    return SimpleNamespace(attention_arch=SimpleNamespace(name=arch), head_dim=head_dim, **configs)


def test_refused_models() -> None:
    assert rocketkv().refuse(model()) is None and rocketkv(topr=128).refuse(model()) is None
    assert "rocketkv needs an MHA or GQA model; this one uses MLA" in str(rocketkv().refuse(model("MLA")))
    assert rocketkv().refuse(model(head_dim=80)) == "its head_dim is 80; allowed: 16, 32, 64, 128"
    assert rocketkv(topr=96).refuse(model(head_dim=64)) == "topr is 96; allowed: at most its head_dim, 64"


def test_a_request_has_a_topk_of_its_own() -> None:
    settings = build("rocketkv", {"min_seq_len": 0, "crossover_tokens": 0})
    rows = [parse_options(settings, params) for params in ({}, {"topk": 5}, {"topk": 10**6}, {"sparse": False})]
    plan = plan_decode(settings.decode, torch.tensor([1602] * 4), rows)
    assert plan.groups[0].n_pages.tolist() == [401] * 4 and plan.groups[0].n_select.tolist() == [64, 5, 401, 401]
    assert plan.covered.tolist() == [False, False, True, True]


@pytest.mark.parametrize(
    ("fields", "prompt", "expected"),
    [
        ({}, 2048, (0, 0)),
        # The window begins at 2017, within block 504; 2016 tokens of the budget are left.
        ({}, 2049, (504, 504)),
        ({}, 100_003, (504, 24992)),
        (SMALL, 24, (0, 0)),
        (SMALL, 25, (4, 4)),
        (SMALL, 27, (4, 4)),
        (SMALL, 28, (4, 5)),
        # What is left of the budget is less than a block.
        ({**SMALL, "prompt_budget": 27}, 200, (4, 48)),
        ({**SMALL, "kt_page_size": 1}, 200, (16, 192)),
        # The window begins in the first block: all is visible.
        ({**SMALL, "kt_page_size": 16, "window_size": 9, "prompt_budget": 25}, 24, (0, 0)),
        ({**SMALL, "kt_page_size": 16}, 25, (1, 1)),
    ],
)
def test_what_a_prompt_keeps(fields: dict[str, Any], prompt: int, expected: tuple[int, int]) -> None:
    assert rocketkv(**fields).kept(prompt) == expected


@given(st.integers(1, 100), st.integers(0, 300), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 1000))
def test_the_budget_bounds_what_is_kept(window: int, more: int, block: int, prompt: int) -> None:
    budget = window + block + more
    method = rocketkv(window_size=window, prompt_budget=budget, kt_page_size=block)
    count, first_visible = method.kept(prompt)
    if prompt <= budget:
        assert (count, first_visible) == (0, 0)
        return
    # The window is visible, and so is the rest of the block in which it begins.
    assert prompt - window - block < first_visible * block <= prompt - window
    assert count == min(first_visible, method.max_kept)
    assert budget - block < window + method.max_kept * block <= budget


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"kernel_size": 1, "kt_page_size": 1},
        {"kernel_size": 201},
        {"kt_page_size": 16, "prompt_budget": 40},
        {"window_size": 1, "prompt_budget": 5},
        {"prompt_budget": 120},
    ],
    ids=str,
)
def test_stage_1(fields: dict[str, Any]) -> None:
    torch.manual_seed(4)
    method = rocketkv(**{**SMALL, **fields})
    lengths = [length for length in (25, 41, 64, 129, 350) if method.kept(length)[1]]
    prompts = prompts_of(lengths, method)
    found = method.keep(prompts)
    assert found.shape == (len(lengths), HEADS, method.max_kept) and found.dtype == torch.int32
    for row, length in enumerate(lengths):
        slots = (prompts.page_table[row, : -(-length // PAGE), None].long() * PAGE + torch.arange(PAGE)).flatten()
        count, first_visible = method.kept(length)
        for head in range(HEADS):
            window = prompts.window[row, :, head * GROUP : (head + 1) * GROUP]
            expected = plain_keep(window, prompts.key_cache[slots[:length], head], method)
            assert found[row, head, :count].tolist() == expected and expected[-1] < first_visible
    # The same for each prompt alone.
    alone = [method.keep(only(prompts, row)) for row in range(len(lengths))]
    counts = [method.kept(length)[0] for length in lengths]
    assert all(torch.equal(found[row, :, :count], alone[row][0, :, :count]) for row, count in enumerate(counts))


@pytest.mark.parametrize("fields", [{}, {"topr": 5}, {"topr": 1, "kt_cache_dtype": "bfloat16"}], ids=str)
def test_stage_2(fields: dict[str, Any]) -> None:
    rows = Rows(rocketkv(**{**SMALL, **fields}))
    found = rows.select()
    for row, (tokens, wanted, *_) in enumerate(rows.table):
        for head in range(HEADS):
            assert found[row][head] == rows.plain(row, head), (row, head)
            assert len(found[row][head]) == min(wanted, len(rows.visible(row, head)))
            assert tokens == 0 or found[row][head][-1] == -(-tokens // BLOCK) - 1, "the newest block"
    assert found[0][0] != found[0][1], "each KV head has kept blocks of its own"
    assert len(rows.visible(3, 0)) < rows.table[3][1], "a row that may see less than it wants"
    attended, held = sum(len(head) for row in found for head in row), HEADS * int(rows.view.n_pages.sum())
    assert rows.view.stats.tolist() == [HEADS * (len(rows.table) - 1), attended, held, 0]


def test_the_scale_of_the_logits_counts() -> None:
    """Heads of a group share their choice by a mean of softmaxes, in which sharper heads count for more."""
    rows = Rows(rocketkv(**SMALL))
    assert rows.select(1e-3) != rows.select(4.0)


def test_an_entry_is_that_of_its_block_alone() -> None:
    method = rocketkv(kt_page_size=BLOCK, kt_cache_dtype="bfloat16")
    aux = AuxBuffers(method.aux_specs(MODEL), (0,), 8, PAGE, "cpu")
    keys = exact_keys(8 * PAGE, HEADS, DIM)
    first = 3 * PAGE
    for slots in ([*range(first, first + 6)], [first + 6], [first + 7, first + 8]):
        aux.refresh({0: keys}, page_ends(torch.tensor(slots), method.block_size))
    entry = aux.buffer(KT_CACHE, 0)[3].float()
    for block, (start, end) in enumerate([(0, 4), (4, 8), (8, 9)]):
        held = keys[first + start : first + end]
        assert torch.equal(entry[block, :, 0], held.amax(0)) and torch.equal(entry[block, :, 1], held.amin(0))
    assert entry[3].count_nonzero() == 0
    assert aux.specs[0].before_select, "a step reads the newest block's entry"


def test_the_check_of_entries_takes_those_of_a_page_that_was_just_written() -> None:
    method = rocketkv()
    aux = AuxBuffers(method.aux_specs(MODEL), (0,), 4, PAGE, "cpu")
    keys = exact_keys(4 * PAGE, HEADS, DIM)
    slots = torch.arange(PAGE, 3 * PAGE - 2)
    aux.refresh({0: keys}, page_ends(slots, method.block_size))
    pool = SimpleNamespace(get_key_buffer=lambda layer: keys)
    setattr(pool, memory.ATTRIBUTE, aux)
    ends = torch.tensor([2 * PAGE - 1, int(slots[-1])])
    assert not stale_summaries(pool, ends).any()
    for block in range(PAGE // BLOCK):
        entry = aux.buffer(KT_CACHE, 0)[2, block]
        before = entry.clone()
        entry[0, 1, 3] = 99.0
        assert stale_summaries(pool, ends).tolist() == [False, True]
        entry.copy_(before)


def test_a_key_that_the_kt_cache_cannot_hold_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    aux = AuxBuffers(rocketkv().aux_specs(MODEL), (0,), 4, PAGE, "cpu")
    keys = torch.zeros(4 * PAGE, HEADS, DIM)
    keys[PAGE, 0, 0] = 1e6
    aux.refresh({0: keys}, torch.tensor([PAGE + 3]))
    for _ in range(3):
        aux.warn_of_overflow()
    (line,) = caplog.messages
    assert line.endswith('this model needs {"kt_cache_dtype": "bfloat16"}')


def test_memory_of_the_kt_cache_and_of_what_is_kept() -> None:
    settings = build("rocketkv", {**SMALL, "layers": "1-"})
    method, shape = settings.method, ModelShape(4, HEADS * GROUP, HEADS, DIM, torch.float32)
    assert isinstance(method, Rocketkv)
    # Three layers, and for four tokens two bounds of a byte a dimension and head.
    assert memory.aux_bytes_per_token(settings, shape) == 3 * HEADS * 2 * DIM // 4
    aux = AuxBuffers(method.aux_specs(shape), method.sparse_layers(4), 10, PAGE, "cpu")
    assert aux.nbytes == 10 * PAGE * memory.aux_bytes_per_token(settings, shape)
    with pytest.raises(RuntimeError, match="nothing was allocated"):
        aux.require_kept(1)
    table = torch.zeros(13, 64, dtype=torch.int32)
    runner: Any = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=table), token_to_kv_pool=None)
    assert prompt_selection.make_paths([method], aux, runner, shape)
    kept = aux.require_kept(1)
    assert sorted(kept.blocks) == [1, 2, 3] and kept.blocks[1].shape == (13, HEADS, 4)
    taken = sum(x.nbytes for x in (*kept.blocks.values(), kept.counts, kept.first_visible))
    assert taken == prompt_selection.kept_bytes(method, shape, 13)


@pytest.mark.parametrize(("lengths", "window"), [([350], 8), ([350, 41, 129], 8), ([1100, 1090], 40)])
def test_stage_1_takes_no_more_than_it_says(lengths: list[int], window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    method = rocketkv(window_size=window, prompt_budget=3 * window)
    prompts = prompts_of(lengths, method)
    collect_after(monkeypatch, methods.window, "window_score")
    with Peak() as peak:
        method.keep(prompts)
    width = prompts.page_table.shape[1] * PAGE
    bound = method.keep_scratch_bytes(MODEL, len(lengths), width)
    assert 0.8 * bound < peak.nbytes <= bound


def test_a_step_takes_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refreshing, selecting and attending in one layer, by the kernels."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    rows = Rows(rocketkv(**SMALL))
    collect_after(monkeypatch, kt_select_triton, "kt_score")
    with Peak() as peak:
        rows.aux.refresh({0: rows.cache}, rows.last_slots, before_select=True)
        found = rows.method.select(rows.view, 0, rows.query, rows.aux)
        asked = (rows.query, rows.cache, rows.values, found.indices, found.counts, rows.last_slots)
        sparse_decode(*asked, BLOCK, SCALE, out=torch.zeros_like(rows.query), usual_pages=rows.view.usual_select)
    meta = allocate_view(len(rows.table), HEADS, 90, 10, BLOCK, torch.zeros(4, dtype=torch.int64, device="meta"))
    assert peak.nbytes == rows.method.scratch_bytes(MODEL, meta, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("context", [131072, 4 * prompt_selection.TOKENS_AT_ONCE])
@pytest.mark.parametrize("budget", [257, 2048])
def test_what_prompts_take_is_charged(budget: int, context: int) -> None:
    """A long one, and as many short ones as go at once, with their queries."""
    shape, requests = ModelShape(36, 32, 8, 128, torch.bfloat16), 20
    args = SimpleNamespace(max_running_requests=requests)
    kvc = SimpleNamespace(
        server_args=args, model_config=SimpleNamespace(context_len=context), model_dtype=torch.bfloat16
    )
    method = rocketkv(prompt_budget=budget)
    need = memory.of_prompts([method], "--sparse-method rocketkv", kvc, shape)
    charged = need.nbytes - prompt_selection.kept_bytes(method, shape, requests + 1)
    taken = []
    for prompt in (budget + 1, 2 * budget, 4 * budget, 16384, context):
        count = max(1, min(prompt_selection.PROMPTS_AT_ONCE, prompt_selection.TOKENS_AT_ONCE // prompt))
        queries = count * method.window_tokens * 32 * 128 * 2
        taken.append(method.keep_scratch_bytes(shape, count, prompt) + queries)
    assert max(taken) <= charged < 1.1 * max(taken)
