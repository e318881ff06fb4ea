"""Choice of the rows that a decode step rectifies: pure functions, so that tensor-parallel ranks agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate


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
    fitting = sum(tokens <= max_tokens for tokens in accumulate(pending[row] for row in chosen))
    return sorted(chosen[: max(1, fitting)])


def ripe_rows(pending: Sequence[int], intervals: Sequence[int]) -> list[int]:
    """Choose the rows that this step rectifies by each row alone: those whose interval is reached, however many.

    Args:
        pending: see ``due_rows``.
        intervals: likewise.
    """
    return [row for row, count in enumerate(pending) if intervals[row] and count >= intervals[row]]
