"""CUDA kernel of the page selection: one block per row and KV head, all scores in registers.

A histogram of the scores' range in 2,048 equal bins finds the bin of the n-th highest; the few scores of that bin are
ranked against one another. Where they are many, as with outliers, the bin is divided by the scores' bits. A running
count over the threads, which hold consecutive pages, then places the selected ones in logical order. Triton cannot say
this: its histogram counts by shuffles.
"""

import functools
from pathlib import Path

import torch

from .. import nvrtc

SOURCE = Path(__file__).with_name("cuda.cu")
_ITEMS = (4, 8, 16, 32)
_MAX_THREADS = 1024
MAX_PAGES = _ITEMS[-1] * _MAX_THREADS


def takes(scores: torch.Tensor) -> bool:
    """Whether rows as wide as those of ``scores`` can be selected from here: at most ``MAX_PAGES``, on NVIDIA GPUs."""
    return scores.shape[2] <= MAX_PAGES and nvrtc.available(scores.device)


def shape_of(width: int, threads: int | None = None) -> tuple[int, int]:
    """Threads of a block, as given or for rows of ``width`` pages, and scores that each holds at most."""
    threads = threads or (512 if width <= 512 else _MAX_THREADS)
    return threads, next(items for items in _ITEMS if items * threads >= width)


@functools.cache
def _kernel(device: torch.device, threads: int, items: int) -> nvrtc.Kernel:
    return nvrtc.Kernel(SOURCE, "page_topk", device, {"THREADS": threads, "ITEMS": items})


def page_topk(
    scores: torch.Tensor,
    page_table: torch.Tensor,
    n_pages: torch.Tensor,
    n_select: torch.Tensor,
    max_select: int,
    out: tuple[torch.Tensor, torch.Tensor],
    stats: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``page_topk.page_topk``; for what ``takes`` allows."""
    indices, counts = out
    batch, heads, width = scores.shape
    if batch == 0:
        return out
    threads, items = shape_of(width)
    tensors = (scores, page_table, n_pages, n_select, indices, counts, stats)
    aligned = int(width % 4 == 0 and scores.data_ptr() % 16 == 0)
    sizes = (page_table.stride(0), width, max_select, aligned)
    _kernel(scores.device, threads, items)((heads, batch), threads, *tensors, *sizes)
    return out
