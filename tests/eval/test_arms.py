"""Tests of the names that the evaluation's commands give servers, and of the servers that they refuse to read."""

from types import SimpleNamespace
from typing import Any

import pytest

from eval.live.arms import (
    decode_config,
    methods_of,
    require_answers,
    require_least,
    require_method,
    require_reference,
)
from eval.live.counters import EvaluationError


def test_servers_with_rules_by_layer_are_called_after_all_their_methods() -> None:
    state = {"method": "resa", "config": {}, "parts": [{"method": "resa"}, {"method": "skip_softmax"}]}
    assert methods_of({"sparse": state}) == "resa/skip_softmax"
    with pytest.raises(EvaluationError, match="expected resa"):
        require_method("resa", {"sparse": state}, False)
    server: Any = SimpleNamespace(sparse_state=lambda: state)
    with pytest.raises(EvaluationError, match="rules of several methods or fields, resa/skip_softmax"):
        decode_config(server)


def test_a_reference_must_be_dense_and_of_the_same_model() -> None:
    plain, other = {"model_path": "m", "sparse": None}, {"model_path": "n", "sparse": None}
    resa = {"model_path": "m", "sparse": {"method": "resa"}}
    for facts in ([resa, plain], [resa, {}]):
        require_reference("auto", facts, {})
    require_reference("auto", [resa, resa], {"sparse": False})
    require_reference("any", [resa, resa], {})
    with pytest.raises(EvaluationError, match="compare with runs resa"):
        require_reference("auto", [resa, resa], {})
    # A server whose prefill alone is sparse is no reference either.
    anchor = {"model_path": "m", "sparse": {"method": None, "prefill": {"method": "anchor"}}}
    with pytest.raises(EvaluationError, match="compare with runs anchor"):
        require_reference("auto", [resa, anchor], {})
    with pytest.raises(EvaluationError, match="different models, m and n"):
        require_reference("auto", [resa, other], {})


def test_a_run_with_failed_requests_is_void() -> None:
    rows = [{"id": str(i), "failed": "refused" if i == 0 else None} for i in range(100)]
    with pytest.raises(EvaluationError, match="void: 1 of 100 base requests failed: refused"):
        require_answers("base", rows)
    require_answers("base", rows[1:])


def test_a_compared_server_needs_a_method() -> None:
    with pytest.raises(EvaluationError, match="runs no sparse method, expected a sparse method"):
        require_method("auto", {}, compared=True)
    require_method("auto", {}, compared=False)
    require_method("dense", {"sparse": None}, compared=True)
    both = {"sparse": {"method": "resa", "prefill": {"method": "anchor"}}}
    require_method("resa+anchor", both, compared=True)
    with pytest.raises(EvaluationError, match=r"runs resa\+anchor, expected resa"):
        require_method("resa", both, compared=True)


@pytest.mark.parametrize(("field", "what"), [("sparsity", "prefill left out"), ("skipped", "decode skipped")])
def test_a_server_that_leaves_out_too_little_is_refused(field: str, what: str) -> None:
    base = {"arm": "base", "task": "single", "length": 32768, "sparsity": 0.1, "skipped": 0.1, field: 0.64}
    dense = {**base, "arm": "compare", field: 0.0}
    require_least([base, dense], field, 0.6)
    for share, said in ((0.59, "0.590"), (None, "0.000")):
        message = rf"{what} less than 0.6 of .* \(--least-{field}\): multikey 8192: {said}$"
        with pytest.raises(EvaluationError, match=message):
            require_least([base, {**base, "task": "multikey", "length": 8192, field: share}], field, 0.6)
