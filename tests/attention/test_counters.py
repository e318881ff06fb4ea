"""The counters: what a decode pass adds, what rectification adds, and how both are handed out."""

import importlib.metadata
from dataclasses import fields

import torch

from sglang_sparse.attention.counters import Counters, DraftCounts, RectifyCounts
from sglang_sparse.attention.plan import DecodePlan, GroupPlan
from sglang_sparse.config.settings import build
from sglang_sparse.config.versions import SUPPORTED_SGLANG
from sglang_sparse.methods.aux_buffers import AuxBuffers
from sglang_sparse.methods.base import ModelShape
from sglang_sparse_kernels.page_centroids import record_bytes

SHAPE = ModelShape(num_layers=4, num_q_heads=8, num_kv_heads=2, head_dim=64, kv_dtype=torch.bfloat16)
FLAT = {
    "passes": "rectifying_steps",
    "second_passes": "second_passes",
    "requests": "rectified_requests",
    "tokens": "rectified_tokens",
    "delay_steps": "rectify_delay_steps",
    "max_delay_steps": "rectify_max_delay_steps",
    "finish_passes": "finish_passes",
    "finish_tokens": "finish_tokens_rectified",
    "tail_tokens_dropped": "tail_tokens_dropped",
}


def counters() -> Counters:
    settings = build("resa", {})
    pools = AuxBuffers(settings.method.aux_specs(SHAPE), (2, 3), 8, 16, "cpu")
    return Counters(settings, pools, SHAPE, torch.zeros(4, dtype=torch.int64))


def plan(pages: list[int], selected: list[int], dense: list[bool], sparse: bool = True) -> DecodePlan:
    held, attended, covered = torch.tensor(pages), torch.tensor(selected), torch.tensor(dense)
    own = GroupPlan(held, attended, covered, torch.zeros(len(pages)))
    return DecodePlan(covered, attended < held, (own,) if sparse else ())


def test_a_new_server_counts_nothing() -> None:
    snapshot = counters().snapshot()
    assert snapshot["method"] == "resa" and snapshot["sparse_layers"] == 2
    assert {snapshot[name] for name in FLAT.values()} == {0}
    assert snapshot["active_fraction"] == 0.0
    assert snapshot["aux_bytes"] == 2 * 8 * SHAPE.num_kv_heads * record_bytes(6, SHAPE.head_dim)


def test_a_server_says_what_it_runs_on() -> None:
    snapshot = counters().snapshot()
    assert snapshot["device"] == "cpu" and snapshot["versions"]["sglang"] == SUPPORTED_SGLANG[0]
    assert snapshot["versions"]["torch"] == importlib.metadata.version("torch")


def test_rows_of_sparse_and_dense_passes() -> None:
    counted = counters()
    counted.add_decode(plan([100, 8], [10, 8], [False, True]))
    counted.add_decode(plan([9, 8, 7], [9, 8, 7], [True] * 3, sparse=False))
    snapshot = counted.snapshot()
    assert (snapshot["decode_steps"], snapshot["decode_rows"], snapshot["dense_fallback_rows"]) == (2, 5, 4)
    assert abs(snapshot["max_active_fraction"] - 0.1) < 1e-6


def test_a_sparse_row_that_selects_all_its_pages_has_no_active_fraction() -> None:
    counted = counters()
    counted.add_decode(plan([3, 40], [3, 8], [False, False]))
    snapshot = counted.snapshot()
    assert snapshot["dense_fallback_rows"] == 0
    assert abs(snapshot["max_active_fraction"] - 0.2) < 1e-6


def test_selection_counts_come_from_the_device() -> None:
    counted = counters()
    counted.select_stats += torch.tensor([12, 30, 300, 4])
    snapshot = counted.snapshot()
    assert snapshot["sparse_layer_rows"] == 6
    assert (snapshot["pages_attended"], snapshot["pages_held"], snapshot["active_fraction"]) == (30, 300, 0.1)
    assert snapshot["overflowed_layer_rows"] == 2
    assert counted.device_totals([12, 30, 300, 4]).items() <= snapshot.items()


def test_touched_pages_of_extend_passes() -> None:
    counted = counters()
    counted.add_extend(torch.tensor([-1, 31, -1, 40]))
    assert counted.snapshot()["extend_pages_summarised"] == 2


def test_every_rectification_count_is_handed_out() -> None:
    counted = counters()
    assert {field.name for field in fields(RectifyCounts)} == set(FLAT)
    for value, name in enumerate(FLAT, 1):
        setattr(counted.rectify, name, value)
    snapshot = counted.snapshot()
    assert [snapshot[flat] for flat in FLAT.values()] == list(range(1, len(FLAT) + 1))
    assert counted.host_totals().items() <= snapshot.items()


def test_rounds_of_drafts() -> None:
    """Tokens behind a round's drafts in its verification do not count as drafts, even if they are right."""
    counted = counters()
    plain = counted.snapshot()
    counted.drafts = DraftCounts()
    counted.drafts.add(3, [0, 2, 3])
    counted.drafts.add(2, [3, 1])
    counted.drafts.add(0, [0, 0])
    names = ("verified_rounds", "undrafted_steps", "draft_steps", "drafted_tokens", "accepted_tokens", "judged_drafts")
    found = dict(zip(names, (2, 1, 5, 13, 8, 11), strict=True))
    assert counted.snapshot() == plain | found and not plain.keys() & found, "other servers have none of these"
    assert found.items() <= counted.host_totals().items()


def test_the_longest_wait_is_taken_by_intervals_and_kept_over_all() -> None:
    counted = counters()
    for longest, taken in ((5, 5), (0, 0), (3, 3)):
        counted.rectify.max_delay_steps = max(counted.rectify.max_delay_steps, longest)
        assert counted.take_max_delay() == taken
        assert counted.snapshot()["rectify_max_delay_steps"] == 5
    counted.rectify.max_delay_steps = 7
    assert counted.snapshot()["rectify_max_delay_steps"] == 7
