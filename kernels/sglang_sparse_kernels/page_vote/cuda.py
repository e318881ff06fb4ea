"""CUDA kernel of the votes by centroids: products by tensor cores of records as they lie in memory.

It replaces the first of Triton's two kernels, which spends longer on converting each number to float16 than on reading
it. Here a number takes half an operation or less. It leaves sums of each warp, where Triton's leaves those of 64 pages;
the second kernel is Triton's.

Triton's kernel serves what this one does not take.
"""

import functools
from pathlib import Path

import torch

from ..block_mass.cuda import float_bits
from ..common import nvrtc
from ..common.launch import LOG2_E, capability, num_processors, planned_rows
from ..page_centroids import count_of, record_bytes
from ..page_score.cuda import KINDS, WARPS, blocks_of
from ..page_topk import cuda as topk
from . import rows_at_once

SOURCE = Path(__file__).with_name("cuda.cu")
DIMS = (64, 128, 256)
# Pages that a warp takes at a time.
PAGES = 16
# Query heads of a KV head: the columns of a product.
MOST_HEADS = 8
# Shared memory of a block, in bytes: two such blocks fit a multiprocessor of Hopper, and one of Ada.
_SHARED_BYTES = 98304


def takes(q: torch.Tensor, summary: torch.Tensor) -> bool:
    """Whether these votes can be counted from here: centroids of `DIMS`, groups of up to `MOST_HEADS`, from Ada on."""
    if summary.dtype != torch.uint8 or q.dtype not in KINDS or q.shape[2] not in DIMS:
        return False
    if summary.data_ptr() % 16 or q.data_ptr() % 16 or q.stride(0) % 8 or q.stride(1) % 8:
        return False
    group = q.shape[1] // summary.shape[1]
    return group <= MOST_HEADS and nvrtc.available(q.device) and capability(q.device) >= (8, 9)


def selects(q: torch.Tensor, summary: torch.Tensor, scores: torch.Tensor) -> bool:
    """Whether `select_by_votes` takes these; ``scores`` are as wide as the rows."""
    return takes(q, summary) and topk.takes(scores) and len(q) > 0 and scores.shape[2] > 0


def defines(dim: int, group: int, count: int, query: torch.dtype) -> dict[str, int]:
    """Return the source's macros."""
    sizes = {"DIM": dim, "GROUP": group, "COUNT": count, "RECORD": record_bytes(count, dim)}
    return {**sizes, "QUERY": KINDS[query], "RESIDENT": _resident(dim), "DEPTH": _depth(dim, count)}


def _depth(dim: int, count: int) -> int:
    """Pieces of `PAGES` records that are on their way to each warp, up to three."""
    return min(3, _SHARED_BYTES // (WARPS * PAGES * record_bytes(count, dim)))


def _resident(dim: int) -> int:
    """Blocks of a multiprocessor: its registers hold so many, with any number of centroids."""
    return 4 if dim == 64 else 2


def parts_of(device: torch.device, dim: int, width: int, rows: int) -> int:
    """Warps that share a row of ``width`` pages, where ``rows`` pairs of a row and a KV head are asked about."""
    return WARPS * blocks_of(width, rows, _resident(dim) * num_processors(device))


def shared_bytes(dim: int, count: int) -> int:
    """Shared memory of a block of threads, in bytes: the records of each warp."""
    return WARPS * _depth(dim, count) * PAGES * record_bytes(count, dim)


@functools.cache
def _kernel(device: torch.device, dim: int, group: int, count: int, query: torch.dtype) -> nvrtc.Kernel:
    size = shared_bytes(dim, count)
    return nvrtc.Kernel(SOURCE, "page_vote", device, defines(dim, group, count, query), shared_bytes=size)


def scratch(q: torch.Tensor, summary: torch.Tensor, width: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Empty logits and parts of ``rows`` rows of ``width`` pages, see `leave_logits`."""
    blocks = parts_of(q.device, q.shape[2], width, planned_rows(rows) * summary.shape[1])
    options = {"dtype": torch.float32, "device": q.device}
    return torch.empty(rows, q.shape[1], width, **options), torch.empty(rows, q.shape[1], blocks, 2, **options)


def select_by_votes(
    q: torch.Tensor,
    summary: torch.Tensor,
    page_table: torch.Tensor,
    n_pages: torch.Tensor,
    n_select: torch.Tensor,
    max_select: int,
    sm_scale: float,
    out: tuple[torch.Tensor, torch.Tensor],
    stats: torch.Tensor | None,
    local_pages: int,
    tables_ready: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``page_vote.select_by_votes``; for what ``selects`` allows."""
    batch, width = page_table.shape
    rows = min(batch, rows_at_once(q.shape[1], width))
    logits, parts = scratch(q, summary, width, rows)
    for first in range(0, batch, rows):
        some = slice(first, first + rows)
        tables = page_table[some], n_pages[some]
        leave_logits(q[some], summary, *tables, sm_scale, logits, parts, tables_ready)
        held = slice(len(tables[0]))
        pages = (*tables, n_select[some], max_select, (out[0][some], out[1][some]), stats, tables_ready)
        topk.page_topk(logits[held], *pages, parts=parts[held], local_pages=local_pages)
    return out


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
    """Write each head's logit of each page, and for each warp the largest and the sum; to the base 2.

    Args:
        q: see ``page_vote.page_vote``, and so for what is not said here.
        summary: likewise.
        page_table: likewise.
        n_pages: likewise.
        sm_scale: likewise.
        logits: ``[B, Hq, M]`` float32.
        parts: ``[B, Hq, P, 2]`` float32, where P is what `parts_of` says.
        summaries_ready: likewise.
    """
    (batch, num_q_heads, dim), heads, warps = q.shape, summary.shape[1], parts.shape[2]
    kernel = _kernel(q.device, dim, num_q_heads // heads, count_of(summary.shape[2], dim), q.dtype)
    strides = (q.stride(0), q.stride(1), page_table.stride(0))
    width, factor = page_table.shape[1], float_bits(sm_scale * LOG2_E)
    sizes = (*strides, width, warps, heads, factor, int(summaries_ready))
    kernel((heads * warps // WARPS, batch), 32 * WARPS, q, summary, page_table, n_pages, logits, parts, *sizes)
