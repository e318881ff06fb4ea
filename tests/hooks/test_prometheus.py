"""Metrics and the log line: intervals that add up, and a device that nobody waits for."""

import logging
import math
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from sglang_sparse.attention.counters import PREFILL_TOTALS, Counters, DraftCounts
from sglang_sparse.attention.plan import DecodePlan, GroupPlan
from sglang_sparse.attention.prefill import PrefillPath
from sglang_sparse.config.settings import build
from sglang_sparse.hooks import prometheus
from sglang_sparse.methods.aux_buffers import AuxBuffers
from sglang_sparse.methods.base import ModelShape
from sglang_sparse.methods.views import SELECT_STATS

SHAPE = ModelShape(num_layers=4, num_q_heads=8, num_kv_heads=2, head_dim=64, kv_dtype=torch.bfloat16)


def counters(method: str | None = "resa", prefill: PrefillPath | None = None) -> Counters:
    settings = build(method, {}, "anchor" if prefill else None, {})
    pools = AuxBuffers(settings.decode.aux_specs(SHAPE), (0, 1), 8, 16, "cpu")
    return Counters(settings, pools, SHAPE, torch.zeros(4, dtype=torch.int64), prefill)


@pytest.fixture
def prefill() -> PrefillPath:
    method = build(None, {}, "anchor", {}).prefill
    assert method is not None
    return PrefillPath(method, range(4), None, torch.zeros(2, 64, dtype=torch.int32), 16, SHAPE.num_q_heads)


def prefilled(path: PrefillPath) -> None:
    """A chunk of which half is sparse."""
    path.sparse_tokens += 512
    path.dense_tokens += 512
    path.pairs += torch.tensor([300, 1200])


def work(counted: Counters) -> None:
    """One rectifying step: a row of 12 pages decodes sparse, another is dense."""
    pages = torch.tensor([12, 3], dtype=torch.int32)
    selected = torch.tensor([4, 3], dtype=torch.int32)
    covered = selected == pages
    counted.add_decode(DecodePlan(covered, ~covered, (GroupPlan(pages, selected, covered, torch.zeros(2)),)))
    counted.select_stats += torch.tensor([4, 14, 30, 0])
    counted.rectify.passes += 1
    counted.rectify.requests += 2
    counted.rectify.tokens += 64
    counted.rectify.delay_steps += 3
    counted.rectify.max_delay_steps = max(counted.rectify.max_delay_steps, 3)
    counted.rectify.tail_tokens_dropped += 5


def reporting(counted: Counters, copy: prometheus.DeviceCopy | None = None) -> prometheus.IntervalReport:
    copy = copy or prometheus.DeviceCopy(counted.device_stats)
    return prometheus.IntervalReport(counted, copy, None, logs=True, time=0.0)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == prometheus.__name__]


@pytest.fixture(autouse=True)
def log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, prometheus.__name__)


def test_one_line_for_each_report(caplog: pytest.LogCaptureFixture) -> None:
    counted = counters()
    report = reporting(counted)
    for step, reported in enumerate((0.0, 0.0, 1.0, 1.0, 1.0, 2.0, 2.0)):
        if step < 3:
            work(counted)
        report.step(reported)
    assert lines(caplog) == [
        "Sparse decode, active fraction: 0.467, pages attended/held: 42/90, rectified: 6 requests 192 tokens in 3 "
        "steps, wait: 1.5 steps (max 3), dense rows: 3/6, tail tokens dropped: 15",
        "Sparse decode, active fraction: n/a, pages attended/held: 0/0, rectified: 0 requests 0 tokens in 0 steps, "
        "wait: 0.0 steps (max 0), dense rows: 0/0, tail tokens dropped: 0",
    ]


class SlowCopy(prometheus.DeviceCopy):
    """A device that takes its time."""

    here = False

    def arrived(self) -> bool:
        return self.here


def test_the_line_waits_for_the_copy_and_shows_when_it_began(caplog: pytest.LogCaptureFixture) -> None:
    counted = counters()
    copy = SlowCopy(counted.device_stats)
    report = reporting(counted, copy)
    work(counted)
    report.step(1.0)
    work(counted)
    report.step(1.0)
    assert not lines(caplog)
    copy.here = True
    report.step(1.0)
    report.step(1.0)
    (line,) = lines(caplog)
    assert "attended/held: 14/30, rectified: 2 requests 64 tokens in 1 steps" in line


def test_no_interval_is_lost_when_the_next_report_comes_first(caplog: pytest.LogCaptureFixture) -> None:
    counted = counters()
    report = reporting(counted, SlowCopy(counted.device_stats))
    for reported in (1.0, 2.0, 3.0):
        work(counted)
        report.step(reported)
    assert [line.count("attended/held: 14/30") for line in lines(caplog)] == [1, 1]


