"""Tests of the rows that a step rectifies: deadlines are kept, and few steps carry a second pass."""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_sparse.attention.counters import RectifyCounts
from sglang_sparse.config.settings import build
from sglang_sparse.scheduler import rectification
from sglang_sparse.scheduler.due_rows import Rectification, due_rows, grouped, plan_step, ripe_rows
from sglang_sparse.scheduler.partial_batch import STEP, Span
from sglang_sparse.scheduler.request_state import ATTRIBUTE


def run(
    joins: list[int], intervals: list[int], max_batch: int, steps: int, max_tokens: int = 8192
) -> tuple[list[list[int]], int]:
    """Decode ``steps`` steps of rows that join at ``joins``; return who was rectified, and the most pending tokens."""
    length, exact = [0] * len(joins), [0] * len(joins)
    chosen, most = [], 0
    for step in range(steps):
        rows = [row for row, join in enumerate(joins) if join <= step]
        for row in rows:
            length[row] += 1
        pending = [length[row] - exact[row] for row in rows]
        most = max([most, *(count for row, count in zip(rows, pending, strict=True) if intervals[row])])
        due = [rows[i] for i in due_rows(pending, [intervals[row] for row in rows], max_batch, max_tokens)]
        for row in due:
            exact[row] = length[row]
        chosen.append(due)
    return chosen, most


def test_a_lone_row_goes_every_f_tokens() -> None:
    chosen, most = run([0], [32], 8, 320)
    assert [step + 1 for step, due in enumerate(chosen) if due] == list(range(32, 321, 32))
    assert most == 32


def test_rows_that_start_together_are_spread_over_steps() -> None:
    chosen, most = run([0] * 20, [32] * 20, 8, 65)
    first = [due for due in chosen[:32] if due]
    assert [len(due) for due in first] == [8, 8, 4]
    assert most == 32


def test_at_batch_16_at_most_a_quarter_of_the_steps_carry_a_pass() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        joins = [rng.randrange(64) for _ in range(16)]
        chosen, most = run(joins, [32] * 16, 8, 1024)
        assert sum(map(bool, chosen)) <= 1024 / 4
        assert most <= 32


def joint_steps(joins: list[list[int]], steps: int, gathered: bool) -> int:
    """In how many steps any rank rectifies, each with rows of its own of an interval of 32."""
    exact = [list(rows) for rows in joins]
    found = 0
    for step in range(steps):
        pending = [[max(0, step - start) for start in rows] for rows in exact]
        own = [due_rows(rows, [32] * len(rows), 8, 8192) for rows in pending]
        if not any(own):
            continue
        found += 1
        for rank, rows in enumerate(pending):
            along = due_rows(rows, [32] * len(rows), 8, 8192, anyway=True) if gathered else []
            for row in own[rank] or along:
                exact[rank][row] = step
        assert max(max(rows) for rows in pending) <= 32
    return found


def test_ranks_that_share_passes_gather_their_rows() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        joins = [[rng.randrange(64) for _ in range(4)] for _ in range(8)]
        alone, together = (joint_steps(joins, 1024, gathered) for gathered in (False, True))
        # Two passes an interval, whoever starts when; without others' passes each rank has its own.
        assert together <= 2 * 1024 / 32 + 4 and alone > 3 * 1024 / 32


def test_never_and_exact_rows_are_left_alone() -> None:
    assert due_rows([500, 1, 40], [0, 2, 0], 8, 8192) == []
    assert due_rows([500, 2, 40], [0, 2, 32], 8, 8192) == [1, 2]


