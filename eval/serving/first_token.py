"""The time to the first token in ``eval.bench_serving``: of cold prompts, and of hits of the prefix cache.

Asked by this project's client, with token ids: starting SGLang's takes longer than most prefills, and its shared-prefix
prompts are texts, which take longer to tokenize than to prefill.

Every run of a cold prompt flushes the prefix cache and asks the same prompt again for one token, so that no cached
tokens prove the flush. SGLang's flush also empties the allocator's cache, of each server alike.

All servers get the same prompts that hit the cache. Those that are up at once answer each of them before the next is
sent, so that whatever the machine does for a while befalls them alike, and the hits of two servers are pairs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eval.live.client import generate, request_of, stream
from eval.live.counters import EvaluationError, moved, sparsity, sum_of
from eval.live.tokens import random_prompts
from eval.scores.stats import median_ratio_interval
from eval.serving.grid import UNCOUNTED_HITS, Cell, beside_dense, least_ratio, spread
from eval.serving.measurement import Side, require_sparse_prefill
from eval.texts.lengths import short_length

TASK, TASK_BELOW = "first_token", "first_token_below"
# Of a median that counts.
LEAST_RUNS = 5
# Of the dense server, what makes it the strongest.
SERVED = ("attention_backend", "page_size", "prefill_graphs")

Row = Mapping[str, Any]


def cold(side: Side, request: dict[str, Any]) -> float:
    """Seconds until the first token of a prompt after a flush; refuses one of which anything was cached."""
    flushed = side.server.ask(lambda http: http.post("/flush_cache"))
    if flushed.is_error:
        raise EvaluationError(f"the {side.name} server did not flush its cache: {flushed.status_code} {flushed.text}")
    (answer,) = side.server.each(stream, [request])
    if answer.cached_tokens:
        raise EvaluationError(f"{answer.cached_tokens} tokens of a prompt were cached although the cache was flushed")
    return answer.chunks[0].seconds - answer.sent


def measure(args: argparse.Namespace, side: Side, context: int, run: int) -> dict[str, Any]:
    """Measure one cold prefill; before the first one of a length comes another that does not count."""
    config = side.prefill_config
    quality = {} if config is None else side.inputs.of_prompt(context, config, side.made)
    (prompt,) = random_prompts(1, context, side.server.vocabulary_size(), args.seed)
    # Asked for by request, so that one server serves all lengths.
    request = request_of(prompt, 1, side.inputs.asked(quality))
    if not run:
        cold(side, request)
    before = side.server.counters() if config is not None else None
    row: dict[str, Any] = {"id": f"{side.name}/{TASK}/{short_length(context)}/{run}", "task": TASK, "arm": side.name}
    row |= {"context": context, "run": run, "ttft": cold(side, request), "cached_tokens": 0}
    row |= {name: side.facts.get(name) for name in SERVED}
    row |= dict.fromkeys(side.inputs.prompt_fields) | quality
    if before is not None:
        after = side.server.counters()
        counts = moved(before, after)
        require_sparse_prefill(Cell(context, 1), counts, after["prefill"])
        row |= {"sparsity": sparsity(counts), "counters": counts}
        side.inputs.judge(row)
    return row


def summarise(items: Sequence[Row], carried: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Compare every server with the dense one, length by length; fields `carried` are kept of the first run.

    Returns:
        For each length and each server but the dense one, where both have `LEAST_RUNS` runs: medians and ranges of the
        time to the first token (``ttft``, seconds), ``ttft_ratio`` of the medians, dense over sparse; of a sparse one
        what its attention was, ``sparsity`` being that of all runs together.
    """
    found = []
    for (arm, context), mine, theirs in beside_dense(items, "context"):
        if min(len(mine), len(theirs)) < LEAST_RUNS:
            continue
        row: dict[str, Any] = {"id": f"{arm}/{TASK}/{short_length(context)}", "task": TASK, "arm": arm}
        row |= {"context": context, "runs": len(mine), "dense_runs": len(theirs)}
        row |= spread("ttft", [run["ttft"] for run in mine]) | spread("dense_ttft", [run["ttft"] for run in theirs])
        row |= {"ttft_ratio": row["dense_ttft"] / row["ttft"]}
        row |= {f"dense_{name}": theirs[0][name] for name in SERVED}
        counts = sum_of(run["counters"] for run in mine if "counters" in run)
        row |= {name: mine[0][name] for name in carried} | {"sparsity": sparsity(counts)}
        found.append(row | {"sparse_tokens": counts.get("prefill_sparse_tokens")})
    return found


