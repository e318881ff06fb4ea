"""The counters of a sparse server, and what they prove about a setting that was measured in between."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

COUNTED = (
    "decode_rows",
    "dense_fallback_rows",
    "sparse_layer_rows",
    "pages_attended",
    "pages_held",
    "overflowed_layer_rows",
    "rectified_requests",
    "rectified_tokens",
    "rectifying_steps",
)
# Of a method whose kernel looks at every key, and skips the values of some blocks.
BLOCKS_COUNTED = ("blocks_visited", "blocks_skipped")
# Of lossless decoding.
DRAFTS_COUNTED = (
    "verified_rounds",
    "undrafted_steps",
    "draft_steps",
    "drafted_tokens",
    "accepted_tokens",
    "judged_drafts",
)
# Of a prefill method; in what `moved` returns they have the prefix ``prefill_``, as in the server's metrics.
PREFILL_COUNTED = ("sparse_tokens", "dense_tokens", "pairs_attended", "pairs_causal")


class EvaluationError(RuntimeError):
    """A measurement that cannot be made, or that would not show what it claims to."""


class Unreachable(EvaluationError):
    """A server that gives no answer."""


def counts_of(state: dict[str, Any]) -> dict[str, int]:
    """The counters in what a server says: ``COUNTED``, and where it has them the other tuples."""
    prefill = state.get("prefill") or {}
    some = (*BLOCKS_COUNTED, *DRAFTS_COUNTED)
    found = {name: state[name] for name in COUNTED} | {name: state[name] for name in some if name in state}
    return found | {f"prefill_{name}": prefill[name] for name in PREFILL_COUNTED if prefill}


def moved(before: dict[str, Any], after: dict[str, Any]) -> dict[str, int]:
    """By how much each counter of `counts_of` went up."""
    earlier = counts_of(before)
    return {name: value - earlier[name] for name, value in counts_of(after).items()}


def sum_of(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of counts that `moved` returned; without any, ``COUNTED`` of 0."""
    found: dict[str, int] = dict.fromkeys(COUNTED, 0)
    for each in counts:
        for name, count in each.items():
            found[name] = found.get(name, 0) + count
    return found


def density(counts: dict[str, int]) -> float | None:
    """Share of the held pages that the selection kernel attended to, None if it did not run; see `dense_rows`."""
    return counts["pages_attended"] / counts["pages_held"] if counts["pages_held"] else None


def sparsity(counts: dict[str, int]) -> float | None:
    """Share of the query-key pairs that prefill left out, None without a prefill method or a prompt token."""
    causal = counts.get("prefill_pairs_causal")
    return 1 - counts["prefill_pairs_attended"] / causal if causal else None


def leaves_out(counts: dict[str, int]) -> bool:
    """Whether decode left anything out: pages that were not selected, or blocks whose values were skipped."""
    return counts["pages_attended"] != counts["pages_held"] or bool(counts.get("blocks_skipped"))


def skipped(counts: dict[str, int]) -> float | None:
    """Share of the blocks that decode looked at and skipped, None of a method that selects, or without such a row."""
    return counts["blocks_skipped"] / counts["blocks_visited"] if counts.get("blocks_visited") else None


def dense_rows(counts: dict[str, int]) -> float | None:
    """Share of the decoded rows that ran dense outside the selection kernel, and so are not in `density`."""
    return counts["dense_fallback_rows"] / counts["decode_rows"] if counts["decode_rows"] else None


def read_shares(counts: dict[str, int]) -> dict[str, float | None]:
    """`density` and `dense_rows`, `skipped` where blocks are, and `sparsity` where a prefill method counts."""
    found = {"density": density(counts), "dense_rows": dense_rows(counts)}
    found |= {"skipped": skipped(counts)} if "blocks_visited" in counts else {}
    return found | ({"sparsity": sparsity(counts)} if "prefill_pairs_causal" in counts else {})


def require_dense_prefill(label: str, counts: dict[str, int]) -> None:
    """Refuse counts of requests that asked for dense prefill and got another."""
    if counts.get("prefill_sparse_tokens") or sparsity(counts):
        raise EvaluationError(
            f"{label}: the server prefilled {counts['prefill_sparse_tokens']} tokens sparse although the requests said "
            "`sparse: false` or `exact_prefix: true`"
        )


def require_dense(label: str, counts: dict[str, int]) -> None:
    """Refuse counts of a dense setting in which a row left pages out or was rectified, or prefill was sparse.

    With ``dense_fallback: never`` a dense row goes through the sparse kernels, but selects every page.
    """
    if leaves_out(counts):
        blocks = f" and skipped {count} of their blocks" if (count := counts.get("blocks_skipped")) else ""
        raise EvaluationError(
            f"{label}: the server attended to {counts['pages_attended']} of {counts['pages_held']} pages{blocks} "
            "although the requests said `sparse: false`"
        )
    if counts["rectified_tokens"]:
        raise EvaluationError(f"{label}: the server rectified {counts['rectified_tokens']} tokens of dense requests")
    require_dense_prefill(label, counts)


def require_sparse(label: str, counts: dict[str, int], rectifying: bool) -> None:
    """Refuse counts if nothing ran sparse, rows ran dense, or rectification is not as `rectifying` says."""
    if not counts["sparse_layer_rows"] or not leaves_out(counts):
        raise EvaluationError(f"{label}: nothing ran sparse")
    if rectifying:
        if not counts["rectified_tokens"]:
            raise EvaluationError(f"{label}: the server rectified nothing")
        return
    if counts["rectified_tokens"]:
        raise EvaluationError(f"{label}: the server rectified {counts['rectified_tokens']} tokens, wanted none")
    # Not judged while rectifying: whether its dense passes count among these rows is the server's affair.
    if counts["dense_fallback_rows"]:
        raise EvaluationError(
            f"{label}: {counts['dense_fallback_rows']} of {counts['decode_rows']} rows ran dense; start the server "
            "with lower min_seq_len, crossover_tokens and min_pages"
        )
