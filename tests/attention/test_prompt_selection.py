"""Tests of the ends of prompts: the used part of a cached prefix, where chunks may end, where each choice is kept."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from model_configs import write_config
from plain_rocketkv import DIM, GROUP, HEADS, PAGE, SMALL, plain_keep, rocketkv
from refusals import refused
from sglang.srt import runtime_context
from sglang.srt.plugins import load_plugins

load_plugins()

from resolved import ServerArgs
from window_stubs import Pass, chunks, request

from sglang_sparse.attention import prompt_selection
from sglang_sparse.attention.prompt_selection import KeepPath, PromptEnd
from sglang_sparse.config.settings import Settings, build
from sglang_sparse.debug import tree_check
from sglang_sparse.scheduler import prefill_chunks, prompt_windows

WINDOW, BUDGET = 8, 24
ROCKETKV, METHOD = build("rocketkv", SMALL), rocketkv(**SMALL)
GROUPS = {"block_size": 16, "step": 2, "crossover_tokens": 64, "dense_tail": 5}
BESIDE_ANCHOR = build("rocketkv", SMALL, "anchor", GROUPS)
MEMORY = 10**6


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Say what server this is."""

    def serve(found: Settings | None) -> None:
        monkeypatch.setattr(prefill_chunks, "current_settings", lambda: found)

    return serve


def test_where_a_window_begins() -> None:
    assert prompt_windows.window_start(ROCKETKV, request(BUDGET + 1)) == BUDGET + 1 - WINDOW
    assert (
        prompt_windows.window_start(ROCKETKV, request(BUDGET + 1, generated=100, known=ROCKETKV)) == BUDGET + 1 - WINDOW
    )
    assert prompt_windows.window_start(ROCKETKV, request(BUDGET)) is None
    assert prompt_windows.window_start(ROCKETKV, request(500, sparse=False)) is None
    assert prompt_windows.window_start(ROCKETKV, request(500, known=ROCKETKV, sparse=False)) is None
    assert prompt_windows.window_start(ROCKETKV, request(500, topk=10**6)) == 500 - WINDOW
    assert prompt_windows.window_start(build("resa", {}), request(500)) is None
    assert prompt_windows.window_start(None, request(500)) is None


@given(st.integers(0, 400), st.integers(0, 300), st.integers(1, 100), st.sampled_from([1, 4, 16, 64]))
def test_an_end_outside_the_window(position: int, start: int, window: int, page: int) -> None:
    position = position // page * page
    found = prompt_windows.outside(position, start, start + window, page)
    assert found <= position and found % page == 0
    assert not start < found < start + window
    # The last such end.
    assert not any(not start < other < start + window for other in range(found + page, position + 1, page))
    assert prompt_windows.outside(position, None, start + window, page) == position


@pytest.mark.parametrize(
    ("found", "prompt", "generated", "options", "expected"),
    [
        (99, 100, 0, {}, 92),
        (50, 100, 0, {}, 50),
        # A retracted request is prefilled again, with what it generated.
        (130, 100, 40, {}, 92),
        (23, BUDGET, 0, {}, 23),
        (130, 100, 40, {"sparse": False}, 130),
    ],
)
def test_a_cached_prefix_is_used_up_to_the_window(
    serving: Any, found: int, prompt: int, generated: int, options: dict[str, Any], expected: int
) -> None:
    serving(ROCKETKV)
    assert prefill_chunks.limit_match(found, request(prompt, generated, **options)) == expected
    serving(None)
    assert prefill_chunks.limit_match(found, request(prompt, generated, **options)) == found


@pytest.mark.parametrize(
    ("found", "prompt", "expected"), [(299, 300, 288), (200, 300, 192), (63, 70, 62), (99, 100, 64)]
)
def test_beside_groups_it_ends_with_a_group_too(serving: Any, found: int, prompt: int, expected: int) -> None:
    serving(BESIDE_ANCHOR)
    assert prefill_chunks.limit_match(found, request(prompt)) == expected


def ended(one: Any, ends: list[int], start: int, path: KeepPath, before: int = 0) -> list[PromptEnd]:
    """Return the prompt ends that passes of these chunks complete, each with ``before`` tokens of another row first."""
    found = []
    other = request(10**6, known=ROCKETKV)
    for end in ends:
        batch = SimpleNamespace(reqs=[other, one], prefix_lens=[0, start], extend_lens=[before, end - start])
        found += prompt_windows._prompt_ends(path, batch)
        start = end
    return found


