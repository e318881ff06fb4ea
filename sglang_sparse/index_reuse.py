"""What DSA chooses in one decode step, for the steps after it: ``index_reuse_steps``.

Ours, not the model's: it was trained to choose in every step. A row's selection then has as many tokens fewer as there
are steps that use it again, for which the newest ones come on top, so that no step attends to more than ``index_topk``.
Steps are counted by a row's length on the device, so that rows that began at other times share a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglang_sparse.methods.dsa import Dsa

if TYPE_CHECKING:
    from sglang_sparse.method import DecodeMethod
    from sglang_sparse.pools import AuxPools


@dataclass(frozen=True)
class StepChoice:
    """What a decode step chooses anew, and what it takes from a step before.

    Attributes:
        slots: ``[rows]`` int64, where each row's selections are kept.
        selective: ``[rows]`` bool, rows that leave something out.
        reused: ``[rows]`` bool, those of them that choose nothing.
        since: ``[rows]`` int32, a selective row's length when it chose last, which may be now.
        lengths: ``[rows]`` int32, tokens that are chosen from; 0 for a row that reuses.
        taken: ``[rows]`` int32, how many of them are chosen.
        attended: ``[rows]`` int32, tokens that a row attends to.
    """

    slots: torch.Tensor
    selective: torch.Tensor
    reused: torch.Tensor
    since: torch.Tensor
    lengths: torch.Tensor
    taken: torch.Tensor
    attended: torch.Tensor


class StepReuse:
    """The selections of all requests, by their row in SGLang's request pool.

    Args:
        requests: rows of the pool.
        layers: those that choose.
        topk: tokens that a row attends to at most.
        steps: that a selection serves, 2 to ``topk``.
        device: where they are kept.
    """

    def __init__(self, requests: int, layers: Sequence[int], topk: int, steps: int, device: torch.device):
        # One more, for rows that pad a graph.
        self._since = torch.zeros(requests + 1, dtype=torch.int32, device=device)
        kept = topk - steps + 1
        self._chosen = {layer: torch.zeros(requests + 1, kept, dtype=torch.int32, device=device) for layer in layers}
        self._kept, self._steps = kept, steps
        self._newest = torch.arange(steps - 1, dtype=torch.int32, device=device)

    def forget(self, requests: torch.Tensor) -> None:
        """Let requests choose anew, whose prompt is being read: their rows may have been others'.

        Args:
            requests: ``[rows]`` int64.
        """
        self._since[requests] = 0

    def begin(self, requests: torch.Tensor, lengths: torch.Tensor, wanted: torch.Tensor) -> StepChoice:
        """Decide for a decode step, once for all layers; without waiting for the device.

        Args:
            requests: ``[rows]`` int64, of a row that pads a graph anything.
            lengths: ``[rows]`` int32, tokens with the new one; 0 for a row that pads a graph.
            wanted: ``[rows]`` int32, tokens that a row would choose.
        """
        slots = torch.where(lengths > 0, requests, len(self._since) - 1)
        selective = lengths > wanted
        since = self._since[slots]
        age = lengths - since
        reused = selective & (since > 0) & (age > 0) & (age < self._steps)
        since = torch.where(reused, since, lengths)
        self._since[slots] = torch.where(selective, since, 0)
        taken = torch.where(selective, wanted - self._steps + 1, wanted)
        return StepChoice(
            slots,
            selective,
            reused,
            since,
            lengths=lengths.masked_fill(reused, 0),
            taken=taken.masked_fill(reused, 0),
            attended=torch.where(selective, taken + lengths - since, wanted),
        )

    def complete(self, layer: int, choice: StepChoice, chosen: torch.Tensor, lengths: torch.Tensor) -> None:
        """Keep what a layer has chosen, and give rows that reuse what it chose before, with the newest tokens.

        Args:
            layer: one that chooses.
            choice: of the step.
            chosen: ``[rows, topk]`` int32, positions in ascending order, then -1; changed in place.
            lengths: ``[rows]`` int32, tokens with the new one.
        """
        kept, slots = self._chosen[layer], choice.slots
        mine = torch.where(choice.reused[:, None], kept[slots], chosen[:, : self._kept])
        kept[slots] = mine
        newest = choice.since[:, None] + self._newest
        newest = newest.masked_fill(newest >= lengths[:, None], -1)
        whole = torch.cat([mine, newest], dim=1)
        chosen.copy_(torch.where(choice.selective[:, None], whole, chosen))


def step_reuse(method: DecodeMethod, pools: AuxPools, runner: Any) -> StepReuse | None:
    """Make what a server keeps; None where every step chooses.

    Args:
        method: of the server.
        pools: with its sparse layers.
        runner: SGLang's ``ModelRunner``.
    """
    if not isinstance(method, Dsa) or method.reuse_steps == 1:
        return None
    requests = runner.req_to_token_pool.req_to_token.shape[0]
    layers = sorted(pools.layers)[:: method.share_layers]
    return StepReuse(requests, layers, method.index_topk, method.reuse_steps, pools.overflow.device)


def state_bytes(method: Dsa, requests: int, layers: int) -> int:
    """Bytes that a server keeps for so many requests.

    Args:
        method: of the server.
        requests: rows of SGLang's request pool.
        layers: of the model.
    """
    if method.reuse_steps == 1:
        return 0
    choosing = -(-layers // method.share_layers)
    return 4 * (requests + 1) * (choosing * (method.index_topk - method.reuse_steps + 1) + 1)
