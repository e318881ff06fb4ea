"""``python -m eval.lab.selection.page_statistics``: which statistic of a page finds what a model attends to.

    python -m eval.lab.selection.page_statistics --model-path Qwen/Qwen2.5-Coder-0.5B-Instruct --out FILE.jsonl

No server: a prompt and its answer run through the checkpoint with dense attention, and for the last positions, every
layer and every KV head each statistic chooses as many pages as ReSA would. Of the choice:

- *mass*: the share of the attention mass, mean over the heads of the group, that falls on chosen pages;
- *found*: how often the page of most mass, but for the first page, which holds the sink, is among them.

The texts are those of RULER on which selections differ (two of needles only, needles in essays, the most common words),
and a book; their answers stand behind them. Pages are of 16 tokens. Those that the judged positions write to are
attended to by all, and so is the page before them, as the newest pages of a row are.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from eval.lab.selection.captured_attention import Captured, capture, load_model, model_facts
from eval.live.client import list_of
from eval.live.counters import EvaluationError
from eval.live.record import Record
from eval.live.suite import Case
from eval.live.tokens import Tokens, tokens
from eval.ruler import RulerSuite
from eval.scores.pictures import rows_of
from eval.texts.lengths import length as parse_length
from eval.texts.text import read_book
from eval.texts.windows import BOOK, make_windows
from sglang_sparse.methods.fingerprint import fingerprint
from sglang_sparse_kernels.page_centroids.reference import means, pack, unpack
from sglang_sparse_kernels.page_vote import page_vote

COMMAND = "eval.lab.selection.page_statistics"
PAGE, LEAST = 16, 16
BOOK_TEXT = "book"
TEXTS = {"mk2": "niah_multikey_2", "mk3": "niah_multikey_3", "essay": "niah_multikey_1", "cwe": "cwe", BOOK_TEXT: None}
# What an answer may add to a prompt.
ANSWER = 96

# Scores ``[queries, kv_heads, pages]`` of keys ``[pages, P, kv_heads, d]`` and queries ``[queries, q_heads, d]``.
Statistic = Callable[[Tensor, Tensor, float], Tensor]


def rounded(vectors: Tensor) -> Tensor:
    """As float8 holds them."""
    return vectors.to(torch.float8_e4m3fn).float()


def _voters(query: Tensor, heads: int, mean: bool) -> Tensor:
    return query.unflatten(1, (heads, -1)).mean(2) if mean else query


def _votes(logits: Tensor) -> Tensor:
    """Scores by logits ``[queries, kv_heads, group, pages]``: each head's softmax, of which the mean counts."""
    return logits.log_softmax(-1).logsumexp(2)


def _products(query: Tensor, vectors: Tensor, scale: float) -> Tensor:
    """``[queries, kv_heads, group, pages, vectors]`` of ``[pages, vectors, kv_heads, d]``."""
    grouped = query.unflatten(1, (vectors.shape[2], -1)).float()
    return torch.einsum("qhgd,pvhd->qhgpv", grouped * scale, vectors)


def minmax(keys: Tensor, query: Tensor, scale: float, mean: bool) -> Tensor:
    """Quest's bound, as a server scores by it before a newest page."""
    pages, heads = len(keys), keys.shape[2]
    table = torch.arange(pages + 1, dtype=torch.int32).expand(len(query), -1) % pages
    counts = torch.full((len(query),), pages + 1, dtype=torch.int32)
    summary = torch.stack([keys.amax(1), keys.amin(1)], 2)
    return page_vote(_voters(query, heads, mean).float(), summary, table, counts, scale)[..., :pages]


def centroids(keys: Tensor, query: Tensor, scale: float, count: int, mean: bool = False, packed: bool = True) -> Tensor:
    """Means of keys that lie together; of one, of all. As a server packs them, or each in float8."""
    written = torch.ones(keys.shape[:2], dtype=torch.bool)
    found = unpack(pack(keys, written, count), keys.shape[3]) if packed else rounded(means(keys, written, count))
    products = _products(_voters(query, keys.shape[2], mean), found.transpose(1, 2), scale)
    return _votes((products - math.log(2) * torch.arange(count)).logsumexp(-1))


def parts(keys: Tensor, query: Tensor, scale: float, count: int) -> Tensor:
    """Means of equal parts of the page, in the order of positions."""
    vectors = rounded(keys.unflatten(1, (count, -1)).mean(2))
    return _votes(_products(query, vectors, scale).logsumexp(-1))


