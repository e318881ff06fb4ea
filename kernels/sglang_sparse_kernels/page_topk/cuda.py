"""CUDA kernel of the page selection: a cluster of blocks per row and KV head, all scores in registers.

A histogram in 2,048 equal bins, over the range of a sample of the scores, finds the bin of the n-th highest; the few
scores of that bin are ranked against one another. Where they are many, as with outliers, the bin is divided by the
scores' bits. A running count over the threads, which hold consecutive pages, then places the selected ones in logical
order. Triton cannot say this: its histogram counts by shuffles.

The blocks of a cluster (Hopper and later) divide a row. They meet twice: for the sums of their histograms, and for the
scores of the bin; each then knows what the others select.

Half of the time is that of loads which wait for others: the numbers of pages, then the scores. Where the tables are
older than the kernel before this one, all that depends on them alone runs beside that kernel.
"""

import functools
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..common import nvrtc
from ..common.launch import dependent_launch, num_processors, planned_rows

SOURCE = Path(__file__).with_name("cuda.cu")
_ITEMS = (4, 8, 16, 32)
_MAX_THREADS = 1024
_CLUSTERS = (1, 2, 4, 8)
# Scores of a row up to which one block is taken instead of a cluster, whose barriers cost more. On an H200 one block
# was faster for 64 pairs of a row and a head with 4,224, and a cluster for 8 pairs with 8,320; nothing in between was
# measured. And a block's part of a longer row, below which more blocks cost more than they save.
_ALONE = 5120
_LEAST_PART = 2048
# A part of that many pages or fewer is faster with half of the threads.
_FEW_PAGES = 4096


@dataclass(frozen=True)
class Shape:
    """``threads`` of a block, a power of two of at least 32; ``items`` is how many scores a thread holds at most.

    Of votes, ``voters`` heads make a score.
    """

    cluster: int
    threads: int
    items: int
    voters: int = 0

    @property
    def defines(self) -> dict[str, int]:
        """Return the source's macros."""
        return {"CLUSTER": self.cluster, "THREADS": self.threads, "ITEMS": self.items, "VOTERS": self.voters}


def max_pages(clusters: bool) -> int:
    """Pages of the longest row, with clusters of blocks or without."""
    return _ITEMS[-1] * _MAX_THREADS * (_CLUSTERS[-1] if clusters else 1)


def takes(scores: torch.Tensor) -> bool:
    """Whether rows as wide as those of ``scores`` can be selected from here: on NVIDIA GPUs, up to ``max_pages``."""
    return nvrtc.available(scores.device) and scores.shape[2] <= max_pages(dependent_launch(scores.device))


def shape_of(width: int, rows: int, processors: int, cluster: int | None = None, threads: int | None = None) -> Shape:
    """Return the launch config of a selection from rows.

    Args:
        width: pages of the longest row.
        rows: pairs of a row and a KV head.
        processors: of a GPU with clusters; 0 if it has none.
        cluster: blocks of a row, as given, a power of two; GPUs take at most 8.
        threads: of a block, as given.

    Raises:
        ValueError: the row does not fit so many blocks and threads.
    """
    cluster = cluster or _cluster_of(width, rows, processors)
    part = -(-width // cluster)
    if threads is None:
        threads = 512 if part <= _FEW_PAGES else _MAX_THREADS
    items = next((items for items in _ITEMS if items * threads >= part), None)
    if items is None:
        raise ValueError(f"{width} pages do not fit {cluster} blocks of {threads} threads with {_ITEMS[-1]} each")
    return Shape(cluster, threads, items)


def _cluster_of(width: int, rows: int, processors: int) -> int:
    """The most blocks that all run at once and have enough to do; more only where a row does not fit otherwise.

    By the longest row that may come, as the lengths of the batch are known on the device alone: a shorter one then has
    more blocks than it needs.
    """
    if processors == 0 or width <= _ALONE:
        return 1
    holding = [size for size in _CLUSTERS if size * max_pages(clusters=False) >= width] or [_CLUSTERS[-1]]
    useful = [size for size in _CLUSTERS if size * rows <= processors and size * _LEAST_PART <= width] or [1]
    return max(holding[0], useful[-1])


@functools.cache
def _kernel(device: torch.device, shape: Shape) -> nvrtc.Kernel:
    return nvrtc.Kernel(SOURCE, "page_topk", device, shape.defines, shape.cluster)


def page_topk(
    scores: torch.Tensor,
    page_table: torch.Tensor,
    n_pages: torch.Tensor,
    n_select: torch.Tensor,
    max_select: int,
    out: tuple[torch.Tensor, torch.Tensor],
    stats: torch.Tensor | None = None,
    tables_ready: bool = False,
    shape: Shape | None = None,
    parts: torch.Tensor | None = None,
    local_pages: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``page_topk.page_topk``; for what ``takes`` allows.

    With ``parts``, ``[B, Hq, P, 2]`` float32, the scores are the logits ``[B, Hq, M]`` of all query heads, as
    ``page_vote.cuda.leave_logits`` leaves both: votes are then counted here, and the newest ``local_pages`` selected.
    """
    indices, counts = out
    batch, _, width = scores.shape
    heads = counts.shape[1]
    if batch == 0:
        return out
    if shape is None:
        processors = num_processors(scores.device) if dependent_launch(scores.device) else 0
        shape = shape_of(width, planned_rows(batch) * heads, processors)
    num_parts = 0
    if parts is not None:
        num_parts, shape = parts.shape[2], replace(shape, voters=scores.shape[1] // heads)
    tensors = (scores, page_table, n_pages, n_select, indices, counts, stats, parts)
    sizes = (page_table.stride(0), width, max_select, int(aligned(scores, page_table)), int(tables_ready))
    sizes = (*sizes, num_parts, local_pages)
    _kernel(scores.device, shape)((shape.cluster * heads, batch), shape.threads, *tensors, *sizes)
    return out


def aligned(scores: torch.Tensor, page_table: torch.Tensor) -> bool:
    """Whether the kernel may read four numbers of a row at once."""
    strides = (scores.shape[2], page_table.stride(0))
    pointers = (scores.data_ptr(), page_table.data_ptr())
    return all(stride % 4 == 0 for stride in strides) and all(pointer % 16 == 0 for pointer in pointers)