def published(registry: CollectorRegistry) -> dict[str, float]:
    families = text_string_to_metric_families(generate_latest(registry).decode())
    samples = [sample for family in families for sample in family.samples if not sample.name.endswith("_created")]
    assert all(sample.labels == {"model_name": "m", "tp_rank": "1"} for sample in samples)
    return {sample.name: sample.value for sample in samples}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def publishing(counted: Counters, registry: CollectorRegistry) -> prometheus.IntervalReport:
    collector = SimpleNamespace(
        labels={"model_name": "m", "tp_rank": 1},
        _counter_cls=partial(Counter, registry=registry),
        _gauge_cls=partial(Gauge, registry=registry),
    )
    copy = prometheus.DeviceCopy(counted.device_stats)
    return prometheus.IntervalReport(counted, copy, prometheus.Metrics(collector, counted), logs=False, time=0.0)


def test_metrics_have_sglangs_labels_and_the_totals(registry: CollectorRegistry) -> None:
    counted = counters()
    report = publishing(counted, registry)
    idle = published(registry)
    assert math.isnan(idle.pop("sglang:sparse_active_fraction"))
    assert idle.pop("sglang:sparse_aux_bytes") == counted.aux_bytes
    assert len(idle) == len(prometheus.COUNTERS) + len(prometheus.GAUGES) - 2 and set(idle.values()) == {0.0}
    for reported in (1.0, 2.0):
        work(counted)
        work(counted)
        report.step(reported)
    shown = published(registry)
    snapshot = counted.snapshot()
    for name in prometheus.COUNTERS:
        assert shown[f"sglang:sparse_{name}_total"] == snapshot[name], name
    assert shown["sglang:sparse_active_fraction"] == 14 / 30
    assert shown["sglang:sparse_rectify_mean_delay_steps"] == 1.5
    assert shown["sglang:sparse_rectify_max_delay_steps"] == 3
    assert not any(name.endswith("_max_delay_steps_total") for name in shown)


@pytest.mark.parametrize("method", ["resa", None])
def test_metrics_of_a_prefill_method(registry: CollectorRegistry, prefill: PrefillPath, method: str | None) -> None:
    counted = counters(method, prefill)
    report = publishing(counted, registry)
    assert math.isnan(published(registry)["sglang:sparse_prefill_sparsity"])
    for reported in (1.0, 2.0):
        prefilled(prefill)
        report.step(reported)
    shown, state = published(registry), counted.snapshot()["prefill"]
    totals = {name: shown[f"sglang:sparse_{name}_total"] for name in prometheus.PREFILL_COUNTERS}
    assert totals == {f"prefill_{name}": state[name] for name in PREFILL_TOTALS}
    assert list(totals.values()) == [1024, 1024, 600, 2400]
    assert shown["sglang:sparse_prefill_sparsity"] == 0.75
    report.step(3.0)
    assert math.isnan(published(registry)["sglang:sparse_prefill_sparsity"])


def test_blocks_that_both_phases_skip(registry: CollectorRegistry, caplog: pytest.LogCaptureFixture) -> None:
    settings = build("skip_softmax", {})
    assert settings.prefill is not None
    path = PrefillPath(settings.prefill, range(4), None, torch.zeros(2, 64, dtype=torch.int32), 16, SHAPE.num_q_heads)
    pools = AuxBuffers((), (0, 1), 8, 16, "cpu")
    counted = Counters(settings, pools, SHAPE, torch.zeros(SELECT_STATS + 2, dtype=torch.int64), path)
    pages, values = torch.tensor([12, 3], dtype=torch.int32), torch.tensor([25.0, 0.0])
    reports = publishing(counted, registry), reporting(counted)
    for reported in (1.0, 2.0):
        covered = values == 0
        plan = DecodePlan(covered, ~covered, (GroupPlan(pages, pages, covered, values),))
        counted.add_decode(plan)
        counted.select_stats += torch.tensor([0, 0, 0, 0, 12, 5])
        path.pairs += torch.tensor([300, 1200, 40, 90])
        for report in reports:
            report.step(reported)
    shown, state = published(registry), counted.snapshot()
    for name, total in {"blocks_visited": 24, "blocks_skipped": 10, "pages_attended": 120, "pages_held": 120}.items():
        assert shown[f"sglang:sparse_{name}_total"] == state[name] == total
    for name, total in {"blocks_visited": 180, "blocks_skipped": 80}.items():
        assert shown[f"sglang:sparse_prefill_{name}_total"] == state["prefill"][name] == total
    assert shown["sglang:sparse_active_fraction"] == 1.0 and state["sparse_layer_rows"] == 8
    (line,) = set(lines(caplog))
    assert "active fraction: 1.000, pages attended/held: 60/60, blocks skipped/visited: 5/12, rectified" in line
    assert line.endswith("tokens: 0 sparse 0 dense, blocks skipped/visited: 40/90")