def minmax_mean(keys: Tensor, query: Tensor, scale: float) -> Tensor:
    """The mean, a quarter of the way to the bound."""
    grouped = query.unflatten(1, (keys.shape[2], -1)).float() * scale
    most, least, mean = (rounded(x) for x in (keys.amax(1), keys.amin(1), keys.mean(1)))
    bound = torch.einsum("qhgd,phd->qhgp", grouped.clamp(min=0), most)
    bound += torch.einsum("qhgd,phd->qhgp", grouped.clamp(max=0), least)
    return _votes(0.75 * torch.einsum("qhgd,phd->qhgp", grouped, mean) + 0.25 * bound)


def gaussian(keys: Tensor, query: Tensor, scale: float) -> Tensor:
    """The mass of keys with this mean and these variances, if they were normally distributed."""
    grouped = query.unflatten(1, (keys.shape[2], -1)).float() * scale
    mean, variance = rounded(keys.mean(1)), rounded(keys.std(1, correction=0)).square()
    logits = torch.einsum("qhgd,phd->qhgp", grouped, mean)
    return _votes(logits + torch.einsum("qhgd,phd->qhgp", grouped.square(), variance) / 2)


# With the bytes that a server keeps for each element of a key and page: minimum and maximum alone in bfloat16, which is
# not rounded to here, all else in float8; of centroids the first in float8, the others as differences in four bits.
STATISTICS: dict[str, tuple[float, Statistic]] = {
    "minimum, maximum; mean query (the paper's)": (4, partial(minmax, mean=True)),
    "minimum, maximum; vote": (4, partial(minmax, mean=False)),
    "mean; vote": (1, partial(centroids, count=1)),
    "mean, variance; vote": (2, gaussian),
    "minimum, maximum, mean; vote": (3, minmax_mean),
    "means of 4 quarters; vote": (4, partial(parts, count=4)),
    "means of 8 pairs; vote": (8, partial(parts, count=8)),
    "4 centroids in float8; vote": (4, partial(centroids, count=4, packed=False)),
    "8 centroids in float8; vote": (8, partial(centroids, count=8, packed=False)),
    "4 centroids; vote": (2.5, partial(centroids, count=4)),
    "6 centroids; mean query": (3.5, partial(centroids, count=6, mean=True)),
    "6 centroids; vote": (3.5, partial(centroids, count=6)),
    "8 centroids; vote": (4.5, partial(centroids, count=8)),
}
TRUE = "true mass"


def prompts(args: argparse.Namespace, tokenizer: Tokens) -> Iterator[tuple[str, int, list[int]]]:
    """Every text: its name, its number, and its tokens with the answer."""
    suite = RulerSuite(
        argparse.Namespace(seed=args.seed, book=[], essays=None, wording="lm-eval", chat=False), tokenizer
    )
    book = {BOOK.stem: tokenizer.encode(read_book(BOOK))} if BOOK_TEXT in args.texts else {}
    for index in range(args.n):
        for text in args.texts:
            if text == BOOK_TEXT:
                yield text, index, list(make_windows(book, args.length, args.n, args.seed)[index].tokens)
                continue
            prompt = suite.build(Case(str(TEXTS[text]), args.length, None, index))
            yield text, index, [*prompt.tokens, *tokenizer.encode(f" {', '.join(prompt.answers)}.")[:ANSWER]]


def judged(captured: Captured, ratios: list[float]) -> Iterator[tuple[str, float, float, float]]:
    """Each statistic and ratio with the mass that it keeps and how often it finds the page of most mass."""
    key, query, scale = captured.key.float(), captured.query.float(), captured.scaling
    tokens_, heads = key.shape[:2]
    pages = (tokens_ - len(query)) // PAGE
    keys = key[: pages * PAGE].unflatten(0, (pages, PAGE))
    logits = torch.einsum("qhgd,thd->qhgt", query.unflatten(1, (heads, -1)) * scale, key)
    later = torch.arange(tokens_) > captured.positions[:, None]
    weights = logits.masked_fill_(later[:, None, None], -torch.inf).softmax(-1).mean(2)
    mass = weights[..., : pages * PAGE].unflatten(-1, (pages, PAGE)).sum(-1)
    newest = weights[..., pages * PAGE :].sum(-1)
    most = mass.index_fill(-1, torch.tensor([0]), 0.0).argmax(-1)
    for name, scores in ((TRUE, mass), *((name, way(keys, query, scale)) for name, (_, way) in STATISTICS.items())):
        scores = scores.index_fill(-1, torch.tensor([pages - 1]), torch.inf)
        for ratio in ratios:
            # Of the newest pages two are in the count, as on a server.
            chosen = scores.topk(max(LEAST, math.ceil(ratio * (pages + 2))) - 2, -1).indices
            kept = mass.gather(-1, chosen).sum(-1) + newest
            found = (chosen == most[..., None]).any(-1)
            yield name, ratio, float(kept.mean()), float(found.float().mean())


