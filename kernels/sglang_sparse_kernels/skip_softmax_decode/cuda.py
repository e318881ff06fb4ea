"""CUDA kernel of Skip-Softmax decode: loads of keys never stop, and those of the wanted values follow them.

Triton's kernel judges the keys of a block and then waits for its values. Here a warp starts the load of the values and
goes on with the keys of its next blocks. Loads arrive in the order of their starts, when the weights are known. So the
memory is always busy, however much is skipped, and loads nothing in vain.

The splits of a row are combined by the one that ends last, where the call has counters for it, or by the kernel that
combines those of sparse decode.
"""

import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from ..block_mass.cuda import float_bits
from ..common import nvrtc
from ..common.flash_decode import combine, split_bytes, split_tensors
from ..common.launch import LOG2_E, capability, dependent_launch, num_processors, planned_rows, properties
from .reference import BLOCK_KEYS, LOCAL_BLOCKS, Inputs

SOURCE = Path(__file__).with_name("cuda.cu")
KINDS = {torch.bfloat16: 0, torch.float16: 1}
DIMS = (64, 128)
MAX_GROUP = 8
_PIECE = 16
_MAX_SPLITS = 256
# Shared memory that each block of threads takes beside its own.
_RESERVED = 1024


@dataclass(frozen=True)
class Config:
    """Launch parameters: warps of a block of threads, pieces of 16 keys or values that each has on their way or in use,
    and blocks of threads that a multiprocessor runs at once.
    """

    warps: int = 12
    ring: int = 4
    resident: int = 1


# By shared memory, the first that fits: that was chosen on an H200, and the others, for GPUs that have less, by nothing
# measured. What it takes says the leg ``framework`` of ``eval.lab.reproduce``.
CONFIGS = (Config(12, 4, 1), Config(8, 4, 1), Config(4, 5, 1))


def faster(device: torch.device) -> bool:
    """Whether this kernel replaces Triton's: from Hopper on; nobody has tried it on older GPUs."""
    return capability(device) >= (9, 0)


