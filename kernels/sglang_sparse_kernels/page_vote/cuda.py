"""CUDA kernel of the votes by centroids: products by tensor cores of records as they lie in memory.

It takes the place of the first of Triton's two kernels, which spends longer on making float16 of each number than on
reading it. Here that is half an operation for one of float8, and one for a level of four bits. It leaves sums for each
16 pages, where Triton's has 64; the second kernel is Triton's.

Triton's kernel serves what this one does not take.
"""

import functools
from pathlib import Path

import torch

from .. import nvrtc
from ..block_mass.cuda import float_bits
from ..launch import LOG2_E, capability, num_processors
from ..page_centroids import count_of
from ..page_score.cuda import DIMS, KINDS, WARPS, blocks_of

SOURCE = Path(__file__).with_name("cuda.cu")
# Pages that a warp takes at a time.
PAGES = 16
# Query heads of a KV head: the columns of a product.
MOST_HEADS = 8
# Blocks of a multiprocessor; a lane holds two records' quarters and a sum for each centroid.
RESIDENT = 4


def takes(q: torch.Tensor, summary: torch.Tensor) -> bool:
    """Whether these votes can be counted from here: centroids of `DIMS`, groups of up to `MOST_HEADS`, from Ada on."""
    if summary.dtype != torch.uint8 or q.dtype not in KINDS or q.shape[2] not in DIMS or summary.data_ptr() % 16:
        return False
    group = q.shape[1] // summary.shape[1]
    return group <= MOST_HEADS and nvrtc.available(q.device) and capability(q.device) >= (8, 9)


def defines(dim: int, group: int, count: int, query: torch.dtype) -> dict[str, int]:
    """What the source is compiled with."""
    return {"DIM": dim, "GROUP": group, "COUNT": count, "QUERY": KINDS[query], "RESIDENT": RESIDENT}


@functools.cache
def _kernel(device: torch.device, dim: int, group: int, count: int, query: torch.dtype) -> nvrtc.Kernel:
    return nvrtc.Kernel(SOURCE, "page_vote", device, defines(dim, group, count, query))


def leave_logits(
    q: torch.Tensor,
    summary: torch.Tensor,
    page_table: torch.Tensor,
    n_pages: torch.Tensor,
    sm_scale: float,
    logits: torch.Tensor,
    parts: torch.Tensor,
    summaries_ready: bool,
) -> None:
    """Write each head's logit of each page, and for each `PAGES` pages the largest and the sum; to the base 2.

    Args:
        q: see ``page_vote.page_vote``, and so for what is not said here.
        summary: likewise.
        page_table: likewise.
        n_pages: likewise.
        sm_scale: likewise.
        logits: ``[B, Hq, M]`` float32.
        parts: ``[B, Hq, ceil(M / PAGES), 2]`` float32.
        summaries_ready: likewise.
    """
    (batch, num_q_heads, dim), heads, width = q.shape, summary.shape[1], page_table.shape[1]
    kernel = _kernel(q.device, dim, num_q_heads // heads, count_of(summary.shape[2], dim), q.dtype)
    strides = (q.stride(0), q.stride(1), page_table.stride(0))
    sizes = (*strides, width, parts.shape[2], heads, float_bits(sm_scale * LOG2_E), int(summaries_ready))
    grid = (heads * blocks_of(width, batch * heads, RESIDENT * num_processors(q.device)), batch)
    kernel(grid, 32 * WARPS, q, summary, page_table, n_pages, logits, parts, *sizes)
