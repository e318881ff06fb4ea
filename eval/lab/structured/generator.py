"""Tensors for benchmarks of attention whose structure, and so whose recall at a sparsity, is known beforehand.

Dummy weights show no structure, and a method that looks for some finds none. What is planted here is described in
`eval.lab.structured.structure`; `Structure.mass` and `Structure.blocks_at_recall` say what it amounts to.

The same arguments give the same tensors on the same kind of device. Stripes, codes and rotations are the same on all
kinds; noise and values differ between a CPU and a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import ValidationError

from eval.lab.structured.structure import Recipe, Slice, Structure

# Float32 elements of queries that are made at a time.
CHUNK = 2**24
SPARSITY_TOLERANCE = 0.02
# Of a share of active blocks: two points are a third of the 6 % that are active at 128k.
ACTIVE_TOLERANCE = 0.1


def read_recipe(data: dict[str, Any]) -> Recipe:
    """A recipe from what a user wrote.

    Raises:
        ValueError: names each wrong field and what was got, and all fields that there are.
    """
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, e['loc'])) or 'shares'}: {e['msg']}, got {e['input']!r}" for e in error.errors()]
        raise ValueError(f"recipe: {'; '.join(wrong)}; its fields are {', '.join(Recipe.model_fields)}") from error


def gqa_structure(
    tokens: int,
    kv_heads: int,
    head_dim: int,
    recipe: Recipe,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Structure:
    """Return the structure of `make_qkv` and `make_decode`; see `Structure`."""
    return Structure(recipe, tokens, kv_heads, (Slice(head_dim, 1.0),), seed, device)


def mla_structure(
    tokens: int,
    recipe: Recipe,
    seed: int = 0,
    device: str | torch.device = "cpu",
    latent: int = 512,
    rope: int = 64,
) -> Structure:
    """Return the structure of `make_mla`: ``rope_share`` of the logits in RoPE dimensions, the rest in latent ones."""
    slices = (Slice(latent, 1 - recipe.rope_share), Slice(rope, recipe.rope_share))
    return Structure(recipe, tokens, 1, slices, seed, device)


def make_qkv(
    tokens: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    recipe: Recipe,
    seed: int = 0,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    v_head_dim: int | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One sequence for grouped-query or multi-head attention.

    Args:
        tokens: length of the sequence.
        q_heads: a multiple of ``kv_heads``.
        kv_heads: KV heads, each with stripes of its own.
        head_dim: at least 20.
        recipe: what the attention looks like.
        seed: of everything random.
        device: where the tensors are made.
        dtype: of the tensors.
        v_head_dim: of the values; None for ``head_dim``.
        scale: of the logits ``q @ k``; None for ``head_dim ** -0.5``.

    Returns:
        q ``[tokens, q_heads, head_dim]``, k ``[tokens, kv_heads, head_dim]`` and v ``[tokens, kv_heads, v_head_dim]``;
        values are normally distributed and know nothing of the structure.

    Raises:
        ValueError: the sizes leave no room for the structure, see `Structure`.
    """
    structure = gqa_structure(tokens, kv_heads, head_dim, recipe, seed, device)
    q = _queries(structure, torch.arange(tokens), q_heads, scale or head_dim**-0.5, seed, dtype)
    return q, _keys(structure, seed, dtype), _values(structure, v_head_dim or head_dim, seed, dtype)


