"""Train tiny-gqa to follow chains: ``python -m eval.lab.train.chains --trunk DIR --data DIR --out DIR``.

tiny-gqa names every variable on the way to a number, so that decode steps look the second one up. The model made here
answers with the number alone: the prompt's last tokens have to find both records. By the loss of the answers alone
it was not seen to learn that; a few hundred steps are enough where a second loss asks the second layer's output, at
the places before each digit, for the words of the second variable. Its two matrices are not part of the model.

In the last stage the rows of an answer attend to blocks that the last tokens of its question choose, in the manner of
RocketKV's, so that the later digits are looked up where the first one was: without it RocketKV loses them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eval.lab.train.batches import Batch, BatchBuilder, Plan
from eval.lab.train.checkpoint import WEIGHTS, load_weights
from eval.lab.train.gqa import GQATrainer
from eval.lab.train.layers import HIDDEN, rms_norm
from eval.lab.train.mixes import SHORT_VALUES, VALUES
from eval.lab.train.model import HEAD_DIM, TinyGQA
from eval.lab.train.ragged import ROLE_STEP, VALUE_ROLE, Ragged, Vocabulary
from eval.lab.train.run import arguments, train
from eval.lab.train.schedule import Stage
from eval.lab.train.sparse import Rows
from eval.lab.train.trainer import last_places

GATE = ("var_value",)
STAGES = (
    Stage("value", 256, 2000, 0.3, GATE, 500, SHORT_VALUES, threshold=0.9, required=True),
    Stage("value-1k", 1024, 2000, 0.3, GATE, 500, VALUES, threshold=0.9),
    Stage("value-4k", 4096, 1000, 0.3, mix=VALUES),
    Stage("value-8k", 8192, 4000, 0.5, mix=VALUES, rate=(1.0, 0.0)),
    Stage("sparse", 8192, 4000, 1.0, mix=VALUES, rate=(0.5, 0.0), sparse=True),
)
HINT_STEP = ROLE_STEP * 8
"""A code is ``hint * HINT_STEP + role * ROLE_STEP + token id``."""
HINT_WEIGHT, MOST_HINTS = 0.5, 16384
QUESTIONS = 4


@dataclass(frozen=True)
class HintedBatch(Batch):
    """With hints (rows, length) int64: 0 for none, or ``1 + first * words + last`` of the second variable's words."""

    hints: Tensor

    def rows(self, index: Tensor) -> HintedBatch:
        """See Batch."""
        return HintedBatch(**vars(super().rows(index)), hints=self.hints[index])


class HintedBuilder(BatchBuilder):
    """Hints stand at the tokens before the digits of a chain's answer."""

    def _pack(self, codes: Tensor) -> HintedBatch:
        return HintedBatch(**vars(super()._pack(codes % HINT_STEP)), hints=codes // HINT_STEP)

    def _turns(self, plan: Plan, fields: dict[str, Tensor]) -> Ragged:
        turns = super()._turns(plan, fields)
        if plan.form.name != "var_value" or plan.hops == 1:
            return turns
        value = F.pad(turns.codes // ROLE_STEP == VALUE_ROLE, (0, 2))
        # The last of these tokens is the end of the turn.
        before = value[..., 1:-1] & value[..., 2:]
        key = fields["key1"]
        hint = 1 + key[..., 0] * self.vocabulary.n_words + key[..., -1]
        return Ragged(turns.codes + before * hint[..., None] * HINT_STEP, turns.length)


class TinyChains(TinyGQA):
    """tiny-gqa's shape; its second layer, which looks numbers up there, is the one that hints ask."""

    name = "tiny-chains"
    kept_layer = 1


class ChainsTrainer(GQATrainer):
    """Trains the whole model on, from ``--trunk``, and two matrices that are thrown away."""

    stages = STAGES
    sparse_lengths = {1024: 10, 2048: 15, 4096: 25, 8192: 45, 16384: 5}

    def new_model(self, compute: torch.dtype, compiled: bool) -> TinyGQA:
        """See Trainer."""
        model = TinyChains(compute, compiled)
        load_weights(model, self.args.trunk / WEIGHTS)
        return model

    def new_builder(self, vocabulary: Vocabulary, stream: Tensor, seed: int) -> BatchBuilder:
        """See Trainer."""
        return HintedBuilder(vocabulary, stream, seed, self.groups)

    def new_optimizers(self, fused: bool) -> list[torch.optim.Optimizer]:
        """See Trainer."""
        words = self.builder.vocabulary.n_words
        self.heads = nn.ModuleList([nn.Linear(HIDDEN, words) for _ in range(2)]).to(self.device)
        options = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0, "fused": fused}
        return [*super().new_optimizers(fused), torch.optim.AdamW(self.heads.parameters(), **options)]

    def rows(self, batch: Batch) -> Rows:
        """See Trainer; with the last tokens of the questions, at most as many as a row of a sparse stage has."""
        ends = F.pad(batch.answers[:, 1:] & ~batch.answers[:, :-1], (0, 1))
        return replace(super().rows(batch), ends=last_places(ends, QUESTIONS).sort(1).values)

    def draw_rows(self, positions: Tensor) -> Rows:
        """See Trainer."""
        return Rows(positions, "window", self.rng.uniform(0.06, 0.125), least=8)

    def auxiliary(self, batch: Batch, rows: Rows | None) -> Tensor:
        """The weighted cross entropy () of the first and the last word of the second variable, at most of the hints."""
        assert isinstance(batch, HintedBatch) and self.model.kept is not None
        places = batch.hints.flatten().nonzero()[:, 0]
        if not len(places):
            return super().auxiliary(batch, rows)
        if len(places) > MOST_HINTS:
            places = places[torch.randperm(len(places), device=self.device)[:MOST_HINTS]]
        words = batch.hints.flatten()[places] - 1
        output = rms_norm(self.model.kept[places], torch.ones(HIDDEN, device=self.device)).float()
        targets = (words // self.builder.vocabulary.n_words, words % self.builder.vocabulary.n_words)
        losses = [F.cross_entropy(head(output), target) for head, target in zip(self.heads, targets, strict=True)]
        return HINT_WEIGHT * torch.stack(losses).sum()


def main() -> None:
    """Trains all stages; the checkpoint is written after each."""
    args = arguments("Trains the tiny GQA model on, to follow chains", budget=600.0, evaluation=0.0, trunk=True)
    train(ChainsTrainer(args), HEAD_DIM, (HEAD_DIM,))


if __name__ == "__main__":
    main()
