"""The machine of a server: its GPU, and the versions of installed packages."""

from __future__ import annotations

from functools import cache
from importlib.metadata import distributions
from typing import TYPE_CHECKING

from sglang_sparse import __version__

if TYPE_CHECKING:
    import torch

# Packages that a measured figure depends on.
PACKAGE = "sglang-sparse"
PACKAGES = (PACKAGE, "torch", "triton", "sglang", "sglang-kernel", "flashinfer-python")
# A server's GPU: whether there is one, or its compute capability; None for this machine's.
Gpu = bool | tuple[int, int] | None


def on_gpu(asked: Gpu = None) -> bool:
    """Whether a server has a GPU: the given one, or this machine's."""
    import torch

    return torch.cuda.is_available() if asked is None else bool(asked)


def capability(asked: Gpu = None) -> tuple[int, int] | None:
    """Return the compute capability of a server's GPU: the given one, or this machine's; None if unknown."""
    import torch

    if asked is None and torch.cuda.is_available():
        return torch.cuda.get_device_capability()
    return asked if isinstance(asked, tuple) else None


def gpu_name(device: torch.device) -> str:
    """Return the driver's name of a device; "cpu" for the CPU."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@cache
def package_versions() -> dict[str, str]:
    """Return the versions of those of `PACKAGES` that are installed."""
    installed = {found.metadata["Name"]: found.version for found in reversed([*distributions()])}
    found = {name: installed[name] for name in PACKAGES if name in installed}
    # The metadata of an editable installation keeps the version of its first day.
    return {**found, PACKAGE: __version__}
