"""Tests of requests that a decode server of a pair takes over: where exact KV ends, and which part others may share."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_sparse.scheduler import arrivals, prefill_chunks
from sglang_sparse.scheduler.request_state import ATTRIBUTE


def request(shareable: int | None) -> SimpleNamespace:
    state = SimpleNamespace(shareable_len=shareable, options=None)
    return SimpleNamespace(origin_input_ids=range(8), **{ATTRIBUTE: state})


@pytest.mark.parametrize(("before", "after"), [(None, None), (8, 8), (12, 12), (13, 12)])
def test_a_request_takes_back_no_more_exact_kv_than_was_copied(monkeypatch, before: int | None, after: int) -> None:
    """With overlap scheduling, the step in flight when a request is retracted counts in its exact length."""
    monkeypatch.setattr(arrivals, "current_settings", object)
    taken: Any = request(before)
    batch: Any = SimpleNamespace(reqs=[taken], seq_lens_cpu=torch.tensor([12]))
    arrivals.note_transferred(None, batch)
    assert arrivals.expected(taken)
    assert getattr(taken, ATTRIBUTE).shareable_len == after


@pytest.mark.parametrize(("shareable", "inserted"), [(None, 12), (10, 10), (12, 12)])
def test_no_approximate_tail_enters_the_tree_before_a_request_ends(
    monkeypatch, shareable: int | None, inserted: int
) -> None:
    monkeypatch.setattr(prefill_chunks, "sharing_method", lambda _: None)
    found: list[int] = []
    tree: Any = None
    taken: Any = request(shareable)
    prefill_chunks.cache_whole_groups(lambda _, __, *, up_to: found.append(up_to), tree, taken, up_to=12)
    assert found == [inserted]
