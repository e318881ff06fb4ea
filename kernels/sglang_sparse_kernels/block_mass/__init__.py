"""Block mass: the share of each row's attention that falls on each block of its tokens, averaged over the heads.

Source: "RoPE-based Blockwise Sparse Multi-head Latent Attention" (RoBSA), section 2.3.2 and lines 5 to 10 of algorithm
1: the softmax of the logits of the RoPE dimensions alone, the mean over heads, the sum over a block. The paper makes a
row of token scores and then sums it; here that row never leaves the kernel. Over all dimensions of the latent query and
key this is the paper's score for the layers that it calls RoPE-insensitive.
"""

import math

import torch

from ..common import checks
from . import reference

_MAX_DIM = 576
_DIM_STEP = 16
_MAX_BLOCK_SIZE = 64


def block_mass(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    n_blocks: torch.Tensor,
    last_slots: torch.Tensor,
    block_size: int,
    sm_scale: float,
    k_scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Exact softmax over all tokens of a row for each head, the mean over the heads, the sum over each block's tokens.

    The kernels round once what a block weighs in a head, to float16 or as coarsely where ``q`` is float16 or bfloat16,
    and normalise by the sum of what they rounded: a mass is off by 2.5e-4 at most, and a row's masses still sum to 1.
    In float32 nothing is rounded further. The same input gives the same bits.

    A logit of -inf is a weight of 0. A NaN or +inf among a row's logits, or a head with -inf alone, makes all the row's
    masses NaN; a selection then has to take every block.

    The kernels allocate a scratch of at most ``H * (2 + block_size / 8)`` bytes per row and block of the table (3 * H
    for blocks of 16 tokens; the table counts in whole tiles of 128 tokens), 2 * H more with a float32 ``q``, and 8 * H
    bytes per row and split. Rows that together need more than 256 MiB take turns in it; see ``scratch_bytes``.

    Args:
        q: ``[B, H, d]``, float32 (CPU only), float16 or bfloat16, the rotated RoPE dimensions (d = 64) or the whole
            latent query (d = 576); any multiple of 16 up to 576. ``d`` is contiguous; a slice of a fused query is fine.
        k_cache: ``[S, d]``, the dtype of ``q`` or float8_e4m3fn; ``d`` is contiguous, a slice of a latent cache is
            fine.
        block_table: ``[B, M]`` int32, the physical block (slot // ``block_size``) of each logical block; ``M`` is
            contiguous. Only the first ``n_blocks[b]`` entries count.
        n_blocks: ``[B]`` int32, blocks of each row, at most ``M``; 0 marks a padded row.
        last_slots: ``[B]`` int64, contiguous: the slot of each row's newest token. It lies in the row's last block,
            where only the slots up to it count.
        block_size: slots per block, a power of two from 1 to 64.
        sm_scale: factor of the logits, positive: the model's own softmax scale (with YaRN's mscale), not ``d ** -0.5``.
        k_scale: factor of the stored keys (float8 caches), positive.
        out: optional ``[B, M]`` float32, contiguous.

    Returns:
        ``[B, M]`` float32. Entries at or beyond ``n_blocks[b]`` are 0 from the reference and *left unwritten* by the
        GPU kernels.

    Raises:
        ValueError: a wrong dimension, dtype, device, stride, scale or block size.

    Example:
        >>> import torch
        >>> from sglang_sparse_kernels.block_mass import block_mass
        >>> q, k_cache = torch.zeros(1, 2, 64), torch.zeros(64, 64)
        >>> block_table, n_blocks = torch.tensor([[3, 1]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
        >>> mass = block_mass(q, k_cache, block_table, n_blocks, torch.tensor([19]), block_size=16, sm_scale=0.1)
        >>> [round(share, 3) for share in mass[0].tolist()]
        [0.8, 0.2]
    """
    if out is None:
        out = torch.empty(block_table.shape, dtype=torch.float32, device=q.device)
    _check_arguments(q, k_cache, block_table, n_blocks, last_slots, block_size, sm_scale, k_scale, out)
    arguments = (q, k_cache, block_table, n_blocks, last_slots, block_size, sm_scale, k_scale, out)
    if checks.use_reference(q):
        return reference.block_mass(*arguments)
    from . import cuda, triton

    kernels = cuda if cuda.takes(q, k_cache, block_size) else triton
    return kernels.block_mass(*arguments)


def scratch_bytes(
    batch: int, heads: int, dim: int, width: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Bytes that the kernels of one call allocate at once beside the result, at most. The reference allocates more.

    It depends on the cache, too, which kernels serve a call of these sizes.

    Args:
        batch: rows, at least one.
        heads: query heads.
        dim: dimension of queries and keys.
        width: blocks of the table, at least one.
        block_size: slots per block.
        dtype: of the queries.
        device: where the call runs.
    """
    from . import cuda, triton

    most = triton.scratch_bytes(batch, heads, dim, width, block_size, dtype, device)
    if cuda.takes_sizes(heads, dim, block_size, dtype, device):
        most = max(most, cuda.scratch_bytes(batch, heads, width, block_size, device))
    return most


def _check_arguments(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    n_blocks: torch.Tensor,
    last_slots: torch.Tensor,
    block_size: int,
    sm_scale: float,
    k_scale: float,
    out: torch.Tensor,
) -> None:
    checks.check_query("q", q, 3)
    checks.check_tensor("k_cache", k_cache, 2, (q.dtype, torch.float8_e4m3fn))
    checks.check_tensor("block_table", block_table, 2, (torch.int32,))
    checks.check_tensor("n_blocks", n_blocks, 1, (torch.int32,))
    checks.check_tensor("last_slots", last_slots, 1, (torch.int64,))
    checks.check_tensor("out", out, 2, (torch.float32,))
    batch, heads, dim = q.shape
    if heads < 1:
        raise ValueError(f"q must have at least one head, got the shape {tuple(q.shape)}")
    if not 1 <= dim <= _MAX_DIM or dim % _DIM_STEP:
        raise ValueError(f"the last dimension of q must be a multiple of {_DIM_STEP} up to {_MAX_DIM}, got {dim}")
    checks.check_shape("k_cache", k_cache, (k_cache.shape[0], dim))
    checks.check_shape("block_table", block_table, (batch, block_table.shape[1]))
    checks.check_shape("n_blocks", n_blocks, (batch,))
    checks.check_shape("last_slots", last_slots, (batch,))
    checks.check_shape("out", out, tuple(block_table.shape))
    if not 1 <= block_size <= _MAX_BLOCK_SIZE or block_size & (block_size - 1):
        raise ValueError(f"block_size must be a power of two from 1 to {_MAX_BLOCK_SIZE}, got {block_size}")
    for name, scale in (("sm_scale", sm_scale), ("k_scale", k_scale)):
        if not 0 < scale < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {scale}")
    checks.check_last(q=q, k_cache=k_cache, block_table=block_table)
    by_row = {"n_blocks": n_blocks, "last_slots": last_slots, "out": out}
    checks.check_device(q.device, k_cache=k_cache, block_table=block_table, **by_row)
    for name, tensor in (("n_blocks", n_blocks), ("last_slots", last_slots), ("out", out)):
        checks.check_contiguous(name, tensor)
