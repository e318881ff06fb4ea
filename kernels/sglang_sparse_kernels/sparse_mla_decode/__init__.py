"""Decode attention over the selected blocks of tokens of a latent (MLA) cache.

Source: step 3 of RoBSA's decode (block sparse attention in the absorbed form of MLA, where all query heads share one
key, of which the latent part is the value as well), split over the selected blocks as in Flash-Decoding. On Hopper FA3
attends to the blocks of many rows (``fa3``).
"""

import torch

from .. import latent_rows
from ..common import checks
from . import reference

LATENT_DIMS = (64, *latent_rows.LATENT_DIMS)
ROPE_DIMS = latent_rows.ROPE_DIMS


def sparse_mla_decode(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    counts: torch.Tensor,
    last_slots: torch.Tensor,
    block_size: int,
    sm_scale: float,
    kv_scale: float = 1.0,
    out: torch.Tensor | None = None,
    usual_blocks: int | None = None,
    newest_last: bool = False,
) -> torch.Tensor:
    """Exact softmax attention of every query head over the tokens of its row's selected blocks.

    The logit of a token is ``sm_scale * kv_scale * (q_nope . latent + q_rope . rotated key)``; the output is the mean
    of ``kv_scale * latent`` under the softmax. In the block that holds ``last_slots[b]`` only the slots up to it count.
    With ``block_size=1`` the indices are token slots. A row with a count of 0 gives zeros. What the kernels allocate is
    in ``scratch_bytes``.

    Args:
        q_nope: ``[B, H, R]``, float32 (CPU only), float16 or bfloat16, the query absorbed into the latent space; ``R``
            is 64, 128, 256 or 512, and contiguous.
        q_rope: ``[B, H, r]`` in the dtype of ``q_nope``, the query's part after RoPE; ``r`` is 16, 32 or 64, and
            contiguous. Both queries may be slices of one ``[B, H, R + r]`` tensor.
        kv_cache: ``[S, R + r]``, the dtype of ``q_nope`` or float8_e4m3fn: latent, then rotated key, contiguous. Or
            ``[S, bytes]`` uint8: rows of float8 latents with scales, see ``latent_rows.check_rows``; then ``R`` is
            not 64, and the kernels round what they read to the dtype of ``q_nope``.
        indices: ``[B, 1, K]`` int32, contiguous: physical blocks (slot // ``block_size``), of which the first
            ``counts`` are read.
        counts: ``[B, 1]`` int32, contiguous.
        last_slots: ``[B]`` int64, contiguous: the slot of each row's newest token.
        block_size: slots per block, a power of two from 1 to 64.
        sm_scale: softmax scale, the model's own.
        kv_scale: factor of what the cache holds (float8 caches).
        out: optional ``[B, H, R]`` in the dtype of ``q_nope``, contiguous.
        usual_blocks: the count that most rows have at most, for which the work is split; ``K`` if not given. Any count
            is served, whatever this says.
        newest_last: the block that holds ``last_slots[b]`` is the last of its row's, if it is among them, as it is in
            ascending order of position. FA3, which masks the ends of rows alone, may then attend (``fa3``).

    Returns:
        ``[B, H, R]`` in the dtype of ``q_nope``.

    Raises:
        ValueError: a wrong dimension, dtype, device, shape, layout or block size.

    Example:
        >>> import torch
        >>> from sglang_sparse_kernels.sparse_mla_decode import sparse_mla_decode
        >>> q_nope, q_rope = torch.zeros(1, 2, 64), torch.zeros(1, 2, 16)
        >>> kv_cache = torch.arange(8.0)[:, None].expand(8, 80).contiguous()
        >>> indices, counts = torch.tensor([[[1, -1]]], dtype=torch.int32), torch.tensor([[1]], dtype=torch.int32)
        >>> out = sparse_mla_decode(
        ...     q_nope, q_rope, kv_cache, indices, counts, torch.tensor([6]), block_size=4, sm_scale=0.1
        ... )
        >>> out[0, :, 0].tolist()
        [5.0, 5.0]
    """
    inputs = reference.Inputs(q_nope, q_rope, kv_cache, indices, counts, last_slots, block_size, sm_scale, kv_scale)
    _check_arguments(inputs)
    out = checks.result("out", out, tuple(q_nope.shape), q_nope.dtype, q_nope.device)
    if checks.use_reference(q_nope):
        return reference.sparse_mla_decode(inputs, out)
    from . import fa3, triton

    batch, num_heads, latent_dim = q_nope.shape
    known = newest_last and fa3.serves(batch, num_heads, latent_dim, block_size, q_nope.dtype, q_nope.device)
    if known and fa3.takes(q_nope, q_rope, kv_cache, indices, block_size, kv_scale, out):
        return fa3.sparse_mla_decode(inputs, out)
    return triton.sparse_mla_decode(inputs, out, usual_blocks=usual_blocks)


