"""Batches built several steps ahead."""

from __future__ import annotations

import torch

from eval.lab.train.batches import Batch, BatchBuilder


class BatchPool:
    """Hands out batches of rows drawn at random from `ahead` batches that were built as one.

    A batch takes some 300 small kernels per group of rows, whatever its size. Built for eight steps at once, the same
    kernels serve eight times the rows, and each step sees more groups.
    """

    def __init__(self, builder: BatchBuilder, tokens: int, ahead: int, seed: int) -> None:
        self.builder, self.tokens, self.ahead = builder, tokens, ahead
        self.generator = torch.Generator(device=builder.books.device).manual_seed(seed)
        self._ready: dict[tuple[int, int], list[Batch]] = {}

    def clear(self) -> None:
        """Forgets what was built, because the mix has changed."""
        self._ready.clear()

    def next(self, length: int, most_turns: int) -> Batch:
        """A batch of `tokens` tokens in rows of `length`."""
        ready = self._ready.setdefault((length, most_turns), [])
        if not ready:
            rows = max(1, self.tokens // length)
            built = self.builder.batch(length, rows * length * self.ahead, most_turns)
            order = torch.randperm(rows * self.ahead, generator=self.generator, device=built.tokens.device)
            ready += [built.rows(part) for part in order.split(rows)]
        return ready.pop()
