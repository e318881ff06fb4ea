"""Loaded before any test module."""

import pytest
import triton_interpreter  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with servers first: a long one that begins last would leave all workers but one idle."""
    items.sort(key=lambda item: item.path.parent.name != "server")
