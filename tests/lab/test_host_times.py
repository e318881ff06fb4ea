"""Tests of the time that hooks take on the host: exclusive times, and a real server that reports them."""

import sys
from pathlib import Path

import pytest
from server_fixtures import serve  # noqa: F401

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "eval" / "lab" / "servers" / "host_times"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import host_times

    yield host_times
    sys.modules.pop("host_times", None)


def test_a_functions_time_is_without_those_within(module) -> None:
    now = 0.0

    def wait(seconds: float) -> None:
        nonlocal now
        now += seconds

    times = module.Times(lambda: now)

    def sglangs() -> None:
        wait(8.0)
        inner()
        wait(16.0)

    def hook(original) -> None:
        wait(1.0)
        original()
        wait(2.0)

    inner = times.within("planning", lambda: wait(4.0))
    outer = times.around("rectification", hook)
    for rows in (3, 5):
        times.begin_step(True, rows)
        outer(sglangs)
        wait(100.0)
    times.begin_step(False, 1)
    assert [*times.figures()] == ["decode, 4 rows", "decode, 8 rows"]
    found = times.figures()["decode, 8 rows"]
    assert found["steps"] == 1
    assert found["planning"] == [4e6, 4e6] and found["rectification"] == [3e6, 3e6]
    assert found["all"] == [7e6, 7e6] and found["other"] == found["prefix_keys"] == [0.0, 0.0]


def test_a_server_says_them(serve) -> None:  # noqa: F811
    config = {"rectify_interval": 8, "dense_fallback": "never"}
    with serve(ROOT / "eval" / "models" / "tiny-gqa", config=config, env={"PYTHONPATH": str(FOLDER)}) as server:
        server.generate(
            input_ids=[[5 * row + token for token in range(300)] for row in range(3)],
            sampling_params={"max_new_tokens": 40, "ignore_eos": True, "temperature": 0.0},
        )
        found = server.server_info()["internal_states"][0]["host_times"]
        server.flush_cache()
        assert not server.server_info()["internal_states"][0]["host_times"]
    steps = found["decode, 4 rows"]
    assert steps["steps"] >= 38
    for part in ("planning", "rectification", "prefix_keys"):
        median, slowest = steps[part]
        assert 0 <= median <= slowest < 1e6
    # Each step is planned, and one of eight is rectified.
    assert steps["planning"][0] > 0 < steps["rectification"][1]
    assert any(kind.startswith("prefill") and parts["all"][1] > 0 for kind, parts in found.items())
