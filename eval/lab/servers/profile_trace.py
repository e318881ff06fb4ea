"""Decode steps in a Chrome trace of torch's profiler, as SGLang's ``/start_profile`` writes it.

A decode step of SGLang is one replay of a CUDA graph, and a few launches before and after it. CUPTI gives all that one
replay launches the correlation id of its ``cudaGraphLaunch``, so a replay is a group of launches of one id. A step goes
from the begin of a replay to the begin of the next: with sampling, copies and the preparation of the next step, each
once. Steps count where both replays launch the same, so that no other batch size or graph is between them.

A rectifying pass is what runs between two replays, where that takes longer than a replay: a pass reads all weights, as
a step does. Where it takes the place of a step, as it does if all rows are due, nothing else is between them.

Time is charged so that it adds up: a launch has the time from the end of all that began before it (or from its begin,
if that is later) to its own end. With programmatic dependent launch kernels begin while their predecessors still run,
and wait; their durations overlap and would add up to more than the step.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from eval.live.counters import EvaluationError

CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
# The graph of a decode step launches more than this even for a single layer; other calls launch one or two things.
LEAST_REPLAY = 8


@dataclass(frozen=True)
class Launch:
    """A kernel, copy or fill that ran on the GPU.

    Attributes:
        name: of the kernel, demangled, with its template arguments.
        start: microseconds of the trace's clock.
        end: likewise.
        correlation: id of the call that launched it.
    """

    name: str
    start: float
    end: float
    correlation: int


@dataclass(frozen=True)
class Use:
    """The launches of one name in one step.

    Attributes:
        us: microseconds that they added to the step; of all names together, the time in which the GPU was busy.
        duration_us: microseconds from begin to end of each, also where they overlap others.
        calls: their number.
    """

    us: float
    duration_us: float
    calls: int


@dataclass(frozen=True)
class Step:
    """One decode step.

    Attributes:
        uses: by the names of kernels, copies and fills.
        span_us: microseconds from the begin of its replay to the begin of the next.
        gaps_us: microseconds of each time in which the GPU did nothing.
    """

    uses: dict[str, Use]
    span_us: float
    gaps_us: list[float]

    @property
    def busy_us(self) -> float:
        """Microseconds in which at least one launch ran."""
        return sum(use.us for use in self.uses.values())


def read_trace(path: Path) -> list[Launch]:
    """Read the launches on the GPU, in the order in which they began.

    Args:
        path: a ``.json`` or ``.json.gz`` file.

    Raises:
        EvaluationError: it is no such trace, or nothing ran on a GPU.
    """
    try:
        raw = path.read_bytes()
        # Names of kernels may hold control characters, which kineto does not escape.
        trace = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw, strict=False)
        events = trace["traceEvents"]
        launches = [
            Launch(event["name"], event["ts"], event["ts"] + event["dur"], event["args"].get("correlation", 0))
            for event in events
            if event.get("cat") in CATEGORIES and event.get("ph") == "X"
        ]
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise EvaluationError(f"{path} is no whole trace of a profiler: {type(error).__name__} {error}") from error
    if not launches:
        raise EvaluationError(f"{path} holds no GPU kernels: the server does not run on a GPU, or did not trace it")
    return sorted(launches, key=lambda launch: launch.start)


def decode_steps(launches: Sequence[Launch], wanted: int) -> list[Step]:
    """The last steps of a trace; those before them may still show the profiler's start.

    Args:
        launches: as `read_trace` returns them.
        wanted: how many.

    Raises:
        EvaluationError: no graph was replayed, or there are fewer steps.
    """
    bounds = [(group[0].start, following[0].start) for group, following in _neighbours(launches)]
    if len(bounds) < wanted:
        raise EvaluationError(
            f"the trace holds {len(bounds)} whole decode steps that are alike, wanted {wanted}: give more --tokens, or "
            "fewer --steps"
        )
    return [step_of(launches, start, end) for start, end in bounds[-wanted:]]


def passes(launches: Sequence[Launch], wanted: int) -> list[Step]:
    """The last rectifying passes of a trace.

    Args:
        launches: as `read_trace` returns them.
        wanted: how many.

    Raises:
        EvaluationError: no graph was replayed, or there are fewer passes.
    """
    found = []
    for group, following in _neighbours(launches):
        end = max(launch.end for launch in group)
        if following[0].start - end > end - group[0].start:
            found.append(step_of(launches, end, following[0].start))
    if len(found) < wanted:
        raise EvaluationError(f"the trace holds {len(found)} rectifying passes, wanted {wanted}: give more --tokens")
    return found[-wanted:]


def _neighbours(launches: Sequence[Launch]) -> list[tuple[list[Launch], list[Launch]]]:
    """Replays of the most common graph, each with the next one where that is of the same graph."""
    replays: dict[int, list[Launch]] = {}
    for launch in launches:
        replays.setdefault(launch.correlation, []).append(launch)
    largest = max(len(group) for group in replays.values())
    if largest < LEAST_REPLAY:
        raise EvaluationError(
            "the trace holds no replay of a CUDA graph, by which steps are told apart: start the server without "
            "--disable-cuda-graph, with --cuda-graph-max-bs of at least --batch"
        )
    # Graphs of half the size and less are no whole step; neither is a replay that began before the trace did.
    whole = [group for group in replays.values() if 2 * len(group) > largest]
    shapes = [tuple(sorted(launch.name for launch in group)) for group in whole]
    common = Counter(shapes).most_common(1)[0][0]
    return [
        (group, following)
        for (shape, group), (next_shape, following) in pairwise(zip(shapes, whole, strict=True))
        if shape == next_shape == common
    ]


def step_of(launches: Iterable[Launch], start: float, end: float) -> Step:
    """Make a step of the launches that began in a window of time; their time beyond it is cut off.

    Args:
        launches: in the order in which they began.
        start: microseconds, the begin of the first launch.
        end: microseconds, beyond the window.
    """
    uses: dict[str, Use] = {}
    gaps = []
    done = start
    for launch in launches:
        if not start <= launch.start < end:
            continue
        finished = min(launch.end, end)
        if launch.start > done:
            gaps.append(launch.start - done)
        added = max(0.0, finished - max(done, launch.start))
        done = max(done, finished)
        use = uses.get(launch.name, Use(0.0, 0.0, 0))
        uses[launch.name] = Use(use.us + added, use.duration_us + launch.end - launch.start, use.calls + 1)
    if end > done:
        gaps.append(end - done)
    return Step(uses, end - start, gaps)
