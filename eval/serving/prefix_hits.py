"""Hits of the prefix cache in ``eval.bench_serving``: the time to the first token, and what was summarised again.

Asked by this project's client, with token ids: SGLang's shared-prefix prompts are texts, which take longer to tokenize
than to prefill. All servers get the same prompts. Those that are up at once answer each of them before the next is
sent, so that whatever the machine does for a while befalls them alike, and the hits of two servers are pairs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eval.live.client import generate, request_of, stream
from eval.live.counters import EvaluationError
from eval.live.tokens import random_prompts
from eval.scores.stats import median_ratio_interval
from eval.serving.grid import UNCOUNTED_HITS, beside_dense, spread
from eval.serving.measurement import Side

TASK = "prefix_hit"
PAGES = "extend_pages_summarised"

Row = Mapping[str, Any]


def steps(args: argparse.Namespace) -> int:
    """How many steps `measure` has."""
    return args.hits + UNCOUNTED_HITS + 1


def measure(args: argparse.Namespace, side: Side) -> Iterator[dict[str, Any] | None]:
    """Time prompts whose first tokens are in the prefix cache, one in each step.

    The first step fills the cache, the second is a hit that does not count, and after all hits comes the row; until
    then steps have nothing to say.

    Raises:
        EvaluationError: a request failed, or its prefix was not cached.
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
    row: dict[str, Any] = {"id": f"{side.name}/{TASK}", "task": TASK, "arm": side.name}
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


def summarise(items: Sequence[Row], seed: int = 0) -> list[dict[str, Any]]:
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
        row: dict[str, Any] = {"id": f"{arm}/{TASK}"}
        row |= {name: item.get(name) for name in ("task", "arm", "context", "hits", "pages_summarised", "recomputed")}
        row |= spread("ttft", mine) | {"ttfts": mine} | spread("dense_ttft", theirs) | {"dense_ttfts": theirs}
        row["ttft_over_dense"] = row["ttft"] / row["dense_ttft"]
        row["ttft_over_dense_interval"] = median_ratio_interval(mine, theirs, seed) if paired else None
        found.append(row)
    return found
