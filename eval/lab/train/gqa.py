"""Trains the tiny GQA model: ``python -m eval.lab.train.gqa --data DIR --tokenizer DIR --out DIR [--seed N]``.

The lengths grow from 256 to 32k tokens. The stages at 256 and 1k tokens end when the questions that need a lookup by
words are answered; a last stage lets the answer rows attend to selected blocks only. About seven minutes on one H200.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from eval.lab.train.model import HEAD_DIM, TinyGQA
from eval.lab.train.run import arguments, train
from eval.lab.train.schedule import FULL, LINKS, SHORT, Stage
from eval.lab.train.sparse import Rows
from eval.lab.train.trainer import GATE_FORMS, Trainer

SHORT_FORMS = ("records", "needle_ruler", "json_completion")
STAGES = (
    Stage("short", 256, 4000, 0.35, SHORT_FORMS, 300, SHORT),
    Stage("links", 256, 4000, 0.4, ("var", "var_completion"), 200, LINKS),
    Stage("256", 256, 1500, 0.2, GATE_FORMS, 300, replace(FULL, text_weight=0.3, json_digits=(3, 5))),
    Stage("1k", 1024, 800, 0.2, GATE_FORMS, 300, replace(FULL, text_weight=0.3, json_digits=(4, 6))),
    Stage("4k", 4096, 400, 0.15),
    Stage("8k", 8192, 350, 0.18),
    Stage("16k", 16384, 250, 0.2),
    Stage("32k", 32768, 500, 0.65, rate=(1.0, 0.3)),
    Stage("sparse", 8192, 500, 1.0, rate=(0.3, 0.0), sparse=True),
)


class GQATrainer(Trainer):
    """Trains with AdamW and with rows that attend to the blocks that Quest or the true mass chooses."""

    stages = STAGES

    def new_model(self, compute: torch.dtype, compiled: bool) -> TinyGQA:
        """See Trainer."""
        return TinyGQA(compute, compiled)

    def draw_rows(self, positions: Tensor) -> Rows:
        """See Trainer."""
        selector = self.rng.choices(("quest", "quest_scores", "mass"), (50, 15, 35))[0]
        return Rows(positions, selector, self.rng.uniform(0.05, 0.2), least=self.rng.choice((4, 8, 16)))


def main() -> None:
    """Trains all stages; the checkpoint is written after each."""
    args = arguments("Trains the tiny GQA model", budget=450.0, evaluation=0.0)
    train(GQATrainer(args), HEAD_DIM, (HEAD_DIM,))


if __name__ == "__main__":
    main()
