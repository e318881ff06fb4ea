"""Accuracy of a tiny checkpoint: ``python -m eval.lab.train.accuracy --model DIR --books DIR --out FILE.jsonl``.

Prompts are made as text (held-out books, keys of words that training never used) and tokenised as a server would. An
answer counts when each of its tokens and the end of the turn is the most probable one given the tokens before it, which
is what greedy decoding would produce.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from eval.lab.train.checkpoint import load
from eval.lab.train.dsa_model import TinyDSA
from eval.lab.train.layers import TinyModel
from eval.lab.train.sparse import Rows
from eval.texts.text import (
    FORMS,
    IM_END,
    Form,
    Haystack,
    hide,
    prompt_text,
    random_key,
    random_number,
    read_books,
    unique_keys,
)

LENGTHS = (256, 1024, 4096, 8192, 16384, 32768)
RATIOS = (0.05, 0.1, 0.2)
SPARSE_LENGTH = 8192


@dataclass(frozen=True)
class Task:
    """`fill`: share of the text that is records, 0 for a single one; at least `least` chains; earlier turns.

    `split`: the words that keys are made of; a model copies names made of unknown words less surely.
    """

    name: str
    form: Form
    fill: float = 0.0
    least: int = 1
    hops: int = 1
    turns: int = 0
    split: str = "eval"

    @property
    def value_digits(self) -> int:
        """Passkeys and variables are shorter than other numbers."""
        return 5 if self.form.keys == "none" or self.form.link else 7


TASKS = (
    Task("needle", FORMS["needle"]),
    Task("needle_ruler", FORMS["needle_ruler"]),
    Task("needle_sentence", FORMS["needle_sentence"]),
    Task("needle_boxed", FORMS["needle_boxed"]),
    Task("multikey_2%", FORMS["needle"], 0.02, 2),
    Task("multikey_2%_ruler", FORMS["needle_ruler"], 0.02, 2),
    Task("multikey_60%", FORMS["needle"], 0.6, 2),
    Task("multikey_60%_ruler", FORMS["needle_ruler"], 0.6, 2),
    Task("four_turns_2%", FORMS["needle"], 0.02, 4, turns=3),
    Task("passkey", FORMS["passkey"]),
    Task("passkey_completion", FORMS["passkey_completion"]),
    Task("var_2hop_2%", FORMS["var"], 0.02, 2, hops=2),
    Task("var_2hop_2%_completion", FORMS["var_completion"], 0.02, 2, hops=2),
    Task("var_2hop_2%_known_words", FORMS["var"], 0.02, 2, hops=2, split="train"),
    Task("records_60%", FORMS["records"], 0.6, 2),
    Task("json_95%", FORMS["json"], 0.95, 2),
    Task("json_95%_completion", FORMS["json_completion"], 0.95, 2),
)
SPARSE_TASKS = ("needle", "multikey_2%", "multikey_2%_ruler", "multikey_60%", "passkey", "var_2hop_2%", "json_95%")
BRIEF_TASKS = (*SPARSE_TASKS, "needle_ruler", "records_60%")
BRIEF_RATIO = 0.1
Choice = tuple[str, float]
"""Selector and ratio of the blocks."""
Job = tuple[Task, int, Choice | None]
"""What is measured: a task at a length, with the blocks of a selector or densely."""


@dataclass(frozen=True)
class Sample:
    """A prompt as text, chat template included, and the whole right answer."""

    prompt: str
    answer: str


class Sampler:
    """Makes prompts of a task at a length."""

    def __init__(self, tokenizer: Tokenizer, books: dict[str, str], seed: int) -> None:
        self.tokenizer, self.seed = tokenizer, seed
        self.haystacks = [Haystack(text, self.sizes) for text in books.values()]

    def sizes(self, texts: list[str]) -> list[int]:
        """Tokens of each text."""
        return [len(e.ids) for e in self.tokenizer.encode_batch(texts, add_special_tokens=False)]

    def samples(self, task: Task, length: int, n: int) -> list[Sample]:
        """`n` prompts, the same for the same seed, task and length."""
        rng = random.Random(f"{self.seed} {task.name} {length}")
        return [self.sample(task, length, rng) for _ in range(n)]

    def sample(self, task: Task, length: int, rng: random.Random) -> Sample:
        """A prompt that together with its answer stays within `length` tokens."""
        form, least = task.form, max(task.least, task.turns + 1)
        asked = self._chains(task, rng, least)
        lines = [form.records(*keys, value=value) for keys, value in asked]
        pairs = [(form.question(*keys[:1]), form.answer(*keys, value=value)) for keys, value in asked]
        per_chain = max(self.sizes(["\n".join(line) + "\n" for line in lines])) + 1
        pairs = pairs[: task.turns + 1]
        around = sum(self.sizes([q + a for q, a in pairs])) + 16 * len(pairs)
        free = length - around
        count = max(least, int(task.fill * free / per_chain))
        if count > least:
            more = self._chains(task, rng, count - least, {keys[0] for keys, _ in asked if keys})
            lines += [form.records(*keys, value=value) for keys, value in more]
        records = [record for line in lines for record in line]
        room = free - per_chain * len(lines)
        sentences = rng.choice(self.haystacks).draw(rng, max(0, room))
        joiner = " " if form.last_record.endswith(".") else "\n"
        text = hide(sentences, records, [rng.random() for _ in records], joiner)
        question, answer = pairs[-1]
        return Sample(prompt_text(form, text, question, pairs[:-1]), answer)

    def _chains(
        self, task: Task, rng: random.Random, n: int, taken: set[str] | None = None
    ) -> list[tuple[tuple[str, ...], str]]:
        """`n` chains of keys with their values; the keys avoid `taken`."""
        if task.form.keys == "none":
            return [((), random_number(rng, task.value_digits))]
        if task.form.keys == "digits":
            keys = unique_keys(rng, n * task.hops, lambda r: random_number(r, 8))
        else:
            keys = unique_keys(rng, n * task.hops, lambda r: random_key(r, split=task.split))
        if taken:
            keys = [key if key not in taken else key + "0" for key in keys]
        chains = [tuple(keys[i * task.hops : (i + 1) * task.hops]) for i in range(n)]
        return [(chain, random_number(rng, task.value_digits)) for chain in chains]


@torch.no_grad()
def judge(model: TinyModel, tokenizer: Tokenizer, samples: list[Sample], rows: Choice | None) -> list[bool]:
    """Whether each answer is exact; with rows = (selector, ratio) the decode steps attend sparsely."""
    device = model.embed.device
    prompts = [e.ids for e in tokenizer.encode_batch([s.prompt for s in samples], add_special_tokens=False)]
    answers = [e.ids for e in tokenizer.encode_batch([s.answer + IM_END for s in samples], add_special_tokens=False)]
    width = -(-max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True)) // 16) * 16
    span = max(map(len, answers))
    tokens = torch.tensor(
        [p + a + [0] * (width - len(p) - len(a)) for p, a in zip(prompts, answers, strict=True)], device=device
    )
    first = torch.tensor([len(p) - 1 for p in prompts], device=device)[:, None]
    last = first + torch.tensor([len(a) for a in answers], device=device)[:, None] - 1
    places = (first + torch.arange(span, device=device)).minimum(last)
    # The prompt's last token is a prefill row on a server, hence dense; the rows after it are decode steps.
    decoded = places.maximum(first + 1).minimum(last)
    sparse = Rows(decoded, *rows) if rows else None
    hidden = model(tokens, sparse).view(*tokens.shape, -1)
    picked = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))
    right: Tensor = model.logits(picked).argmax(-1) == tokens.gather(1, places + 1)
    return right.all(1).tolist()


def chunks(samples: list[Sample], size: int) -> Iterator[list[Sample]]:
    """Pieces of at most `size` samples."""
    for i in range(0, len(samples), size):
        yield samples[i : i + size]


def measure(
    model: TinyModel, sampler: Sampler, task: Task, length: int, n: int, rows: Choice | None = None
) -> dict[str, object]:
    """One line of the result file."""
    start = time.perf_counter()
    size = max(1, (131072 if model.embed.is_cuda else 4096) // length)
    samples = sampler.samples(task, length, n)
    right = [ok for part in chunks(samples, size) for ok in judge(model, sampler.tokenizer, part, rows)]
    line: dict[str, object] = {"task": task.name, "form": task.form.name, "length": length, "n": n}
    line |= {"selector": rows[0] if rows else model.native, "ratio": rows[1] if rows else native_ratio(model, length)}
    line |= {"exact_match": round(sum(right) / n, 4), "seconds": round(time.perf_counter() - start, 1)}
    return line


def native_ratio(model: TinyModel, length: int) -> float:
    """Share of the tokens that a row attends to by itself."""
    return min(1.0, model.topk / length) if isinstance(model, TinyDSA) else 1.0


def choices(model: TinyModel, length: int) -> list[Choice]:
    """Selectors and ratios to compare; an indexer's choice has a fixed size, and so have the others."""
    if isinstance(model, TinyDSA):
        return [(name, 1.0 if name == "dense" else native_ratio(model, length)) for name in model.selectors]
    return list(product(model.selectors, RATIOS))


