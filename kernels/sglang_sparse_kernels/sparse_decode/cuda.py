"""CUDA kernel of sparse decode attention for few tokens: all of a KV head at once, and combined without memory.

Of a few hundred selected tokens the time is that of waiting for one thing after another. Triton's kernels share them
among many programs, which hand on their results through memory. Here a block of threads, or a cluster of them (Hopper
and later), asks for the keys and values of all of a row's KV head before it uses any, and keeps its results to itself.
"""

import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from ..block_mass.cuda import float_bits
from ..common import nvrtc
from ..common.launch import LOG2_E, dependent_launch, num_processors
from .reference import Inputs

SOURCE = Path(__file__).with_name("cuda.cu")
KINDS = {torch.bfloat16: 0, torch.float16: 1}
DIMS = (64, 128)
MAX_GROUP = 8
PIECE = 16
# Selected tokens of a KV head up to which this kernel serves: RocketKV's. It was tried with no more.
FEW_TOKENS = 256


@dataclass(frozen=True)
class Config:
    """Launch parameters: warps of a block of threads, pieces of 16 tokens that each has on their way or in use, blocks
    of a cluster, and blocks that a multiprocessor runs at once.
    """

    warps: int
    depth: int = 1
    cluster: int = 1
    resident: int = 1


# Where multiprocessors are left over, and where they are not: chosen on an H200; what they take says the leg
# ``framework`` of ``eval.lab.reproduce``.
CONFIGS = SPREAD, ALONE = Config(4, 1, 4), Config(8, 1, 1, 2)


def config_of(pairs: int, tokens: int, device: torch.device) -> Config | None:
    """Return the launch config of a call; None if Triton's kernels are faster.

    Args:
        pairs: of a row and a KV head.
        tokens: that most pairs select at most.
        device: where the call runs.
    """
    if tokens > FEW_TOKENS:
        return None
    spread = SPREAD.cluster * pairs <= num_processors(device) and dependent_launch(device)
    return SPREAD if spread else ALONE


def takes(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether these can be served from here: caches of the type of the queries, read 16 bytes at a time."""
    if q.dtype not in KINDS or k_cache.dtype != q.dtype or q.shape[2] not in DIMS or v_cache.shape[2] != q.shape[2]:
        return False
    if q.shape[1] > MAX_GROUP * k_cache.shape[1] or q.data_ptr() % 4 or q.stride(0) % 2 or q.stride(1) % 2:
        return False
    caches = k_cache, v_cache
    if any(cache.data_ptr() % 16 or cache.stride(0) % 8 or cache.stride(1) % 8 for cache in caches):
        return False
    return out.data_ptr() % 4 == 0 and nvrtc.available(q.device)


def defines(dim: int, group: int, dtype: torch.dtype, config: Config) -> dict[str, int]:
    """Return the source's macros."""
    sizes = {"DIM": dim, "GROUP": group, "KIND": KINDS[dtype], "WARPS": config.warps, "DEPTH": config.depth}
    return {**sizes, "CLUSTER": config.cluster, "RESIDENT": config.resident}


def shared_bytes(dim: int, group: int, config: Config) -> int:
    """Shared memory of a block of threads, in bytes: keys and values of each warp, and what they hand in."""
    warp = config.depth * 2 * PIECE * 2 * dim + 2 * MAX_GROUP * 4
    return -(-(config.warps * warp + group * (dim + 1) * 4) // 256) * 256


@functools.cache
def _kernel(device: torch.device, dim: int, group: int, dtype: torch.dtype, config: Config) -> nvrtc.Kernel:
    values, size = defines(dim, group, dtype, config), shared_bytes(dim, group, config)
    return nvrtc.Kernel(SOURCE, "sparse_decode", device, values, config.cluster, size)


def sparse_decode(inputs: Inputs, out: torch.Tensor, config: Config) -> torch.Tensor:
    """See ``sparse_decode.sparse_decode``; for what ``takes`` allows."""
    q, k_cache, v_cache = inputs.q, inputs.k_cache, inputs.v_cache
    (batch, num_q_heads, dim), heads = q.shape, k_cache.shape[1]
    if batch == 0:
        return out
    kernel = _kernel(q.device, dim, num_q_heads // heads, q.dtype, config)
    strides = [stride * cache.itemsize for cache in (k_cache, v_cache) for stride in cache.stride()[:2]]
    scales = float_bits(inputs.sm_scale * inputs.k_scale * LOG2_E), float_bits(inputs.v_scale)
    sizes = (q.stride(0), q.stride(1), *strides, inputs.indices.shape[2], inputs.page_size.bit_length() - 1, *scales)
    grid = (config.cluster * heads, batch)
    kernel(grid, 32 * config.warps, q, k_cache, v_cache, inputs.indices, inputs.counts, inputs.last_slots, out, *sizes)
    return out
