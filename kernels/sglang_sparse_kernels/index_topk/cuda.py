"""CUDA kernel of the token selection: each logit is read once, and few are kept.

A sample of a row says which logits can hardly be among the best; the others, half as many again as are wanted, are kept
in shared memory while the row passes. Among them a histogram in 2,048 bins of keys finds the last one that is chosen,
dividing its bin again until nothing is left to divide. Which are chosen is written down as a bitmap of the row, which
puts them in order, and from there to the result. So the time of a long row is that of reading it.

Nothing hangs on the sample but time: where it kept too few or too many, as with very many equal logits, the row is
read again, for each division of a bin and for the bitmap.

The blocks of a cluster (Hopper and later) divide a row. They meet when their candidates are complete, which each then
reads from all, and when they know how many of them are chosen.
"""

import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from ..common import nvrtc
from ..common.launch import dependent_launch, num_processors
from ..index_keys import PAGE_SIZE
from .reference import Names, Results

SOURCE = Path(__file__).with_name("cuda.cu")
MAX_TOPK = 4096
CANDIDATES = 4992
_CLUSTERS = (1, 2, 4, 8)
# Threads that a multiprocessor runs of this kernel, each with 64 registers.
_RESIDENT = 1024
# A block's part of a row, below which more blocks cost more than they save.
_LEAST_PART = 8192
# Tokens that one block can choose most likely without reading the row again, as for more it would lack candidates.
_MOST_ALONE = 2048


@dataclass(frozen=True)
class Shape:
    """``threads`` of a block, a power of two of at least 32; ``candidates`` that it keeps."""

    cluster: int
    threads: int
    candidates: int = CANDIDATES

    @property
    def defines(self) -> dict[str, int]:
        """Return the source's macros."""
        sizes = {"CLUSTER": self.cluster, "THREADS": self.threads, "CANDIDATES": self.candidates}
        return {**sizes, "RESIDENT": max(1, _RESIDENT // self.threads), "PAGE": PAGE_SIZE}

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest row, whose bitmap has to fit the memory of the candidates."""
        return self.cluster * (32 * self.candidates - 16)


def takes(logits: torch.Tensor, topk: int) -> bool:
    """Whether rows as wide as those of ``logits`` can be selected from here: on NVIDIA GPUs, up to a million tokens,
    or 159,000 where there are no clusters of blocks.
    """
    if topk > MAX_TOPK or not nvrtc.available(logits.device):
        return False
    most = _CLUSTERS[-1] if dependent_launch(logits.device) else 1
    return logits.shape[1] <= Shape(most, _RESIDENT).max_tokens


def shape_of(width: int, queries: int, topk: int, processors: int, clusters: bool = True) -> Shape:
    """Return the launch config of a selection from rows.

    One block where there are as many queries as run at once: then only throughput counts, and small blocks leave the
    memory idle least. With fewer the most blocks that have a multiprocessor of their own and enough to do.

    Args:
        width: tokens of the longest row.
        queries: rows.
        topk: most tokens that are chosen of a row.
        processors: of the GPU.
        clusters: whether it has clusters of blocks.
    """
    sizes = _CLUSTERS if clusters else _CLUSTERS[:1]
    holding = [size for size in sizes if Shape(size, _RESIDENT).max_tokens >= width] or [sizes[-1]]
    useful = [size for size in sizes if size * queries <= processors and size * _LEAST_PART <= width] or [1]
    spare = 2 if clusters and topk > _MOST_ALONE else 1
    cluster = max(holding[0], useful[-1], spare)
    return Shape(cluster, 512 if cluster > 1 or queries <= 2 * processors else 256)


@functools.cache
def _kernel(device: torch.device, shape: Shape) -> nvrtc.Kernel:
    return nvrtc.Kernel(SOURCE, "index_topk", device, shape.defines, shape.cluster)


def index_topk(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    topk: int,
    first: torch.Tensor | None,
    wanted: torch.Tensor | None,
    names: Names,
    out: Results,
    stats: torch.Tensor | None = None,
    nothing: int = -1,
    shape: Shape | None = None,
) -> None:
    """See ``index_topk.index_topk``, whose page table, rows and offsets are ``names``; for what ``takes`` allows."""
    queries, width = logits.shape
    if queries == 0:
        return
    if shape is None:
        device = logits.device
        shape = shape_of(width, queries, topk, num_processors(device), dependent_launch(device))
    table_stride = names[0].stride(0) if names[0] is not None else 0
    sizes = (logits.stride(0), width, topk, table_stride, nothing)
    grid = (shape.cluster * queries, 1)
    _kernel(logits.device, shape)(grid, shape.threads, logits, lengths, first, wanted, *names, *out, stats, *sizes)
