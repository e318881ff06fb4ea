"""Trains the tiny GQA model: ``python -m eval.train.gqa --data DIR --tokenizer DIR --out DIR [--seed N]``.

The lengths grow from 256 to 32k tokens. The stages at 256 and 1k tokens end when the questions that need a lookup by
words are answered; a last stage lets the answer rows attend to selected blocks only. About seven minutes on one H200.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from eval.text import read_books
from eval.train.batches import Batch, BatchBuilder
from eval.train.mixes import FULL, LINKS, SHORT, Mix
from eval.train.model import TinyGQA, save
from eval.train.ragged import ANSWER_ROLE, VALUE_ROLE, Vocabulary
from eval.train.sparse import Rows

SHORT_FORMS = ("records", "needle_ruler", "json_completion")
GATE_FORMS = ("needle", "needle_ruler", "var", "records")
REPORT_FORMS = (*GATE_FORMS, "needle_boxed", "needle_sentence", "passkey", "json", "json_completion", "var_completion")
GATE = 0.85
WARM_UP = 100


@dataclass(frozen=True)
class Stage:
    """Steps at one length.

    Attributes:
        steps: upper limit of the steps.
        share: upper limit of the time, as a share of what is left of --max-seconds.
        gate: the stage ends when the exact match of each of these forms passes GATE, but not before `at_least` steps.
        rate: learning rate at the start and at the end, relative to the full one.
        sparse: answer rows attend to selected blocks, at random lengths up to this one.
    """

    name: str
    length: int
    steps: int
    share: float
    gate: tuple[str, ...] = ()
    at_least: int = 0
    mix: Mix = FULL
    rate: tuple[float, float] = (1.0, 1.0)
    sparse: bool = False


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


def token_stream(tokenizer: Tokenizer, books: Iterable[str], device: torch.device) -> Tensor:
    """All books as one row of tokens (n,) int64."""
    pieces = [book[i : i + 20_000] for book in books for i in range(0, len(book), 20_000)]
    ids = [i for encoding in tokenizer.encode_batch(pieces, add_special_tokens=False) for i in encoding.ids]
    return torch.tensor(ids, device=device)


def attention_backends(device: torch.device) -> list[SDPBackend]:
    """Fused attention backends of this GPU, the faster first; one whose gradients are off is left out."""
    if device.type == "cpu":
        return [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    shape, results = (2, 8, 8192, 64), {}
    inputs = [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            with sdpa_kernel(backend):
                for _ in range(3):
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    out = F.scaled_dot_product_attention(inputs[0], inputs[1], inputs[2], is_causal=True)
                    grads = torch.autograd.grad(out.float().square().sum(), inputs)
                    torch.cuda.synchronize()
                    results[backend] = (time.perf_counter() - start, grads)
        except RuntimeError as error:
            print(f"attention: {backend.name} is not usable here: {error}")
    expected = results[SDPBackend.FLASH_ATTENTION][1]
    for backend, (seconds, grads) in list(results.items()):
        off = max(float((g - e).float().norm() / e.float().norm()) for g, e in zip(grads, expected, strict=True))
        print(f"attention: {backend.name} {seconds * 1e3:.2f} ms, gradients differ by {off:.1e}")
        if off > 0.02:
            del results[backend]
    return sorted(results, key=lambda backend: results[backend][0])


@torch.no_grad()
def exact_match(model: TinyGQA, batch: Batch) -> float:
    """Share of rows in which every token of the answer, its end included, is the most probable one."""
    hidden = model(batch.tokens).view(*batch.tokens.shape, -1)
    wanted = (batch.roles == VALUE_ROLE) | (batch.roles == ANSWER_ROLE)
    right = torch.ones_like(wanted)
    for i in range(len(hidden)):
        right[i, 1:] = model.logits(hidden[i, :-1]).argmax(-1) == batch.tokens[i, 1:]
    rows = wanted.any(1)
    return float((right | ~wanted).all(1)[rows].float().mean()) if rows.any() else 0.0


class Trainer:
    """Model, optimisers and data of one run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.start = args, time.perf_counter()
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        cuda = self.device.type == "cuda"
        self.model = TinyGQA(torch.bfloat16 if cuda else torch.float32, compiled=cuda).to(self.device)
        tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
        self.builder, self.judge = (self._builder(tokenizer, split) for split in ("train", "eval"))
        self.rng = random.Random(args.seed)
        matrices = self.model.matrices()
        rest = [self.model.embed, *(w for w in self.model.parameters() if w.ndim == 1)]
        # Muon at 0.02 (3e-3 for the embedding) forms lookups by words after about as many steps of the short stage.
        self.optimizers = [
            torch.optim.AdamW(w, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=cuda) for w in (matrices, rest)
        ]
        self.base = [group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups]
        self.steps = 0

    def _builder(self, tokenizer: Tokenizer, split: str) -> BatchBuilder:
        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False).ids

        folder = self.args.data / "books" / ("train" if split == "train" else "heldout")
        stream = token_stream(tokenizer, read_books(folder).values(), self.device)
        print(f"{split}: {len(stream):,} tokens of books")
        return BatchBuilder(Vocabulary(encode, split, self.device), stream, self.args.seed + (split == "eval"))

    def seconds(self) -> float:
        """Time since the start."""
        return time.perf_counter() - self.start

    def lengths(self, stage: Stage) -> int:
        """Length of the next batch: a quarter of a dense stage's batches are shorter."""
        known = [s.length for s in STAGES if s.length <= stage.length]
        if stage.sparse:
            return self.rng.choices((1024, 2048, 4096, 8192, 32768), (15, 15, 25, 35, 10))[0]
        return self.rng.choice(known) if self.rng.random() < 0.25 else stage.length

    def rows(self, batch: Batch) -> Rows:
        """The answer rows, with a selector and a budget drawn anew."""
        length = batch.tokens.shape[1]
        places = torch.arange(length, device=self.device).where(batch.answer_weight > 0, -1)
        last = places.topk(min(64, length), 1).values
        selector = self.rng.choices(("quest", "quest_scores", "mass"), (50, 15, 35))[0]
        positions = last.where(last >= 0, length - 1)
        return Rows(positions, selector, self.rng.uniform(0.05, 0.2), least=self.rng.choice((4, 8, 16)))

    def step(self, stage: Stage, rate: float) -> Tensor:
        """One update; returns the losses (2,) of text and answers."""
        length = min(self.lengths(stage), self.args.max_length)
        sparse = stage.sparse and length < 32768
        batch = self.builder.batch(length, self.args.tokens, most_turns=4 if sparse else 16)
        rows = self.rows(batch) if sparse else None
        weights = (batch.lm_weight, batch.answer_weight)
        # A last batch of uneven rows has another number of tokens: only the usual number is compiled.
        plain = batch.tokens.numel() != self.args.tokens
        text, answer = self.model.loss(batch.tokens, *weights, rows, plain=plain)
        (stage.mix.text_weight * text + answer).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        rate *= min(1.0, (self.steps + 1) / WARM_UP)
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        for group, base in zip(groups, self.base, strict=True):
            group["lr"] = base * rate
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return torch.stack([text, answer]).detach()

    def measure(self, length: int, forms: tuple[str, ...], rows: int = 96, fill: float = 0.6) -> dict[str, float]:
        """Exact match by form on held-out books and keys of held-out words."""
        length = min(length, self.args.max_length)
        rows = max(1, min(rows, 4 * self.args.tokens // length))
        return {name: exact_match(self.model, self.judge.form_batch(name, length, rows, fill)) for name in forms}

    def run(self, stage: Stage) -> dict[str, Any]:
        """All steps of a stage; returns what the log keeps of it."""
        self.builder.mix = self.judge.mix = stage.mix
        begun, done, total = self.seconds(), 0, torch.zeros(2, device=self.device)
        steps, limit = min(stage.steps, self.args.steps), stage.share * (self.args.max_seconds - begun)
        while done < steps and self.seconds() - begun < limit:
            low, high = stage.rate
            total += self.step(stage, low + (high - low) * max(done / steps, (self.seconds() - begun) / limit))
            done += 1
            if done % 100:
                continue
            gate = self.measure(stage.length, stage.gate, 64)
            losses = [
                f"{name} {value:.3f}" for name, value in zip(("text", "answer"), (total / 100).tolist(), strict=True)
            ]
            matches = [f"{name} {value:.2f}" for name, value in gate.items()]
            print(stage.name, done, f"{self.seconds():.0f} s", *losses, *matches, flush=True)
            total.zero_()
            if gate and done >= stage.at_least and min(gate.values()) >= GATE:
                break
        line = {"stage": stage.name, "length": stage.length, "steps": done, "seconds": round(self.seconds() - begun, 1)}
        forms = tuple(name for name in REPORT_FORMS if name in stage.mix.forms)
        line["exact_match"] = {name: round(value, 3) for name, value in self.measure(stage.length, forms).items()}
        print(json.dumps(line), flush=True)
        return line


def main() -> None:
    """Trains all stages; the checkpoint is written after each."""
    parser = argparse.ArgumentParser(description="Trains the tiny GQA model")
    parser.add_argument("--data", type=Path, required=True, help="folder with books/train and books/heldout")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint and of training.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=131072, help="tokens per step")
    parser.add_argument("--steps", type=int, default=10**9, help="upper limit of the steps of every stage")
    parser.add_argument("--max-length", type=int, default=32768, help="upper limit of the length of every stage")
    parser.add_argument("--max-seconds", type=float, default=450.0, help="the stages share this time at most")
    args = parser.parse_args()
    trainer = Trainer(args)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if args.out.resolve() != args.tokenizer.resolve():
            shutil.copy(args.tokenizer / name, args.out / name)
    device = torch.cuda.get_device_name() if trainer.device.type == "cuda" else "CPU"
    parameters = sum(w.numel() for w in trainer.model.parameters())
    log = [{"seed": args.seed, "tokens_per_step": args.tokens, "device": device, "parameters": parameters}]
    with sdpa_kernel(attention_backends(trainer.device), set_priority=True):
        for stage in STAGES:
            log.append(trainer.run(stage))
            save(trainer.model, args.out)
            (args.out / "training.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))


if __name__ == "__main__":
    main()
