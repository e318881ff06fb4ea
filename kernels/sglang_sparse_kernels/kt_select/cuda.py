"""CUDA kernel of the KT selection: what is visible, its scores and the choice in one launch.

Few of its loads wait for others: which blocks are visible is read while the kernel before it still runs, and of the
bounds on keys each thread has 256 bytes on their way at once, before it looks at the query. What separate kernels hand
on through memory stays in shared memory; the logits of a row of so many candidates that it cannot hold them are in
global memory.

Of 32 rows of Qwen3-8B with 512 visible blocks the bounds are 34 MB; of one row they are 1 MB, 131 KB for each of eight
blocks of threads.

A pair of a row and a KV head has one block of threads. That of a long row, in a small batch, has a cluster of them
(Hopper and later), which divide it: whether it is long is known on the device alone, and what is not needed ends.

Scores are those of ``reference.kt_score``, by other means: products of float16, which holds float8_e5m2, and queries
multiplied by a power of two; sums of weights in whole numbers. So they are a function of the row alone, too.
"""

import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from ..block_mass.cuda import float_bits
from ..common import nvrtc
from ..common.launch import LOG2_E, dependent_launch, num_processors, planned_rows
from ..common.scratch import LIMIT, most_bytes, rows_at_once

SOURCE = Path(__file__).with_name("cuda.cu")
KINDS = {torch.bfloat16: 0, torch.float16: 1}
DIMS = (64, 128)
MAX_GROUP = 8
_CLUSTERS = (1, 2)
# Logits that a block of threads keeps in shared memory.
_HELD = 8192


@dataclass(frozen=True)
class Config:
    """Launch parameters: threads of a block, blocks that a multiprocessor is to run at once, blocks of a cluster."""

    threads: int
    resident: int
    cluster: int = 1


def config_of(pairs: int, processors: int, clusters: bool) -> Config:
    """As many threads as a multiprocessor has registers for, in one block where each has one of its own; and as many
    blocks for each of the pairs of a row and a KV head as then have one, but no more than two, of which the second is
    for the long rows that may come.
    """
    if pairs > processors:
        return Config(256, 2)
    return Config(512, 1, max(size for size in _CLUSTERS if size * pairs <= processors) if clusters else 1)


def takes_sizes(
    heads: tuple[int, int],
    dim: int,
    width: int,
    dtype: torch.dtype,
    summary_dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether calls of these sizes are served from here: on NVIDIA GPUs, bounds in float8_e5m2, at most eight query
    ``heads`` to a KV head, and rows of less than a million blocks, whose weights add up in a word.
    """
    return (
        dtype in KINDS
        and summary_dtype == torch.float8_e5m2
        and dim in DIMS
        and heads[0] <= MAX_GROUP * heads[1]
        and width < 1 << 20
        and nvrtc.available(device)
    )


def takes(q: torch.Tensor, summary: torch.Tensor, width: int) -> bool:
    """Whether these are served from here: calls of such sizes, whose bounds are read 16 bytes at a time."""
    heads = q.shape[1], summary.shape[1]
    sizes = takes_sizes(heads, q.shape[2], width, q.dtype, summary.dtype, q.device)
    return sizes and summary.data_ptr() % 16 == 0


def defines(dim: int, group: int, dtype: torch.dtype, topr: int, config: Config) -> dict[str, int]:
    """Return the source's macros."""
    sizes = {"DIM": dim, "GROUP": group, "KIND": KINDS[dtype], "CHOOSE": int(topr < dim)}
    sizes |= {"HEADS": MAX_GROUP, "HELD": _HELD // group}
    return {**sizes, "CLUSTER": config.cluster, "THREADS": config.threads, "RESIDENT": config.resident}


def _row_bytes(num_q_heads: int, num_kv_heads: int, width: int) -> int:
    """Of the logits of a row that shared memory may not hold."""
    fits = width <= _HELD // (num_q_heads // num_kv_heads)
    return 0 if fits else num_q_heads * width * torch.float32.itemsize


def scratch_bytes(batch: int, num_q_heads: int, num_kv_heads: int, width: int, limit: int = LIMIT) -> int:
    """See ``kt_select.scratch_bytes``; ``limit`` is that of the call."""
    return most_bytes(batch, _row_bytes(num_q_heads, num_kv_heads, width), limit)


@functools.cache
def _kernel(device: torch.device, dim: int, group: int, dtype: torch.dtype, topr: int, config: Config) -> nvrtc.Kernel:
    return nvrtc.Kernel(SOURCE, "kt_select", device, defines(dim, group, dtype, topr, config), config.cluster)


def kt_select(
    q: torch.Tensor,
    summary: torch.Tensor,
    tables: tuple[torch.Tensor, ...],
    topr: int,
    scale: float,
    out: tuple[torch.Tensor, torch.Tensor],
    stats: torch.Tensor | None = None,
    tables_ready: bool = False,
    config: Config | None = None,
    limit: int = LIMIT,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``kt_select.kt_select``, whose tables these are, in its order; for what ``takes`` allows.

    ``limit`` bounds the scratch in bytes wherever that of a single row fits.
    """
    kept, n_kept, first_visible, *by_row = tables
    (batch, num_q_heads, dim), (heads, width) = q.shape, out[0].shape[1:]
    if batch == 0:
        return out
    rows, scratch = batch, None
    if row_bytes := _row_bytes(num_q_heads, heads, width):
        rows = rows_at_once(batch, row_bytes, limit)
        scratch = torch.empty(rows, num_q_heads, width, dtype=torch.float32, device=q.device)
    config = config or config_of(planned_rows(rows) * heads, num_processors(q.device), dependent_launch(q.device))
    kernel = _kernel(q.device, dim, num_q_heads // heads, q.dtype, topr, config)
    sizes = (q.stride(0), q.stride(1), kept.shape[2], by_row[1].stride(0), width, topr, float_bits(scale * LOG2_E))
    for first in range(0, batch, rows):
        part = slice(first, first + rows)
        inputs = (q[part], summary, kept, n_kept, first_visible, *(tensor[part] for tensor in by_row), scratch)
        results = (*(tensor[part] for tensor in out), stats)
        grid = (config.cluster * heads, min(rows, batch - first))
        kernel(grid, config.threads, *inputs, *results, *sizes, int(tables_ready))
    return out
