"""A training run of a tiny model: its data, its steps, its stages and its clock."""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from eval.lab.train.batches import Batch, BatchBuilder, BatchPool
from eval.lab.train.layers import TinyModel
from eval.lab.train.ragged import Vocabulary
from eval.lab.train.schedule import EVERY, Stage, passed, progress, rate_at
from eval.lab.train.sparse import Rows
from eval.texts.text import read_books

GATE_FORMS = ("needle", "needle_ruler", "var", "records")
REPORT_FORMS = (
    *(*GATE_FORMS, "needle_boxed", "needle_sentence", "passkey", "json", "json_completion"),
    "var_completion",
)
WARM_UP, RATE = 100, 1e-3


def token_stream(tokenizer: Tokenizer, books: Iterable[str], device: torch.device) -> Tensor:
    """All books as one row of tokens (n,) int64."""
    pieces = [book[i : i + 20_000] for book in books for i in range(0, len(book), 20_000)]
    ids = [i for encoding in tokenizer.encode_batch(pieces, add_special_tokens=False) for i in encoding.ids]
    return torch.tensor(ids, device=device)


def last_places(marked: Tensor, most: int) -> Tensor:
    """Places (rows, most) int64 of the last marked tokens of (rows, length) bool; a row's end where it has fewer."""
    length = marked.shape[1]
    last = torch.arange(length, device=marked.device).where(marked, -1).topk(min(most, length), 1).values
    return last.where(last >= 0, length - 1)


@torch.no_grad()
def exact_match(model: TinyModel, batch: Batch) -> float:
    """Share of rows in which every token of the answer, its end included, is the most probable one."""
    hidden = model(batch.tokens).view(*batch.tokens.shape, -1)
    wanted = batch.answers
    right = torch.ones_like(wanted)
    for i in range(len(hidden)):
        right[i, 1:] = model.logits(hidden[i, :-1]).argmax(-1) == batch.tokens[i, 1:]
    rows = wanted.any(1)
    return float((right | ~wanted).all(1)[rows].float().mean()) if rows.any() else 0.0


