"""SGLang platform plugin for machines without a GPU: for trying, testing and CI, not for serving."""

from __future__ import annotations

import gc
import os


def activate() -> str | None:
    """Entry point of group ``sglang.srt.platforms``.

    Returns:
        The platform class in ``pkgutil.resolve_name`` form, or None where CUDA is available, so that the
        distribution may stay installed on a GPU machine (``CUDA_VISIBLE_DEVICES=""`` brings it back there).
    """
    # SGLang calls this while its own modules are half imported: keep this module free of sglang imports.
    import torch

    if torch.cuda.is_available():
        return None
    # SGLang decorates small functions with torch.compile; on a CPU that means a C++ compiler run at first use, and
    # loading the compiler in each of the three processes. PyTorch reads this when a decorator is evaluated.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # The imports that follow make millions of objects that stay; collecting among them is a sixth of the start-up.
    gc.set_threshold(50_000)
    return "sglang_cpu_platform.platform:TorchCpuPlatform"
