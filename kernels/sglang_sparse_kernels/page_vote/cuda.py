"""CUDA kernel of the votes by centroids: products by tensor cores of records as they lie in memory.

It replaces the first of Triton's two kernels, which spends longer on converting each number to float16 than on reading
it. Here a number takes half an operation or less. It leaves sums for each 16 pages, where Triton's has 64; the second
kernel is Triton's.

Triton's kernel serves what this one does not take.
"""

import functools
from pathlib import Path

import torch

from ..block_mass.cuda import float_bits
from ..common import nvrtc
from ..common.launch import LOG2_E, capability, num_processors
from ..page_centroids import HEADER, count_of
from ..page_score.cuda import DIMS, KINDS, WARPS, blocks_of

SOURCE = Path(__file__).with_name("cuda.cu")
# Pages that a warp takes at a time.
PAGES = 16
# Query heads of a KV head: the columns of a product.
MOST_HEADS = 8
# Blocks of a multiprocessor (one where it has but 100 KB of shared memory), and pieces of `PAGES` records that are on
# their way to each warp of one.
RESIDENT, DEPTH = 3, 2


def takes(q: torch.Tensor, summary: torch.Tensor) -> bool:
    """Whether these votes can be counted from here: centroids of `DIMS`, groups of up to `MOST_HEADS`, from Ada on."""
    if summary.dtype != torch.uint8 or q.dtype not in KINDS or q.shape[2] not in DIMS:
        return False
    if summary.data_ptr() % 16 or q.data_ptr() % 16 or q.stride(0) % 8 or q.stride(1) % 8:
        return False
    group = q.shape[1] // summary.shape[1]
    return group <= MOST_HEADS and nvrtc.available(q.device) and capability(q.device) >= (8, 9)


def defines(dim: int, group: int, count: int, query: torch.dtype) -> dict[str, int]:
    """What the source is compiled with."""
    return {"DIM": dim, "GROUP": group, "COUNT": count, "QUERY": KINDS[query], "RESIDENT": RESIDENT, "DEPTH": DEPTH}


def shared_bytes(dim: int, count: int) -> int:
    """Shared memory of a block of threads, in bytes: the records of each warp."""
    return WARPS * DEPTH * PAGES * (HEADER + dim + (count - 1) * dim // 2)


@functools.cache
def _kernel(device: torch.device, dim: int, group: int, count: int, query: torch.dtype) -> nvrtc.Kernel:
    size = shared_bytes(dim, count)
    return nvrtc.Kernel(SOURCE, "page_vote", device, defines(dim, group, count, query), shared_bytes=size)


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
