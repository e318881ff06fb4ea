"""Where kernels in Gluon run: on Hopper GPUs, by a Triton that has what they are made of."""

import functools
import importlib
import logging
import operator
from types import ModuleType

import torch
from triton import knobs

from .launch import capability

logger = logging.getLogger(__name__)


@functools.cache
def _gluon(package: str, operation: str) -> ModuleType | None:
    """A package's kernel in Gluon, None where Triton does not have what it is made of: that language is still
    experimental.
    """
    try:
        module = importlib.import_module(".hopper", package)
        # Its compilation would be the first to miss this one.
        operator.attrgetter("gl.shared_memory_descriptor._reinterpret")(module)
    except (ImportError, AttributeError, TypeError) as error:
        # Without it all is right and slower.
        logger.warning("sglang_sparse: %s has no kernel of its own on Hopper: %s", operation, error)
        return None
    return module


def hopper_kernel(package: str, operation: str, device: torch.device) -> ModuleType | None:
    """The module of an operation's kernel for Hopper; None for other devices, for which it is not even imported.

    Args:
        package: whose module ``hopper`` it is.
        operation: what a warning calls it.
        device: where the kernel would run.
    """
    # AMD numbers its GPUs from 9, too.
    if torch.version.hip is not None or capability(device)[0] != 9 or knobs.runtime.interpret:
        return None
    return _gluon(package, operation)
