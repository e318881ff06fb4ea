"""Which kernel of Skip-Softmax prefill runs."""

from types import ModuleType

import torch

from .. import gluon_kernels
from .plan import SkipSoftmaxPlan


def hopper_kernel(device: torch.device) -> ModuleType | None:
    """The module of the kernel for Hopper; None for other devices, for which it is not even imported."""
    return gluon_kernels.hopper_kernel(str(__package__), "Skip-Softmax prefill", device)


def kernels(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: SkipSoftmaxPlan, page_size: int
) -> ModuleType:
    """The module whose ``skip_softmax_prefill`` serves these."""
    from . import triton

    hopper = hopper_kernel(q.device)
    return hopper if hopper is not None and hopper.takes(q, k_cache, v_cache, plan, page_size) else triton