def test_drafts_of_lossless_decoding(registry: CollectorRegistry, caplog: pytest.LogCaptureFixture) -> None:
    counted = counters()
    counted.drafts = DraftCounts()
    reports = publishing(counted, registry), reporting(counted)
    for reported in (1.0, 2.0):
        counted.drafts.add(6, [6, 1])
        counted.drafts.add(0, [0])
        for report in reports:
            report.step(reported)
    shown, state = published(registry), counted.snapshot()
    totals = {name: shown[f"sglang:sparse_{name}_total"] for name in prometheus.DRAFT_COUNTERS}
    assert totals == counted.drafts.totals() and totals.items() <= state.items()
    assert list(totals.values()) == [2, 2, 12, 24, 14, 16]
    (line,) = set(lines(caplog))
    assert "held: 0/0, drafts accepted: 7/12 in 1 rounds, steps without drafts: 1, rectified" in line


def test_the_line_of_a_prefill_method(caplog: pytest.LogCaptureFixture, prefill: PrefillPath) -> None:
    reports = [reporting(counters(method, prefill)) for method in ("resa", None)]
    for reported in (1.0, 2.0):
        for report in reports:
            report.step(reported)
        prefilled(prefill)
    for report in reports:
        report.step(3.0)
    both, alone = lines(caplog)[::2], lines(caplog)[1::2]
    assert alone == [
        "Sparse prefill, sparsity: n/a, tokens: 0 sparse 0 dense",
        *["Sparse prefill, sparsity: 0.750, tokens: 512 sparse 512 dense"] * 2,
    ]
    assert [line.partition("; ")[2] for line in both] == [line.replace("S", "s", 1) for line in alone]
    assert all(line.startswith("Sparse decode, active fraction: n/a, ") for line in both)


def scheduler(sparse: bool, logging_rank: bool) -> SimpleNamespace:
    args = SimpleNamespace(sparse_method="resa" if sparse else None, sparse_config="{}")
    reporter = SimpleNamespace(
        is_stats_logging_rank=logging_rank,
        current_scheduler_metrics_enabled=False,
        metrics_collector=None,
        last_decode_stats_tic=7.0,
    )
    runner = SimpleNamespace(attn_backend=SimpleNamespace(counters=counters()))
    worker = SimpleNamespace(model_runner=runner)
    return SimpleNamespace(server_args=args, metrics_reporter=reporter, tp_worker=worker, enable_overlap=False)


@pytest.mark.parametrize(("sparse", "logging_rank"), [(False, True), (True, False)])
def test_dense_servers_and_silent_ranks_report_nothing(sparse: bool, logging_rank: bool) -> None:
    quiet = scheduler(sparse, logging_rank)
    reporter = quiet.metrics_reporter
    before = dict(vars(reporter))
    prometheus.start(quiet)
    reporter.last_decode_stats_tic = before["last_decode_stats_tic"] = 8.0
    prometheus.follow(None, reporter, True, running_batch=None)
    assert vars(reporter) == before


def test_without_metrics_the_line_is_still_logged(caplog: pytest.LogCaptureFixture) -> None:
    loud = scheduler(True, True)
    prometheus.start(loud)
    prometheus.follow(None, loud.metrics_reporter, True, running_batch=None)
    assert not lines(caplog)
    loud.metrics_reporter.last_decode_stats_tic = 8.0
    prometheus.follow(None, loud.metrics_reporter, True, running_batch=None)
    assert len(lines(caplog)) == 1


def test_prometheus_is_not_imported_before_sglang_has_set_it_up() -> None:
    modules = "sglang_sparse.hooks.prometheus, sglang_sparse.attention.counters"
    code = f"import sys, {modules}; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("overlap", [True, False])
def test_a_busy_gpu_is_not_waited_for(overlap: bool) -> None:
    source = torch.zeros(3, dtype=torch.int64, device="cuda")
    stream = torch.cuda.Stream() if overlap else torch.cuda.current_stream()
    copy = prometheus.DeviceCopy((source, source), stream if overlap else None)

    def launch(cycles: int, increment: int) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
            source.add_(increment)

    # The first launch of a kernel loads it, and loading waits for the device.
    launch(1, 0)
    copy.begin()
    torch.cuda.synchronize()
    launch(10**9, 1)
    began = time.perf_counter()
    copy.begin()
    assert not copy.arrived()
    assert time.perf_counter() - began < 0.05
    launch(1, 1)
    assert copy.read() == [1] * 6
    assert copy.arrived()
