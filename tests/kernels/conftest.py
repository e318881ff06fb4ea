"""Kernel tests run on the GPU, or through Triton's interpreter on a machine without one."""

import importlib
import os
import sys

import pytest
import torch

OPERATIONS = ("page_summary", "page_score", "page_topk", "sparse_decode")
HAS_GPU = torch.cuda.is_available()
# Triton decides at import whether its functions are interpreted. The variable is set for that moment and for the
# tests here alone: a server that another test starts must not inherit it.
INTERPRETED = not HAS_GPU and "triton" not in sys.modules

if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"
    for operation in OPERATIONS:
        importlib.import_module(f"sglang_sparse_kernels.{operation}.triton")
    del os.environ["TRITON_INTERPRET"]


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
        pytest.skip("Triton was imported before its interpreter could be turned on: run tests/kernels by themselves")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return "cpu"
