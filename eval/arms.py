"""The servers of a run, and what each must be and prove before its scores count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eval.client import LiveServer
from eval.completions import served_model
from eval.counters import EvaluationError
from eval.suite import Case


@dataclass(frozen=True)
class Arm:
    """One of the servers under comparison, as it is asked.

    Attributes:
        name: "base" or "compare".
        server: where it is.
        model: its name there.
        context: most tokens of prompt and answer; None where the server does not say.
        options: further fields of each request.
        counted: whether the server counts what its sparse method does.
    """

    name: str
    server: LiveServer
    model: str
    context: int | None
    options: dict[str, Any]
    counted: bool


def make_arm(name: str, server: LiveServer, facts: dict[str, Any], model: str | None, params: dict[str, Any]) -> Arm:
    """Describe a server, of which `facts` is what it says about itself."""
    found, context = server.ask(lambda http: served_model(http, model))
    counted = facts.get("sparse") is not None
    return Arm(name, server, found, context, {"custom_params": params} if params else {}, counted)


def require_method(expect: str, facts: dict[str, Any], compared: bool) -> None:
    """Refuse a server that does not run what is expected of it.

    Args:
        expect: of the command line.
        facts: what the server says about itself.
        compared: whether it is compared with another server.

    Raises:
        EvaluationError: names both.
    """
    method = (facts.get("sparse") or {}).get("method")
    if expect == "any" or (expect == "auto" and (method or not compared)):
        return
    wanted = {"auto": "a sparse method", "dense": None}.get(expect, expect)
    if method != wanted:
        raise EvaluationError(
            f"the base server runs {method or 'no sparse method'}, expected {wanted or 'none'}: "
            f"start it with --sparse-method, or say --expect {method or 'dense'}"
        )


def require_proof(label: str, arm: Arm, expect: str, counts: Sequence[dict[str, int]]) -> None:
    """Refuse the scores of a sparse server whose counters do not show that it decoded sparse.

    Args:
        label: of the group, for the message.
        arm: the server.
        expect: of the command line.
        counts: what it counted for the group, run by run.

    Raises:
        EvaluationError: as said; names what to change.
    """
    dense_asked = arm.options.get("custom_params", {}).get("sparse") is False
    if expect in ("any", "dense") or dense_asked:
        return
    attended, held = (sum(count[name] for count in counts) for name in ("pages_attended", "pages_held"))
    if not any(count["sparse_layer_rows"] for count in counts) or attended >= held:
        raise EvaluationError(
            f"{label}: nothing of it was decoded sparse, so it says nothing about the method: start the server with "
            "lower min_seq_len, crossover_tokens and min_pages, ask longer questions, or say --expect any"
        )


def require_room(cases: Sequence[Case], arms: Sequence[Arm]) -> None:
    """Refuse questions that a server has no room for.

    Raises:
        EvaluationError: names the length and the server's context.
    """
    longest = max((case.length or 0 for case in cases), default=0)
    for arm in arms:
        if arm.context is not None and longest > arm.context:
            raise EvaluationError(
                f"a length of {longest} tokens is wanted, the {arm.name} server's context is {arm.context}: start it "
                "with a larger --context-length, or ask for shorter ones"
            )
