"""FA3 as sparse MLA decode attention: FlashAttention-3 from SGLang's kernel package, with the selected blocks as pages.

FA3 attends over a table of pages in the table's order, up to a number of tokens, and reads neither entries nor values
beyond them. So physical blocks are such a table as they are, over the cache seen in blocks, if the newest one, of which
only a part may count, comes last. How many tokens that makes is all that has to be computed, by one small kernel.

By these numbers FA3 divides the rows among the multiprocessors, in a kernel of its own, so that a CUDA graph serves any
counts. Only the most splits of a row are fixed at launch, and with them what it allocates.

``faster`` says where it is chosen. Triton's kernels serve all else.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable

import torch

from ..common import launch
from ..common.launch import capability, num_processors
from .reference import Inputs
from .triton import selected_tokens

logger = logging.getLogger(__name__)

LATENT_DIM, ROPE_DIM = 512, 64
# Pages as large as FA3's tiles of 64 tokens it may load whole: behind the newest token they may hold NaN, which a
# weight of zero leaves NaN. Smaller ones it loads by token, and none that does not count. Below 16 it is not measured.
BLOCK_SIZES = (16, 32)
# Query heads of a tile.
TILE_HEADS = 64
# From which it is faster, see `faster`: heads, and heads of all rows.
MIN_HEADS, MIN_QUERIES = 32, 256
# It loads and stores 16 bytes at once.
ALIGNMENT = 16


@functools.cache
def attention() -> Callable[..., torch.Tensor] | None:
    """``flash_attn_with_kvcache``; None where it is not installed, or is one that cannot write to a given output."""
    try:
        found = importlib.import_module("sgl_kernel.flash_attn").flash_attn_with_kvcache
    except ImportError:
        return None
    if not {"qv", "num_splits", "out"} <= inspect.signature(found).parameters.keys():
        return None
    logger.info("sglang_sparse: FA3 attends over the selected blocks of latents where it was measured to be faster")
    return found


def installed(device: torch.device) -> bool:
    """Whether ``device`` is a GPU for which FA3 has kernels with a latent part of the query, and has them here."""
    if device.type != "cuda" or torch.version.cuda is None or capability(device)[0] != 9:
        return False
    return attention() is not None


def faster(batch: int, num_heads: int) -> bool:
    """Whether FA3 is faster than Triton's kernels.

    Measured on an H200 over 6 % of the blocks of 16 tokens, rows of 64k and 128k tokens, 128 heads: one row takes a
    tenth longer, two rows a little less, four to 24 about two thirds of the time, and 48 rows, or some of very
    different lengths, less than half. Likewise 24 rows of 32 and of 64 heads. With 16 heads three quarters of each of
    FA3's tiles are empty: it gains less for 16 and 24 rows, and loses with fewer and with more.
    """
    return num_heads >= MIN_HEADS and batch * num_heads >= MIN_QUERIES


def has_kernel(latent_dim: int, block_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether FA3 is installed for ``device``, and was seen to attend over such blocks with queries of this dtype."""
    return latent_dim == LATENT_DIM and block_size in BLOCK_SIZES and dtype == torch.bfloat16 and installed(device)


def serves(
    batch: int, num_heads: int, latent_dim: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether calls of these sizes come here, if FA3 ``takes`` their tensors.

    None does with ``launch.fixed_rows``: FA3 splits a row by the lengths of the others.
    """
    return launch.fixed_rows is None and faster(batch, num_heads) and has_kernel(latent_dim, block_size, dtype, device)


def takes(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    block_size: int,
    kv_scale: float,
    out: torch.Tensor,
) -> bool:
    """Whether FA3 can read and write these: a cache of whole blocks in the dtype of the queries, aligned to 16 bytes.

    Over a float8 cache it has no such kernel.
    """
    return (
        q_rope.shape[2] == ROPE_DIM
        and kv_cache.dtype == q_nope.dtype
        and kv_scale == 1.0
        and kv_cache.shape[0] % block_size == 0
        and indices.numel() > 0
        and all(_aligned(tensor) for tensor in (q_nope, q_rope, kv_cache, out))
    )


def _aligned(tensor: torch.Tensor) -> bool:
    strides = (stride * tensor.itemsize for stride in tensor.stride()[:-1])
    return tensor.data_ptr() % ALIGNMENT == 0 and all(stride % ALIGNMENT == 0 for stride in strides)


def most_splits(batch: int, num_heads: int, processors: int) -> int:
    """The most splits that FA3 may divide a row into.

    It divides a row of a tenth more than its share of all tokens by the multiprocessors, so that of rows of the same
    length each gets ``processors / (1.1 * tiles)`` splits; one that is longer than the others gets more. Twice as many
    serve uneven rows, and take 64 MB of memory at most (on 132 multiprocessors). FA3's own choice is for a row alone,
    57 with 128 heads, whatever the batch: 360 MB for 24 rows. Where rows fill the multiprocessors there is one.
    """
    tiles = -(-num_heads // TILE_HEADS)
    even, alone = (-(-10 * processors // (11 * rows * tiles)) for rows in (batch, 1))
    return 1 if even == 1 else min(2 * even, alone)


def scratch_bytes(batch: int, num_heads: int, device: torch.device) -> int:
    """Bytes that a call allocates: tokens and plan of the rows, and sums of weights and splits of their heads.

    FA3 allocates as much or a few bytes a row less, by its version.
    """
    splits = most_splits(batch, num_heads, num_processors(device))
    kept = splits * (LATENT_DIM + 1) if splits > 1 else 0
    # Up to four numbers for each row, whose number is rounded up to a multiple of four, and a counter.
    plan = 4 * (-(-batch // 4) * 4) + 1
    return 4 * (batch + plan + batch * num_heads * (1 + kept))


def sparse_mla_decode(
    inputs: Inputs,
    out: torch.Tensor,
    splits: int | None = None,
) -> torch.Tensor:
    """See ``sparse_mla_decode.sparse_mla_decode``; for what ``takes`` allows, with the newest block last.

    ``splits`` are the most of a row; 0 leaves them to FA3. ``kv_scale`` is 1.
    """
    q_nope, q_rope, kv_cache = inputs.q_nope, inputs.q_rope, inputs.kv_cache
    attend = attention()
    assert attend is not None
    batch, num_heads, latent_dim = q_nope.shape
    if splits is None:
        splits = most_splits(batch, num_heads, num_processors(q_nope.device))
    blocks = kv_cache.unflatten(0, (-1, inputs.block_size))[:, :, None]
    attend(
        q_rope[:, None],
        blocks[..., latent_dim:],
        blocks[..., :latent_dim],
        qv=q_nope[:, None],
        cache_seqlens=selected_tokens(inputs.indices, inputs.counts, inputs.last_slots, inputs.block_size),
        page_table=inputs.indices[:, 0],
        softmax_scale=inputs.sm_scale,
        causal=False,
        num_splits=splits,
        out=out[:, None],
    )
    return out
