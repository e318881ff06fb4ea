"""What the commands of the evaluation call a server, and which they refuse to read."""

from types import SimpleNamespace
from typing import Any

import pytest

from eval.live.arms import decode_config, methods_of, require_method
from eval.live.counters import EvaluationError


def test_servers_with_rules_by_layer_are_called_after_all_their_methods() -> None:
    state = {"method": "resa", "config": {}, "parts": [{"method": "resa"}, {"method": "skip_softmax"}]}
    assert methods_of({"sparse": state}) == "resa/skip_softmax"
    with pytest.raises(EvaluationError, match="expected resa"):
        require_method("resa", {"sparse": state}, False)
    server: Any = SimpleNamespace(sparse_state=lambda: state)
    with pytest.raises(EvaluationError, match="rules of several methods or fields, resa/skip_softmax"):
        decode_config(server)
