"""CUDA kernels of the block mass of the RoPE dimensions: block sums of the split rows, then their masses.

What bounds it are the exponentials, one for each head and token, so that the rest is what the kernel saves. Weights are
relative to a reference, 2 to the power of a head's highest logit among the first tokens of a split, and no maximum is
looked for afterwards: float32 holds weights up to 2^64 times as large, and what is less than 2^-116 of the reference
weighs nothing beside it. Where a weight is larger all the same, the reference is raised, and what the split has summed
up before is divided by so much. References are powers of two with whole exponents, which makes that exact.

A word has the sums of two times 16 tokens in a head: 12 bits each, and the exponent that they share. So masses are as
precise as those of Triton's kernel, whose block sums are float16, and nothing is kept to say what they are relative to
but one reference for each split and head.

The merge adds up the totals of a row's splits, of which there are many where rows are few: a cluster of blocks (Hopper
and later) then divides them.
"""

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from ..common import nvrtc
from ..common.launch import LOG2_E, dependent_launch, num_processors, planned_rows
from ..common.scratch import LIMIT, rows_at_once

SOURCE, MERGE = (Path(__file__).with_name(name) for name in ("cuda.cu", "merge.cu"))
KINDS = {torch.bfloat16: 0, torch.float16: 1}
DIM = 64
MAX_HEADS = 128
# Tokens that are summed up together.
PIECE = 16
_MAX_BLOCK_SIZE = 64
_CLUSTER = 8
# Splits of a row up to which a block of the merge adds up all of their totals itself.
_FEW_SPLITS = 48
_MERGE_THREADS = 256


