"""Benchmarks have their GPUs to themselves, at full clock, or say so and compare nothing."""

from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path

import pynvml
import pytest
import torch

from eval.live import gpu_watch
from eval.live.counters import EvaluationError
from eval.live.gpu_watch import SpeedRecord
from eval.live.record import read_rows

HOT = pynvml.nvmlClocksEventReasonSwThermalSlowdown
CAPPED = pynvml.nvmlClocksEventReasonSwPowerCap


class Gpu:
    """Stub of a GPU, with what NVML would say of it."""

    def __init__(self, loads: Iterator[int], *reasons: int) -> None:
        self.loads, self.reasons = loads, chain(reasons[:-1], repeat((0, *reasons)[-1]))

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have NVML ask it."""
        monkeypatch.setattr(gpu_watch, "EVERY", 0.001)
        monkeypatch.setattr(gpu_watch, "QUIET", 0.02)
        monkeypatch.setattr(gpu_watch, "PATIENCE", 0.2)
        monkeypatch.setattr(gpu_watch, "handles", lambda: [self])
        monkeypatch.setattr(gpu_watch, "load_of", lambda gpu: next(gpu.loads))
        monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", lambda gpu: next(gpu.reasons))
        monkeypatch.setattr(pynvml, "nvmlDeviceGetClockInfo", lambda gpu, kind: 1980)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetTemperature", lambda gpu, kind: 61)


def measure(path: Path, samples: int = 20) -> None:
    """Write a file whose measurement lasts for some samples of its GPU."""
    with SpeedRecord(path, "eval.bench_serving") as record:
        ((_, seen),) = record._gpus
        while len(seen.clocks) < samples:
            pass
        record.add("summary", tpot=0.01)
        record.add("summary", tpot=0.02)


def idle_then(*loads: int) -> Iterator[int]:
    """Idle until the file is there, busy by turns from then on."""
    return chain(repeat(0, 60), loads, repeat(90))


def test_a_busy_gpu_is_refused_and_a_quiet_one_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonl"
    Gpu(repeat(90)).patch(monkeypatch)
    with pytest.raises(EvaluationError, match="GPU 0 is busy, 90 % of the time"):
        SpeedRecord(path, "eval.bench_serving")
    assert not path.exists()
    Gpu(chain(repeat(90, 5), idle_then())).patch(monkeypatch)
    measure(path)
    kinds = [row["kind"] for row in read_rows(path)]
    assert kinds == ["header", "gpus", "summary", "summary"]


def test_a_slowed_gpu_has_no_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonl"
    Gpu(idle_then(), *repeat(0, 10), HOT).patch(monkeypatch)
    with pytest.raises(EvaluationError, match="GPU 0 was slowed down by heat"):
        measure(path)
    (gpu,) = read_rows(path)[-1]["gpus"]
    assert gpu["slowed"]["heat"] > 0.3
    assert [row["kind"] for row in read_rows(path)] == ["header", "gpus"]


def test_the_power_limit_is_told_and_idle_samples_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonl"
    Gpu(idle_then(*repeat(0, 50)), CAPPED).patch(monkeypatch)
    measure(path)
    (gpu,) = read_rows(path)[1]["gpus"]
    assert gpu["power_capped"] == 1.0 and not gpu["slowed"]
    assert (gpu["sm_mhz"], gpu["celsius"]) == (1980, 61)


def test_a_slowed_run_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it came to its summary or was interrupted before; what was measured at full clock is gone on with."""
    path = tmp_path / "run.jsonl"
    for reason, earlier in ((HOT, 0), (CAPPED, 1)):
        Gpu(idle_then(), reason).patch(monkeypatch)
        with SpeedRecord(path, "eval.bench_serving") as record:
            record.add("item", id="0")
            while len(record._gpus[0][1].clocks) < 20:
                pass
        Gpu(idle_then()).patch(monkeypatch)
        with SpeedRecord(path, "eval.bench_serving", resume=True) as record:
            assert sum(row["kind"] == "item" for row in record.earlier) == earlier


def test_what_cannot_be_watched_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def handles() -> list[Gpu]:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(gpu_watch, "handles", handles)
    with SpeedRecord(tmp_path / "run.jsonl", "eval.bench_serving") as record:
        record.add("summary")
    assert read_rows(tmp_path / "run.jsonl")[1] == {"kind": "gpus", "gpus": [], "unwatched": "Not Supported"}
    with SpeedRecord(tmp_path / "run.jsonl", "eval.bench_serving", watch=False) as record:
        record.add("summary")
    assert [row["kind"] for row in read_rows(tmp_path / "run.jsonl")] == ["header", "summary"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu_at_work_is_seen(tmp_path: Path) -> None:
    some = torch.ones(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    with SpeedRecord(tmp_path / "run.jsonl", "eval.bench_serving") as record:
        seen = record._gpus[torch.cuda.current_device()][1]
        while len(seen.clocks) < 4:
            some = some @ some * 0
            torch.cuda.synchronize()
        record.add("summary")
    assert read_rows(tmp_path / "run.jsonl")[1]["gpus"][0]["sm_mhz"] > 0