def below_crossover(summary: Sequence[Row]) -> list[dict[str, Any]]:
    """The `least_ratio` at contexts of at most ``SHORT`` tokens that a server prefilled dense by itself.

    ``context`` is the longest.
    """
    # Of another dense server nothing is counted.
    dense = [row for row in summary if row["sparse_tokens"] == 0]
    names = ("sparsity", *(f"dense_{name}" for name in SERVED))
    return [
        row | {"context": max(cell["context"] for cell in cells)} | {name: least[name] for name in names}
        for row, least, cells in least_ratio(TASK_BELOW, "ttft_ratio", dense)
    ]


HIT = "prefix_hit"
PAGES = "extend_pages_summarised"


def hit_steps(args: argparse.Namespace) -> int:
    """Return the number of steps of `hits`."""
    return args.hits + UNCOUNTED_HITS + 1


def hits(args: argparse.Namespace, side: Side) -> Iterator[dict[str, Any] | None]:
    """Time prompts whose first tokens are in the prefix cache, one in each step; refused if they are not cached.

    The first step fills the cache, the second is a hit that does not count, and after all hits comes the row; until
    then steps have nothing to say.
    """
    page = side.target.facts["page_size"]
    vocabulary = side.server.vocabulary_size()
    (prefix,) = random_prompts(1, args.prefix, vocabulary, args.seed)
    fill, warm, *tails = random_prompts(args.hits + UNCOUNTED_HITS, args.tail, vocabulary, args.seed + 1)
    side.server.each(generate, [request_of([*prefix, *fill], 1, {})])
    yield None
    side.server.each(stream, [request_of([*prefix, *warm], 1, {})])
    before = side.server.counters() if side.counted else None
    yield None
    answers = []
    for tail in tails:
        answers += side.server.each(stream, [request_of([*prefix, *tail], 1, {})])
        yield None
    row: dict[str, Any] = {"id": f"{side.name}/{HIT}", "task": HIT, "arm": side.name}
    row |= {"context": args.prefix, "tail": args.tail, "hits": len(answers), "in_turn": args.both}
    asked = args.prefix + args.tail
    uncached = [asked - answer.cached_tokens for answer in answers]
    if max(uncached) > args.tail + page:
        raise EvaluationError(f"of prompts of {asked} tokens up to {max(uncached)} were not cached")
    row |= {"ttft": [answer.chunks[0].seconds - answer.sent for answer in answers], "uncached_tokens": uncached}
    if before is not None:
        pages = side.server.counters()[PAGES] - before[PAGES]
        row |= {"pages_summarised": pages, "recomputed": pages - sum(-(-tokens // page) for tokens in uncached)}
    yield row


def summarise_hits(items: Sequence[Row], seed: int = 0) -> list[dict[str, Any]]:
    """Time to the first token where a long prefix is in the cache, sparse over dense.

    Returns:
        A row for each server but the dense one: all times, their medians and ranges; ``ttft_over_dense`` of the
        medians, and its paired bootstrap 95 % interval, None where the servers did not take turns or there is only one
        pair; ``recomputed`` is how many pages were summarised beyond those of the tokens that were not cached.
    """
    found = []
    for (arm,), (item, *_), (dense, *_) in beside_dense(items):
        mine, theirs = item["ttft"], dense["ttft"]
        paired = item["in_turn"] and len(mine) > 1
        row: dict[str, Any] = {"id": f"{arm}/{HIT}"}
        row |= {name: item.get(name) for name in ("task", "arm", "context", "hits", "pages_summarised", "recomputed")}
        row |= spread("ttft", mine) | {"ttfts": mine} | spread("dense_ttft", theirs) | {"dense_ttfts": theirs}
        row["ttft_over_dense"] = row["ttft"] / row["dense_ttft"]
        row["ttft_over_dense_interval"] = median_ratio_interval(mine, theirs, seed) if paired else None
        found.append(row)
    return found
