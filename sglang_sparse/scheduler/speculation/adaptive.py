"""The draft length of a round: a pure function of lengths and of past acceptance, which all ranks know.

A round of n drafts takes ``n * s + v`` dense steps, ``s`` of them for a draft and ``v`` for the verification, and gives
``1 + a + ... + a**n`` tokens where a draft is right with probability ``a``. The n with the most tokens for its time is
best; where none beats a dense step, nothing is drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from sglang_sparse.attention.counters import judge
from sglang_sparse.methods.roles import AttendsItself

if TYPE_CHECKING:
    from sglang_sparse.attention.plan import DecodePlan
    from sglang_sparse.methods.groups import DecodeGroups

# What a layer takes beside reading memory, launches of its kernels above all, as bytes that could be read meanwhile.
LAYER_BYTES = 150 * 2**20
# A method whose kernel looks at every key leaves out values only; how many is known on the device alone.
LOOKS_AT_ALL = 0.75
# A verification in dense steps, of 9 tokens with FA3, where both read the same weights.
VERIFICATION = 1.3
# What is assumed of acceptance until so many drafts were judged, and how fast older rounds are forgotten.
ACCEPTANCE, JUDGED, KEPT = 0.9, 4.0, 0.95
# What a round must gain: a dense step is certain.
GAIN = 1.03


@dataclass(frozen=True)
class StepBytes:
    """Bytes that a decode step reads on this rank.

    Attributes:
        fixed: bytes of the weights that every pass reads, and what the layers take beside reading.
        token: bytes of KV of a token, all layers.
        summary: bytes of a token's share of the summaries, all layers.
        experts: bytes of the routed experts.
        routed: share of the experts that a token takes.
    """

    fixed: int
    token: int
    summary: float
    experts: int = 0
    routed: float = 0.0

    def weights(self, tokens: int) -> float:
        """Return the bytes of weights that a pass over so many tokens reads, if each takes experts at random."""
        return self.fixed + self.experts * (1 - (1 - self.routed) ** tokens)

    def draft(self, plan: DecodePlan, groups: DecodeGroups, tokens: int, layers: int) -> float:
        """Return what a draft takes without choosing its pages, in dense steps.

        Args:
            plan: of a batch that runs sparse.
            groups: the server's methods.
            tokens: KV tokens of the batch.
            layers: of the model.
        """
        dense = self.token * tokens
        read, sparse = 0.0, 0
        for method, own in zip(groups.methods, plan.groups, strict=True):
            mine = len(method.sparse_layers(layers))
            share = float(own.n_select.sum()) / float(own.n_pages.sum())
            read += mine * (min(share, LOOKS_AT_ALL) if isinstance(method, AttendsItself) else share)
            sparse += mine
        share = (read + layers - sparse) / layers
        weights = self.weights(len(plan.covered))
        return (weights + dense * share) / (weights + dense)

    def choice(self, rows: int, tokens: int) -> float:
        """Return what choosing pages takes once, in dense steps.

        Args:
            rows: of the batch.
            tokens: KV tokens of the batch.
        """
        return self.summary * tokens / (self.weights(rows) + self.token * tokens)

    def verification(self, rows: int, width: int, tokens: int) -> float:
        """Return what a verification takes, in dense steps.

        Args:
            rows: of the batch.
            width: tokens of a row that it takes.
            tokens: KV tokens of the batch.
        """
        dense = self.token * tokens
        return VERIFICATION * (self.weights(rows * width) + dense) / (self.weights(rows) + dense)


def best_steps(draft: float, acceptance: float, most: int, once: float = VERIFICATION) -> int:
    """Return how many tokens to draft, 0 to ``most``.

    Args:
        draft: what a draft takes, in dense steps.
        acceptance: the probability that a draft is right, where those before it are.
        most: drafts a round.
        once: what a round takes once, the verification above all, in dense steps.
    """
    tokens = accumulate((acceptance**step for step in range(1, most + 1)), initial=1.0)
    gains = [found / (step * draft + once) for step, found in enumerate(tokens)]
    best = max(range(1, most + 1), key=gains.__getitem__)
    return best if gains[best] > GAIN else 0


class Acceptance:
    """The share of recent drafts that were right.

    What was assumed at first comes back as rounds without drafts pass, so that drafts are tried again.
    """

    def __init__(self) -> None:
        self._right = self._judged = 0.0

    def add(self, steps: int, right: Sequence[int]) -> None:
        """Take in a round of ``steps`` drafts a row, of which the first ``right[row]`` were right."""
        self._right, self._judged = self._right * KEPT, self._judged * KEPT
        found, judged = judge(steps, right)
        self._right += found
        self._judged += judged

    @property
    def rate(self) -> float:
        """The probability that a draft is right, where those before it are."""
        return (self._right + ACCEPTANCE * JUDGED) / (self._judged + JUDGED)
