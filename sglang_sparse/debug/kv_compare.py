"""Comparisons of the exactness checks: page summaries with their keys, stored KV with recomputed KV."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from sglang_sparse.attention import memory
from sglang_sparse.attention.protocols import KVPool
from sglang_sparse.methods import aux_buffers
from sglang_sparse.scheduler.inserted_keys import InexactTreeError

# Bounds the temporary copies of a layer's KV: 64 MiB for pages of 16 tokens and 8 bf16 heads of 128.
PAGES_AT_ONCE = 1024
# Bounds the part of a buffer that is on the device twice: 32 MiB in fp32 for 8 heads of 128.
ROWS_AT_ONCE = 8192
# See ``default_tolerance``.
TOLERANCE = 1e-4
PLAIN_MAGNITUDE = 4.0
ROUNDINGS = 16


def default_tolerance(dtype: torch.dtype, magnitude: float) -> float:
    """The largest absolute difference between two cold runs over the same tokens.

    They differ by rounding alone: batch shapes and chunk borders change the order of sums, and coarse dtypes round
    every activation. Approximate KV differs by about its own magnitude, so there is room between the two.

    Returns:
        1e-4 up to magnitude 4 and proportional above, or 16 ``eps`` of the magnitude where that is more.

    Args:
        dtype: of the KV cache.
        magnitude: largest absolute value of the compared tensor.
    """
    relative = max(TOLERANCE / PLAIN_MAGNITUDE, ROUNDINGS * torch.finfo(dtype).eps)
    return max(TOLERANCE, relative * magnitude)


def stale_summaries(kv_pool: KVPool, last_slots: torch.Tensor) -> torch.Tensor:
    """Find page summaries that do not match their keys.

    Args:
        kv_pool: SGLang's KV pool.
        last_slots: ``[pages]`` int64, the last written slot of each page.

    Returns:
        ``[pages]`` bool.
    """
    aux: aux_buffers.AuxBuffers = getattr(kv_pool, memory.ATTRIBUTE)
    size = aux.page_size
    pages = last_slots // size
    slots = page_slots(pages, size)
    stale = torch.zeros_like(pages, dtype=torch.bool)
    for layer in sorted(aux.layers):
        keys = _gather(kv_pool.get_key_buffer(layer), slots)
        for spec in aux.specs_of(layer):
            written, compact = _written_entries(last_slots % size, aux.entry_tokens_of(spec), size)
            stored = _gather(aux.buffer(spec.name, layer), pages)
            fresh = torch.zeros_like(stored)
            spec.refresh([keys], [fresh], compact, size, torch.zeros_like(aux.overflow))
            # NaN stands for a bound that an fp8 summary cannot hold.
            equal = stored.float().eq(fresh.float()) | (stored.float().isnan() & fresh.float().isnan())
            stale |= (written & ~equal.reshape(*written.shape, -1).all(2)).any(1)
    return stale


def _written_entries(last: torch.Tensor, entry_tokens: int, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the entries of pages that were written; others are not compared.

    Args:
        last: ``[pages]`` int64, the last written token of each page.
        entry_tokens: tokens that an entry summarises.
        page_size: tokens per page.

    Returns:
        ``[pages, entries]`` bool; and flat int64 the last written slot of each entry, -1 where nothing is written, if
        the pages lay one behind the other.
    """
    starts = torch.arange(0, page_size, entry_tokens, device=last.device)
    ends = torch.minimum(starts + entry_tokens - 1, last[:, None])
    written = starts <= last[:, None]
    first = torch.arange(len(last), device=last.device)[:, None] * page_size
    return written, torch.where(written, first + ends, -1).flatten()


def checksums(kv_pool: KVPool, pages: list[int]) -> list[int]:
    """A 64-bit hash of the bits of K, V and summaries in all layers, for each page."""
    aux: aux_buffers.AuxBuffers = getattr(kv_pool, memory.ATTRIBUTE)
    sums: list[int] = []
    for part in page_parts(kv_pool, pages):
        slots = page_slots(part, aux.page_size)
        total = torch.zeros_like(part)
        for buffer, rows in _places(kv_pool, slots, part):
            bits = _gather(buffer, rows).reshape(len(part), -1).view(torch.uint8)
            if bits.shape[1] % 4 == 0:
                bits = bits.view(torch.int32)
            # Odd multipliers, and no use of the global random state.
            weights = torch.arange(1, 2 * bits.shape[1], 2, device=part.device) * 0x1E3779B97F4A7C15
            total = total * 0x2545F4914F6CDD1D + (bits * weights).sum(1)
        sums += total.tolist()
    return sums


