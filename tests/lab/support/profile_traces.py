"""Traces of a profiler, as a server with CUDA graphs would write them."""

import gzip
import json
from pathlib import Path
from typing import Any

FLASH = (
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2"
)
# Ten launches of 10 us in a row: a graph with two layers.
LAYER = ("nvjet_sm90_tst_64x8_64x16_2x1_v_bz_TNT", "fused_rope_kernel", FLASH, "act_and_mul_kernel", "Memset (Device)")
GRAPH = LAYER * 2


def event(name: str, ts: float, dur: float, correlation: int, cat: str = "kernel") -> dict[str, Any]:
    args = {"device": 0, "stream": 7, "correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": dur, "args": args}


def replays(count: int, names: tuple[str, ...] = GRAPH, period: float = 150.0) -> list[dict[str, Any]]:
    """Replays of a graph; 20 us after each a sampling kernel of 5 us, then nothing until the next one."""
    events = []
    for step in range(count):
        begin, call = 1000.0 + step * period, 100 + 10 * step
        events += [event(name, begin + 10 * i, 10.0, call) for i, name in enumerate(names)]
        events.append(event("reduce_argmax", begin + 120, 5.0, call + 1))
        events.append(event("cudaGraphLaunch", begin - 90, 80.0, call, cat="cuda_runtime"))
    return events


def with_passes(count: int = 8, period: float = 150.0) -> list[dict[str, Any]]:
    """Replays, and after each third one an attention of 300 us between small kernels."""
    events, later = [], 0.0
    for step in range(count):
        mine = [event for event in replays(count, period=period) if event["args"]["correlation"] // 10 == 10 + step]
        events += [launch | {"ts": launch["ts"] + later} for launch in mine]
        if step % 3 == 2:
            begin, call = 1000.0 + step * period + later + 125, 5000 + 10 * step
            events += [event("rope", begin, 10.0, call), event(FLASH, begin + 15, 300.0, call + 1)]
            later += 320.0
    return events


def write(path: Path, events: list[dict[str, Any]]) -> Path:
    with gzip.open(path, "wt") as file:
        # As it comes from a profiler, in no order, and with a control character in a name.
        marker = {"ph": "i", "cat": "user", "name": "a\tb"}
        file.write(json.dumps({"traceEvents": [marker, *reversed(events)]}).replace("\\t", "\t"))
    return path
