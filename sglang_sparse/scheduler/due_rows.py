"""Choice of the rows that a decode step rectifies, and of their passes, by which tensor-parallel ranks agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from sglang_sparse.scheduler.partial_batch import Span


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
