"""Compaction: what a request lets go of, what it holds then, and who may have the rest."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from compact_stubs import CORES, MODEL, TREES, Server
from peak_memory import Peak
from plain_rocketkv import HEADS, PAGE, rocketkv
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_context

load_plugins()

from sglang_sparse.attention import memory
from sglang_sparse.debug.kv_compare import stale_summaries
from sglang_sparse.scheduler import compaction, exact_kv
from sglang_sparse.scheduler.request_state import state_of


@pytest.fixture
def published() -> Iterator[None]:
    """Arguments of the process, which SGLang asks where a request ends."""
    with get_context().override_server_args():
        yield


@pytest.mark.parametrize(
    ("fields", "prompt", "generated", "expected"),
    [
        # Its window begins behind the last full page.
        ({}, 200, 0, compaction.Span(176, 192, 4, 48)),
        ({}, 207, 0, compaction.Span(176, 192, 4, 48)),
        ({}, 208, 0, compaction.Span(176, 208, 4, 50)),
        # A retracted request, whose output was prefilled again.
        ({}, 200, 57, compaction.Span(176, 256, 4, 48)),
        # The kept blocks lie side by side with the window in one page.
        ({"prompt_budget": 12}, 216, 0, compaction.Span(192, 208, 1, 52)),
        ({"kt_page_size": 16, "prompt_budget": 72}, 300, 0, compaction.Span(224, 288, 4, 18)),
        # As many pages as before.
        ({}, 36, 0, None),
        ({}, 47, 0, compaction.Span(16, 32, 4, 8)),
        ({}, 24, 0, None),
        ({"sparse": False}, 200, 0, None),
    ],
)
def test_what_is_copied(fields: dict[str, Any], prompt: int, generated: int, expected: object) -> None:
    options = {"sparse": False} if "sparse" in fields else {}
    server = Server(**{name: value for name, value in fields.items() if name != "sparse"})
    request = server.prefill(prompt, generated, **options)
    assert server.compaction.span(request, state_of(request)) == expected  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("at_once", [1024, 8])
@pytest.mark.parametrize(
    ("fields", "prompt", "generated"),
    [
        ({}, 208, 0),
        ({}, 199, 40),
        ({"window_size": 33, "prompt_budget": 140}, 350, 0),
        ({"kt_page_size": 16, "prompt_budget": 72, "topk": 4}, 300, 9),
        ({"kt_page_size": 1, "window_size": 3, "prompt_budget": 40, "topk": 20}, 150, 0),
    ],
    ids=str,
)
def test_a_step_sees_what_it_would_see(
    fields: dict[str, Any], prompt: int, generated: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, while others write into the pages of the prompt."""
    monkeypatch.setattr(memory, "COPIED_AT_ONCE", at_once)
    server = Server(**fields)
    request, other = server.prefill(prompt, generated), server.prefill(90, tokens=1)
    server.cached(request, other)
    before, others = server.attend(request), server.attend(other)
    pages = set((server.row(request) // PAGE).tolist())
    assert server.release_prompt(request)
    server.compaction.run()
    row = server.row(request)
    held = row[request.kv.cache_protected_len :]
    server.tree.evict(EvictParams(num_tokens=10**6))
    assert len(pages & set(server.allocator.free_pages.tolist())) == (prompt + generated) // PAGE
    for cache in (*server.keys, *server.values):
        cache[torch.isin(torch.arange(len(cache)), torch.cat([held, server.row(other)]), invert=True)] = float("nan")
    assert all(map(torch.equal, server.attend(request), before))
    assert all(map(torch.equal, server.attend(other), others))
    count, first_visible = server.method.kept(prompt)
    assert not stale_summaries(server.kv_pool, held[2 * PAGE - 1 :: PAGE]).any()
    assert not row[: request.kv.cache_protected_len].any() and int(held.min()) >= PAGE
    kept = server.aux.require_kept(0)
    boundary = min(first_visible, (prompt + generated) // PAGE * PAGE // server.method.block_size)
    for blocks in kept.blocks.values():
        expected = torch.arange(boundary - count, boundary, dtype=torch.int32).expand(HEADS, -1)
        assert torch.equal(blocks[request.kv.req_pool_idx, :, :count], expected)


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize("tree", TREES)
def test_every_page_has_an_owner_until_all_are_free(tree: str) -> None:
    server = Server(tree=tree)
    requests = [server.prefill(208), server.prefill(300, 37, tokens=1), server.prefill(150, tokens=2)]
    server.cached(*requests)
    server.require_all_pages_owned(*requests)
    free = server.allocator.available_size() + server.tree.evictable_size()
    assert server.release_prompt(requests[0]) and server.release_prompt(requests[1])
    server.compaction.run()
    server.require_all_pages_owned(*requests)
    now = server.allocator.available_size() + server.tree.evictable_size()
    counts = server.compaction.snapshot()
    assert now - free == counts["freed_tokens"] == 176 + 272 and counts["compacted"] == 2
    for request in requests:
        server.release(request)
    server.tree.evict(EvictParams(num_tokens=10**6))
    assert server.allocator.available_size() == server.pages * PAGE
    assert len(server.table.free_slots) == server.table.size


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize("evicted", [False, True])
@pytest.mark.parametrize("core", CORES)
def test_a_finished_request_shares_nothing_of_what_it_kept(core: str, evicted: bool) -> None:
    server = Server(tree=core)
    request = server.prefill(208, 20)
    server.cached(request)
    # Its exact length would end before its own pages begin.
    state = state_of(request)
    assert state is not None
    assert server.release_prompt(request)
    state.shareable_len = 100
    if evicted:
        # Else what it inserts is there already.
        server.tree.evict(EvictParams(num_tokens=10**6))
    prompt, _ = server.tree.total_size()
    assert prompt == (0 if evicted else 224)
    server.release(request)
    assert server.tree.total_size() == (prompt, 0) and server.tree.evictable_size() == prompt
    assert server.allocator.available_size() + prompt == server.pages * PAGE
    assert state.counts.tail_tokens_dropped == 128
    exact_kv.forget_exact_length(None, request)
    assert (state.kept, state.compacted) == ((0, 0), False)


@pytest.mark.parametrize("core", CORES)
def test_what_others_hold_too_stays(core: str) -> None:
    server = Server(tree=core)
    one = server.prefill(208)
    server.cached(one)
    two = server.prefill(208)
    server.cached(two)
    assert two.kv.cache_protected_len == 208 and server.tree.protected_size() == 208
    before = server.attend(two)
    assert server.release_prompt(one)
    assert server.tree.protected_size() == 208
    server.tree.evict(EvictParams(num_tokens=10**6))
    server.compaction.run()
    assert all(map(torch.equal, server.attend(two), before))
    assert server.release_prompt(two)
    assert server.tree.evictable_size() == 208


@pytest.mark.parametrize("tree", TREES)
def test_one_request_gets_the_pages_that_another_let_go_of(tree: str) -> None:
    """In one step, with room for one copy: the second one's is where the first one's prompt was."""
    server = Server(pages=2 * 13 + 2, tree=tree)
    one, two = server.prefill(208), server.prefill(208, tokens=1)
    server.cached(one, two)
    before = [*server.attend(one), *server.attend(two)]
    prompt = set((server.row(one)[:208] // PAGE).tolist())
    assert server.allocator.available_size() == 2 * PAGE
    assert server.release_prompt(one) and server.release_prompt(two)
    server.require_all_pages_owned(one, two)
    assert prompt & set((server.row(two)[two.kv.cache_protected_len : 208] // PAGE).tolist())
    server.compaction.run()
    assert all(map(torch.equal, [*server.attend(one), *server.attend(two)], before))


@pytest.mark.parametrize("core", CORES)
def test_without_room_nothing_changes(core: str) -> None:
    server = Server(pages=13 + 2, tree=core)
    request = server.prefill(208)
    server.cached(request)
    before, row = vars(request) | {"kv": replace(request.kv)}, server.row(request)
    assert not server.release_prompt(request, reserve=1)
    assert vars(request) == before and torch.equal(server.row(request), row)
    assert server.compaction.snapshot() == {"compacted": 0, "freed_tokens": 0, "compact_waits": 0}
    # What nobody holds is evicted for it.
    assert server.release_prompt(request)
    small = Server(pages=13 + 2, tree=core)
    old = small.prefill(30, tokens=1)
    small.cached(old)
    small.tree.unlock(old.lock)
    small.allocator.free(small.row(old)[16:])
    request = small.prefill(208)
    small.cached(request)
    assert small.allocator.available_size() == PAGE and small.tree.evictable_size() == PAGE
    assert small.release_prompt(request)


@pytest.mark.parametrize("at_once", [16, 1024])
def test_copying_takes_no_more_than_it_says(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "COPIED_AT_ONCE", at_once)
    server = Server(prompt_budget=216, pages=80)
    request = server.prefill(300, 200)
    server.cached(request)
    assert server.release_prompt(request)
    monkeypatch.setattr(server.aux, "refresh", lambda *_: None)
    with Peak() as peak:
        server.compaction.run()
    bound = memory.compaction_bytes(server.method, MODEL)
    if at_once == 16:
        # The list of the copied blocks, too, which a piece of a real size dwarfs.
        assert 0.5 * bound < peak.nbytes <= 1.5 * bound
    else:
        assert peak.nbytes <= bound
    assert memory.compaction_bytes(rocketkv(), MODEL) == 0
