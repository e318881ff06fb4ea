"""Launches of sparse decode attention: the parameters of its kernels, and the splits of a row."""

# Type checkers take Triton's helpers of the host for those of kernels.
# pyright: reportReturnType=false, reportArgumentType=false

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from ..common.flash_decode import num_splits
from ..common.launch import num_processors, planned_rows, properties

# Numbers that a warp can hold when it combines splits.
_FUSED_WARP = 2048
# Selected tokens per multiprocessor below which smaller tiles balance the programs better, or a program has so few of
# them that more should be on their way at once.
_FEW_TOKENS = 2048
_FEWEST_TOKENS = 400


@dataclass(frozen=True)
class Config:
    """Launch parameters: tokens per step, warps, pipeline stages, and programs aimed for per multiprocessor.

    With ``narrow`` the results of the splits have the dtype of the output instead of float32.
    """

    block_tokens: int = 64
    num_warps: int = 4
    num_stages: int = 3
    programs_per_processor: int = 3
    narrow: bool = False


# More programs of small tiles.
_SMALL = Config(block_tokens=32, num_stages=2, programs_per_processor=6, narrow=True)
# As many bytes on their way as with larger heads.
_SMALL_HEADS = Config(block_tokens=128, num_warps=8, num_stages=2)
# One deep program a multiprocessor, and the shared memory that it takes with rows of 512 bytes.
_DEEP = Config(block_tokens=128, num_stages=3, programs_per_processor=1)
_DEEP_BYTES = 136 * 1024
# Shared memory next to a tile's keys and values, at most: queries and weights.
_BESIDE = 24 * 1024
# Selected tokens per multiprocessor from and below which it is used, and share of them that have a program, at least.
_DEEP_TOKENS, _DEEP_BELOW = 256, 8192
_DEEP_SHARE = 0.95


def plan(
    batch: int,
    group: int,
    heads: int,
    dim: int,
    v_dim: int,
    pages: int,
    page_size: int,
    kv_dtype: torch.dtype,
    device: torch.device,
    config: Config | None = None,
) -> tuple[Config, int, int]:
    """Return the config of a call; ``heads`` are KV heads of ``group`` query heads each, and ``pages`` those that most
    rows select at most.

    Returns:
        Its parameters, the pages of a tile, and the splits of each row and KV head.
    """
    processors, pairs = num_processors(device), planned_rows(batch) * heads
    row_bytes = (triton.next_power_of_2(dim) + triton.next_power_of_2(v_dim)) * kv_dtype.itemsize
    if config is None:
        tokens = pairs * pages * page_size // processors
        config = default_config(row_bytes, tokens, kv_dtype)
        deep = _DEEP_TOKENS <= tokens < _DEEP_BELOW and row_bytes == 512
        if deep and _fits_deep(pairs, group, v_dim, device):
            config = _DEEP
    tile_pages = max(config.block_tokens, page_size) // page_size
    if row_bytes * tile_pages * page_size + _BESIDE > properties(device).shared_memory:
        config = replace(config, num_warps=8, num_stages=1)
    splits = num_splits(pairs, pages, tile_pages, config.programs_per_processor * processors)
    return config, tile_pages, splits


def default_config(row_bytes: int, tokens_per_processor: int, kv_dtype: torch.dtype) -> Config:
    """Return the fastest config on one H200, see ``eval.lab.bench_kernels``, where `_fits_deep` finds nothing better.

    Small tiles where a program gets only a few of them, or where a token's key and value (in bytes) are large; as many
    programs as fit a multiprocessor in registers and in shared memory. Tried beside these, without gain: 98 other
    tiles, warps, stages and numbers of programs at 6x128k, 4x256k and 8x64k; 260 with one row of 32k, 128k and 256k,
    of which `_DEEP` won by a tenth at 128k, as with one to eight rows of 16k to 128k, and by a fiftieth at 8x64k,
    16x64k and 4x256k; 60 with heads of 64 at 8x128k; FA3 and FlashInfer over the same pages.
    """
    if tokens_per_processor < _FEWEST_TOKENS and row_bytes <= 512:
        return Config(block_tokens=32, num_warps=2, num_stages=4, programs_per_processor=6)
    if tokens_per_processor < _FEW_TOKENS or row_bytes > 512:
        return _SMALL
    return _SMALL_HEADS if row_bytes == 256 and kv_dtype.itemsize == 2 else Config()


def _fits_deep(pairs: int, group: int, v_dim: int, device: torch.device) -> bool:
    """Whether one deep program a multiprocessor is faster than several with small tiles: where they take nearly all
    multiprocessors, and the last split of a pair of row and KV head can combine all of them.
    """
    processors = num_processors(device)
    splits = processors // pairs
    return (
        properties(device).shared_memory >= _DEEP_BYTES
        and splits * pairs >= _DEEP_SHARE * processors
        and combines(splits, group, v_dim, _DEEP.num_warps)
    )


def combines(splits: int, group: int, v_dim: int, num_warps: int) -> bool:
    """Whether one program of so many warps can hold what the splits of a KV head have found, and combine them."""
    numbers = triton.next_power_of_2(splits) * triton.next_power_of_2(group) * triton.next_power_of_2(v_dim)
    return splits > 1 and numbers <= _FUSED_WARP * num_warps
