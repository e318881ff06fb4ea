"""``python -m eval.lab.blind``: which layers of a checkpoint look a needle's number up.

    python -m eval.lab.blind --model-path eval/models/tiny-gqa --lengths 2k --n 50 --out blind.jsonl

No server: the checkpoint runs in this process with transformers and dense attention. Prompts are those of
`eval.lab.recall`: a needle in a book, the question and the right answer. In one layer at a time every token behind the
number is kept from attending to it, and an answer counts by what the model would have said then: its first token, which
nothing but the text tells, and each of them behind those before it. A layer without which the first one is lost looks
the number up; where several do, each may stand for the other.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tqdm import tqdm

from eval.lab.recall import add_prompt_arguments, prompts
from eval.lab.selection.recall_attention import load_model, model_facts
from eval.live.counters import EvaluationError
from eval.live.record import Record
from eval.live.tokens import tokens
from eval.scores.stats import mean_interval

COMMAND = "eval.lab.blind"
ARGUMENTS = ("model_path", "lengths", "n", "text", "book", "no_chat", "seed")


def place_of(number: Sequence[int], ids: Sequence[int]) -> int:
    """Where the first of a number's tokens stands in a prompt for the first time.

    Raises:
        EvaluationError: nowhere, or at the end alone, where the answer is.
    """
    size = len(number)
    found = [start for start in range(len(ids) - size + 1) if list(ids[start : start + size]) == list(number)]
    if len(found) < 2:
        raise EvaluationError("the tokenizer reads a number in the text otherwise than in the answer")
    return found[0]


@contextmanager
def hidden(model: Any, layer: int | None, first: int, end: int) -> Iterator[None]:
    """Keep all tokens from ``end`` on from attending to those from ``first`` on before it, in one layer or in none."""
    if layer is None:
        yield
        return

    def hide(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        states = kwargs["hidden_states"]
        count = states.shape[1]
        unseen = torch.ones(count, count, dtype=torch.bool, device=states.device).triu(1)
        unseen[end:, first:end] = True
        mask = torch.zeros(count, count, dtype=states.dtype, device=states.device).masked_fill(unseen, -torch.inf)
        return args, {**kwargs, "attention_mask": mask[None, None]}

    handle = model.model.layers[layer].self_attn.register_forward_pre_hook(hide, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def said(model: Any, ids: Sequence[int], number: Sequence[int], first: int, layer: int | None) -> dict[str, float]:
    """Whether the model says the first token of the number that ends a prompt, and each of them after those before.

    The number stands in the prompt from ``first`` on, too, where ``layer`` does not see it.
    """
    size = len(number)
    with torch.inference_mode(), hidden(model, layer, first, first + size):
        logits = model(torch.tensor([ids[:-1]], device=model.device), logits_to_keep=size).logits[0]
    right = (logits.argmax(-1).cpu() == torch.tensor(number)).tolist()
    return {"first": float(right[0]), "all": float(all(right))}


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Ask all prompts and write the file; returns its summary.

    Raises:
        EvaluationError: see the functions that this one calls.
    """
    described = model_facts(args.model_path)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    model, tokenizer = load_model(args.model_path, device, dtype), tokens(args.model_path)
    arguments = {name: getattr(args, name) for name in ARGUMENTS}
    layers = [None, *range(described.num_hidden_layers)]
    scores: dict[tuple[int, int | None], list[dict[str, float]]] = {}
    with Record(args.out, COMMAND, args.revision, arguments=arguments, model={"device": device}) as record:
        for prompt in tqdm(prompts(args, tokenizer), total=args.n * len(args.lengths), desc=COMMAND):
            number = tokenizer.encode(prompt.facts["value"])
            first = place_of(number, prompt.tokens)
            for layer in layers:
                score = said(model, prompt.tokens, number, first, layer)
                scores.setdefault((prompt.length, layer), []).append(score)
                record.add("item", id=prompt.id, task="needle", arm="hidden", layer=layer, scores=score)
        summary = []
        for (length, layer), found in scores.items():
            row: dict[str, Any] = {"task": "needle", "length": length, "layer": layer, "n": len(found)}
            for name in ("first", "all"):
                values = [score[name] for score in found]
                row |= {name: sum(values) / len(values), f"{name}_interval": mean_interval(values)}
            summary.append(row)
            record.add("summary", arm="hidden", **row)
    return summary


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 1 when its figures would not show what they say."""
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_prompt_arguments(parser, "2k", 50)
    parser.add_argument("--out", type=Path, required=True, help="JSONL file")
    parser.add_argument("--revision", help="of this code, where its git history is not at hand")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    args = parser.parse_args(arguments)
    try:
        if args.model_path is None or args.text is not None or args.n < 1 or not args.lengths:
            raise EvaluationError("--model-path, --n of 1 or more and --lengths are needed; --text hides no needles")
        summary = run(args)
    except (EvaluationError, torch.OutOfMemoryError) as error:
        print(f"{COMMAND}: {error}", file=sys.stderr)
        return 1
    shown = pd.DataFrame(summary).astype({"layer": object}).fillna({"layer": "none"})
    print(shown.to_string(index=False, float_format="{:.3f}".format))
    return 0


if __name__ == "__main__":
    sys.exit(main())
