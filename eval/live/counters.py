"""The counters of a sparse server, and what they prove about a setting that was measured in between."""

from __future__ import annotations

from typing import Any

COUNTED = (
    "decode_rows",
    "dense_fallback_rows",
    "sparse_layer_rows",
    "pages_attended",
    "pages_held",
    "rectified_requests",
    "rectified_tokens",
    "rectifying_steps",
)


class EvaluationError(RuntimeError):
    """A measurement that cannot be made, or that would not show what it claims to."""


class Unreachable(EvaluationError):
    """A server that gives no answer."""


def moved(before: dict[str, Any], after: dict[str, Any]) -> dict[str, int]:
    """By how much each counter of ``COUNTED`` went up."""
    return {name: after[name] - before[name] for name in COUNTED}


def density(counts: dict[str, int]) -> float | None:
    """Share of the held pages that the selection kernel attended to, None if it did not run; see `dense_rows`."""
    return counts["pages_attended"] / counts["pages_held"] if counts["pages_held"] else None


def dense_rows(counts: dict[str, int]) -> float | None:
    """Share of the decoded rows that ran dense outside the selection kernel, and so are not in `density`."""
    return counts["dense_fallback_rows"] / counts["decode_rows"] if counts["decode_rows"] else None


def require_dense(label: str, counts: dict[str, int]) -> None:
    """Refuse counts of a dense setting in which a row left pages out or was rectified.

    With ``dense_fallback: never`` a dense row goes through the sparse kernels, but selects every page.

    Raises:
        EvaluationError: as said.
    """
    if counts["pages_attended"] != counts["pages_held"]:
        raise EvaluationError(
            f"{label}: the server attended to {counts['pages_attended']} of {counts['pages_held']} pages although the "
            "requests said `sparse: false`"
        )
    if counts["rectified_tokens"]:
        raise EvaluationError(f"{label}: the server rectified {counts['rectified_tokens']} tokens of dense requests")


def require_sparse(label: str, counts: dict[str, int], rectifying: bool) -> None:
    """Refuse counts of a sparse setting that do not show it.

    Args:
        label: the setting, for the message.
        counts: what `moved` returned for it.
        rectifying: whether it has a rectification interval.

    Raises:
        EvaluationError: nothing ran sparse, rows ran dense, or rectification is not as `rectifying` says.
    """
    if not counts["sparse_layer_rows"] or counts["pages_attended"] >= counts["pages_held"]:
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
