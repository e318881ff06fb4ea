"""Code shared by tests of sparse MLA decode attention: its reference in float32, and selections that hold anything."""

from typing import Any

import torch

from sglang_sparse_kernels.sparse_mla_decode import reference

# Relative L2 error by the dtype of the query; bfloat16 also rounds the weights of the softmax.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def run_reference(arguments: dict[str, Any]) -> torch.Tensor:
    """The reference in float32, so that only the kernel under test rounds."""
    q_nope, q_rope = arguments["q_nope"].float(), arguments["q_rope"].float()
    inputs = reference.Inputs(**{**arguments, "q_nope": q_nope, "q_rope": q_rope})
    return reference.sparse_mla_decode(inputs, torch.empty(q_nope.shape, device=q_nope.device))


def stored(arguments: dict[str, Any], slots: list[int]) -> torch.Tensor:
    """Return the cache's contents at some slots, in float64."""
    cache, latent_dim = arguments["kv_cache"][slots], arguments["q_nope"].shape[2]
    if cache.dtype != torch.uint8:
        return cache.double()
    tiles = latent_dim // 128
    values, scales, rotated = cache.split([latent_dim, 4 * tiles, 2 * arguments["q_rope"].shape[2]], -1)
    factors = scales.contiguous().view(torch.float32).double().repeat_interleave(128, -1)
    latent = values.view(torch.float8_e4m3fn).double() * factors
    return torch.cat([latent, rotated.contiguous().view(torch.bfloat16).double()], -1)


def poisoned(arguments: dict[str, Any], extra: int = 9) -> dict[str, Any]:
    """The same selection in wider rows that hold anything beyond the count, as memory that was never written does."""
    indices, counts = arguments["indices"], arguments["counts"]
    width = indices.shape[2]
    wide = torch.full((len(indices), 1, width + extra), 2**31 - 1, dtype=torch.int32, device=indices.device)
    wide[:, :, 1::2] = 0
    chosen = torch.arange(width, device=indices.device) < counts[..., None]
    wide[:, :, :width] = torch.where(chosen, indices, wide[:, :, :width])
    return {**arguments, "indices": wide}
