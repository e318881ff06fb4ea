"""Whether a measurement had its GPUs to itself, and at their full clock: a ratio is worth nothing otherwise.

`SpeedRecord` is the file of a benchmark. It is refused where something else computes on a GPU at its beginning; what
begins later is not seen. It has no summary where a clock was slowed down meanwhile: by heat, by the board's power
supply, or by another fault of the hardware. The power limit of the card is no such fault, since users have it too; how
often it held the clock back is in the file, in a row of kind ``gpus`` for each run. GPUs are those that this process
sees; where NVML cannot look at them, the row says why.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import pynvml

from eval.live.counters import EvaluationError
from eval.live.record import Record, read_rows

EVERY = 0.25
# Seconds without load, and the longest wait for them: a server that has just started may still be at it.
QUIET, PATIENCE = 1.0, 15.0
# Percent of the time, as NVML counts it.
IDLE = 10
# Of the samples: an instant of it moves no figure.
RARE = 0.01
SLOWED = {
    "heat": pynvml.nvmlClocksEventReasonSwThermalSlowdown | pynvml.nvmlClocksEventReasonHwThermalSlowdown,
    "the power supply": pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
    "the hardware": pynvml.nvmlClocksEventReasonHwSlowdown,
}


def load_of(handle: Any) -> int:
    """Percent of the time in which a GPU computes."""
    return int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)


def handles() -> list[Any]:
    """NVML's handles of the GPUs that this process sees, in its order.

    Raises:
        pynvml.NVMLError: it cannot look at them.
    """
    import torch

    uuids = [torch.cuda.get_device_properties(i).uuid for i in range(torch.cuda.device_count())]
    if not uuids:
        return []
    pynvml.nvmlInit()
    found = [pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") for uuid in uuids]
    for handle in found:
        Seen().sample(handle)
    return found


@dataclass
class Seen:
    """Observations of a GPU under load.

    Attributes:
        clocks: of its multiprocessors, in MHz, by sample.
        celsius: the highest temperature.
        capped: samples in which the card's power limit held the clock back.
        slowed: samples in which the GPU was slowed down, by cause.
    """

    clocks: list[int] = field(default_factory=list)
    celsius: int = 0
    capped: int = 0
    slowed: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))

    def sample(self, handle: Any) -> None:
        """Look once; an idle GPU has another clock, and does not count."""
        reasons = pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
        clock = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
        celsius = pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
        if load_of(handle) <= IDLE:
            return
        self.clocks.append(clock)
        self.celsius = max(self.celsius, celsius)
        self.capped += bool(reasons & pynvml.nvmlClocksEventReasonSwPowerCap)
        for cause, bits in SLOWED.items():
            self.slowed[cause] += bool(reasons & bits)

    def facts(self) -> dict[str, Any]:
        """For the file."""
        count = len(self.clocks)
        if not count:
            return {"samples": 0}
        ordered = sorted(self.clocks)
        facts = {"samples": count, "sm_mhz": ordered[count // 2], "least_sm_mhz": ordered[0], "celsius": self.celsius}
        shares = {cause: times / count for cause, times in self.slowed.items() if times}
        return facts | {"power_capped": self.capped / count, "slowed": shares}


def slowed(row: dict[str, Any]) -> str | None:
    """Name the cause that slowed a GPU down for more than an instant, by a row of kind ``gpus``; None without any."""
    for number, facts in enumerate(row.get("gpus", ())):
        for cause, share in facts.get("slowed", {}).items():
            if share > RARE:
                return f"GPU {number} was slowed down by {cause} in {share:.0%} of the samples under load"
    return None


class SpeedRecord(Record):
    """A `Record` of speeds, whose first summary is preceded by what became of the GPUs.

    One in which a GPU was slowed down is made anew.

    Args:
        path: see `Record`, as the further ones.
        command: its name.
        revision: of the code.
        resume: whether to go on with the file.
        watch: False for a server that is not seen to run here.
        **header: facts for the first line.

    Raises:
        EvaluationError: at first where a GPU is busy; at the summary where one was slowed down.
    """

    def __init__(
        self,
        path: Path,
        command: str,
        revision: str | None = None,
        resume: bool = False,
        watch: bool = True,
        **header: Any,
    ):
        self._gpus: list[tuple[Any, Seen]] = []
        self._unwatched: dict[str, str] = {}
        try:
            self._gpus = [(handle, Seen()) for handle in handles()] if watch else []
            self._require_idle()
        except pynvml.NVMLError as error:
            self._gpus, self._unwatched = [], {"unwatched": str(error)}
        resume = resume and not (path.exists() and any(map(slowed, read_rows(path))))
        super().__init__(path, command, revision, resume, **header)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _require_idle(self) -> None:
        """Wait until nothing computes."""
        since = started = time.monotonic()
        while self._gpus and time.monotonic() - since < QUIET:
            loads = [load_of(handle) for handle, _ in self._gpus]
            now = time.monotonic()
            if max(loads) > IDLE:
                since = now
            if now - started > PATIENCE:
                raise EvaluationError(
                    f"GPU {loads.index(max(loads))} is busy, {max(loads)} % of the time: a benchmark needs it alone; "
                    "end what runs there (nvidia-smi), or choose another one by CUDA_VISIBLE_DEVICES"
                )
            time.sleep(EVERY)

    def _watch(self) -> None:
        while not self._ended.wait(EVERY):
            for handle, seen in self._gpus:
                with suppress(pynvml.NVMLError):
                    seen.sample(handle)

    def add(self, kind: str, **fields: Any) -> None:
        """See `Record.add`."""
        found = self._end() if kind == "summary" else None
        if found:
            raise EvaluationError(
                f"{found}: no ratio; let it cool down (nvidia-smi -q -d PERFORMANCE), and the same command begins anew"
            )
        super().add(kind, **fields)

    def _end(self) -> str | None:
        """Once: end the watch and write what it saw. Returns what slowed a GPU down."""
        if self._ended.is_set():
            return None
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        row = {"gpus": [seen.facts() for _, seen in self._gpus], **self._unwatched}
        if self._gpus or self._unwatched:
            super().add("gpus", **row)
        return slowed(row)

    def __enter__(self) -> SpeedRecord:
        if self._gpus:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._end()
        super().__exit__(kind, error, tb)
