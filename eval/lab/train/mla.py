"""Train tiny-mla: ``python -m eval.lab.train.mla --data DIR --tokenizer DIR --out DIR --budget-seconds 500``.

The lengths grow from 256 to 32k tokens, and each stage up to 8k ends as soon as the questions with word keys are
answered. A last stage lets the answer rows attend to chosen blocks only and, in the layers of ``--proxy-weights``,
draws the scores of the rotary part alone and the full ones together, at these rows and at random ones. So the model can
show what a selection by RoPE scores does, and a calibration finds layers of both kinds: such whose rotary part is a
reliable proxy, and such whose is not, because RoBSA runs both kinds differently (its section 2.3.1). It is the stage in
which the learning rate falls from its full height to zero, and it has the time that the others leave.

By default these are the first two layers, which attend nearby; the third one looks numbers up, and is where a selection
says more than a window. Its rotary scores are drawn in by two further runs of the last stage (``--resume`` and
``--from-stage sparse``), first with ``--proxy-weights 4,4,0.3,0`` and then with ``4,4,1,0``, as those of the shipped
model were: by a large weight at once the look-up is driven into the fourth layer, or lost where that has one, too.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from eval.lab.train.batches import Batch
from eval.lab.train.mla_model import NOPE, ROPE, VALUE, TinyMLA
from eval.lab.train.run import arguments, train
from eval.lab.train.schedule import FULL, LINKS, SHORT, Stage
from eval.lab.train.sparse import Rows
from eval.lab.train.trainer import Trainer

WORD_FORMS = ("records", "needle_ruler")
WORD_CHAT_FORMS = (*WORD_FORMS, "needle")
PROXY_WEIGHTS = (4.0, 4.0, 0.0, 0.0)
"""By layer, of the divergence of the RoPE-only scores."""
SAMPLED = 64
"""Rows of a sequence that are drawn at random for the divergence, beside those in answers: a calibration looks at rows
of plain text, too."""


def _stage(name: str, length: int, steps: int, share: float, least: int, digits: tuple[int, int]) -> Stage:
    """A stage with all forms that ends when word keys are looked up nearly always."""
    mix = replace(FULL, text_weight=0.3 if length <= 1024 else 0.5, json_digits=digits)
    return Stage(name, length, steps, share, WORD_CHAT_FORMS, least, mix, threshold=0.95, looks=2)


STAGES = (
    Stage("short", 256, 4000, 0.3, WORD_FORMS, 300, SHORT, threshold=0.92, looks=2, required=True),
    Stage("links", 256, 4000, 0.35, ("var", "var_completion"), 200, LINKS, threshold=0.8, looks=2),
    _stage("256", 256, 1000, 0.15, 300, (3, 5)),
    _stage("1k", 1024, 800, 0.15, 300, (4, 6)),
    _stage("4k", 4096, 500, 0.15, 200, (5, 8)),
    _stage("8k", 8192, 400, 0.2, 200, (5, 8)),
    Stage("16k", 16384, 250, 0.25),
    Stage("32k", 32768, 600, 0.6, rate=(1.0, 0.3)),
    Stage("sparse", 8192, 3000, 1.0, rate=(1.0, 0.0), sparse=True),
)


class MLATrainer(Trainer):
    """Trains with AdamW and with rows that attend to the blocks that the RoPE-only scores or the true mass choose."""

    stages = STAGES
    groups, ahead = 24, 8

    def new_model(self, compute: torch.dtype, compiled: bool) -> TinyMLA:
        """See Trainer."""
        return TinyMLA(compute, compiled)

    def draw_rows(self, positions: Tensor) -> Rows:
        """See Trainer."""
        selector = self.rng.choices(("rope", "mass", "dense"), (50, 30, 20))[0]
        least = self.rng.choice((4, 8, 16))
        return Rows(positions, selector, self.rng.uniform(0.05, 0.2), least, divergence=[])

    def rows(self, batch: Batch) -> Rows:
        """See Trainer; with random rows for the divergence."""
        size, length = batch.tokens.shape
        return replace(super().rows(batch), extra=torch.randint(length, (size, SAMPLED), device=self.device))

    def auxiliary(self, batch: Batch, rows: Rows | None) -> Tensor:
        """The divergence () of the RoPE-only scores, weighted by layer."""
        if rows is None:
            return super().auxiliary(batch, rows)
        assert rows.divergence
        return (torch.stack(rows.divergence) * torch.tensor(self.args.proxy_weights, device=self.device)).sum()


def main() -> None:
    """Trains all stages that fit into the budget; the checkpoint is written after each."""
    args = arguments("Trains the tiny MLA model", budget=500.0, evaluation=70.0, proxies=PROXY_WEIGHTS)
    train(MLATrainer(args), NOPE + ROPE, (NOPE + ROPE, VALUE))


if __name__ == "__main__":
    main()
