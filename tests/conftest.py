"""Loaded before any test module."""

import gc
import os
from pathlib import Path

# Threads that wait for each other at every small product are slow where cores are shared. PyTorch and NumPy read this
# while they are imported, and whatever a test starts has it too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import triton_interpreter  # noqa: F401
from hypothesis import settings

# How long an example takes says how busy the machine is.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")


LAB = Path(__file__).with_name("lab")
# Folders whose files take longest, in their order.
LONG = {"schedules": 0, "server": 1, "lab": 2}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: one that begins last would leave all workers but one idle."""
    items.sort(key=lambda item: LONG.get(item.path.parent.name, len(LONG)))
    for item in items:
        if LAB in item.path.parents and not item.get_closest_marker("soak"):
            item.add_marker("lab")


def pytest_collection_finish() -> None:
    """Tests of memory collect garbage at each kernel, which would look through all that was imported."""
    gc.freeze()
