"""Kernel tests run on the GPU, or through Triton's interpreter on a machine without one."""

import pytest
from triton_interpreter import HAS_GPU, INTERPRETED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases that are too large for the interpreter, and skip what needs a GPU where there is none."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        case = callspec.params.get("case") if callspec else None
        if getattr(case, "gpu_only", False):
            item.add_marker(pytest.mark.gpu)
        if not HAS_GPU and item.get_closest_marker("gpu") and item.path.parent.name == "kernels":
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    """The device on which the public functions run their Triton kernels."""
    if HAS_GPU:
        return "cuda"
    if not INTERPRETED:
        pytest.fail("Triton was imported before its interpreter could be turned on")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return "cpu"
