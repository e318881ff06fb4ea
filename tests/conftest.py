"""Loaded before any test module."""

import pytest
import triton_interpreter  # noqa: F401
from hypothesis import settings

# How long an example takes says how busy the machine is.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with servers first: a long one that begins last would leave all workers but one idle."""
    items.sort(key=lambda item: item.path.parent.name != "server")
