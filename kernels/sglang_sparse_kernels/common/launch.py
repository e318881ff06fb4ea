"""Launches of Triton kernels: the device's properties, and dependent launch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Kernels exponentiate to base 2.
LOG2_E = 1.4426950408889634
# Rows and columns of the smallest product that tensor cores compute.
MIN_DOT = 16


@dataclass(frozen=True)
class Properties:
    """Properties of a device for launches.

    Attributes:
        capability: what the device can do, by NVIDIA's numbers.
        processors: streaming multiprocessors.
        shared_memory: bytes that a program may have at most.
    """

    capability: tuple[int, int]
    processors: int
    shared_memory: int


# What launches on CPU tensors go by: in the interpreter an Ampere, which has no float8, with few processors. Whoever
# compiles for a GPU that is not there puts its properties here.
stand_in = Properties((8, 0), 4, 166912)


# A launch that splits rows by their number sums up a row in an order that depends on the batch. Whoever needs the same
# bits in every batch puts a number here that all launches are planned for, such as `FEW_ROWS`: as many splits as fill
# a GPU with few rows, and not so many that those of many rows take much memory. None plans each for its own rows.
FEW_ROWS = 4
fixed_rows: int | None = None


def planned_rows(batch: int) -> int:
    """Rows that a launch over a batch is planned for, see ``fixed_rows``."""
    return batch if fixed_rows is None else fixed_rows


@functools.cache
def _properties(device: torch.device) -> Properties:
    found = torch.cuda.get_device_properties(device)
    return Properties((found.major, found.minor), found.multi_processor_count, found.shared_memory_per_block_optin)


def properties(device: torch.device) -> Properties:
    """Return the properties of ``device`` for launches."""
    return stand_in if device.type == "cpu" else _properties(device)


def most_latent_rows(gpu: Properties) -> int:
    """Most rows of a product over latents of 512.

    Those of 64 go through tensor memory on compute capability 10.x, for which Triton 3.8 takes more shared memory than
    there is.
    """
    return 32 if gpu.capability[0] == 10 else 64


def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of ``device``."""
    return properties(device).processors


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of ``device``."""
    return properties(device).capability


def dependent_launch(device: torch.device) -> bool:
    """Whether kernels may be launched before the previous one of the stream has finished (Hopper and later)."""
    return torch.version.cuda is not None and properties(device).capability >= (9, 0)


@triton.jit
def await_inputs(DEPENDENT: tl.constexpr):
    """Wait for the kernels before this one in the stream; every program calls it before it reads what they write, and
    before it writes.

    A program that returned without waiting would let a later kernel start before an earlier one has finished.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()


def to_device(
    values: Sequence[float] | Sequence[tuple[float, ...]], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Copy host numbers without waiting for the device."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
