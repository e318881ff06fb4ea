"""``python -m eval.lab.recall``: how much of a checkpoint's attention the pages that a decode method selects keep.

No server: the checkpoint runs in this process with transformers and dense attention, and at each of the last positions
of a prompt the method itself, the code that a server runs, selects from the keys that decode would find there. For
every layer and query head:

- *mass*: the share of the attention mass that falls on selected tokens, mean and 5th percentile over positions;
- the same for the *best* selection of as many pages, by true mass for each KV head, and for *random* pages; of an MLA
  model, which robsa serves, of as many blocks, one selection for all heads;
- *error*: relative L2 distance of the attention output, over the selected tokens, to that over all of them.

All earlier KV is exact here and no layer sees what a selection did to the one before: for what adds up over layers and
steps see `eval.long_generation`. Rows that a server would run dense (``min_seq_len``, ``crossover_tokens``) are judged
too. KV is float32 on a CPU and bfloat16 on a GPU.

Prompts are needles in books: the text, the question and the right answer, so that the last positions are those that
look the needle up; or stretches of a text of your own (``--text``). After "Attention mass recall" as papers on KV
selection report it; there is no official definition.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tqdm import tqdm

from eval.lab.selection.recall_attention import (
    SELECTORS,
    Captured,
    Judged,
    Selection,
    capture,
    judge,
    load_model,
    model_facts,
)
from eval.lab.selection.recall_method import method_settings, require_served, select, selected_share
from eval.lab.selection.recall_summary import plot, summarise
from eval.live.client import list_of
from eval.live.counters import EvaluationError
from eval.live.record import Record
from eval.live.tokens import Tokens, fit, tokens
from eval.scores.pictures import add_file_arguments, rows_of
from eval.texts import haystacks
from eval.texts.lengths import length as parse_length
from eval.texts.text import FORMS, hide, messages, prompt_text, random_key, random_number
from eval.texts.windows import make_windows

COMMAND = "eval.lab.recall"
# What the results depend on; the config of the method is added as it was resolved.
ARGUMENTS = ("method", "model_path", "lengths", "n", "queries", "text", "book", "no_chat", "seed")


@dataclass(frozen=True)
class Prompt:
    """Token ids of one prompt, its place among those of its length, and where it is from."""

    length: int
    index: int
    tokens: Sequence[int]
    facts: dict[str, Any]

    @property
    def id(self) -> str:
        """Unique within a run."""
        return f"{self.length}/{self.index}"


def needle_prompt(args: argparse.Namespace, tokenizer: Tokens, length: int, index: int) -> Prompt:
    """A needle in a book, the question for it and the answer, `length` tokens together."""
    rng = random.Random(f"{args.seed} {length} {index}")
    form = FORMS["needle_ruler" if args.no_chat else "needle"]
    key, value, depth, start = random_key(rng), random_number(rng), rng.random(), rng.random()
    parts = haystacks.haystack("books", tuple(args.book), tokenizer)
    question, answer, record = form.question(key), form.answer(key, value=value), form.record(key, value=value)

    def make(filling: int) -> list[int]:
        taken = parts.draw(random.Random(start), filling)
        text = hide(taken, [record], [haystacks.share(taken, depth)])
        if args.no_chat:
            return tokenizer.start() + tokenizer.encode(prompt_text(form, text, question) + answer)
        return tokenizer.chat(messages(text, (), question), prefix=answer)

    return Prompt(length, index, fit(make, length), {"key": key, "value": value, "depth": round(depth, 4)})


def text_prompts(args: argparse.Namespace, tokenizer: Tokens, length: int) -> list[Prompt]:
    """Stretches of the text of ``--text`` that do not overlap.

    Raises:
        EvaluationError: it holds fewer.
    """
    start = tokenizer.start()
    ids = tokenizer.encode(haystacks.book_text(args.text))
    size = length - len(start)
    if len(ids) < args.n * size:
        raise EvaluationError(
            f"--text {args.text}: {len(ids)} tokens hold {len(ids) // size} stretches of {size} tokens, wanted "
            f"{args.n}: lower --n or --lengths"
        )
    windows = make_windows({Path(args.text).name: ids}, size, args.n, args.seed)
    return [
        Prompt(length, i, start + list(window.tokens), {"text": window.book, "start": window.start})
        for i, window in enumerate(windows)
    ]


def prompts(args: argparse.Namespace, tokenizer: Tokens) -> Iterator[Prompt]:
    """All prompts, the shortest first."""
    for length in args.lengths:
        if args.text:
            yield from text_prompts(args, tokenizer, length)
        else:
            yield from (needle_prompt(args, tokenizer, length, i) for i in range(args.n))


def item_rows(prompt: Prompt, captured: Captured, chosen: Selection, judged: Judged) -> list[dict[str, Any]]:
    """One row for each query head of a layer."""
    q_heads, selections = captured.query.shape[1], chosen.counts.shape[1]
    held = captured.positions // chosen.unit + 1
    density = (chosen.counts / held[:, None]).mean(0).tolist()
    rows = []
    for head in range(q_heads):
        kept = {name: judged.mass[name][head] for name in SELECTORS}
        scores = {"mass" if name == "method" else name: float(kept[name].mean()) for name in SELECTORS}
        for name in SELECTORS:
            scores["error" if name == "method" else f"{name}_error"] = float(judged.error[name][head].mean())
        rows.append(
            {
                "id": f"{prompt.id}/{captured.layer}/{head}",
                "length": prompt.length,
                "index": prompt.index,
                "layer": captured.layer,
                "head": head,
                "scores": {name: round(score, 6) for name, score in scores.items()},
                "density": round(density[head * selections // q_heads], 6),
                "kept": {name: [round(mass, 4) for mass in kept[name].tolist()] for name in SELECTORS},
            }
        )
    return rows


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all prompts and write the file.

    Returns:
        The summary, see `eval.lab.selection.recall_summary.summarise`.

    Raises:
        EvaluationError: see the functions that this one calls.
    """
    settings = method_settings(args.method, args.sparse_config)
    if selected_share(settings, args.lengths[0]) >= 1:
        raise EvaluationError(f"--lengths: the method selects all pages of {args.lengths[0]} tokens; ask for more")
    described = model_facts(args.model_path)
    layers = require_served(settings, described)
    if args.lengths[-1] > described.context_len:
        raise EvaluationError(f"--lengths {args.lengths[-1]}: the model's context is {described.context_len} tokens")
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    model, tokenizer = load_model(args.model_path, device, dtype), tokens(args.model_path)
    task = "text" if args.text else "needle"
    arguments = {name: getattr(args, name) for name in ARGUMENTS} | {"config": settings.config.model_dump()}
    arguments["dtype"] = str(dtype).removeprefix("torch.")
    facts = {"class": type(model).__name__, "layers": described.num_hidden_layers, "device": device}
    header = {"arguments": arguments, "label": args.label, "model": facts}
    with Record(args.out, COMMAND, args.revision, resume=True, **header) as record:
        rows = list(record.earlier)
        done = {row["id"] for row in rows if row["kind"] == "prompt"}

        def add(kind: str, **fields: Any) -> None:
            rows.append({"kind": kind, **fields})
            record.add(kind, **fields)

        for prompt in tqdm(prompts(args, tokenizer), total=args.n * len(args.lengths), desc=COMMAND):
            if prompt.id in done:
                continue

            def visit(captured: Captured, prompt: Prompt = prompt) -> None:
                if captured.layer not in layers:
                    return
                chosen = select(settings, captured, described)
                judged = judge(
                    captured, chosen, random.Random(f"{args.seed} {prompt.id} {captured.layer}").getrandbits(60)
                )
                for row in item_rows(prompt, captured, chosen, judged):
                    add("item", task=task, arm=args.method, **row)

            capture(model, prompt.tokens, args.queries, visit)
            # Only now is the prompt whole.
            add("prompt", id=prompt.id, tokens=len(prompt.tokens), facts=prompt.facts)
        summary = summarise(rows, args.seed)
        for row in summary:
            record.add("summary", **row)
    return summary


