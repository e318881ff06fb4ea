"""Prometheus metrics and one log line for each interval of SGLang's decode reports.

Nothing waits for the device's counters. A copy of them starts when SGLang reports, behind the passes already launched.
The first decode step after its arrival, usually the next one, publishes the interval. So the figures lag SGLang's own
by a step, and the work between the last report and an idle server is published with the next report. ``/server_info``
is always up to date.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglang_sparse.attention.native_counts import counters_of
from sglang_sparse.attention.selection_counts import sum_counts
from sglang_sparse.config.settings import settings_of

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter

    from sglang_sparse.attention.counters import Counters
    from sglang_sparse.attention.protocols import Scheduler

logger = logging.getLogger(__name__)

# The attribute of SGLang's metrics reporter that holds the IntervalReport; a rank that reports nothing has none.
ATTRIBUTE = "sglang_sparse_report"

# Published as sglang:sparse_<name>_total, with the names in Counters.
COUNTERS = {
    "decode_rows": "Requests decoded, counted once in every decode pass they were part of.",
    "dense_fallback_rows": "Of the decoded rows, those that ran dense: too short, in too small a batch, or on request.",
    "pages_attended": "KV pages attended to, counted when selected, per row, sparse layer and KV head of this rank.",
    "pages_held": "KV pages held by the rows that select, per row, sparse layer and KV head of this rank.",
    "overflowed_layer_rows": "Rows of sparse decode passes, per sparse layer, that needed more pages than their method "
    "allows and attended to all.",
    "rectifying_steps": "Steps of decode or mixed batches that carried a dense pass to rectify approximate KV.",
    "second_passes": "Of the rectifying steps, those that also ran a decode pass over the rows not rectified.",
    "rectified_requests": "Rows rectified, counted once in every rectifying step they were part of.",
    "rectified_tokens": "Tokens encoded again densely by rectifying steps.",
    "rectify_delay_steps": "Decode steps that rectified rows had waited beyond their rectification interval, summed.",
    "finish_passes": "Dense passes over the last tokens of finished requests (rectify_on_finish).",
    "finish_tokens_rectified": "Tokens encoded again densely at the end of finished requests (rectify_on_finish).",
    "tail_tokens_dropped": "Approximate tokens at the end of finished requests, whose KV was freed instead of shared.",
}
# Those of lossless decoding, published only with it.
DRAFT_COUNTERS = {
    "verified_rounds": "Rounds of lossless decoding: drafts of all rows, then a dense pass that verifies them.",
    "undrafted_steps": "Decode steps of lossless decoding that ran dense and drafted nothing: drafts would not pay.",
    "draft_steps": "Sparse decode steps of these rounds: divided by verified_rounds, the drafts of a round.",
    "drafted_tokens": "Tokens drafted by the sparse method.",
    "accepted_tokens": "Of the drafted tokens, those that the dense pass chose too.",
    "judged_drafts": "The accepted tokens and each row's first wrong draft of a round; none behind it is judged.",
}
# Published as sglang:sparse_<name>.
GAUGES = {
    "active_fraction": "Pages attended to divided by pages held, over the sparse decode passes of the last report "
    "interval; NaN if it had none.",
    "rectify_mean_delay_steps": "Decode steps that a rectified row had waited beyond its rectification interval, mean "
    "over the last report interval; 0 if no row was rectified.",
    "rectify_max_delay_steps": "The most decode steps that a rectified row had waited beyond its rectification "
    "interval, over the last report interval; 0 if no row was rectified.",
    "aux_bytes": "Bytes of this rank's page summaries and of the pages that drafts share, outside its KV pool.",
}
# Those of a prefill method, published only if there is one.
PREFILL_COUNTERS = {
    "prefill_sparse_tokens": "Prompt tokens prefilled sparse: those between the crossover and the prompt's tail.",
    "prefill_dense_tokens": "Prompt tokens prefilled dense: before the crossover, in a prompt's tail, on request, or "
    "generated before a retraction.",
    "prefill_pairs_attended": "Query-key pairs attended to in prefill, per sparse layer and query head of this rank.",
    "prefill_pairs_causal": "Query-key pairs of prefill that dense attention would have, per sparse layer and query "
    "head of this rank.",
}
PREFILL_GAUGES = {
    "prefill_sparsity": "Share of the query-key pairs that prefill left out, over the last report interval; NaN if it "
    "had none.",
}


@dataclass(frozen=True)
class Interval:
    """Counts between two reports.

    Attributes:
        counts: increase of each of ``COUNTERS``, of ``PREFILL_COUNTERS`` with a prefill method, of ``DRAFT_COUNTERS``
            with lossless decoding, and of the methods' ``method_counters``.
        max_delay_steps: the longest wait of a row that was rectified, in decode steps beyond its interval.
    """

    counts: Mapping[str, int]
    max_delay_steps: int

    @property
    def active_fraction(self) -> float:
        """Pages attended to divided by pages held; NaN without a sparse decode pass."""
        held = self.counts["pages_held"]
        return self.counts["pages_attended"] / held if held else math.nan

    @property
    def mean_delay_steps(self) -> float:
        """Mean wait of the rows that were rectified, in decode steps beyond their interval; 0 without any."""
        return self.counts["rectify_delay_steps"] / max(1, self.counts["rectified_requests"])

    @property
    def prefill_sparsity(self) -> float:
        """Share of the query-key pairs that prefill left out; NaN without any."""
        causal = self.counts.get("prefill_pairs_causal")
        return 1 - self.counts["prefill_pairs_attended"] / causal if causal else math.nan

    def line(self, decodes: bool = True) -> str:
        """Return the log line.

        Args:
            decodes: whether a decode method runs.
        """
        sentences = [f"Sparse decode, {', '.join(self._of_decode())}"] if decodes else []
        if "prefill_pairs_causal" in self.counts:
            sparse, dense = (self.counts[f"prefill_{kind}_tokens"] for kind in ("sparse", "dense"))
            found = f"sparsity: {_share(self.prefill_sparsity)}, tokens: {sparse} sparse {dense} dense"
            found = ", ".join([found, *self._of_blocks("prefill_")])
            sentences.append(f"{'sparse' if decodes else 'Sparse'} prefill, {found}")
        return "; ".join(sentences)

    def _of_blocks(self, phase: str = "") -> list[str]:
        skipped, visited = (self.counts.get(f"{phase}blocks_{kind}") for kind in ("skipped", "visited"))
        return [] if visited is None else [f"blocks skipped/visited: {skipped}/{visited}"]

    def _of_drafts(self) -> list[str]:
        if "drafted_tokens" not in (of := self.counts):
            return []
        return [
            f"drafts accepted: {of['accepted_tokens']}/{of['drafted_tokens']} in {of['verified_rounds']} rounds",
            f"steps without drafts: {of['undrafted_steps']}",
        ]

    def _of_decode(self) -> list[str]:
        of = self.counts
        return [
            f"active fraction: {_share(self.active_fraction)}",
            f"pages attended/held: {of['pages_attended']}/{of['pages_held']}",
            *self._of_blocks(),
            *self._of_drafts(),
            f"rectified: {of['rectified_requests']} requests {of['rectified_tokens']} tokens in "
            f"{of['rectifying_steps']} steps",
            f"wait: {self.mean_delay_steps:.1f} steps (max {self.max_delay_steps})",
            f"dense rows: {of['dense_fallback_rows']}/{of['decode_rows']}",
            f"tail tokens dropped: {of['tail_tokens_dropped']}",
            *([f"overflowed layer rows: {overflowed}"] if (overflowed := of["overflowed_layer_rows"]) else []),
        ]


def _share(value: float) -> str:
    return "n/a" if math.isnan(value) else f"{value:.3f}"


class DeviceCopy:
    """Copy a few small tensors to the host without waiting for the device.

    Args:
        sources: the tensors, int64 of one dimension.
        stream: the CUDA stream that writes them; None for the current stream. The copy runs there too, so it sees
            whole passes only.
    """

    def __init__(self, sources: Sequence[torch.Tensor], stream: torch.cuda.Stream | None = None):
        self._sources = sources
        self._stream = stream
        cuda = sources[0].is_cuda
        self._host = [torch.zeros(source.shape, dtype=source.dtype, pin_memory=cuda) for source in sources]
        self._event = torch.cuda.Event() if cuda else None

    def begin(self) -> None:
        """Start a copy."""
        if self._event is None:
            self._copy()
            return
        with torch.cuda.stream(self._stream):
            self._copy()
            self._event.record()

    def _copy(self) -> None:
        for host, source in zip(self._host, self._sources, strict=True):
            host.copy_(source, non_blocking=True)

    def arrived(self) -> bool:
        """Whether the last copy has arrived."""
        return self._event is None or self._event.query()

    def read(self) -> list[int]:
        """Return the values of the last copy, one tensor after the other; waits until it has arrived."""
        if self._event is not None:
            self._event.synchronize()
        return [value for host in self._host for value in host.tolist()]


class Metrics:
    """The Prometheus metrics, with the labels of SGLang's own, present from the start.

    Args:
        collector: SGLang's ``SchedulerMetricsCollector``, which exists only after SGLang has set Prometheus up.
        counters: this rank's.
    """

    def __init__(self, collector: Any, counters: Counters):
        # Its import reads the folder of its files, which only SGLang knows.
        from prometheus_client import Counter, Gauge

        labels = collector.labels
        # A collector with another destination has its own classes.
        counter_class = collector._counter_cls or Counter
        gauge_class = collector._gauge_cls or Gauge
        self._counters = {
            name: counter_class(f"sglang:sparse_{name}_total", text, labelnames=labels.keys()).labels(**labels)
            for name, text in _counters(counters).items()
        }
        self._gauges = {
            name: gauge_class(
                f"sglang:sparse_{name}", text, labelnames=labels.keys(), multiprocess_mode="mostrecent"
            ).labels(**labels)
            for name, text in _with_prefill(GAUGES, PREFILL_GAUGES, counters).items()
        }
        # A gauge appears once it is set.
        self.publish(Interval(dict.fromkeys(self._counters, 0), 0))
        self._gauges["aux_bytes"].set(counters.aux_bytes)

    def publish(self, interval: Interval) -> None:
        """Add an interval."""
        for name, counter in self._counters.items():
            counter.inc(interval.counts[name])
        self._gauges["active_fraction"].set(interval.active_fraction)
        self._gauges["rectify_mean_delay_steps"].set(interval.mean_delay_steps)
        self._gauges["rectify_max_delay_steps"].set(interval.max_delay_steps)
        if "prefill_sparsity" in self._gauges:
            self._gauges["prefill_sparsity"].set(interval.prefill_sparsity)


def _with_prefill(names: dict[str, str], more: dict[str, str], counters: Counters) -> dict[str, str]:
    return names | (more if counters.prefills else {})


def _counters(counters: Counters) -> dict[str, str]:
    of_drafts = DRAFT_COUNTERS if counters.drafts else {}
    return _with_prefill(COUNTERS, PREFILL_COUNTERS, counters) | of_drafts | method_counters(counters)


class IntervalReport:
    """Publish the counts of each interval of SGLang's decode reports.

    Args:
        counters: this rank's.
        copy: of ``counters.device_stats``.
        metrics: the metrics, or None without ``--enable-metrics``.
        logs: whether this rank logs.
        time: when SGLang last reported, any clock.
    """

    def __init__(self, counters: Counters, copy: DeviceCopy, metrics: Metrics | None, logs: bool, time: float):
        self._counters = counters
        self._copy = copy
        self._metrics = metrics
        self._logs = logs
        self._time = time
        # The host's counts when the copy began, until they are published.
        self._pending: tuple[dict[str, int], int] | None = None
        self._published = dict.fromkeys(_counters(counters), 0)

    def step(self, time: float) -> None:
        """Handle a decode step.

        Args:
            time: when SGLang last reported; a new value means that it just did.
        """
        if time != self._time:
            # The results of the passes before that copy have arrived, so this waits for nothing.
            self._publish()
            self._time = time
            host = self._counters.host_totals() | kept_totals(self._counters)
            self._pending = host, self._counters.take_max_delay()
            self._copy.begin()
        if self._pending is not None and self._copy.arrived():
            self._publish()

    def _publish(self) -> None:
        if self._pending is None:
            return
        host, max_delay = self._pending
        self._pending = None
        totals = sum_counts([host, self._counters.device_totals(self._copy.read())])
        interval = Interval({name: totals[name] - before for name, before in self._published.items()}, max_delay)
        self._published = {name: totals[name] for name in self._published}
        if self._metrics is not None:
            self._metrics.publish(interval)
        if self._logs:
            logger.info(interval.line(self._counters.decodes))


def start(scheduler: Scheduler) -> None:
    """Create the metrics, on a rank that reports."""
    settings = settings_of(scheduler.server_args)
    if settings is None:
        return
    reporter = scheduler.metrics_reporter
    runner = scheduler.tp_worker.model_runner
    ours = settings.passes_through or hasattr(runner.attn_backend, "counters")
    publishes = reporter.current_scheduler_metrics_enabled
    if not ours or not (publishes or reporter.is_stats_logging_rank):
        return
    counters = counters_of(runner, settings)
    metrics = Metrics(reporter.metrics_collector, counters) if publishes else None
    copy = DeviceCopy(counters.device_stats, scheduler.forward_stream if scheduler.enable_overlap else None)
    report = IntervalReport(counters, copy, metrics, reporter.is_stats_logging_rank, reporter.last_decode_stats_tic)
    setattr(reporter, ATTRIBUTE, report)


def follow(_: None, reporter: SchedulerMetricsReporter, *args: object, **kwargs: object) -> None:
    """After ``SchedulerMetricsReporter.report_decode_stats``, which runs after every decode step but reports rarely."""
    report: IntervalReport | None = getattr(reporter, ATTRIBUTE, None)
    if report is not None:
        report.step(reporter.last_decode_stats_tic)


# Published as sglang:sparse_<name>_total if a method of the server counts them.
METHOD_COUNTERS = {
    "blocks_visited": "Blocks of keys that sparse decode passes scored, per row, sparse layer and KV head of this "
    "rank; those of rows that attend densely are left out.",
    "blocks_skipped": "Of the blocks that sparse decode passes scored, those with values that were skipped.",
    "prefill_blocks_visited": "Blocks of keys that sparse prefill scored, per sparse tile of queries, sparse layer "
    "and query head of this rank.",
    "prefill_blocks_skipped": "Of the blocks that sparse prefill scored, those with values that were skipped.",
}
# Those of methods with a selection at a prompt's end, by their names there.
KEPT_COUNTERS = {
    "kept_prompts": "Prompts that their request sees in part only, chosen at the prompt's end.",
    "kept_whole_prompts": "Prompts that stay visible as a whole, against the config: their last tokens came "
    "in two passes because memory was lacking.",
    "kept_compacted": "Requests that have released their prompt (eviction: compact).",
    "kept_freed_tokens": "KV tokens of prompts that requests have released (eviction: compact).",
    "kept_compact_waits": "Decode steps at which a request lacked memory to release its prompt, summed over requests "
    "(eviction: compact).",
}


def method_counters(counters: Counters) -> dict[str, str]:
    """Return those of the above that a server has; other counters of a method are in the server info only."""
    own = {*counters.more_counts, *(f"prefill_{name}" for name in counters.prefill_more_counts), *kept_totals(counters)}
    return {name: text for name, text in (METHOD_COUNTERS | KEPT_COUNTERS).items() if name in own}


def kept_totals(counters: Counters) -> dict[str, int]:
    """Return what a server's stage at a prompt's end has counted, by the names of ``KEPT_COUNTERS``."""
    return {f"kept_{name}": count for name, count in sum_counts([path.totals() for path in counters.keeps]).items()}
