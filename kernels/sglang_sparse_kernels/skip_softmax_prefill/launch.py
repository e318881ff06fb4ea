"""Choice of the kernel of Skip-Softmax prefill."""

import functools
import importlib
import logging
import operator
from types import ModuleType

import torch
from triton import knobs

from ..common.launch import capability
from .plan import SkipSoftmaxPlan

logger = logging.getLogger(__name__)


@functools.cache
def _gluon() -> ModuleType | None:
    """The kernel in Gluon, None where Triton does not have what it is made of: that language is still experimental."""
    try:
        module = importlib.import_module(".hopper", __package__)
        # Its compilation would be the first to miss this one.
        operator.attrgetter("gl.shared_memory_descriptor._reinterpret")(module)
    except (ImportError, AttributeError, TypeError) as error:
        # Without it all is right and prefill is slower.
        logger.warning("sglang_sparse: Skip-Softmax prefill has no kernel of its own on Hopper: %s", error)
        return None
    return module


def hopper_kernel(device: torch.device) -> ModuleType | None:
    """The module of the kernel for Hopper; None for other devices, for which it is not even imported."""
    # AMD numbers its GPUs from 9, too.
    if torch.version.hip is not None or capability(device)[0] != 9 or knobs.runtime.interpret:
        return None
    return _gluon()


def kernels(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: SkipSoftmaxPlan, page_size: int
) -> ModuleType:
    """The module whose ``skip_softmax_prefill`` serves these."""
    from . import triton

    hopper = hopper_kernel(q.device)
    return hopper if hopper is not None and hopper.takes(q, k_cache, v_cache, plan, page_size) else triton
