"""Faults put into the product on purpose, to prove that the harness sees them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from engine import Engine
from sglang.srt.managers.schedule_batch import Req

from sglang_sparse.attention import memory
from sglang_sparse.methods.prefill import PrefillMethod, PrefillSpan
from sglang_sparse.scheduler import arrivals, exact_kv, prefill_chunks, prefix_keys, rectification, sessions
from sglang_sparse.scheduler.speculation import worker


def let_approximate_kv_in(engine: Engine) -> None:
    """Take the radix guards away: a finished request inserts all it committed."""
    prefill_chunks.state_of = lambda request: None
    Req.owned_kv_len = lambda self: self.kv.kv_committed_len


def corrupt_a_summary(engine: Engine) -> None:
    """From the 20th forward pass on, change one byte of what is kept of a page that it wrote."""

    def corrupt(forward_batch: Any, calls: int) -> None:
        page = int(forward_batch.out_cache_loc[0]) // engine.options.page_size
        if calls >= 20:
            aux = getattr(engine.runner.token_to_kv_pool, memory.ATTRIBUTE)
            aux.buffer(aux.specs[0].name, 1)[page].view(torch.uint8).flatten()[3] ^= 16

    _after_forward(engine, corrupt)


def spoil_rectified_kv(engine: Engine) -> None:
    """After a rectifying step, change V of the newest tokens, which are exact where a row was rectified."""
    counts = engine.runner.attn_backend.counters.rectify
    seen = [0]

    def spoil(forward_batch: Any, calls: int) -> None:
        if counts.passes > seen[0]:
            engine.runner.token_to_kv_pool.get_value_buffer(0)[forward_batch.out_cache_loc] += 0.01
        seen[0] = counts.passes

    _after_forward(engine, spoil)


def _after_forward(engine: Engine, then: Callable[[Any, int], None]) -> None:
    runner = engine.runner
    original, calls = runner.forward, [0]

    def forward(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(forward_batch, *args, **kwargs)
        calls[0] += 1
        then(forward_batch, calls[0])
        return output

    runner.forward = forward


def lose_a_page(engine: Engine) -> None:
    """Forget to free the fifth run of pages that is to be freed."""
    allocator = engine.scheduler.token_to_kv_pool_allocator
    original, calls = allocator.free_segment, [0]

    def free_segment(slots: torch.Tensor, *, start_pos: int) -> None:
        calls[0] += len(slots) > 0
        if calls[0] != 5:
            original(slots, start_pos=start_pos)

    allocator.free_segment = free_segment


def share_incomplete_groups(engine: Engine) -> None:
    """Let whatever was prefilled into the tree."""
    prefill_chunks.share_limit = lambda request, method: len(request.origin_input_ids)


def match_within_groups(engine: Engine) -> None:
    """Use cached prefixes up to their last page, and let chunks end anywhere."""
    PrefillMethod.boundary = lambda self, position: position


def forget_what_a_group_is(engine: Engine) -> None:
    """Let prompts that part within a group share its first pages."""
    prefix_keys.with_group_digest = lambda tokens, *_: tokens


def use_the_last_page_of_a_pair(engine: Engine) -> None:
    """In a tree of pairs, use all that a lookup finds: prompts that part right behind a group lack its last page."""
    prefix_keys._whole_groups = lambda tree, key: key


def share_dense_tails(engine: Engine) -> None:
    """Let the complete groups that a prompt's dense tail touches into the tree."""
    prefill_chunks.share_limit = lambda request, method: max(
        method.boundary(len(request.origin_input_ids)), method.dense_below
    )


def prefill_decoding_rows(engine: Engine) -> None:
    """Let the rows that decode within a mixed batch take the path of prompts."""
    path = engine.runner.attn_backend.prefill
    original = path.begin

    def begin(spans: list[PrefillSpan], *args: Any, **kwargs: Any) -> None:
        routed = [replace(span, method=path.groups) if span.decodes else span for span in spans]
        original(routed, *args, **kwargs)

    path.begin = begin


def forget_a_copy(engine: Engine) -> None:
    """Leave the values of one layer where they were, though a request has let go of them."""
    path = engine.runner.attn_backend.keeps[0].compaction
    path._values[1] = path._keys[1]


def hide_a_kept_block(engine: Engine) -> None:
    """Make requests that have let go of their prompts overlook the last block of what they kept, which they hold."""
    path = engine.runner.attn_backend.keeps[0].compaction
    original = path.run

    def run() -> None:
        places = [move.place for move in path._moves]
        original()
        path._kept.counts[places] -= 1

    path.run = run


def share_compacted_rows(engine: Engine) -> None:
    """Let finished requests insert into the tree what they kept of their prompts, as if it were the prompts."""
    rectification.state_of = lambda request: None


def let_compacted_rows_run_dense(engine: Engine) -> None:
    """Forget that a batch below the crossover has rows that hold a part of their KV only."""
    original = exact_kv.plan_decode
    exact_kv.plan_decode = lambda groups, seq_lens, rows, compacted: original(groups, seq_lens, rows)


def believe_drafts(engine: Engine) -> None:
    """Let a verification take the word of the drafts that it is there to judge."""
    original, drafted = worker.choose, list[torch.Tensor]()

    def choose(*args: Any) -> torch.Tensor:
        chosen = original(*args)
        width = args[4] if len(args) > 4 else 1
        if width == 1:
            drafted.append(chosen)
            return chosen
        believed = [*drafted[1 - width :], chosen.view(-1, width)[:, -1]]
        return torch.stack(believed, 1).flatten()

    worker.choose = choose


def forget_arrivals(engine: Engine) -> None:
    """Leave the summaries of pages that come back from host memory as they were."""
    arrivals.begin = lambda *_: None


def forget_transfers(engine: Engine) -> None:
    """Leave the summaries of pages that another server sent as they were."""
    engine.runner.attn_backend.decoding.expect = lambda *_: None


def keep_approximate_turns(engine: Engine) -> None:
    """Let a session keep all that a turn has committed."""
    sessions.state_of = lambda _: None


SABOTAGES: dict[str, Callable[[Engine], None]] = {
    "guard": let_approximate_kv_in,
    "summary": corrupt_a_summary,
    "rectified": spoil_rectified_kv,
    "leak": lose_a_page,
    "groups": share_incomplete_groups,
    "match": match_within_groups,
    "keys": forget_what_a_group_is,
    "pairs": use_the_last_page_of_a_pair,
    "mixed": prefill_decoding_rows,
    "tail": share_dense_tails,
    "copies": forget_a_copy,
    "unseen": hide_a_kept_block,
    "insert": share_compacted_rows,
    "drafts": believe_drafts,
    "dense": let_compacted_rows_run_dense,
    "arrivals": forget_arrivals,
    "transfers": forget_transfers,
    "turns": keep_approximate_turns,
}
