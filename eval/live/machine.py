"""What a server runs on that a command starts itself: this machine and this environment."""

from __future__ import annotations

from typing import Any

import torch

from eval.live.record import versions

PACKAGES = ("torch", "triton", "sglang", "sglang-kernel", "flashinfer-python")


def gpus() -> str | None:
    """The names of the GPUs that this process sees, each kind once; None without any."""
    return " or ".join(sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())})) or None


def this_machine() -> dict[str, Any]:
    """``device`` and ``versions`` of the servers that this process starts."""
    return {"device": gpus() or "cpu", "versions": versions(PACKAGES)}
