"""What every Triton kernel here needs at launch: the device's properties and dependent launch."""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Kernels exponentiate to base 2.
LOG2_E = 1.4426950408889634
# Rows and columns of the smallest product that tensor cores compute.
MIN_DOT = 16
# A grid for the interpreter, which has no device to ask.
_CPU_PROCESSORS = 4


@functools.cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of ``device``."""
    if device.type == "cpu":
        return _CPU_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """What ``device`` can do, by NVIDIA's numbers; the interpreter counts as Ampere, which has no float8."""
    return (8, 0) if device.type == "cpu" else torch.cuda.get_device_capability(device)


@functools.cache
def dependent_launch(device: torch.device) -> bool:
    """Whether kernels may be launched before the previous one of the stream has finished (Hopper and later)."""
    return torch.version.cuda is not None and capability(device) >= (9, 0)


@triton.jit
def await_inputs(DEPENDENT: tl.constexpr):
    """Wait for the kernels before this one in the stream; every program calls it before it reads what they write, and
    before it writes.

    A program that returned without waiting would let a later kernel start before an earlier one has finished.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
