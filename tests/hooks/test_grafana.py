"""The Grafana dashboard shows all that a server exports, and nothing that it does not."""

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from dashboard import DASHBOARD
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from sglang.srt.observability.metrics_collector import SchedulerMetricsCollector
from sglang.srt.runtime_context import SpawnRanks, create_context, use_context
from sglang.srt.server_args import ServerArgs

from sglang_sparse.attention.counters import Counters, DraftCounts
from sglang_sparse.attention.prefill import PrefillPath
from sglang_sparse.config.settings import build
from sglang_sparse.hooks.prometheus import KEPT_COUNTERS, Metrics
from sglang_sparse.methods.aux_buffers import AuxBuffers
from sglang_sparse.methods.base import ModelShape
from sglang_sparse.methods.views import SELECT_STATS

SHAPE = ModelShape(num_layers=1, num_q_heads=2, num_kv_heads=1, head_dim=64, kv_dtype=torch.bfloat16)
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
# Prometheus adds these to whatever it scrapes.
SCRAPED = {"instance", "job"}
GRAFANA = {"__rate_interval"}


class Collector(SchedulerMetricsCollector):
    """SGLang's, with its labels and without its metrics."""

    def __init__(self, *, labels: dict[str, Any], **_: Any):
        self.labels = labels
        self.registry = CollectorRegistry()
        self._counter_cls = partial(Counter, registry=self.registry)
        self._gauge_cls = partial(Gauge, registry=self.registry)


def exported_by(count: Callable[[], Counters]) -> dict[str, set[str]]:
    """The labels of each metric of a server, by its counters."""
    args: Any = ServerArgs(model_path="dummy", served_model_name="m", enable_metrics=True)
    with use_context(create_context(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))):
        context = Collector.init_new(
            server_args=args, enable_priority_scheduling=False, enable_lora=False, enable_hierarchical_cache=False
        )
    collector: Any = context.collector
    Metrics(collector, count())
    families = text_string_to_metric_families(generate_latest(collector.registry).decode())
    samples = [sample for family in families for sample in family.samples]
    return {sample.name: set(sample.labels) for sample in samples if not sample.name.endswith("_created")}


def skipping() -> Counters:
    """Of a server whose methods of both phases count for themselves too."""
    settings = build("skip_softmax", {})
    assert settings.prefill is not None
    path = PrefillPath(settings.prefill, range(1), None, torch.zeros(2, 64, dtype=torch.int32), 16, SHAPE.num_q_heads)
    stats = torch.zeros(SELECT_STATS + len(settings.decode.more_counts), dtype=torch.int64)
    return Counters(settings, AuxBuffers((), (0,), 8, 16, "cpu"), SHAPE, stats, path)


def compacting() -> Counters:
    """Of a server whose requests let go of their prompts."""
    settings = build("rocketkv", {"eviction": "compact"})
    pools = AuxBuffers(settings.decode.aux_specs(SHAPE), (0,), 8, 16, "cpu")
    keeps: Any = Mock(totals=lambda: {name.removeprefix("kept_"): 0 for name in KEPT_COUNTERS})
    return Counters(settings, pools, SHAPE, torch.zeros(SELECT_STATS, dtype=torch.int64), keeps=(keeps,))


def drafting() -> Counters:
    """Of a server with lossless decoding."""
    counted = skipping()
    counted.drafts = DraftCounts()
    return counted


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """The labels of each metric that some server exports; ``tests/server`` asks live ones."""
    return exported_by(drafting) | exported_by(compacting)


def expressions() -> list[str]:
    return [target["expr"] for panel in PANELS for target in panel["targets"]]


def queries() -> list[str]:
    return [variable["definition"] for variable in VARIABLES.values() if variable["type"] == "query"]


def test_every_metric_is_shown_and_no_other(exported: dict[str, set[str]]) -> None:
    assert len(exported) > 20
    assert {name for text in expressions() for name in re.findall(r"sglang:\w+", text)} == set(exported)
    assert {name for text in queries() for name in re.findall(r"sglang:\w+", text)} <= set(exported)


def test_every_label_is_exported(exported: dict[str, set[str]]) -> None:
    labels = set.intersection(*exported.values()) | SCRAPED
    used = {name for text in (*expressions(), *queries()) for name in re.findall(r"(\w+)=~?\"", text)}
    used |= {name for text in queries() for name in re.findall(r", (\w+)\)$", text)}
    shown = [target["legendFormat"] for panel in PANELS for target in panel["targets"]]
    used |= {name for text in shown for name in re.findall(r"{{(\w+)}}", text)}
    assert used and used <= labels, used - labels


def test_only_counters_are_rates(exported: dict[str, set[str]]) -> None:
    for text in expressions():
        rates = set(re.findall(r"rate\((sglang:\w+)\{[^}]*\}\[\$__rate_interval\]\)", text))
        assert rates == {name for name in re.findall(r"sglang:\w+", text) if name.endswith("_total")}, text
        assert text.count("rate(") == len(rates)


def test_variables_are_defined() -> None:
    text = json.dumps(DASHBOARD)
    used = set(re.findall(r"\$\{?(\w+)", text)) - {"__all"}
    assert used == set(VARIABLES) | GRAFANA


def test_panels_say_what_they_show() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for panel in PANELS:
        assert panel["title"] and panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