@given(st.lists(st.integers(0, 100), min_size=1, max_size=200), st.integers(1, 16), st.integers(2, 40))
@settings(max_examples=50)
def test_no_row_waits_longer_than_its_turn(joins: list[int], max_batch: int, interval: int) -> None:
    chosen, most = run(joins, [interval] * len(joins), max_batch, 200)
    assert most <= interval + 1
    assert all(len(due) <= max(max_batch, -(-len(joins) // interval)) for due in chosen)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(2, 64)), min_size=1, max_size=60), st.integers(1, 16))
@settings(max_examples=50)
def test_mixed_intervals(rows: list[tuple[int, int]], max_batch: int) -> None:
    joins, intervals = [join for join, _ in rows], [interval for _, interval in rows]
    chosen, _ = run(joins, intervals, max_batch, 200)
    last = list(joins)
    for step, due in enumerate(chosen):
        for row in due:
            assert step + 1 - last[row] <= intervals[row] + -(-len(rows) // max_batch)
            last[row] = step + 1


def test_a_pass_is_never_larger_than_a_chunk_of_prefill() -> None:
    chosen, most = run([0] * 8, [1000] * 8, 8, 3000, max_tokens=2048)
    assert max(map(len, chosen)) == 2
    assert most <= 1003


def test_tails_are_grouped_by_rows_and_tokens() -> None:
    request: Any = SimpleNamespace(multimodal_inputs=None)
    spans = [Span(request, 0, tokens) for tokens in (5, 5, 5, 90, 5, 200, 5)]
    sizes = [[span.tokens for span in group] for group in grouped(spans, 3, 100)]
    assert sizes == [[5, 5, 5], [90, 5], [200], [5]]


def test_a_pass_without_a_graph_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    rectification._warn_eager.cache_clear()
    for _ in range(2):
        rectification._warn_eager()
    (record,) = caplog.records
    assert "ran without a CUDA graph" in record.message


def fail(*_: Any, **__: Any) -> None:
    raise KeyError("SGLang")


def a_decode_step() -> tuple[Any, Any]:
    """A server with ``rectify_on_finish``, and a decode batch."""
    config = build("resa", {"rectify_on_finish": True}).config.model_dump_json()
    args = SimpleNamespace(sparse_method="resa", sparse_prefill_method=None, sparse_config=config)
    runner = SimpleNamespace(attn_backend=SimpleNamespace(rectifying=None, divide=None))
    names = {"server_args": args, "is_draft_worker": False, "model_runner": runner, "tree_cache": SimpleNamespace()}
    return SimpleNamespace(**names), SimpleNamespace(forward_mode=ForwardMode.DECODE)


def test_a_step_that_raises_leaves_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, batch = a_decode_step()
    monkeypatch.setattr(rectification, "plan_step", lambda *_: object())
    monkeypatch.setattr(rectification, "pass_tokens", lambda _: 8)
    with pytest.raises(KeyError, match="SGLang"):
        rectification.run_step(fail, worker, batch)
    assert worker.model_runner.attn_backend.rectifying is None


def test_before_a_mixed_batch_due_rows_are_encoded_up_to_their_newest_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that decode in it: not a prompt, one that is not due, or one that has finished since it was scheduled."""
    worker, _ = a_decode_step()
    counts = worker.model_runner.attn_backend.counters = SimpleNamespace(rectify=RectifyCounts())
    encoded: list[Any] = []
    monkeypatch.setattr(rectification, "pass_tokens", lambda _: 8192)
    monkeypatch.setattr(rectification, "rows_view", lambda _, reqs: SimpleNamespace(reqs=reqs, mamba_track_mask_cpu=()))
    monkeypatch.setattr(rectification, "extend_view", lambda _, spans: spans)
    monkeypatch.setattr(rectification, "_encode", lambda _, spans: encoded.append(spans))
    options = SimpleNamespace(rectify_interval=32)
    _, due, early, gone = requests = [
        SimpleNamespace(
            multimodal_inputs=None,
            kv=SimpleNamespace(req_pool_idx=row),
            **{ATTRIBUTE: SimpleNamespace(shareable_len=start, options=options)},
        )
        for start, row in ((100, 1), (110, 2), (130, 3), (100, None))
    ]
    # As ``joint_pass.attach`` leaves it where a single rank gathers sizes, with --moe-dense-tp-size.
    batch: Any = SimpleNamespace(reqs=requests, decoding_reqs=[due, early, gone], **{STEP: None})
    batch.forward_mode, batch.seq_lens_cpu = ForwardMode.MIXED, torch.tensor([600, 142, 141, 140])
    assert rectification.run_step(lambda *_: "ran", worker, batch) == "ran"
    assert encoded == [[Span(due, 110, 141)]] and (counts.rectify.requests, counts.rectify.tokens) == (1, 31)


def test_between_rounds_full_pages_are_rectified_before_a_round_could_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of 4 tokens, pages of 16: what a row needs of its interval of 32 is 8 rounds."""
    launched: list[list[tuple[int, int, int]]] = []

    def row(exact: int | None, committed: int, interval: int = 32, finished: bool = False) -> SimpleNamespace:
        state = SimpleNamespace(shareable_len=exact, options=SimpleNamespace(rectify_interval=interval))
        kv = SimpleNamespace(kv_committed_len=committed)
        names = {"kv": kv, "state": state, "number": len(rows), "multimodal_inputs": None}
        return SimpleNamespace(finished=lambda: finished, **names)

    rows: list[SimpleNamespace] = []
    # Long overdue, finished, never, retracted, exact beyond its last full page, and halfway to its interval.
    for asked in ((100, 150), (100, 150, 32, True), (100, 150, 0), (None, 0), (100, 101), (100, 115)):
        rows.append(row(*asked))
    scheduler, batch = a_decode_step()
    counts = RectifyCounts()
    backend = SimpleNamespace(verified=4, counters=SimpleNamespace(rectify=counts))
    scheduler.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(attn_backend=backend))
    scheduler.tree_cache.token_to_kv_pool_allocator = SimpleNamespace(page_size=16)
    batch.reqs = rows
    monkeypatch.setattr(rectification, "state_of", lambda request: request.state)
    monkeypatch.setattr(rectification, "pass_tokens", lambda _: 8192)
    monkeypatch.setattr(
        rectification,
        "_launch",
        lambda *args: launched.append([(span.request.number, span.start, span.end) for span in args[2]]),
    )
    rectification.follow_results(lambda *_: None, scheduler, batch, None)
    assert launched == [[(0, 100, 144), (5, 100, 112)]]
    assert (counts.passes, counts.requests, counts.tokens, counts.delay_steps) == (1, 2, 56, 4)
    rows[0].state.shareable_len, rows[5].state.shareable_len = 144, 112
    rectification.follow_results(lambda *_: None, scheduler, batch, None)
    assert len(launched) == 1


def test_results_that_raise_release_whom_they_held_and_leave_the_tree_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler, batch = a_decode_step()
    released: list[tuple[Any, bool]] = []
    options = SimpleNamespace(rectify_interval=8)
    state = SimpleNamespace(shareable_len=4, compacted=False, options=options)
    monkeypatch.setattr(rectification, "state_of", lambda _: state)
    kv = SimpleNamespace(kv_committed_len=9)
    request = SimpleNamespace(kv=kv, finished_reason=None, multimodal_inputs=None)

    def process(scheduler: Any, *_: Any) -> None:
        rectification.hold_release(
            lambda request, tree, *, checkpoint: released.append((request, checkpoint)),
            request,
            scheduler.tree_cache,
            checkpoint=True,
        )
        assert not released
        fail()

    with pytest.raises(KeyError, match="SGLang"):
        rectification.follow_results(process, scheduler, batch, None)
    assert released == [(request, True)] and not vars(scheduler.tree_cache)


def test_alone_a_row_is_due_when_its_interval_is_reached_and_neither_sooner_nor_later() -> None:
    assert ripe_rows([31, 32, 33, 500, 8, 1], [32, 32, 32, 0, 8, 2]) == [1, 2, 4]
    # However many are due, and however few another pass would take along.
    assert ripe_rows([8] * 100, [8] * 100) == list(range(100))


def planned(
    starts: Sequence[int],
    lengths: Sequence[int],
    stored: list[bool] | None = None,
    shared: bool = False,
    deterministic: bool = False,
) -> tuple[Rectification, list[Any]]:
    """Plan a step of rows that are exact up to their starts, in passes of 64 tokens; return their states, too."""
    options = SimpleNamespace(rectify_interval=32)
    states = [SimpleNamespace(shareable_len=start, options=options, approximate_states=set()) for start in starts]
    requests: Any = [SimpleNamespace(multimodal_inputs=None, **{ATTRIBUTE: state}) for state in states]
    batch: Any = SimpleNamespace(seq_lens_cpu=torch.tensor(lengths), reqs=requests, mamba_track_mask_cpu=stored)
    served = build("resa", {"rectify_max_batch": 1})
    served.decode.deterministic = deterministic
    step = plan_step(served, batch, 64, shared=shared)
    assert step is not None and step.late == [0] * len(step.due)
    return step, states


@pytest.mark.parametrize("deterministic", [True, False])
def test_rows_that_are_due_alone_share_passes_of_a_chunk(deterministic: bool) -> None:
    step, _ = planned((108, 268, 58, 240, 77), (140, 300, 90, 250, 77), deterministic=deterministic)
    assert (step.due, step.parts) == (([0, 1, 2], [[0, 1], [2]]) if deterministic else ([0], [[0]]))


@pytest.mark.parametrize("shared", [True, False])
def test_rows_whose_states_are_stored_take_the_room_of_a_pass(shared: bool) -> None:
    """Row 0 is due, and the others store states in this step, of which the last one finds no room."""
    step, states = planned((168, 236, 294, 360), (200, 256, 320, 384), [False, True, True, True], shared=shared)
    assert (step.due, step.parts, step.urgent) == ([1, 2], [[0, 1]], True)
    assert [state.approximate_states for state in states] == [set(), set(), set(), {384}]
    step, states = planned((168, 250, 310, 380), (200, 256, 320, 384), [False, True, True, True], shared=shared)
    assert (step.due, [state.approximate_states for state in states]) == ([0, 1, 2, 3], [set()] * 4)
