"""Compaction: which requests let go of their prompts and when, what is left free for it, and what is refused."""

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compact_stubs import CORES, TREES, Server
from plain_rocketkv import PAGE, rocketkv
from sglang.srt.mem_cache.prefill_budget import PrefillBudget
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang_sparse.attention.plan import plan_decode
from sglang_sparse.config import settings as config
from sglang_sparse.config.request_options import parse_options
from sglang_sparse.scheduler import compaction
from sglang_sparse.scheduler.request_state import state_of


def running(server: Server, *requests: Any) -> Any:
    """A decode batch of them, after ``update_running_batch``, and let go of what they may."""
    lengths = torch.tensor([request.kv.kv_committed_len + 1 for request in requests])
    batch = SimpleNamespace(reqs=[*requests], seq_lens_cpu=lengths, batch_is_full=True)
    server.args.sparse_config = server.settings.config.model_dump_json()
    compaction.compact_running(batch, server.scheduler)
    return batch


def compacted(*requests: Any) -> list[bool]:
    return [state_of(request).compacted for request in requests]  # pyright: ignore[reportOptionalMemberAccess]


def test_who_lets_go() -> None:
    server = Server(pages=200)
    ready, short, dense, all_blocks = (
        server.prefill(208, tokens=0),
        server.prefill(24, tokens=1),
        server.prefill(208, tokens=2, sparse=False),
        server.prefill(208, tokens=3, topk=10**6),
    )
    server.cached(ready, short, dense, all_blocks)
    batch = running(server, ready, short, dense, all_blocks)
    assert compacted(*batch.reqs) == [True, False, False, False] and not batch.batch_is_full
    batch.batch_is_full = True
    # Nothing is left to do for it.
    row = server.row(ready)
    batch = running(server, ready, short, dense, all_blocks)
    assert batch.batch_is_full and torch.equal(server.row(ready), row)
    assert server.compaction.snapshot() == {"compacted": 1, "freed_tokens": 176, "compact_waits": 0}


@pytest.mark.parametrize("tree", TREES)
def test_only_what_the_tree_has_is_let_go_of(tree: str) -> None:
    """With overlap scheduling a request decodes once before SGLang puts its prompt into the tree."""
    server = Server(tree=tree)
    request = server.prefill(208)
    running(server, request)
    assert compacted(request) == [tree == "disabled"]
    server.cached(request)
    running(server, request)
    assert compacted(request) == [True]


def test_waits_are_counted_and_leave_a_page_for_each_row() -> None:
    server = Server(pages=13 + 2 + 1 + 2)
    request, other = server.prefill(208), server.prefill(16, tokens=1)
    server.cached(request, other)
    taken = server.allocator.alloc(PAGE)
    batch = running(server, request, other)
    assert compacted(request) == [False] and batch.batch_is_full
    running(server, request, other)
    assert server.compaction.waits == 2
    server.allocator.free(taken)
    running(server, request, other)
    assert compacted(request) == [True] and server.compaction.waits == 2


def test_a_request_is_admitted_beside_others_only_with_room_for_a_copy() -> None:
    server = Server()
    settings, long = server.settings, server.prefill(208)
    done, short = server.prefill(208, tokens=1), server.prefill(20, tokens=2)
    state = state_of(done)
    assert state is not None
    state.compacted = True

    def room(request: Any, *others: Any, running: Any = None, preempted: Sequence[Any] = ()) -> int:
        budget = PrefillBudget(server.allocator, server.tree)
        budget.total_offset, budget.current_offset = 7, 5
        before = budget.remaining_total, budget.remaining_current
        adder: Any = SimpleNamespace(page_size=PAGE, can_run_list=others, running_batch=running, memory_budget=budget)
        adder.preempt_list = [*preempted]
        request.sampling_params = SimpleNamespace(ignore_eos=True)
        with compaction.room_for_a_copy(settings, adder, request):
            found = budget.total_offset - 7
            assert budget.current_offset == 5 + found and not request.sampling_params.ignore_eos
            assert (budget.remaining_total + found, budget.remaining_current + found) == before
        assert (budget.total_offset, budget.current_offset) == (7, 5)
        assert request.sampling_params.ignore_eos
        return found

    # What it keeps, its window, what fills pages up, and a page for each row.
    copy = 16 + 8 + 2 * PAGE
    assert server.compaction.span(long, state_of(long)).start >= 208 - copy  # pyright: ignore
    assert room(long, short) == copy + 2 * PAGE == room(short, done, long) - PAGE
    assert room(long, running=SimpleNamespace(reqs=[done, short])) == copy + 3 * PAGE
    # Alone it is admitted as always; and these copy nothing.
    assert room(long) == room(short, done) == room(short, running=SimpleNamespace(reqs=[done, short])) == 0
    retracted = server.prefill(208, 50, tokens=3)
    assert room(short, retracted, long) == copy + 50 + 3 * PAGE
    # SGLang would lose whom it has taken off for a request that then does not fit.
    assert room(long, short, preempted=[done]) == 0