@dataclass(frozen=True)
class Shape:
    """The division of heads: each warp has ``head_tiles`` tiles of 16, and ``token_warps`` warps have the same ones."""

    heads: int
    head_tiles: int
    token_warps: int

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.heads // (16 * self.head_tiles) * self.token_warps

    @property
    def tile_tokens(self) -> int:
        """Tokens that a block takes at a time, 32 for each warp."""
        return 2 * PIECE * self.token_warps

    @property
    def resident(self) -> int:
        """Blocks that a multiprocessor runs at once: four warps for each of its four parts, three for 64 heads, which
        would spill registers on some GPUs, or all that a block has.
        """
        return max(1, (384 if self.heads == 64 else 512) // self.threads)

    def defines(self, dtype: torch.dtype) -> dict[str, int]:
        """Macros of the kernel of splits."""
        # So that about 64 KiB are on their way to a multiprocessor.
        stages = 2 if self.token_warps == 4 else 3 if self.resident > 2 else 4
        more = {"HEAD_TILES": self.head_tiles, "STAGES": stages, "RESIDENT": self.resident}
        return {"HEADS": self.heads, "TOKEN_WARPS": self.token_warps, "KIND": KINDS[dtype], **more}

    def merge_defines(self, cluster: int) -> dict[str, int]:
        """Macros of the kernel that merges them."""
        return {"HEADS": self.heads, "TOKEN_WARPS": self.token_warps, "CLUSTER": cluster}


def shape_of(heads: int) -> Shape:
    """Two 16s of heads a warp where there are many, since all warps of a block read all keys of their tokens."""
    head_tiles = 2 if heads % 32 == 0 and heads > 32 else 1
    return Shape(heads, head_tiles, 2 if heads > 16 else 4)


def takes_sizes(heads: int, dim: int, block_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether calls of these sizes may be served from here; ``takes`` says which are."""
    if dim != DIM or dtype not in KINDS or heads % 16 or not 16 <= heads <= MAX_HEADS:
        return False
    return PIECE <= block_size <= _MAX_BLOCK_SIZE and nvrtc.available(device)


def takes(q: torch.Tensor, k_cache: torch.Tensor, block_size: int) -> bool:
    """Whether these are served from here: RoPE queries and keys of one type, read 4 and 16 bytes at a time."""
    if q.dtype != k_cache.dtype or q.data_ptr() % 4 or q.stride(0) % 2 or q.stride(1) % 2:
        return False
    stride = k_cache.stride(0) * k_cache.itemsize
    if k_cache.data_ptr() % 16 or stride % 16 or not 0 <= stride < 2**24:
        return False
    return takes_sizes(q.shape[1], q.shape[2], block_size, q.dtype, q.device)


def num_splits(batch: int, tiles: int, resident: int) -> int:
    """Splits of each row: as many as run at once, and have something to do.

    Args:
        batch: rows.
        tiles: of the longest row that may come.
        resident: blocks that the GPU runs at once.
    """
    return min(tiles, max(1, resident // planned_rows(batch)))


def cluster_of(splits: int, clusters: bool) -> int:
    """Blocks of the merge that divide the totals of a row's splits; 1 on GPUs without clusters."""
    return _CLUSTER if clusters and splits > _FEW_SPLITS else 1


def _tiles(width: int, block_size: int, shape: Shape) -> int:
    return -(-width * block_size // shape.tile_tokens)


def _row_words(width: int, block_size: int, shape: Shape) -> int:
    """Words of a row: one for each head and two pieces."""
    return _tiles(width, block_size, shape) * shape.token_warps * shape.heads


def scratch_bytes(batch: int, heads: int, width: int, block_size: int, device: torch.device, limit: int = LIMIT) -> int:
    """Bytes that a call allocates at once beside the result; for what ``takes_sizes`` allows."""
    shape = shape_of(heads)
    row_words = _row_words(width, block_size, shape)
    rows, resident = rows_at_once(batch, 4 * row_words, limit), shape.resident * num_processors(device)
    # The last rows may be fewer, and then have more splits in all.
    launches = {rows, batch % rows or rows}
    splits = max(launch * num_splits(launch, _tiles(width, block_size, shape), resident) for launch in launches)
    return 4 * (rows * row_words + 2 * splits * heads)


@functools.cache
def _kernels(device: torch.device, shape: Shape, dtype: torch.dtype) -> tuple[nvrtc.Kernel, dict[int, nvrtc.Kernel]]:
    """The splits, and the merge by the size of a cluster: all at once, as loading one ends the capture of a graph."""
    clusters = (1, _CLUSTER) if dependent_launch(device) else (1,)
    merges = {
        size: nvrtc.Kernel(MERGE, "block_mass_merge", device, shape.merge_defines(size), size) for size in clusters
    }
    return nvrtc.Kernel(SOURCE, "block_mass_splits", device, shape.defines(dtype)), merges


def block_mass(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    n_blocks: torch.Tensor,
    last_slots: torch.Tensor,
    block_size: int,
    sm_scale: float,
    k_scale: float,
    out: torch.Tensor,
    limit: int = LIMIT,
) -> torch.Tensor:
    """See ``block_mass.block_mass``; for what ``takes`` allows. Entries at or beyond ``n_blocks`` are left unwritten.

    ``limit`` bounds the words in bytes wherever those of a single row fit.
    """
    (batch, heads, _), width = q.shape, block_table.shape[1]
    if batch == 0 or width == 0:
        return out
    shape = shape_of(heads)
    row_words = _row_words(width, block_size, shape)
    rows = rows_at_once(batch, 4 * row_words, limit)
    words = torch.empty(rows, row_words, dtype=torch.int32, device=q.device)
    for first in range(0, batch, rows):
        part = slice(first, first + rows)
        inputs = (q[part], k_cache, block_table[part], n_blocks[part], last_slots[part])
        _launch(inputs, words, out[part], block_size, sm_scale * k_scale * LOG2_E, shape)
    return out


def _launch(
    inputs: tuple[torch.Tensor, ...],
    words: torch.Tensor,
    out: torch.Tensor,
    block_size: int,
    logit_scale: float,
    shape: Shape,
) -> None:
    q, k_cache, block_table, n_blocks, _ = inputs
    (batch, width), row_words = block_table.shape, words.shape[1]
    resident, tiles = shape.resident * num_processors(q.device), _tiles(width, block_size, shape)
    splits = num_splits(batch, tiles, resident)
    totals = torch.empty(batch, splits, shape.heads, 2, dtype=torch.float32, device=q.device)
    split_kernel, merges = _kernels(q.device, shape, q.dtype)
    size_log2 = block_size.bit_length() - 1
    strides = (q.stride(0), q.stride(1), k_cache.stride(0) * k_cache.itemsize, block_table.stride(0))
    sizes = (*strides, row_words, size_log2, float_bits(logit_scale))
    split_kernel((splits, batch), shape.threads, *inputs, words, totals, *sizes)
    cluster = cluster_of(splits, dependent_launch(q.device))
    grid = (-(-splits // cluster) * cluster, batch)
    tensors = (words, totals, n_blocks, out)
    merges[cluster](grid, _MERGE_THREADS, *tensors, row_words, splits, width, size_log2)


def float_bits(number: float) -> int:
    """A float32 as an integer, as kernels take no other numbers; infinite where it is too large for one."""
    return ctypes.c_uint32.from_buffer(ctypes.c_float(number)).value
