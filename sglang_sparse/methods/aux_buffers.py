"""Buffers that stand next to SGLang's KV pool and share its page ids."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from sglang_sparse.methods.base import AuxSpec
from sglang_sparse.methods.roles import Kept
from sglang_sparse.methods.shared_selection import SharedSelection

logger = logging.getLogger(__name__)


class AuxBuffers:
    """The method's buffers, one a sparse layer and declared ``AuxSpec``, indexed by KV page id.

    An entry is a pure function of its page's keys, so entries have no life cycle: whoever holds a page holds its
    entries.

    Args:
        specs: what the method declared.
        layers: the sparse layers.
        num_pages: pages of the KV pool with its dummy page 0.
        page_size: tokens per page.
        device: device of the KV pool.

    Attributes:
        accounted_bytes: what SGLang's sizing was charged for these buffers.
        measured_bytes: what the GPU's allocator really handed out for them; None on the CPU.
        kv_bytes_per_token: what a token takes in SGLang's pool on this rank, see ``kv_bytes_per_token``.
        kept: what the requests keep of their prompts, for each ``PromptSelector``.
        views_ready: whether a batch's view and the entries of earlier passes are sure to be written when the first
            sparse layer begins: what looks up embeddings waits for them, and a later stage of pipeline parallelism
            has nothing that does.
        shared: what the drafts of a round share; None where they do not.
    """

    def __init__(
        self,
        specs: tuple[AuxSpec, ...],
        layers: tuple[int, ...],
        num_pages: int,
        page_size: int,
        device: str,
    ):
        self.specs = specs
        self.layers = frozenset(layers)
        self.page_size = page_size
        self._buffers: dict[str, dict[int, torch.Tensor]] = {spec.name: {} for spec in specs}
        for spec in specs:
            for layer in layers if spec.layers is None else spec.layers:
                buffer = torch.zeros(num_pages, *spec.page_shape, dtype=spec.dtype, device=device)
                self._buffers[spec.name][layer] = buffer
        self.overflow = torch.zeros(1, dtype=torch.int32, device=device)
        self._uncounted = torch.zeros_like(self.overflow)
        self._warned = False
        # The configs that help where an entry in float8 cannot hold a key; asked for before every pass.
        float8 = (spec for spec in specs if spec.dtype.is_floating_point and spec.dtype.itemsize == 1)
        self.remedies = tuple(dict.fromkeys(spec.remedy for spec in float8))
        self.overflows = torch.zeros(1, dtype=torch.int64, device=device)
        self._overflow_seen = torch.zeros(1, dtype=torch.int64, pin_memory=self.overflow.is_cuda)
        self.accounted_bytes = 0
        self.measured_bytes: int | None = None
        self.kv_bytes_per_token = 0
        self.kept: tuple[Kept, ...] = ()
        self.views_ready = True
        self.shared: SharedSelection | None = None

    def require_kept(self, layer_id: int) -> Kept:
        """Return ``kept`` of the method that has a layer.

        Raises:
            RuntimeError: it was never allocated.
        """
        for kept in self.kept:
            if layer_id in kept.blocks:
                return kept
        raise RuntimeError(f"nothing was allocated for what requests keep of their prompts in layer {layer_id}")

    def buffer(self, name: str, layer_id: int) -> torch.Tensor:
        """Return a buffer ``[num_pages, *page_shape]``."""
        return self._buffers[name][layer_id]

    def entry_tokens_of(self, spec: AuxSpec) -> int:
        """Return how many tokens an entry of a buffer summarises."""
        return spec.entry_tokens or self.page_size

    @property
    def entry_sizes(self) -> tuple[int, ...]:
        """Return the numbers of tokens that an entry of the buffers summarises, each once."""
        return tuple(dict.fromkeys(map(self.entry_tokens_of, self.specs)))

    def specs_of(self, layer_id: int) -> tuple[AuxSpec, ...]:
        """Return which buffers a sparse layer has."""
        return tuple(spec for spec in self.specs if spec.layers is None or layer_id in spec.layers)

    def refresh(
        self,
        k_caches: Mapping[int, torch.Tensor],
        last_slots: torch.Tensor,
        before_select: bool = False,
        entry_tokens: int | None = None,
    ) -> None:
        """Recompute the entries of the pages that were just written.

        Args:
            k_caches: K caches ``[slots, kv_heads, head_dim]`` by sparse layer.
            last_slots: ``[n]`` int64, the last written slot of each touched entry, or -1.
            before_select: only the buffers whose spec asks for it.
            entry_tokens: only those with entries of so many tokens; all if not given.
        """
        for spec in self.specs:
            if before_select and not spec.before_select:
                continue
            if entry_tokens not in (None, self.entry_tokens_of(spec)):
                continue
            own = {i: cache for i, cache in k_caches.items() if spec.layers is None or i in spec.layers}
            if not own:
                continue
            buffers = [self._buffers[spec.name][layer] for layer in own]
            # The refresh at the end of the pass counts.
            overflow = self._uncounted if before_select else self.overflow
            spec.refresh(list(own.values()), buffers, last_slots, self.page_size, overflow)

    def warn_of_overflow(self) -> None:
        """Warn once when entries could not hold keys, one or two passes after it happened.

        Such pages are selected before others. Called before every forward pass. It reads what an asynchronous copy
        brought and starts the next copy, so it never waits for the device.
        """
        if not self.remedies:
            return
        # Of one pass: an int32 that nobody empties would wrap.
        self.overflows += self.overflow
        self.overflow.zero_()
        if int(self._overflow_seen) and not self._warned:
            self._warned = True
            logger.warning(
                "sglang_sparse: %d values of page summaries are outside the range of fp8; pages with such values are "
                "selected before others, which leaves these less room: this model needs %s",
                int(self._overflow_seen),
                " and ".join(self.remedies),
            )
        self._overflow_seen.copy_(self.overflows, non_blocking=True)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self.entry_bytes + (self.shared.nbytes if self.shared else 0)

    @property
    def entry_bytes(self) -> int:
        """Bytes of all entries."""
        return sum(buffer.nbytes for layers in self._buffers.values() for buffer in layers.values())


def page_ends(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """Find the last slot of each page, or part of one, in what an extend pass wrote, without leaving the device.

    Args:
        slots: ``[tokens]`` int64, the slots written, request after request in the order of positions; slots of page
            0 pad a graph, as a rule slot 0.
        page_size: tokens per page, or of a part that has its own entry.

    Returns:
        ``[tokens]`` int64, the slots whose successor is not the next slot of the same page, -1 elsewhere. Two
        requests never write to one page, so this finds the ends of requests too.
    """
    successors = torch.roll(slots, -1)
    successors[-1:] = -1
    is_end = (successors != slots + 1) | (slots % page_size == page_size - 1)
    return torch.where(is_end & (slots >= page_size), slots, -1)


def newest_ends(ends: torch.Tensor, page_size: int) -> torch.Tensor:
    """Keep the last end of each page: kernels refresh a page twice in any order where it has two ends.

    Args:
        ends: ``[n]`` int64, what several calls of ``page_ends`` found.
        page_size: see ``page_ends``.

    Returns:
        ``[n]`` int64, the last slot of each page once, and -1.
    """
    ordered = ends.sort().values
    repeated = ordered[:-1] // page_size == ordered[1:] // page_size
    return torch.cat([torch.where(repeated, -1, ordered[:-1]), ordered[-1:]])