def summarise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over prompts and layers, for each text and over all texts."""
    items: Any = pd.DataFrame([row for row in rows if row["kind"] == "item"])
    keys = ["ratio", "statistic"]
    by_text = items.groupby([*keys, "text"], sort=False)[["mass", "found"]].mean().reset_index()
    overall = by_text.groupby(keys, sort=False)[["mass", "found"]].mean().reset_index().assign(text="all")
    return pd.concat([by_text, overall]).round(4).to_dict("records")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all texts and write the file.

    Raises:
        EvaluationError: see the functions that this one calls.
    """
    described = model_facts(args.model_path)
    if args.length + ANSWER > described.context_len:
        raise EvaluationError(
            f"--length {args.length}: the model's context is {described.context_len} tokens, and an answer may take "
            f"{ANSWER}"
        )
    model, tokenizer = load_model(args.model_path, "cpu", torch.float32), tokens(args.model_path)
    names = ("texts", "length", "n", "queries", "ratios", "seed")
    facts = {
        "name": args.name or args.model_path,
        "class": type(model).__name__,
        "weights": fingerprint(args.model_path),
        "quantization": getattr(described.hf_config, "quantization_config", None),
    }
    arguments = {name: getattr(args, name) for name in names}
    with Record(args.out, COMMAND, args.revision, resume=True, arguments=arguments, model=facts) as record:
        rows = list(record.earlier)
        done = {row["id"] for row in rows if row["kind"] == "prompt"}
        for text, index, ids in tqdm(prompts(args, tokenizer), total=args.n * len(args.texts), desc=COMMAND):
            if (place := f"{text}/{index}") in done:
                continue

            def visit(captured: Captured, text: str = text, place: str = place) -> None:
                for name, ratio, mass, found in judged(captured, args.ratios):
                    row = {"id": f"{place}/{captured.layer}/{name}/{ratio}", "text": text, "layer": captured.layer}
                    row |= {"statistic": name, "ratio": ratio, "mass": round(mass, 5), "found": round(found, 5)}
                    rows.append({"kind": "item", **row})
                    record.add("item", **row)

            with torch.inference_mode():
                capture(model, ids, args.queries, visit)
            # Only now is the prompt whole.
            record.add("prompt", id=place, tokens=len(ids))
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
    parser.add_argument("--model-path", help="folder or name of a checkpoint that transformers loads")
    parser.add_argument("--texts", type=list_of(str), default=list(TEXTS), help=f"of {', '.join(TEXTS)}")
    parser.add_argument("--length", type=parse_length, default=6144, help="tokens of a prompt")
    parser.add_argument("--n", type=int, default=2, help="prompts of each text")
    parser.add_argument("--queries", type=int, default=32, help="last positions of a prompt that are judged")
    parser.add_argument("--ratios", type=list_of(float), default=[0.1, 0.05], help="shares of the pages")
    parser.add_argument("--out", type=Path, help="JSONL file; a run that was interrupted goes on")
    parser.add_argument("--from", type=Path, dest="file", help="take the figures of this JSONL file, without a model")
    parser.add_argument("--name", help="of the model, for the file's header; the folder's or the hub's by default")
    parser.add_argument("--revision", help="of this code, outside of a git checkout")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    args = parser.parse_args(arguments)
    if args.file is None and (args.model_path is None or args.out is None):
        raise EvaluationError("--model-path and --out are needed, or --from")
    if unknown := set(args.texts) - set(TEXTS):
        raise EvaluationError(f"--texts {', '.join(sorted(unknown))}: allowed are {', '.join(TEXTS)}")
    for name in ("n", "queries"):
        if getattr(args, name) < 1:
            raise EvaluationError(f"--{name} {getattr(args, name)}: allowed is 1 or more")
    if not all(0 < ratio < 1 for ratio in args.ratios):
        raise EvaluationError(f"--ratios {args.ratios}: allowed are numbers between 0 and 1")
    if args.length < 2 * LEAST * PAGE + args.queries:
        raise EvaluationError(f"--length {args.length}: allowed is {2 * LEAST * PAGE + args.queries} or more")
    return args


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 1 when its figures would not show what they say."""
    try:
        args = parse(arguments)
        summary = summarise(rows_of(args.file, COMMAND)) if args.file else run(args)
    except (EvaluationError, ValueError) as error:
        print(f"{COMMAND}: {error}", file=sys.stderr)
        return 1
    found: Any = pd.DataFrame(summary)
    columns = {"index": ["ratio", "statistic"], "columns": "text", "values": ["mass", "found"], "sort": False}
    print(found.pivot_table(**columns).to_string(float_format="{:.3f}".format))
    return 0


if __name__ == "__main__":
    sys.exit(main())