def make_decode(
    tokens: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    recipe: Recipe,
    seed: int = 0,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    v_head_dim: int | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The last query of a sequence, ``[q_heads, head_dim]``, and the keys and values that `make_qkv` gives.

    The query is that of `make_qkv` but for its noise.
    """
    structure = gqa_structure(tokens, kv_heads, head_dim, recipe, seed, device)
    q = _queries(structure, torch.tensor([tokens - 1]), q_heads, scale or head_dim**-0.5, seed, dtype)
    return q[0], _keys(structure, seed, dtype), _values(structure, v_head_dim or head_dim, seed, dtype)


def make_mla(
    tokens: int,
    heads: int,
    recipe: Recipe,
    scale: float,
    seed: int = 0,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    latent: int = 512,
    rope: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence for multi-head latent attention in its absorbed form.

    Args:
        tokens: length of the sequence.
        heads: query heads.
        recipe: ``rope_share`` of the logits is in the RoPE dimensions.
        scale: the model's own, with YaRN's factor.
        seed: of everything random.
        device: where the tensors are made.
        dtype: of the tensors.
        latent: dimensions of the latent, absorbed by the query.
        rope: dimensions of the RoPE part, rotated.

    Returns:
        q ``[tokens, heads, latent + rope]`` and k ``[tokens, 1, latent + rope]``, of which the latent part is the value
        too.

    Raises:
        ValueError: the sizes leave no room for the structure, see `Structure`.
    """
    structure = mla_structure(tokens, recipe, seed, device, latent, rope)
    return _queries(structure, torch.arange(tokens), heads, scale, seed, dtype), _keys(structure, seed, dtype)


def make_mla_decode(
    tokens: int,
    heads: int,
    recipe: Recipe,
    scale: float,
    seed: int = 0,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    latent: int = 512,
    rope: int = 64,
    positions: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last query of a sequence, ``[heads, latent + rope]``, and the keys that `make_mla` gives.

    The query is that of `make_mla` but for its noise. With ``positions`` the sequence is the first ``tokens`` of so
    many, as on a server, which makes as many as a request may have: where stripes lie depends on how many there are.
    """
    structure = mla_structure(positions or tokens, recipe, seed, device, latent, rope)
    q = _queries(structure, torch.tensor([tokens - 1]), heads, scale, seed, dtype)
    return q[0], _keys(structure, seed, dtype)[:tokens]


def _generator(structure: Structure, seed: int, use: int) -> torch.Generator:
    return torch.Generator(structure.kind.device).manual_seed(4 * seed + use)


def _queries(
    structure: Structure, positions: torch.Tensor, heads: int, scale: float, seed: int, dtype: torch.dtype
) -> torch.Tensor:
    dims = sum(part.dims for part in structure.slices)
    device = structure.kind.device
    made = torch.empty(len(positions), heads, dims, dtype=dtype, device=device)
    generator = _generator(structure, seed, 1)
    step = max(CHUNK // (heads * dims), 1)
    for chunk, into in zip(positions.to(device).split(step), made.split(step), strict=True):
        into.copy_(structure.queries(chunk, heads, scale, generator))
    return made


def _keys(structure: Structure, seed: int, dtype: torch.dtype) -> torch.Tensor:
    dims, device = sum(part.dims for part in structure.slices), structure.kind.device
    made = torch.empty(structure.tokens, structure.kv_heads, dims, dtype=dtype, device=device)
    generator = _generator(structure, seed, 2)
    step = max(CHUNK // (structure.kv_heads * dims), 1)
    for chunk, into in zip(torch.arange(structure.tokens, device=device).split(step), made.split(step), strict=True):
        into.copy_(structure.keys(chunk, generator))
    return made


def _values(structure: Structure, dim: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    shape = (structure.tokens, structure.kv_heads, dim)
    device = structure.kind.device
    return torch.randn(shape, generator=_generator(structure, seed, 3), device=device, dtype=dtype)


def near_active(share: float, target: float) -> bool:
    """Whether a share of active blocks is the one that inputs were made for: within `SPARSITY_TOLERANCE` of it, and
    within `ACTIVE_TOLERANCE` of its size.
    """
    return abs(share - target) <= min(SPARSITY_TOLERANCE, ACTIVE_TOLERANCE * target)


def near_target(sparsity: float, target: float, active: object) -> bool:
    """Whether a measured sparsity is the one that inputs were made for.

    Args:
        sparsity: as measured.
        target: what the inputs were made for.
        active: the share of the blocks that these name as active; it must be near in its own size, see `near_active`.
            None where they name none.
    """
    if active is not None:
        return near_active(1 - sparsity, 1 - target)
    return abs(sparsity - target) <= SPARSITY_TOLERANCE
