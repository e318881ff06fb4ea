"""``python -m eval.lab.theta``: sparsity and attention mass of AnchorAttention's prefill against its threshold.

No server: prompts are prefilled in one piece, each layer's queries and keys are looked at in this process, and the
definition of the method (the reference of the kernel op) says which query-key pairs it keeps at every threshold. For
each threshold, with the anchor and without (the ablation of the paper's table 4: scores are compared with 0, so that
thresholds below 0 are of interest, too), averaged over layers and heads:

- *sparsity*: the share of the causal query-key pairs that are left out;
- *recall*: the share of the attention mass that falls on the pairs that are kept, mean over queries;
- *oracle*: the most that as many keys of each group of queries and head could keep, and beside those that the method
  always keeps, which alone keep *always*, *random*: what as many random ones keep, and *window*: as many of the newest.

Rows of the kind ``anchors`` say how far apart the anchors are that the scores are compared with: by query head the mean
over its blocks of queries, and their standard deviation.

With ``--planted`` there are rows of the kind ``planted``: in each group so many queries of a block look for one key far
before it (`eval.lab.selection.recall_planted`), and the rows say which share of such keys the method finds, and as many
random or newest keys do.

Prompts are needles in books or stretches of a text (``--text``) on a checkpoint, as for `eval.lab.recall`, or attention
of a known structure (``--structured``, see `eval.lab.structured`), which needs no model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import torch
from tqdm import tqdm

from eval.lab.recall import add_prompt_arguments, prompts
from eval.lab.selection.recall_attention import Captured, capture, load_model
from eval.lab.selection.recall_planted import find, places, plant
from eval.lab.selection.recall_prefill import anchors, measure
from eval.lab.selection.theta_summary import PLANTED, SHARED, plot, summarise
from eval.lab.structured.generator import make_qkv, read_recipe
from eval.live.client import list_of
from eval.live.counters import EvaluationError
from eval.live.record import Record
from eval.live.tokens import tokens
from eval.scores.pictures import add_file_arguments, rows_of

COMMAND = "eval.lab.theta"
ARGUMENTS = (
    "model_path",
    "structured",
    "lengths",
    "n",
    "thetas",
    "block_size",
    "step",
    "text",
    "book",
    "no_chat",
    "planted",
)


def sources(args: argparse.Namespace) -> Iterator[tuple[str, int, Callable[[Callable[[Captured], None]], None]]]:
    """Every prompt: its id, its tokens, and a function that shows its layers one by one."""
    if args.structured is None:
        model, tokenizer = load_model(args.model_path, "cpu", torch.float32), tokens(args.model_path)
        for prompt in prompts(args, tokenizer):
            ids = prompt.tokens
            yield prompt.id, prompt.length, lambda visit, ids=ids: capture(model, ids, len(ids), visit)
        return
    recipe = read_recipe(args.structured)
    for length in args.lengths:
        for index in range(args.n):

            def show(visit: Callable[[Captured], None], length: int = length, index: int = index) -> None:
                query, key, value = make_qkv(length, 8, 2, 64, recipe, args.seed + index, dtype=torch.float32)
                visit(Captured(0, query, key, value, 64**-0.5))

            yield f"{length}/{index}", length, show


def task_of(args: argparse.Namespace) -> str:
    """What the prompts are."""
    if args.structured is None:
        return "text" if args.text else "needle"
    return "structured, level" if read_recipe(args.structured).has_level else "structured"


def judged(args: argparse.Namespace, captured: Captured, prompt: str, length: int) -> Iterator[dict[str, Any]]:
    """The rows of a layer: ``anchors``, an ``item`` for each comparison and threshold, and ``planted`` if asked for."""
    place = {"task": task_of(args), "length": length, "layer": captured.layer}

    def by_head(values: torch.Tensor) -> list[float]:
        return [round(value, 5) for value in values.tolist()]

    found = anchors(captured, args.block_size, args.step)
    spread = {"mean": by_head(found.mean(1)), "deviation": by_head(found.std(1))}
    yield {"kind": "anchors", "id": f"{prompt}/{captured.layer}", **place, **spread}
    for kept in measure(captured, args.thetas, args.block_size, args.step):
        name = f"{prompt}/{captured.layer}/{kept.anchor}/{kept.theta}"
        shares = {share: by_head(getattr(kept, share)) for share in SHARED}
        yield {"kind": "item", "id": name, **place, "anchor": kept.anchor, "theta": kept.theta, **shares}
    sizes = args.block_size, args.step
    keys = places(length, captured.key.shape[1], args.planted, *sizes, f"{args.seed} {prompt}")
    for one in find(plant(captured, keys), keys, args.thetas, *sizes) if keys else ():
        name = f"{prompt}/{captured.layer}/planted/{one.queries}/{one.theta}"
        shares = {share: by_head(getattr(one, share)) for share in PLANTED}
        facts = {"queries": one.queries, "theta": one.theta, "keys": one.keys}
        yield {"kind": "planted", "id": name, **place, **facts, **shares}


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all prompts and write the file.

    Returns:
        The summary, see `eval.lab.selection.theta_summary.summarise`.

    Raises:
        EvaluationError: see the functions that this one calls.
    """
    arguments = {name: getattr(args, name) for name in ARGUMENTS} | {"seed": args.seed}
    with Record(args.out, COMMAND, args.revision, resume=True, arguments=arguments, label=args.label) as record:
        rows = list(record.earlier)
        done = {row["id"] for row in rows if row["kind"] == "prompt"}
        for prompt, length, show in tqdm(sources(args), total=args.n * len(args.lengths), desc=COMMAND):
            if prompt in done:
                continue

            def visit(captured: Captured, prompt: str = prompt, length: int = length) -> None:
                for row in judged(args, captured, prompt, length):
                    rows.append(row)
                    record.add(**row)

            with torch.inference_mode():
                show(visit)
            # Only now is the prompt whole.
            record.add("prompt", id=prompt, tokens=length)
        summary = summarise(rows)
        for row in summary:
            record.add("summary", **row)
    return summary


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line.

    Raises:
        EvaluationError: names the argument, what it was and what is allowed.
    """
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_prompt_arguments(parser, "8k", 1)
    parser.add_argument("--structured", type=json.loads, help="recipe of structured attention, as JSON, {} for its own")
    parser.add_argument("--thetas", type=list_of(float), default="-8,-6,-4,-2,0,2,4,6,8,10,12,14", help="thresholds")
    parser.add_argument("--block-size", type=int, default=128, help="queries of a block")
    parser.add_argument("--step", type=int, default=16, help="query blocks of a group")
    parser.add_argument(
        "--planted", type=list_of(int), default=[], metavar="N,N", help="queries that look for a planted key each"
    )
    add_file_arguments(parser, "a model")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    args = parser.parse_args(arguments)
    if args.file is None and args.out is None:
        raise EvaluationError("--out is needed, or --from")
    if args.file is None and (args.model_path is None) == (args.structured is None):
        raise EvaluationError("one of --model-path and --structured is needed, and only one")
    if args.n < 1:
        raise EvaluationError(f"--n {args.n}: allowed is 1 or more")
    args.lengths, args.thetas = sorted(set(args.lengths)), sorted(set(args.thetas))
    group = args.block_size * args.step
    if not args.lengths or args.lengths[0] <= group:
        raise EvaluationError(f"--lengths {args.lengths}: allowed is a list of lengths above a group of {group} tokens")
    if not all(1 <= count <= args.block_size for count in args.planted) or len(args.planted) > args.step:
        raise EvaluationError(
            f"--planted {args.planted}: allowed are up to {args.step} numbers from 1 to {args.block_size}, a block"
        )
    return args


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 1 when its figures would not show what they say."""
    try:
        args = parse(arguments)
        summary = summarise(rows_of(args.file, COMMAND)) if args.file else run(args)
        if args.plot:
            plot(summary, args.plot)
    except (EvaluationError, ValueError) as error:
        print(f"{COMMAND}: {error}", file=sys.stderr)
        return 1
    print(pd.DataFrame(summary).to_string(index=False, float_format="{:.4f}".format))
    return 0


if __name__ == "__main__":
    sys.exit(main())