def add_prompt_arguments(parser: argparse.ArgumentParser, lengths: str, n: int) -> None:
    """Arguments of a command whose prompts are those of `prompts`, but for the seed.

    Args:
        parser: of the command line.
        lengths: default of ``--lengths``.
        n: default of ``--n``.
    """
    parser.add_argument("--model-path", help="folder or name of a checkpoint that transformers loads")
    parser.add_argument("--lengths", type=list_of(parse_length), default=lengths, help="tokens of the prompts")
    parser.add_argument("--n", type=int, default=n, help="prompts of each length")
    parser.add_argument("--text", help="text file to take the prompts from, .txt or .txt.xz, instead of needles")
    parser.add_argument("--book", action="append", default=[], help="text file to hide needles in; repeat for more")
    parser.add_argument("--no-chat", action="store_true", help="raw prompts, for a model without a chat template")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, checked as far as neither method nor model are needed for it.

    Raises:
        EvaluationError: names the argument, what it was and what is allowed.
    """
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_prompt_arguments(parser, "1k,8k", 4)
    parser.add_argument("--method", default="resa", help="as for --sparse-method of a server")
    parser.add_argument("--sparse-config", help="as for --sparse-config of a server: JSON or a file")
    parser.add_argument("--queries", type=int, default=32, help="last positions of a prompt that are judged")
    add_file_arguments(parser, "a model")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts, the random pages and the bootstrap")
    args = parser.parse_args(arguments)
    if args.file is None and (args.model_path is None or args.out is None):
        raise EvaluationError("--model-path and --out are needed, or --from")
    for name in ("n", "queries"):
        if getattr(args, name) < 1:
            raise EvaluationError(f"--{name} {getattr(args, name)}: allowed is 1 or more")
    args.lengths = sorted(set(args.lengths))
    if not args.lengths or args.lengths[0] <= args.queries:
        raise EvaluationError(f"--lengths {args.lengths}: allowed is a list of lengths above --queries {args.queries}")
    return args


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 1 when its figures would not show what they say."""
    try:
        args = parse(arguments)
        summary = summarise(rows_of(args.file, COMMAND), args.seed) if args.file else run(args)
        if args.plot:
            plot(summary, args.plot)
    except (EvaluationError, torch.OutOfMemoryError) as error:
        print(f"{COMMAND}: {error}", file=sys.stderr)
        return 1
    shown = [row | {"layer": "all" if row["layer"] is None else row["layer"]} for row in summary if row["head"] is None]
    print(pd.DataFrame(shown).drop(columns="head").to_string(index=False, float_format="{:.4f}".format))
    return 0


if __name__ == "__main__":
    sys.exit(main())
