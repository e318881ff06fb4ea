"""The tokens of a round of lossless decoding, and the batches of its passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput

from sglang_sparse.scheduler.partial_batch import BOUNDED, DENSE_PASS, LATER, without_sampling

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from sglang_sparse.scheduler.speculation.algorithm import Carried


@dataclass
class Window:
    """The positions that a round may fill: each row's last token, which has no KV yet, and those behind it.

    Attributes:
        held: ``[rows]`` int64, tokens that have KV.
        host: the same on the CPU, or bounds as long as ``late`` is set; the batch's.
        positions: ``[rows, width]`` int64.
        slots: ``[rows, width]`` int64, where their KV goes.
        seeds: ``[rows]`` int64; None where all rows are greedy.
        late: waits for the lengths, see ``Carried``.
        passes: what ran, so that what it reads outlives the round on the host.
    """

    held: torch.Tensor
    host: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    seeds: torch.Tensor | None
    late: Callable[[], torch.Tensor] | None = None
    passes: list[ForwardBatch] = field(default_factory=list)

    @classmethod
    def of(cls, batch: ScheduleBatch, width: int, seeds: torch.Tensor | None) -> Window:
        """Return the window of a decode batch, whose slots SGLang has allocated."""
        held = batch.seq_lens.to(torch.int64)
        positions = held[:, None] if width == 1 else held[:, None] + torch.arange(width, device=held.device)
        table = batch.req_to_token_pool.req_to_token
        slots = table[batch.req_pool_indices.to(torch.int64)[:, None], positions].to(torch.int64)
        late = cast("Carried", batch.spec_info).late_lengths
        return cls(held, batch.seq_lens_cpu, positions, slots, seeds, late)

    def settle(self) -> None:
        """Wait for the lengths, unless the host knows them; they take the place of the batch's bounds."""
        if self.late is not None:
            self.host.copy_(self.late())
            self.late = None

    def step(self, batch: ScheduleBatch, tokens: torch.Tensor, step: int) -> ScheduleBatch:
        """Make the batch of a decode step of the round.

        Args:
            batch: the round's.
            tokens: ``[rows]`` int64, those at its position.
            step: which one; the first is 0.
        """
        view = without_sampling(batch)
        view.forward_mode, view.spec_info, view.input_ids = ForwardMode.DECODE, None, tokens
        view.out_cache_loc = self.slots[:, step].contiguous()
        setattr(view, LATER, step > 0)
        self._extend(view, step + 1)
        return view

    def dense_step(self, batch: ScheduleBatch, chain: torch.Tensor) -> ScheduleBatch:
        """Make the batch of a round without drafts: dense, though drafts could run sparse and only would not pay."""
        view = self.step(batch, chain[:, 0], 0)
        setattr(view, DENSE_PASS, True)
        return view

    def verification(self, batch: ScheduleBatch, chain: torch.Tensor) -> ScheduleBatch:
        """Make the batch of the dense pass over ``[rows, width]`` tokens.

        SGLang's attention backends take the lengths without these tokens on the device and, for a chain, with them on
        the host.
        """
        width = chain.shape[1]
        view = without_sampling(batch)
        view.forward_mode, view.input_ids, view.out_cache_loc = (
            ForwardMode.TARGET_VERIFY,
            chain.reshape(-1),
            self.slots.reshape(-1),
        )
        self._extend(view, 0)
        view.seq_lens_cpu = self.host + width
        view.spec_info = DFlashVerifyInput(
            view.input_ids, self.positions.reshape(-1), width, capture_hidden_mode=CaptureHiddenMode.NULL
        )
        return view

    def _extend(self, view: ScheduleBatch, tokens: int) -> None:
        view.seq_lens, view.seq_lens_cpu = self.held + tokens, self.host + tokens
        view.seq_lens_sum = int(view.seq_lens_cpu.sum())
        setattr(view, BOUNDED, self.late is not None)
        view.orig_seq_lens = view.seq_lens.to(torch.int32)
