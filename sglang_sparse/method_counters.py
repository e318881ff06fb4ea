"""What methods count themselves and servers export: their ``more_counts``, those of prefill with a prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_sparse.stats import Counters

# Published as sglang:sparse_<name>_total by servers whose methods count it.
METHOD_COUNTERS = {
    "blocks_visited": "Blocks of keys that sparse decode passes looked at, per row, sparse layer and KV head of this "
    "rank; those of rows that attend densely are left out.",
    "blocks_skipped": "Of the blocks that sparse decode passes looked at, those whose values were not attended to.",
    "prefill_blocks_visited": "Blocks of keys that sparse prefill looked at, per sparse tile of queries, sparse layer "
    "and query head of this rank.",
    "prefill_blocks_skipped": "Of the blocks that sparse prefill looked at, those whose values were not attended to.",
}


def method_counters(counters: Counters) -> dict[str, str]:
    """Return those of ``METHOD_COUNTERS`` that a server has. What else a method counts is in the server info alone."""
    own = {*counters.more_counts, *(f"prefill_{name}" for name in counters.prefill_more_counts)}
    return {name: text for name, text in METHOD_COUNTERS.items() if name in own}