def test_what_sglang_is_told_is_taken_back_where_its_decision_raises() -> None:
    server = Server()
    budget = PrefillBudget(server.allocator, server.tree)
    long, other = server.prefill(208), server.prefill(208, tokens=1)
    names = {"page_size": PAGE, "can_run_list": [other], "running_batch": None, "memory_budget": budget}
    adder = SimpleNamespace(**names, preempt_list=[])
    long.sampling_params = SimpleNamespace(ignore_eos=True)
    before = budget.total_offset, budget.current_offset

    def decide() -> None:
        with compaction.room_for_a_copy(server.settings, adder, long):
            assert budget.total_offset > before[0]
            raise KeyError("SGLang")

    with pytest.raises(KeyError, match="SGLang"):
        decide()
    assert (budget.total_offset, budget.current_offset) == before and long.sampling_params.ignore_eos


@pytest.mark.parametrize("core", CORES)
def test_who_shares_a_prompt_copies_it_only_where_that_is_less_for_all(core: str) -> None:
    server = Server(tree=core)
    sharers = [server.prefill(80) for _ in range(4)]
    for request in sharers:
        server.cached(request)
    assert sharers[-1].kv.cache_protected_len == 80
    running(server, *sharers)
    # Each would copy 32 tokens.
    assert compacted(*sharers) == [False] * 4 and server.compaction.waits == 0
    # As others end those that are left let go, one and all.
    for request in sharers[2:]:
        server.tree.unlock(request.lock)
    running(server, *sharers[:2])
    assert compacted(*sharers[:2]) == [True] * 2 and server.tree.protected_size() == 0


def test_a_batch_that_is_dense_lets_go_of_nothing_and_one_with_a_compacted_row_is_not_dense() -> None:
    server = Server(dense_fallback="auto", min_seq_len=100, crossover_tokens=400)
    one, two, below = server.prefill(208), server.prefill(250, tokens=1), server.prefill(60, tokens=2)
    server.cached(one, two, below)
    running(server, one, below)
    assert compacted(one, below) == [False, False]
    running(server, one, two, below)
    assert compacted(one, two, below) == [True, True, False]
    # Its neighbour has left.
    rows = [parse_options(server.settings, {})] * 2
    lengths = torch.tensor([209, 61])
    assert not plan_decode(server.settings.decode, lengths, rows).sparse
    plan = plan_decode(server.settings.decode, lengths, rows, compacted=True)
    assert plan.sparse and plan.covered.tolist() == [False, True]
    assert plan.groups[0].n_select.tolist() == [6, 16]


def test_what_does_not_go_with_it() -> None:
    settings = config.build("rocketkv", {"eviction": "compact"})
    assert parse_options(settings, {"topk": 5, "rectify_interval": 0}).decode.config == settings.config.model_copy(
        update={"topk": 5}
    )
    arch, plain = SimpleNamespace(name="MHA"), SimpleNamespace()
    model = SimpleNamespace(
        attention_arch=arch, head_dim=128, num_hidden_layers=4, hf_config=plain, hf_text_config=plain
    )
    for layers in ("all", "0-", [3, 1, 0, 2]):
        assert rocketkv(eviction="compact", layers=layers).refuse(model) is None
    said = 'eviction is "compact" and 1 of its 4 layers are dense, which would attend to what is gone; allowed: none'
    assert said in str(rocketkv(eviction="compact", layers="1-").refuse(model))
    assert rocketkv(layers="1-").refuse(model) is None


def test_a_server_that_does_not_compact_does_nothing() -> None:
    for method, fields in (("rocketkv", {}), ("resa", {})):
        args = SimpleNamespace(sparse_method=method, sparse_config=json.dumps(fields))
        assert config.settings_of(args) is not None  # pyright: ignore[reportArgumentType]
        compaction.compact_running(SimpleNamespace(), SimpleNamespace(server_args=args))


def test_a_step_that_sglang_leaves_out_lets_go_of_nothing() -> None:
    """SGLang has no batch for a while where memory is short."""
    server = Server()
    request = server.prefill(208)
    server.cached(request)
    server.args.sparse_config = server.settings.config.model_dump_json()
    compaction.compact_running(None, server.scheduler)
    assert compacted(request) == [False] and server.compaction.waits == 0
