"""Choice of the rows that a step rectifies, and of their passes: each rank chooses the same, from the batch alone."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from sglang_sparse.attention.protocols import ScheduleBatch
from sglang_sparse.config.settings import prefill_chunk
from sglang_sparse.scheduler.partial_batch import JointPass, Span
from sglang_sparse.scheduler.request_state import state_of

if TYPE_CHECKING:
    from sglang_sparse.config.settings import Settings
    from sglang_sparse.scheduler.fa3_packing import Divide


@dataclass
class Rectification:
    """A decode step that rectifies some of its rows.

    Attributes:
        outer_batch: the scheduler's batch.
        due: rows that are rectified, ascending.
        spans: what is re-encoded of each of them.
        late: steps that each of them waited beyond its interval.
        parts: which of them, as indices of ``due``, share a pass.
        joint: the pass that other ranks of data-parallel attention run along.
        urgent: whether this rank wants the pass, or only takes part where another one does.
    """

    outer_batch: ScheduleBatch
    due: list[int]
    spans: list[Span]
    late: list[int]
    parts: list[list[int]]
    joint: JointPass | None = None
    urgent: bool = True

    @property
    def rest(self) -> list[int]:
        """The rows that decode as always."""
        due = set(self.due)
        return [row for row in range(len(self.outer_batch.reqs)) if row not in due]


def pass_tokens(server_args: object) -> int:
    """Most tokens of a pass: a chunk of prefill, for which SGLang keeps memory."""
    return prefill_chunk(server_args) or sys.maxsize


def due_rows(
    pending: Sequence[int], intervals: Sequence[int], max_batch: int, max_tokens: int, anyway: bool = False
) -> list[int]:
    """Choose the rows that this step rectifies.

    Deadlines first: row r in the order of urgency must be served within r // max_batch steps from now, so a pass runs
    as soon as waiting longer would make some row late. A pass that runs anyway takes rows along that are at least
    halfway to their interval: from then on they are due together, and fewer steps carry a second pass.

    Args:
        pending: ``[rows]``, approximate tokens of each row and its newest one.
        intervals: ``[rows]``, generated tokens between rectifications; 0 means never.
        max_batch: rows that one pass takes, unless this many could not keep up.
        max_tokens: most tokens of a pass; the others wait for the next step. At least one row is taken.
        anyway: whether a pass runs anyway, without a deadline of these rows.

    Returns:
        Ascending rows; empty where nothing is due.
    """
    rows = [row for row, count in enumerate(pending) if intervals[row] and count > 1]
    load = sum(1 / interval for interval in intervals if interval)
    # Nine ninths are a little more than 1 in binary.
    batch = max(max_batch, math.ceil(load - 1e-9))
    left = {row: intervals[row] - pending[row] for row in rows}
    rows.sort(key=lambda row: (left[row], row))
    if not anyway and all(left[row] > rank // batch for rank, row in enumerate(rows)):
        return []
    # Near its capacity a pass must take what it can get, or the last rows would be late.
    busy = 2 * load > batch
    chosen = [row for row in rows[:batch] if busy or left[row] <= 0 or 2 * pending[row] >= intervals[row]]
    return first_fitting(chosen, pending, max_tokens)


def first_fitting(rows: Sequence[int], pending: Sequence[int], max_tokens: int) -> list[int]:
    """Return the first of some rows, in ascending order, that fit in a pass of ``max_tokens``; at least one."""
    fitting = sum(tokens <= max_tokens for tokens in accumulate(pending[row] for row in rows))
    return sorted(rows[: max(1, fitting)])


def ripe_rows(pending: Sequence[int], intervals: Sequence[int]) -> list[int]:
    """Choose the rows that this step rectifies by each row alone: those whose interval is reached, however many.

    Args:
        pending: see ``due_rows``.
        intervals: likewise.
    """
    return [row for row, count in enumerate(pending) if intervals[row] and count >= intervals[row]]


def grouped(spans: Sequence[Span], max_batch: int, max_tokens: int) -> list[list[Span]]:
    """Split spans into passes of at most ``max_batch`` spans and ``max_tokens`` tokens, or a single span."""
    groups: list[list[Span]] = []
    for span in spans:
        last = groups[-1] if groups else []
        if last and len(last) < max_batch and sum(other.tokens for other in last) + span.tokens <= max_tokens:
            last.append(span)
        else:
            groups.append([span])
    return groups


def plan_step(
    settings: Settings, batch: ScheduleBatch, max_tokens: int, divide: Divide | None = None, shared: bool = False
) -> Rectification | None:
    """Decide which rows of a prepared decode batch are rectified in this step, of ``max_tokens`` together.

    They share one pass, unless ``divide`` says otherwise, see ``fa3_packing.Divider.divide``. With deterministic
    inference no row waits for others: all that are due are rectified, in passes of up to ``max_tokens``. Rows whose
    recurrent states SGLang stores in this step come first, and what finds no room is marked. Where ranks have
    ``shared`` passes, the plan of a rank without a deadline is not ``urgent``.
    """
    lengths = batch.seq_lens_cpu.tolist()
    states = [state_of(request) for request in batch.reqs]
    exact = [
        length if state is None or state.shareable_len is None else state.shareable_len
        for state, length in zip(states, lengths, strict=True)
    ]
    pending = [length - start for length, start in zip(lengths, exact, strict=True)]
    intervals = [state.options.rectify_interval if state else 0 for state in states]
    if not any(intervals) or settings.rectify is None:
        return None
    alone, most = settings.decode.deterministic, (settings.rectify.rectify_max_batch, max_tokens)
    due = ripe_rows(pending, intervals) if alone else due_rows(pending, intervals, *most)
    # SGLang stores the states of these rows for the prefix cache in this step, where exact ones alone may be.
    stored = [row for row, here in enumerate(batch.mamba_track_mask_cpu or ()) if here and intervals[row]]
    if stored:
        due = first_fitting([*stored, *sorted(set(due).difference(stored))], pending, max_tokens)
        for state, length in ((states[row], lengths[row]) for row in stored if row not in due):
            assert state is not None
            state.approximate_states.add(length)
    urgent = bool(due)
    if shared and not due:
        due = due_rows(pending, intervals, *most, anyway=True)
    if not due:
        return None
    spans = [Span(batch.reqs[row], exact[row], lengths[row]) for row in due]
    late = [max(0, pending[row] - intervals[row]) for row in due]
    if alone:
        ends = accumulate((len(group) for group in grouped(spans, len(due), max_tokens)), initial=0)
        parts = [list(range(first, last)) for first, last in pairwise(ends)]
    elif divide:
        parts = divide([(span.tokens, span.end) for span in spans])
    else:
        parts = [list(range(len(due)))]
    return Rectification(batch, due, spans, late, parts, urgent=urgent)
