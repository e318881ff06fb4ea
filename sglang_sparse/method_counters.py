"""What methods count themselves and servers export: ``more_counts``, with a prefix in prefill, and kept prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_sparse.attention.counters import Counters

# Published as sglang:sparse_<name>_total by servers whose methods count it.
METHOD_COUNTERS = {
    "blocks_visited": "Blocks of keys that sparse decode passes looked at, per row, sparse layer and KV head of this "
    "rank; those of rows that attend densely are left out.",
    "blocks_skipped": "Of the blocks that sparse decode passes looked at, those whose values were not attended to.",
    "prefill_blocks_visited": "Blocks of keys that sparse prefill looked at, per sparse tile of queries, sparse layer "
    "and query head of this rank.",
    "prefill_blocks_skipped": "Of the blocks that sparse prefill looked at, those whose values were not attended to.",
}
# The same of methods that choose where a prompt ends, by their names there.
KEPT_COUNTERS = {
    "kept_prompts": "Prompts of which a request sees a part only, chosen where they end.",
    "kept_whole_prompts": "Prompts that would have been cut but stay visible throughout: their last tokens came "
    "in two passes for want of memory.",
    "kept_compacted": "Requests that have let go of their prompt (eviction: compact).",
    "kept_freed_tokens": "KV tokens that requests which let go of their prompt no longer hold (eviction: compact).",
    "kept_compact_waits": "Decode steps at which a request had no room to let go of its prompt, summed over requests "
    "(eviction: compact).",
}


def method_counters(counters: Counters) -> dict[str, str]:
    """Return those of the above that a server has. What else a method counts is in the server info alone."""
    own = {*counters.more_counts, *(f"prefill_{name}" for name in counters.prefill_more_counts), *kept_totals(counters)}
    return {name: text for name, text in (METHOD_COUNTERS | KEPT_COUNTERS).items() if name in own}


def kept_totals(counters: Counters) -> dict[str, int]:
    """Return what a server's stage at a prompt's end has counted, by the names of ``KEPT_COUNTERS``."""
    return {f"kept_{name}": count for name, count in counters.keeps.totals().items()} if counters.keeps else {}