def jobs(model: TinyModel, max_length: int) -> list[Job]:
    """What is measured, in order: as the model attends by itself up to 8k, with other choices, by itself above."""
    lengths = [length for length in LENGTHS if length <= max_length]
    short = [(task, length, None) for length in lengths if length <= SPARSE_LENGTH for task in TASKS]
    long = [(task, length, None) for length in lengths if length > SPARSE_LENGTH for task in TASKS]
    chosen = [task for task in TASKS if task.name in SPARSE_TASKS]
    length = min(SPARSE_LENGTH, max_length)
    sparse = [(task, length, rows) for rows in choices(model, length) for task in chosen]
    return [*short, *sparse, *long]


def is_brief(job: Job) -> bool:
    """Whether a job belongs to a first look, a tenth of the whole."""
    return job[0].name in BRIEF_TASKS and (job[2] is None or job[2][1] == BRIEF_RATIO or job[2][1] not in RATIOS)


def write(
    model: TinyModel,
    sampler: Sampler,
    wanted: Sequence[Job],
    out: Path,
    n: int,
    append: bool = False,
    seconds: float = float("inf"),
) -> None:
    """Measures and writes one line per job, until the time is over.

    Args:
        n: prompts per job; half of it above 8k tokens and if sparse.
        append: keep the lines that are in the file.
    """
    end, device = time.perf_counter() + seconds, model.embed.device.type
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a" if append else "w") as file:
        for task, length, rows in wanted:
            if time.perf_counter() > end:
                print("accuracy: the time is over")
                return
            count = max(1, n if length <= SPARSE_LENGTH and not rows else n // 2)
            line = measure(model, sampler, task, length, count, rows)
            print(json.dumps(line), flush=True)
            file.write(json.dumps(line | {"seed": sampler.seed, "device": device}) + "\n")
            file.flush()


def main() -> None:
    """Measures and writes one line per task, length and selector."""
    parser = argparse.ArgumentParser(description="Accuracy of a tiny checkpoint")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--books", type=Path, required=True, help="folder with held-out books")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file")
    parser.add_argument(
        "--n", type=int, default=200, help="prompts per task and length; half of it above 8k tokens and if sparse"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tasks", nargs="*", default=[task.name for task in TASKS], help="only these, dense")
    parser.add_argument("--append", action="store_true", help="keep the lines that are in the file")
    parser.add_argument("--max-length", type=int, default=LENGTHS[-1])
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    model = load(args.model, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    sampler = Sampler(Tokenizer.from_file(str(args.model / "tokenizer.json")), read_books(args.books), args.seed)
    named = [task for task in TASKS if task.name in args.tasks]
    lengths = [length for length in LENGTHS if length <= args.max_length]
    wanted: Sequence[Job] = [(task, length, None) for length in lengths for task in named]
    if named == list(TASKS):
        wanted = jobs(model, args.max_length)
    write(model, sampler, wanted, args.out, args.n, args.append)


if __name__ == "__main__":
    main()