class Trainer(ABC):
    """Model, optimisers and data of one run.

    Attributes:
        stages: in order; the last one is what every run ends with.
        groups: groups of equal rows in a built batch; ahead: steps for which a batch is built.
        sparse_lengths: lengths of a sparse stage with their weights; rows of the longest attend densely.
        losses: what `step` returns.
    """

    stages: ClassVar[tuple[Stage, ...]]
    groups: ClassVar[int] = 8
    ahead: ClassVar[int] = 1
    sparse_lengths: ClassVar[dict[int, int]] = {1024: 15, 2048: 15, 4096: 25, 8192: 35, 32768: 10}
    losses: ClassVar[tuple[str, ...]] = ("text", "answer", "auxiliary")

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.start = args, time.perf_counter()
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        cuda = self.device.type == "cuda"
        self.model = self.new_model(torch.bfloat16 if cuda else torch.float32, cuda).to(self.device)
        self.tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
        self.builder, self.judge = (self._builder(split) for split in ("train", "eval"))
        self.pool = BatchPool(self.builder, args.tokens, self.ahead, args.seed)
        self.rng = random.Random(args.seed)
        # Muon at 0.02 formed lookups by words after about as many steps of tiny-gqa's short stage.
        options = {"lr": RATE, "betas": (0.9, 0.95), "weight_decay": 0.0, "fused": cuda}
        self.optimizers = [torch.optim.AdamW(weights, **options) for weights in self.learned()]
        self.steps = 0

    @abstractmethod
    def new_model(self, compute: torch.dtype, compiled: bool) -> TinyModel:
        """An untrained model on the CPU."""

    def learned(self) -> list[list[nn.Parameter]]:
        """The weights that learn; by default all, matrices and others apart."""
        return [self.model.matrices(), self.model.others()]

    @abstractmethod
    def draw_rows(self, positions: Tensor) -> Rows:
        """What the answer rows at positions (B, R) attend to in a sparse stage, drawn anew for each step."""

    def auxiliary(self, batch: Batch, rows: Rows | None) -> Tensor:
        """A further loss () of what `step` just ran; rows: those of a sparse stage."""
        return torch.zeros((), device=self.device)

    def _builder(self, split: str) -> BatchBuilder:
        def encode(text: str) -> list[int]:
            return self.tokenizer.encode(text, add_special_tokens=False).ids

        stream = token_stream(self.tokenizer, read_books(self.books(split)).values(), self.device)
        print(f"{split}: {len(stream):,} tokens of books")
        seed = self.args.seed + (split == "eval")
        return BatchBuilder(Vocabulary(encode, split, self.device), stream, seed, self.groups)

    def books(self, split: str) -> Path:
        """Folder of the books of a split, "train" or "eval"."""
        return self.args.data / "books" / ("train" if split == "train" else "heldout")

    def seconds(self) -> float:
        """Time since the start."""
        return time.perf_counter() - self.start

    def length(self, stage: Stage) -> int:
        """Length of the next batch: a quarter of a dense stage's batches are shorter."""
        if stage.sparse:
            return self.rng.choices(list(self.sparse_lengths), list(self.sparse_lengths.values()))[0]
        known = [s.length for s in self.stages if s.length <= stage.length]
        return self.rng.choice(known) if self.rng.random() < 0.25 else stage.length

    def rows(self, batch: Batch) -> Rows:
        """The last 64 answer rows of each row of the batch."""
        return self.draw_rows(last_places(batch.answer_weight > 0, 64))

    def step(self, stage: Stage, rate: float) -> Tensor:
        """One update; returns the `losses`: of text and answers and the auxiliary one."""
        length = min(self.length(stage), self.args.max_length)
        sparse = stage.sparse and length < max(self.sparse_lengths)
        batch = self.pool.next(length, most_turns=4 if sparse else 16)
        rows = self.rows(batch) if sparse else None
        weights = (batch.lm_weight, batch.answer_weight)
        # A last batch of uneven rows has another number of tokens: only the usual number is compiled.
        plain = batch.tokens.numel() != self.args.tokens
        text, answer = self.model.loss(batch.tokens, *weights, rows, plain=plain)
        further = self.auxiliary(batch, rows)
        self.update(stage.mix.text_weight * text + answer + further, rate)
        return torch.stack([text, answer, further]).detach()

    def update(self, loss: Tensor, rate: float) -> None:
        """Learn from a loss () at a relative learning rate."""
        loss.backward()
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        torch.nn.utils.clip_grad_norm_([weight for group in groups for weight in group["params"]], 1.0)
        for group in groups:
            group["lr"] = RATE * rate * min(1.0, (self.steps + 1) / WARM_UP)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.steps += 1

    def measure(self, length: int, forms: tuple[str, ...], rows: int = 96, fill: float = 0.6) -> dict[str, float]:
        """Exact match by form on held-out books and keys of held-out words."""
        length = min(length, self.args.max_length)
        rows = max(1, min(rows, 4 * self.args.tokens // length))
        return {name: exact_match(self.model, self.judge.form_batch(name, length, rows, fill)) for name in forms}

    def run(self, stage: Stage) -> dict[str, Any]:
        """All steps of a stage; returns what the log keeps of it."""
        self.builder.mix = self.judge.mix = stage.mix
        self.pool.clear()
        begun, done, ended, total = self.seconds(), 0, "steps", torch.zeros(len(self.losses), device=self.device)
        steps, limit = min(stage.steps, self.args.steps), stage.share * (self.args.train_seconds - begun)
        gates: list[dict[str, float]] = []
        losses: dict[str, float] = {}
        while done < steps:
            seconds = self.seconds() - begun
            if seconds >= limit:
                ended = "time"
                break
            total += self.step(stage, rate_at(stage, progress(stage, done, steps, seconds, limit)))
            done += 1
            if done % EVERY == 0:
                gates.append(self.measure(stage.length, stage.gate, 64))
                losses = dict(zip(self.losses, (total / EVERY).tolist(), strict=True))
                self._report(stage, done, (self.seconds() - begun) / done, losses, gates[-1])
                total.zero_()
                if passed(stage, done, gates):
                    ended = "gate"
                    break
        line: dict[str, Any] = {"stage": stage.name, "length": stage.length, "steps": done, "ended": ended}
        line["seconds"] = round(self.seconds() - begun, 1)
        line["losses"] = {name: round(value, 4) for name, value in losses.items()}
        forms = tuple(name for name in REPORT_FORMS if name in stage.mix.forms)
        line["exact_match"] = {name: round(value, 3) for name, value in self.measure(stage.length, forms).items()}
        print(json.dumps(line), flush=True)
        return line

    def _report(
        self, stage: Stage, done: int, seconds: float, losses: dict[str, float], gate: dict[str, float]
    ) -> None:
        shown = [f"{name} {value:.3f}" for name, value in losses.items()]
        shown += [f"{name} {value:.2f}" for name, value in gate.items()]
        print(stage.name, done, f"{self.seconds():.0f} s, {seconds * 1e3:.0f} ms a step:", *shown, flush=True)
        if not all(map(math.isfinite, losses.values())):
            raise RuntimeError(f"the loss of stage {stage.name} is no number after {done} steps")