def scratch_bytes(
    batch: int,
    num_heads: int,
    latent_dim: int,
    blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Bytes that the kernels of one call allocate beside the output: what the splits of a row hand on.

    Not monotonic: small batches are split, large ones are not and need next to nothing. Where either FA3 or Triton's
    kernels may serve the call, it is the larger of both. The reference allocates more.

    Args:
        batch: rows, at least one.
        num_heads: query heads.
        latent_dim: dimension of the latents.
        blocks: the call's ``usual_blocks``.
        block_size: slots per block.
        dtype: of the queries.
        device: where the call runs.
    """
    from ..common.flash_decode import split_bytes
    from . import fa3, triton

    config, *_, splits = triton.plan(batch, num_heads, blocks, block_size, device)
    taken = split_bytes(batch * num_heads, splits, latent_dim, dtype, config.narrow)
    if fa3.serves(batch, num_heads, latent_dim, block_size, dtype, device):
        return max(taken, fa3.scratch_bytes(batch, num_heads, device))
    return taken


def _check_arguments(inputs: reference.Inputs) -> None:
    q_nope, indices, block_size = inputs.q_nope, inputs.indices, inputs.block_size
    checks.check_query("q_nope", q_nope, 3)
    checks.check_tensor("kv_cache", inputs.kv_cache, 2, (q_nope.dtype, torch.float8_e4m3fn, torch.uint8))
    check_latents(q_nope, inputs.q_rope, inputs.kv_cache)
    checks.check_tensor("indices", indices, 3, (torch.int32,))
    if block_size not in (allowed := [2**power for power in range(7)]):
        raise ValueError(f"block_size must be one of {', '.join(map(str, allowed))}, got {block_size}")
    batch = q_nope.shape[0]
    checks.check_exactly("indices", indices, (batch, 1, indices.shape[2]), torch.int32)
    checks.check_exactly("counts", inputs.counts, (batch, 1), torch.int32)
    checks.check_exactly("last_slots", inputs.last_slots, (batch,), torch.int64)
    checks.check_device(q_nope.device, indices=indices, counts=inputs.counts, last_slots=inputs.last_slots)


def check_latents(q_nope: torch.Tensor, q_rope: torch.Tensor, kv_cache: torch.Tensor) -> None:
    """Raise ValueError unless these are both parts of a query, and a cache of such latents and rotated keys.

    Args:
        q_nope: ``[B, H, R]``, whose dtype is allowed.
        q_rope: ``[B, H, r]``.
        kv_cache: ``[S, R + r]``, or rows of float8 latents; its dtype is allowed.
    """
    checks.check_tensor("q_rope", q_rope, 3, (q_nope.dtype,))
    batch, num_heads, latent_dim = q_nope.shape
    rope_dim = q_rope.shape[2]
    for name, dim, dims in (("q_nope", latent_dim, LATENT_DIMS), ("q_rope", rope_dim, ROPE_DIMS)):
        if dim not in dims:
            raise ValueError(f"the last dimension of {name} must be one of {', '.join(map(str, dims))}, got {dim}")
    checks.check_shape("q_rope", q_rope, (batch, num_heads, rope_dim))
    if kv_cache.dtype == torch.uint8:
        latent_rows.check_rows("kv_cache", kv_cache, latent_dim, rope_dim)
    else:
        checks.check_shape("kv_cache", kv_cache, (kv_cache.shape[0], latent_dim + rope_dim))
    checks.check_last(q_nope=q_nope, q_rope=q_rope, kv_cache=kv_cache)
    checks.check_device(q_nope.device, q_rope=q_rope, kv_cache=kv_cache)
