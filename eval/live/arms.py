"""The servers of a run, and what each must be and prove before its scores count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eval.live.client import LiveServer
from eval.live.completions import served_model
from eval.live.counters import COUNTED, EvaluationError, dense_rows, require_dense
from eval.live.suite import Case

# More would make the scores those of a dense server, and the recorded density those of a few rows.
MAX_DENSE_ROWS = 0.1


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

    @property
    def asks_dense(self) -> bool:
        """Whether its requests ask a sparse server to decode dense."""
        return self.options.get("custom_params", {}).get("sparse") is False


def make_arm(name: str, server: LiveServer, facts: dict[str, Any], model: str | None, params: dict[str, Any]) -> Arm:
    """Describe a server, of which `facts` is what it says about itself."""
    found, context = server.ask(lambda http: served_model(http, model))
    counted = facts.get("sparse") is not None
    return Arm(name, server, found, context, {"custom_params": params} if params else {}, counted)


def methods_of(facts: dict[str, Any]) -> str | None:
    """Return the sparse methods that a server runs, such as "resa" or "resa+anchor"; None for a dense one."""
    state = facts.get("sparse") or {}
    names = [state.get("method"), (state.get("prefill") or {}).get("method")]
    return "+".join(name for name in names if name) or None


def require_method(expect: str, facts: dict[str, Any], compared: bool) -> None:
    """Refuse a server that does not run what is expected of it.

    Args:
        expect: of the command line.
        facts: what the server says about itself.
        compared: whether it is compared with another server.

    Raises:
        EvaluationError: names both.
    """
    method = methods_of(facts)
    if expect == "any" or (expect == "auto" and (method or not compared)):
        return
    wanted = {"auto": "a sparse method", "dense": None}.get(expect, expect)
    if method != wanted:
        raise EvaluationError(
            f"the base server runs {method or 'no sparse method'}, expected {wanted or 'none'}: "
            f"start it so, or say --expect {method or 'dense'}"
        )


def require_reference(expect: str, facts: Sequence[dict[str, Any]], params: dict[str, Any]) -> None:
    """Refuse a server to compare with that is no reference.

    Args:
        expect: of the command line.
        facts: what the two servers say about themselves.
        params: custom parameters of the second one's requests.

    Raises:
        EvaluationError: it runs a sparse method and is not asked to run dense, or has another model.
    """
    method = methods_of(facts[1])
    if method and params.get("sparse") is not False and expect != "any":
        raise EvaluationError(
            f"the server to compare with runs {method}: say --compare-custom-params '{{\"sparse\": false}}' to have it "
            "run dense, or --expect any"
        )
    models = [fact.get("model_path") for fact in facts]
    if all(models) and models[0] != models[1]:
        raise EvaluationError(f"the servers have different models, {models[0]} and {models[1]}: prompts are token ids")


def require_proof(label: str, arm: Arm, expect: str, counts: Sequence[dict[str, int]]) -> None:
    """Refuse the scores of a server whose counters do not show that it decoded as it was asked to: sparse, or dense.

    Args:
        label: of the group, for the message.
        arm: the server.
        expect: of the command line.
        counts: what it counted for the group, run by run.

    Raises:
        EvaluationError: as said; names what to change.
    """
    total = {name: sum(count[name] for count in counts) for name in COUNTED}
    if arm.asks_dense:
        require_dense(f"{label} {arm.name}", total)
        return
    if expect in ("any", "dense"):
        return
    if not total["sparse_layer_rows"] or total["pages_attended"] >= total["pages_held"]:
        raise EvaluationError(
            f"{label}: nothing of it was decoded sparse, so it says nothing about the method: start the server with "
            "lower min_seq_len, crossover_tokens and min_pages, ask longer questions, or say --expect any"
        )
    share = dense_rows(total) or 0.0
    if share > MAX_DENSE_ROWS:
        raise EvaluationError(
            f"{label}: {share:.0%} of the rows were decoded dense, allowed are {MAX_DENSE_ROWS:.0%}: start the server "
            "with lower min_seq_len and crossover_tokens, raise --concurrency, or say --expect any"
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
