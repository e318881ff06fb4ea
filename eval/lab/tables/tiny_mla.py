"""A sentence of the documents about what tiny-mla answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eval.scores.verdicts import GATE_DENSE

HOPS = "var_2hop"


def hops(lines: Sequence[Mapping[str, Any]]) -> str:
    """Why variables of two hops judge no method, from the lines of ``eval.lab.train.accuracy``."""
    found = {row["length"]: row["exact_match"] for row in lines if _is_hops(row)}
    return (
        f"Variables of two hops decide nothing here: dense, tiny-mla answers {min(found.values()):.3f} to "
        f"{max(found.values()):.3f} of them at {min(found)} to {max(found)} tokens "
        f"([its card](../../models/tiny-mla/README.md)), and a task decides from {GATE_DENSE:g} on."
    )


def _is_hops(row: Mapping[str, Any]) -> bool:
    return row.get("selector") == "dense" and row["task"].startswith(HOPS)
