"""CUDA kernel of the page score: products by tensor cores of summaries as they lie in memory.

What Triton's kernel does with each number of a summary, to make it float32, multiply and add it, takes longer than to
read it where the numbers are float8. Here it is half a conversion, or none, and a 16th of a product. The query is
divided into parts of the summaries' type, whose products are exact, so that nothing of its precision is lost: the parts
are columns of the product, which would be empty otherwise.

Triton's kernel serves what this one does not take, and summaries of two bytes an entry, of which it reads long rows
faster on an H200: ``eval.lab.bench_kernels`` times both.
"""

import functools
from pathlib import Path

import torch

from ..common import nvrtc
from ..common.launch import capability, num_processors

SOURCE = Path(__file__).with_name("cuda.cu")
DIMS = (64, 128)
KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float8_e4m3fn: 2}
WARPS, PAGES = 4, 16


def faster(summary: torch.Tensor) -> bool:
    """Whether this kernel is faster than Triton's."""
    return summary.itemsize == 1


def takes(q: torch.Tensor, summary: torch.Tensor) -> bool:
    """Whether these can be scored from here: heads of `DIMS`, on NVIDIA GPUs that convert the summaries' type."""
    if q.dtype not in KINDS or summary.dtype not in KINDS or q.shape[2] not in DIMS or summary.data_ptr() % 16:
        return False
    return nvrtc.available(q.device) and (summary.itemsize > 1 or capability(q.device) >= (8, 9))


def defines(dim: int, group: int, query: torch.dtype, summary: torch.dtype) -> dict[str, int]:
    """Return the source's macros. With float8 a lane holds half as much, so that more blocks run at once."""
    kind, resident = KINDS[summary], 5 if summary.itemsize == 1 else 4
    return {"DIM": dim, "GROUP": group, "KIND": kind, "QUERY": KINDS[query], "RESIDENT": resident}


def blocks_of(width: int, rows: int, resident: int) -> int:
    """Blocks that share a row of ``width`` pages: as many as run at once, and have something to do.

    Args:
        width: pages of the longest row that may come.
        rows: pairs of a row and a KV head.
        resident: blocks that the GPU runs at once.
    """
    return min(-(-width // (WARPS * PAGES)), max(1, resident // rows))


@functools.cache
def _kernel(device: torch.device, dim: int, group: int, query: torch.dtype, summary: torch.dtype) -> nvrtc.Kernel:
    return nvrtc.Kernel(SOURCE, "page_score", device, defines(dim, group, query, summary))


def page_score(
    q: torch.Tensor,
    summary: torch.Tensor,
    page_table: torch.Tensor,
    n_pages: torch.Tensor,
    out: torch.Tensor,
    local_pages: int = 1,
    summaries_ready: bool = False,
) -> torch.Tensor:
    """See ``page_score.page_score``; for what ``takes`` allows. Entries at or beyond ``n_pages`` are left unwritten."""
    (batch, num_q_heads, dim), heads, width = q.shape, summary.shape[1], page_table.shape[1]
    if batch == 0 or width == 0:
        return out
    kernel = _kernel(q.device, dim, num_q_heads // heads, q.dtype, summary.dtype)
    resident = defines(dim, 1, q.dtype, summary.dtype)["RESIDENT"] * num_processors(q.device)
    strides = (q.stride(0), q.stride(1), page_table.stride(0))
    sizes = (*strides, width, heads, local_pages, int(summaries_ready))
    grid = (heads * blocks_of(width, batch * heads, resident), batch)
    kernel(grid, 32 * WARPS, q, summary, page_table, n_pages, out, *sizes)
    return out