@contextmanager
def borrowed(kv_pool: KVPool, slots: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Lend slots that are in use, zeroed, to a pass that writes them; K, V and summaries come back bit for bit.

    The copy is in host memory, because SGLang leaves little on the device outside its pool: as many bytes as the pool
    has for these tokens. On the device there are ``ROWS_AT_ONCE`` rows of a layer at a time.

    Args:
        kv_pool: SGLang's KV pool. Nobody else may read or write these slots meanwhile.
        slots: ``[n]`` int64, one page after the other; the last page may be incomplete.

    Yields:
        For each layer K and then V as they were, ``[n, heads, bytes]`` uint8 on the CPU.
    """
    size = getattr(kv_pool, memory.ATTRIBUTE).page_size
    places = _places(kv_pool, slots, slots[::size] // size)
    copies = [
        torch.cat([buffer.view(torch.uint8)[part].cpu() for part in rows.split(ROWS_AT_ONCE)])
        for buffer, rows in places
    ]
    try:
        for buffer, rows in places:
            # A pass that misses some of them must not find there what it is compared with.
            buffer.view(torch.uint8)[rows] = 0
        yield copies[: 2 * kv_pool.layer_num]
    finally:
        for (buffer, rows), copy in zip(places, copies, strict=True):
            for part, content in zip(rows.split(ROWS_AT_ONCE), copy.split(ROWS_AT_ONCE), strict=True):
                buffer.view(torch.uint8)[part] = content.to(buffer.device)


def compare(
    kv_pool: KVPool,
    tokens: list[int],
    positions: torch.Tensor,
    slots: torch.Tensor,
    stored: Sequence[torch.Tensor],
    tolerance: float | None = None,
) -> float:
    """Compare stored KV with recomputed KV, in all layers.

    Args:
        kv_pool: SGLang's KV pool.
        tokens: the sequence, for the message.
        positions: ``[n]`` int64, the compared positions in it.
        slots: ``[len(tokens)]`` int64, where the recomputed KV is.
        stored: what ``borrowed`` yielded for these slots.
        tolerance: largest allowed absolute difference; ``default_tolerance`` if None.

    Returns:
        The largest absolute difference.

    Raises:
        InexactTreeError: a difference above the tolerance, or NaN.
    """
    overall = 0.0
    for (name, layer, buffer), copy in zip(_buffers(kv_pool), stored, strict=True):
        differences, magnitude = _differences(buffer, copy, positions, slots)
        allowed = default_tolerance(buffer.dtype, magnitude) if tolerance is None else tolerance
        wrong = positions[~(differences <= allowed)]
        if len(wrong):
            raise InexactTreeError(
                f"{name} of layer {layer} differs by {float(differences.max()):.3g} from its recomputation (allowed: "
                f"{allowed:.3g}) at {len(wrong)} of the tokens {int(wrong.min())} to {int(wrong.max())} of the path of "
                f"{len(tokens)} tokens that starts with {tokens[:8]}"
            )
        overall = max(overall, float(differences.max()))
    return overall


def _differences(
    buffer: torch.Tensor, copy: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """The largest difference at each position, ``[n]`` float32, and the magnitude of what was recomputed."""
    differences, magnitude = [], 0.0
    for part in positions.split(ROWS_AT_ONCE):
        expected = _gather(buffer, slots[part]).float()
        stored = copy[part.cpu()].to(buffer.device).view(buffer.dtype).float()
        differences.append((stored - expected).abs().flatten(1).amax(1))
        magnitude = max(magnitude, float(expected.abs().max()))
    return torch.cat(differences), magnitude


def _places(kv_pool: KVPool, slots: torch.Tensor, pages: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """All buffers with their rows of these slots and their pages: K and V of each layer, then the summaries."""
    aux: aux_buffers.AuxBuffers = getattr(kv_pool, memory.ATTRIBUTE)
    entries = ((layer, spec) for layer in sorted(aux.layers) for spec in aux.specs_of(layer))
    places = [(buffer, slots) for _, _, buffer in _buffers(kv_pool)]
    return places + [(aux.buffer(spec.name, layer), pages) for layer, spec in entries]


def _buffers(kv_pool: KVPool) -> Iterator[tuple[str, int, torch.Tensor]]:
    for layer in range(kv_pool.start_layer, kv_pool.start_layer + kv_pool.layer_num):
        yield "K", layer, kv_pool.get_key_buffer(layer)
        yield "V", layer, kv_pool.get_value_buffer(layer)


def _gather(buffer: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    # Not every dtype can be indexed on every device; bytes can.
    return buffer.view(torch.uint8)[rows].view(buffer.dtype)


def page_parts(kv_pool: KVPool, pages: list[int]) -> tuple[torch.Tensor, ...]:
    """Page ids as int64 tensors on the pool's device, at most ``PAGES_AT_ONCE`` each."""
    device = kv_pool.get_key_buffer(kv_pool.start_layer).device
    return torch.tensor(pages, dtype=torch.int64, device=device).split(PAGES_AT_ONCE)


def page_slots(pages: torch.Tensor, size: int) -> torch.Tensor:
    """The slots ``[pages * size]`` of whole pages ``[pages]``, both int64."""
    return (pages[:, None] * size + torch.arange(size, device=pages.device)).flatten()
