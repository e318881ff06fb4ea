"""Trains the tiny DSA model: ``python -m eval.lab.train.dsa --trunk DIR --data DIR --out DIR --budget-seconds 200``.

The trunk is the finished tiny MLA model and stays as it is; only the indexers learn, in the two stages of DeepSeek-V3.2
(DeepSeek-V3.2-Exp report, section 2.1). In the first one all attention is dense and an indexer's softmax is drawn
towards the mean of the heads' over all tokens, in the second one every row attends to what its indexer chooses and both
are compared over these tokens alone. Differences from the report: sampled rows instead of all, and no language loss,
because it does not reach an indexer and all else is frozen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from eval.lab.train.batches import Batch
from eval.lab.train.checkpoint import link_trunk, load_trunk
from eval.lab.train.dsa_model import TinyDSA
from eval.lab.train.mla_model import NOPE, ROPE, VALUE
from eval.lab.train.run import arguments, train
from eval.lab.train.schedule import Stage
from eval.lab.train.sparse import Rows
from eval.lab.train.trainer import Trainer

STAGES = (
    Stage("warm-up", 8192, 400, 0.4),
    Stage("sparse", 8192, 800, 1.0, rate=(1.0, 0.0), sparse=True),
)
SAMPLED = 64
"""Rows of a sequence that are drawn at random, beside as many in answers."""
FEWER = 4
"""The tokens of a step are divided by this where all rows attend sparsely: their scores are what a step costs."""


class DSATrainer(Trainer):
    """Trains the indexers alone."""

    model: TinyDSA
    stages = STAGES
    ahead = 4
    losses = ("divergence", "mass")
    sparse_lengths = {1024: 10, 2048: 15, 4096: 25, 8192: 40, 32768: 10}

    def new_model(self, compute: torch.dtype, compiled: bool) -> TinyDSA:
        """See Trainer; nothing is compiled, because the compiler would cost a tenth of the time."""
        model = TinyDSA(compute)
        load_trunk(model, self.args.trunk)
        return model

    def learned(self) -> list[list[nn.Parameter]]:
        """See Trainer."""
        return [list(self.model.indexers.parameters())]

    def draw_rows(self, positions: Tensor) -> Rows:
        """See Trainer."""
        return Rows(positions, self.model.native, 1.0)

    def sample(self, batch: Batch) -> Tensor:
        """Positions (B, R) of the rows that a step learns from: the last ones of answers, and random ones."""
        answers = self.rows(batch).positions
        drawn = torch.randint(batch.tokens.shape[1], (len(answers), SAMPLED), device=self.device)
        return torch.cat([answers, drawn], 1)

    def length(self, stage: Stage) -> int:
        """See Trainer; the longest rows cost too much where all of them attend sparsely."""
        lengths = {n: w for n, w in self.sparse_lengths.items() if n <= 8192 or not stage.sparse}
        return self.rng.choices(list(lengths), list(lengths.values()))[0]

    def step(self, stage: Stage, rate: float) -> Tensor:
        """One update; returns the divergence, summed over the layers, and the mean mass (2,)."""
        length = min(self.length(stage), self.args.max_length)
        batch = self.pool.next(length, most_turns=8)
        lessons = self.model.lessons(batch.tokens, self.sample(batch), stage.sparse)
        divergence, mass = lessons[:, 0].sum(), lessons[:, 1].mean()
        self.update(divergence, rate)
        return torch.stack([divergence, mass]).detach()

    def measure(self, length: int, forms: tuple[str, ...], rows: int = 16, fill: float = 0.6) -> dict[str, float]:
        """See Trainer; fewer rows, because all of them attend sparsely."""
        return super().measure(length, forms, rows, fill)

    def run(self, stage: Stage) -> dict[str, Any]:
        """See Trainer."""
        self.pool.tokens = max(1, self.args.tokens // (FEWER if stage.sparse else 1))
        return super().run(stage)


def main() -> None:
    """Trains both stages; the checkpoint is written after each."""
    args = arguments("Trains the tiny DSA model", budget=200.0, evaluation=60.0, trunk=True)
    link_trunk(args.trunk, args.out)
    train(DSATrainer(args), NOPE + ROPE, (NOPE + ROPE, VALUE))


if __name__ == "__main__":
    main()