@given(st.data(), st.sampled_from([1, 4, 16]), st.booleans())
def test_no_chunk_ends_within_a_window_unless_memory_forces_it(data: st.DataObject, size: int, short: bool) -> None:
    prompt, generated = data.draw(st.integers(BUDGET + 1, 300)), data.draw(st.integers(0, 60))
    window = prompt - WINDOW
    # A prefix from the tree.
    start = data.draw(st.integers(0, window // size)) * size
    least = -(-(WINDOW + size - 1) // size) * size
    budgets = data.draw(st.lists(st.integers(least, 200), min_size=80, max_size=80))
    memory = data.draw(st.integers(1, 4)) * size if short else MEMORY
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_chunks, "current_settings", lambda: ROCKETKV)
        one = request(prompt, generated, start, known=ROCKETKV)
        ends = chunks(one, budgets, memory, size)
    assume(ends and ends[-1] >= prompt)
    within = [end for end in ends if window < end < prompt]
    assert short or not within
    path = Mock(place=0, compaction=None)
    ((row, length, kept, query),) = (vars(end).values() for end in ended(one, ends, start, path, before=7))
    assert (row, length) == (1, prompt)
    assert kept == ((0, 0) if within else METHOD.kept(prompt))
    assert path.note_whole.call_count == (1 if within else 0)
    last = max([start, *(end for end in ends if end < prompt)])
    assert query == 7 + window - last


@given(st.integers(0, 40), st.integers(1, 300), st.integers(0, 60), st.sampled_from([1, 4, 16]))
def test_a_full_budget_is_enough(pages: int, prompt: int, generated: int, size: int) -> None:
    """No request waits for more than a chunk that holds a window and a page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_chunks, "current_settings", lambda: ROCKETKV)
        one = request(prompt, generated)
        cached = prefill_chunks.limit_match(min(pages * size, prompt + generated - 1), one) // size * size
        one.prefix_len = cached
        least = -(-(WINDOW + size - 1) // size) * size
        assert chunks(one, [least] * 400, MEMORY, size)[-1] == prompt + generated


@pytest.mark.parametrize(
    ("begun", "memory", "expected"),
    [
        # It gets what it would have without the rows that decode.
        ([], MEMORY, 16),
        # A second prompt of the pass waits.
        (["first"], MEMORY, None),
        # Rows are no memory.
        ([], 8, None),
    ],
)
def test_beside_rows_that_decode_a_window_has_room(
    serving: Any, monkeypatch: pytest.MonkeyPatch, begun: list[str], memory: int, expected: int | None
) -> None:
    """Six of them, which SGLang has taken off a chunk of 16 tokens; None: the budget stays as it is."""
    serving(ROCKETKV)
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: SimpleNamespace(enable_mixed_chunk=True))
    running = SimpleNamespace(reqs=[None] * 6)
    adder = SimpleNamespace(
        rem_chunk_tokens=10,
        running_batch=running,
        can_run_list=begun,
        page_size=4,
        rem_total_tokens=memory,
        chunked_req_limit=None,
    )
    # The window begins a token after what is cached.
    prefill_chunks.add_chunk(lambda *_: None, adder, request(101, cached=92))
    assert adder.rem_chunk_tokens == (10 if expected is None else expected)


@pytest.mark.parametrize(
    ("anchor", "window", "chunk", "needed"),
    [(False, 16, 16, 32), (False, 17, 16, 32), (False, 18, 32, 48), (True, 8, 32, 64), (True, 34, 64, 96)],
)
def test_a_chunk_that_no_window_may_fit_is_refused(
    anchor: bool, window: int, chunk: int, needed: int, tmp_path: Path
) -> None:
    """A prompt would wait for one that does, for ever. Pages have 16 tokens here, and groups 32."""
    flags: dict[str, Any] = {"sparse_config": json.dumps({"window_size": window}), "sparse_method": "rocketkv"}
    if anchor:
        flags |= {"sparse_prefill_method": "anchor", "sparse_prefill_config": json.dumps(GROUPS)}
    model = write_config(tmp_path, "qwen3")
    with refused("--chunked-prefill-size", chunk) as caught:
        ServerArgs(model_path=model, chunked_prefill_size=chunk, **flags)
    assert caught.value.allowed == f"at least {needed}, so that the last {window} tokens of a prompt fit one chunk"
    assert ServerArgs(model_path=model, chunked_prefill_size=needed, **flags).chunked_prefill_size == needed
    assert ServerArgs(model_path=model, chunked_prefill_size=-1, **flags).chunked_prefill_size == -1


@given(st.integers(1, 400), st.integers(0, 400), st.sampled_from([0, 30]))
def test_beside_anchor_the_smallest_chunk_is_enough(prompt: int, found: int, generated: int) -> None:
    """For a group and a window, wherever a cached prefix ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_chunks, "current_settings", lambda: BESIDE_ANCHOR)
        one = request(prompt, generated)
        cached = prefill_chunks.limit_match(min(found, prompt + generated - 1), one) // PAGE * PAGE
        one.prefix_len = cached
        ends = chunks(one, [64] * 400, MEMORY, PAGE)
    assert ends[-1] == prompt + generated
    assert prompt <= BUDGET or not any(prompt - WINDOW < end < prompt for end in ends)


def test_what_is_kept_is_the_same_in_pieces_in_any_company(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = {1: 200, 3: 57, 4: 310, 5: 26}
    rows = {place: request(length, known=ROCKETKV) for place, length in lengths.items()}
    alone = Pass()
    for place, length in lengths.items():
        alone.run([(rows[place], 0, length, place)])
    expected = {place: alone.of(place) for place in lengths}
    for place, length in lengths.items():
        window, keys = alone.window(place, length), alone.keys_of(place, length)
        group = [window[:, head * GROUP : (head + 1) * GROUP] for head in range(HEADS)]
        plain = [plain_keep(group[head], keys[:, head], METHOD) for head in range(HEADS)]
        assert expected[place] == (*METHOD.kept(length), plain)
    assert len({str(kept[2]) for kept in expected.values()}) == len(lengths)
    for at_once in (1, 400, 10**6):
        monkeypatch.setattr(prompt_selection, "TOKENS_AT_ONCE", at_once)
        together = Pass()
        together.run([(rows[4], 0, 160, 4), (rows[1], 0, 100, 1)])
        assert together.path.prompts == 0 and together.kept.counts.count_nonzero() == 0
        last = [(rows[4], 160, 150, 4), (rows[5], 0, 26, 5), (rows[1], 100, 100, 1), (rows[3], 48, 9, 3)]
        together.run(last, padding=5)
        assert {place: together.of(place) for place in lengths} == expected
        assert (together.path.prompts, together.path.whole_prompts) == (4, 0)


def test_a_prompt_that_is_visible_throughout_leaves_nothing_of_its_predecessor() -> None:
    found = Pass()
    cut = request(200, known=ROCKETKV)
    for other in (request(BUDGET, known=ROCKETKV), request(200, known=ROCKETKV, sparse=False)):
        found.run([(cut, 0, 200, 3)])
        assert found.of(3)[:2] == (4, 48)
        found.run([(other, 0, len(other.origin_input_ids), 3)])
        assert found.of(3) == (0, 0, [[], []])


@pytest.mark.parametrize("start", [193, 199])
def test_a_window_that_came_in_two_passes_is_counted_and_all_is_visible(
    start: int, caplog: pytest.LogCaptureFixture
) -> None:
    found = Pass()
    found.run([(request(200, known=ROCKETKV), 0, 200, 3)])
    one = request(200, known=ROCKETKV)
    found.run([(one, 0, start, 3)])
    found.run([(one, start, 200 - start, 3)])
    assert found.of(3) == (0, 0, [[], []])
    assert found.path.snapshot() == {"prompts": 1, "whole_prompts": 1, "bytes": 4 * 6 * (HEADS * 4 + 2)}
    found.run([(request(200, known=ROCKETKV), 0, start, 3)])
    found.run([(request(200, known=ROCKETKV), start, 200 - start, 3)])
    assert found.path.totals() == {"prompts": 1, "whole_prompts": 2}
    (warning,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert f"its last {WINDOW} tokens came in two passes for want of memory" in warning


def test_rows_that_decode_keep_what_they_have() -> None:
    found = Pass()
    running, fresh = request(200, known=ROCKETKV), request(57, known=ROCKETKV)
    found.run([(running, 0, 200, 3)])
    before = found.of(3)
    # The lengths of a verification are those of the last prefill.
    passes: list[dict[str, Any]] = [{"mode": "decode"}, {"dense": True}, {"mode": "target_verify"}]
    for kwargs in passes:
        for start, tokens in ((200, 5), (190, 10)):
            found.run([(running, start, tokens, 3)], **kwargs)
            assert found.of(3) == before
    found.run([(fresh, 0, 57, 1), (running, 203, 1, 3)], mode="mixed")
    assert found.of(3) == before and found.of(1)[:2] == METHOD.kept(57)


def test_a_retracted_request_whose_whole_prompt_is_cached_has_nothing_of_its_predecessor() -> None:
    found = Pass()
    found.run([(request(200, known=ROCKETKV), 0, 200, 3)])
    # It sees all of its prompt; another request of the same tokens left what it generated in the tree.
    short = request(BUDGET, generated=20, known=ROCKETKV)
    found.run([(short, BUDGET + 8, 12, 3)])
    assert found.of(3) == (0, 0, [[], []])


def test_a_recomputation_chooses_nothing() -> None:
    """An idle server that checks its tree, after a pass that completed a prompt."""
    found = Pass()
    found.run([(request(200, known=ROCKETKV), 0, 200, 3)])
    before = found.of(3)
    runner = found.runner
    runner.attn_backend = SimpleNamespace(prefill=None, keeps=found.path)
    runner.lora_manager, runner.model_config = None, SimpleNamespace(model_is_mrope=False)
    runner.forward = lambda batch: found.layer(torch.randn(len(batch.input_ids), HEADS * GROUP * DIM))
    tree_check._recompute(runner, [0] * 192, torch.arange(192), None, 0)
    assert found.of(3) == before