def shared_bytes(dim: int, config: Config) -> int:
    """Shared memory of a block of threads, in bytes: the ring and the waiting weights of each warp, and what they hand
    in.
    """
    pieces = BLOCK_KEYS // _PIECE
    weights = (2 + (config.ring - 2) // pieces) * (pieces + 1) * 32 * 8
    own = -(-(config.ring * _PIECE * 2 * dim + weights) // 256) * 256
    handed = config.warps * (3 * MAX_GROUP + 2) * 4 + 1
    return -(-(config.warps * own + handed) // 256) * 256


def config_of(dim: int, device: torch.device) -> Config | None:
    """Return the first config that fits a device's shared memory; None if none does."""
    limit = properties(device).shared_memory + _RESERVED
    fits = (config for config in CONFIGS if config.resident * (shared_bytes(dim, config) + _RESERVED) <= limit)
    return next(fits, None)


def takes_sizes(heads: tuple[int, int], dim: int, v_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether calls of these sizes may be served from here; ``takes`` says which are."""
    if dtype not in KINDS or dim not in DIMS or v_dim != dim or heads[0] > MAX_GROUP * heads[1]:
        return False
    return nvrtc.available(device) and config_of(dim, device) is not None


def takes(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether these are served from here: caches of the type of the queries, read 16 bytes at a time."""
    if k_cache.dtype != q.dtype or q.data_ptr() % 4 or q.stride(0) % 2 or q.stride(1) % 2 or out.data_ptr() % 4:
        return False
    caches = k_cache, v_cache
    if any(cache.data_ptr() % 16 or cache.stride(0) % 8 or cache.stride(1) % 8 for cache in caches):
        return False
    return takes_sizes((q.shape[1], k_cache.shape[1]), q.shape[2], v_cache.shape[2], q.dtype, q.device)


def defines(dim: int, group: int, dtype: torch.dtype, config: Config) -> dict[str, int]:
    """Return the source's macros."""
    sizes = {"DIM": dim, "GROUP": group, "KIND": KINDS[dtype], "BLOCK_KEYS": BLOCK_KEYS, "LOCAL_BLOCKS": LOCAL_BLOCKS}
    return {**sizes, "WARPS": config.warps, "RING": config.ring, "RESIDENT": config.resident}


def splits_of(pairs: int, pages: int, page_size: int, config: Config, device: torch.device) -> int:
    """Splits of each of the pairs of a row and a KV head.

    Args:
        pairs: of the call.
        pages: that most rows hold at most.
        page_size: slots per page.
        config: launch parameters.
        device: where the call runs.
    """
    tiles = -(-pages * page_size // (config.warps * BLOCK_KEYS))
    return _splits_of(pairs, max(1, tiles), config.resident * num_processors(device))


@functools.cache
def _splits_of(pairs: int, tiles: int, programs: int) -> int:
    """Those with which the last of the blocks of threads ends first, of which so many run at once. A tile is a block of
    keys for each warp; what comes before the first and after the last one takes about as long as another.
    """

    def end(splits: int) -> int:
        return -(-pairs * splits // programs) * (-(-tiles // splits) + 1)

    return min(range(1, min(tiles, _MAX_SPLITS) + 1), key=end)


def scratch_bytes(
    batch: int, heads: tuple[int, int], dim: int, pages: int, page_size: int, device: torch.device
) -> int:
    """See ``skip_softmax_decode.scratch_bytes``; for what ``takes_sizes`` allows."""
    config = config_of(dim, device) or CONFIGS[-1]
    splits = splits_of(planned_rows(batch) * heads[1], pages, page_size, config, device)
    return split_bytes(batch * heads[0], splits, dim, torch.float32, narrow=False)


@functools.cache
def _kernel(device: torch.device, dim: int, group: int, dtype: torch.dtype, config: Config) -> nvrtc.Kernel:
    values, size = defines(dim, group, dtype, config), shared_bytes(dim, config)
    return nvrtc.Kernel(SOURCE, "skip_softmax_decode", device, values, shared_bytes=size)


def skip_softmax_decode(
    inputs: Inputs,
    out: torch.Tensor,
    stats: torch.Tensor | None = None,
    config: Config | None = None,
    usual_pages: int | None = None,
    arrivals: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``skip_softmax_decode.skip_softmax_decode``; for what ``takes`` allows."""
    q, k_cache, v_cache = inputs.q, inputs.k_cache, inputs.v_cache
    page_size, page_table = inputs.page_size, inputs.page_table
    (batch, num_q_heads, dim), heads = q.shape, k_cache.shape[1]
    if batch == 0:
        return out
    config = config or config_of(dim, q.device) or CONFIGS[-1]
    pages = usual_pages or page_table.shape[1]
    splits = splits_of(planned_rows(batch) * heads, pages, page_size, config, q.device)
    partial, lse = split_tensors(batch * num_q_heads, splits, dim, torch.float32, False, q.device)
    kernel = _kernel(q.device, dim, num_q_heads // heads, q.dtype, config)
    rows = (page_table, inputs.n_pages, inputs.last_slots, inputs.threshold_scale_factor)
    strides = [stride * cache.itemsize for cache in (k_cache, v_cache) for stride in cache.stride()[:2]]
    scales = float_bits(inputs.sm_scale * inputs.k_scale * LOG2_E), float_bits(inputs.v_scale)
    results = (out, partial, lse, arrivals, stats)
    sizes = (q.stride(0), q.stride(1), *strides, page_table.stride(0), page_size.bit_length() - 1, splits, *scales)
    kernel((splits * heads, batch), 32 * config.warps, q, k_cache, v_cache, *rows, *results, *sizes)
    if splits > 1 and arrivals is None:
        # One count for all heads of a row, whose results lie side by side in each split.
        combine(partial, lse, inputs.n_pages[:, None], out, splits, BLOCK_KEYS // page_size, dependent_launch(q.device))
    return out
