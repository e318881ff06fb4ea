"""The definition of rows of float8 latents in plain torch."""

import torch

TILE = 128
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
# The inverse of a smaller one may be infinite.
LEAST_SCALE = torch.finfo(torch.float32).tiny


def row_bytes(latent_dim: int, rope_dim: int) -> int:
    """Bytes of a token with ``latent_dim`` latents and ``rope_dim`` rotated ones; without these, where they begin."""
    return latent_dim + 4 * (latent_dim // TILE) + 2 * rope_dim


def parts(rows: torch.Tensor, latent_dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of rows ``[..., bytes]``: values ``[..., tiles, 128]`` uint8, scales ``[..., tiles]`` float32, and rotated
    keys ``[..., r]`` bfloat16.
    """
    tiles = latent_dim // TILE
    values, scales, rotated = rows.tensor_split((latent_dim, row_bytes(latent_dim, 0)), dim=-1)
    return values.unflatten(-1, (tiles, TILE)), scales.view(torch.float32), rotated.view(torch.bfloat16)


def write_latents(latent: torch.Tensor, rotated: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """See ``latent_rows.write_latents``."""
    stored = torch.empty(len(latent), rows.shape[1], dtype=torch.uint8, device=rows.device)
    values, scales, keys = parts(stored, latent.shape[1])
    tiles = latent.float().unflatten(-1, (-1, TILE))
    amax = tiles.abs().amax(dim=-1)
    # On CUDA torch multiplies by the inverse of a number, which rounds twice.
    scale = amax / torch.full_like(amax, FP8_MAX)
    inverse = torch.where(scale < LEAST_SCALE, 0.0, 1 / scale.clamp(min=LEAST_SCALE))
    infinite = ~amax.isfinite()
    scaled = (tiles * inverse[..., None]).masked_fill(infinite[..., None], float("nan"))
    values.copy_(scaled.to(torch.float8_e4m3fn).view(torch.uint8))
    scales.copy_(scale.masked_fill(infinite, float("nan")))
    keys.copy_(rotated)
    kept = slots >= 0
    rows[slots[kept]] = stored[kept]


def read_latents(rows: torch.Tensor, latent_dim: int) -> torch.Tensor:
    """Latents and rotated keys of rows ``[..., bytes]``: ``[..., R + r]`` float32."""
    values, scales, rotated = parts(rows, latent_dim)
    latent = values.view(torch.float8_e4m3fn).float() * scales[..., None]
    return torch.cat([latent.flatten(-2), rotated.float()], dim=-1)
