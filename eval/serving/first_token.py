"""Cold prefills of ``eval.bench_serving``: the time to the first token.

Asked by this project's client, with token ids: starting SGLang's takes longer than most prefills. Every run flushes the
prefix cache and asks the same prompt again for one token, so that no cached tokens prove the flush. SGLang's flush also
empties the allocator's cache, of each server alike.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from eval.live.client import request_of, stream
from eval.live.counters import EvaluationError, moved, sparsity, sum_of
from eval.live.tokens import random_prompts
from eval.serving.grid import DENSE, ROOM, Cell, least_ratio
from eval.serving.measurement import Side, require_sparse_prefill
from eval.texts.lengths import short_length

TASK, TASK_BELOW = "first_token", "first_token_below"
# Of a median that counts.
LEAST_RUNS = 5
# Of the dense server, what makes it the strongest.
SERVED = ("attention_backend", "page_size", "prefill_graphs")

Row = Mapping[str, Any]


def tokens(context: int) -> int:
    """Tokens of KV that a prompt and its answer take."""
    return context + ROOM


def flush(side: Side) -> None:
    """Empty the server's prefix cache."""
    answer = side.server.ask(lambda http: http.post("/flush_cache"))
    if answer.is_error:
        raise EvaluationError(f"the {side.name} server did not flush its cache: {answer.status_code} {answer.text}")


def cold(side: Side, request: dict[str, Any]) -> float:
    """Seconds until the first token of a prompt; refuses one of which anything was cached."""
    flush(side)
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
    """Compare every server with the dense one, length by length.

    Args:
        items: rows of task `TASK`.
        carried: further fields of the first run that the summary keeps.

    Returns:
        For each length and each server but the dense one, where both have `LEAST_RUNS` runs: medians and ranges of the
        time to the first token (``ttft``, seconds), ``ttft_ratio`` of the medians, dense over sparse; of a sparse one
        what its attention was, ``sparsity`` being that of all runs together.
    """
    runs: dict[tuple[str, int], list[Row]] = {}
    for item in items:
        runs.setdefault((item["arm"], item["context"]), []).append(item)
    found = []
    for (arm, context), mine in runs.items():
        theirs = runs.get((DENSE, context), [])
        if arm == DENSE or min(len(mine), len(theirs)) < LEAST_RUNS:
            continue
        own, dense = ([row["ttft"] for row in rows] for rows in (mine, theirs))
        row: dict[str, Any] = {"id": f"{arm}/{TASK}/{short_length(context)}", "task": TASK, "arm": arm}
        row |= {"context": context, "runs": len(mine), "dense_runs": len(theirs)}
        row |= {"ttft": median(own), "ttft_range": (min(own), max(own))}
        row |= {"dense_ttft": median(dense), "dense_ttft_range": (min(dense), max(dense))}
        row |= {"ttft_ratio": row["dense_ttft"] / row["ttft"]}
        row |= {f"dense_{name}": theirs[0][name] for name in SERVED}
        row |= {name: mine[0][name] for name in carried} | _pairs(mine)
        found.append(row)
    return found


def _pairs(runs: Sequence[Row]) -> dict[str, Any]:
    counts = sum_of(row["counters"] for row in runs if "counters" in row)
    return {"sparsity": sparsity(counts), "sparse_tokens": counts.get("prefill_sparse_tokens")}


def below_crossover(summary: Sequence[Row]) -> list[dict[str, Any]]:
    """The least ratio at contexts of at most ``SHORT`` tokens that the server prefilled dense by itself.

    Returns:
        For each server that has such contexts `least_ratio`; ``context`` is the longest.
    """
    # Of another dense server nothing is counted.
    dense = [row for row in summary if row["sparse_tokens"] == 0]
    names = ("sparsity", *(f"dense_{name}" for name in SERVED))
    return [
        row | {"context": max(cell["context"] for cell in cells)} | {name: least[name] for name in names}
        for row, least, cells in least_ratio(TASK_BELOW, "ttft_ratio", dense)
    ]
