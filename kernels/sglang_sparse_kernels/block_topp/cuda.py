"""CUDA kernel of the top-p selection: a block of threads per row, all masses in registers as whole numbers.

A histogram of the masses by their leading bits, whose bins have sums, says in which bin the sum from the highest down
reaches what is needed. The bin is divided again by the bits that follow until it is a single number, mostly once.
Running counts over the threads, which hold consecutive blocks, then place the selected ones in logical order.

Triton's kernel serves wider rows, and GPUs that are not NVIDIA's.
"""

import functools
from pathlib import Path

import torch

from ..common import nvrtc

SOURCE = Path(__file__).with_name("cuda.cu")
_ITEMS = (4, 8, 16, 32)
_THREADS = 1024


def takes(mass: torch.Tensor) -> bool:
    """Whether rows as wide as those of ``mass`` are served from here: on NVIDIA GPUs, up to 32 blocks a thread."""
    return nvrtc.available(mass.device) and mass.shape[1] <= _ITEMS[-1] * _THREADS


def defines(width: int) -> dict[str, int]:
    """Return the source's macros for rows of ``width`` blocks."""
    return {"THREADS": _THREADS, "ITEMS": next(items for items in _ITEMS if items * _THREADS >= width)}


@functools.cache
def _kernel(device: torch.device, items: int) -> nvrtc.Kernel:
    return nvrtc.Kernel(SOURCE, "block_topp", device, {"THREADS": _THREADS, "ITEMS": items})


def block_topp(
    mass: torch.Tensor,
    block_table: torch.Tensor,
    n_blocks: torch.Tensor,
    capacity: torch.Tensor,
    top_p: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor],
    stats: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``block_topp.block_topp``; for what ``takes`` allows."""
    indices, counts = out
    batch, width = mass.shape
    if batch == 0 or width == 0:
        return out
    four = mass.stride(0) % 4 == 0 and mass.data_ptr() % 16 == 0
    tensors = (mass, block_table, n_blocks, capacity, top_p, indices, counts, stats)
    sizes = (mass.stride(0), block_table.stride(0), width, int(four))
    _kernel(mass.device, defines(width)["ITEMS"])((batch, 1), _THREADS, *tensors, *sizes)
    return out
