"""Ranks of one server compare what decides their answers; a difference ends the start of each."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.runtime_context import get_parallel

from sglang_sparse import __version__
from sglang_sparse.config.settings import build
from sglang_sparse.errors import SparseArgumentError
from sglang_sparse.hooks import equal_ranks

CONFIG = build("resa", {}).config.model_dump_json()
Change = Callable[[dict[str, Any]], dict[str, Any]]


def same(fields: dict[str, Any]) -> dict[str, Any]:
    return fields


@pytest.fixture(autouse=True)
def waited(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The groups that were waited for; there is no other process."""
    found: list[Any] = []
    monkeypatch.setattr(equal_ranks.distributed, "monitored_barrier", lambda group, **_: found.append(group))
    return found


def compare(change: Change | None, **given: Any) -> list[Any]:
    """Compare with a second rank, which has changed fields; None: there is no second rank. Returns what was sent."""
    own = {"sparse_method": "resa", "sparse_prefill_method": None, "sparse_config": CONFIG, "page_size": 16}
    one = {"node_rank": 0, "nnodes": 1, "elastic_ep_backend": None}
    args: Any = SimpleNamespace(**(own | one | given))
    sent: list[Any] = []

    def gather(own: Any) -> list[Any]:
        sent.append(own)
        node, fields = own
        return [own] if change is None else [own, (node + 1, change(fields))]

    size = 1 if change is None else 2
    group = SimpleNamespace(world_size=size, all_gather_object=gather, cpu_group="gloo")
    with get_parallel().override(world_group=group):
        equal_ranks.require_equal_ranks(args)
    return sent


def test_one_rank_sends_nothing(waited: list[Any]) -> None:
    assert compare(None) == compare(None, nnodes=2) == []
    assert compare(same, sparse_method=None) == []
    # Ranks come and go there.
    assert compare(same, elastic_ep_backend="mooncake") == []
    assert waited == []


def test_equal_ranks_go_on() -> None:
    assert len(compare(same)) == len(compare(same, sparse_method=None, nnodes=2)) == 1


@pytest.mark.parametrize(
    ("field", "own", "other"),
    [
        ("sglang-sparse", f'"{__version__}"', '"0.0.1"'),
        ("--page-size", 16, 32),
        ("--sparse-config crossover_tokens", 16384, 9000),
        ("--sparse-config active_ratio", 0.1, 0.3),
    ],
)
def test_a_difference_ends_the_start_with_both_values(field: str, own: Any, other: Any) -> None:
    with pytest.raises(SparseArgumentError) as caught:
        compare(lambda fields: fields | {field: json.loads(str(other))})
    error = caught.value
    assert error.field == field and error.got == {field: f"{own} (rank 0 of node 0); {other} (rank 1 of node 1)"}
    assert "the same sparse flags, config files and version of sglang_sparse on each node" in str(error)
    assert f"got {field} {own}" in str(error)


def test_a_rank_that_does_not_take_part_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(group: Any, **_: Any) -> None:
        raise RuntimeError("Rank 1 failed to pass monitoredBarrier")

    monkeypatch.setattr(equal_ranks.distributed, "monitored_barrier", late)
    with pytest.raises(SparseArgumentError, match=r"within 300 s \(Rank 1 failed .*allowed: this plugin on each node"):
        compare(same)
