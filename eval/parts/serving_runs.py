"""One measurement of ``eval.bench_serving`` on one server: a batch by SGLang's client, or hits of the prefix cache."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.bench_decode import random_prompts, request_of
from eval.figures.tpot import decode_figures
from eval.live.arms import MAX_DENSE_ROWS
from eval.live.client import LiveServer, generate, stream
from eval.live.counters import EvaluationError, dense_rows, moved, read_shares, require_sparse
from eval.parts.judge_commands import Target, run_judge, serving_command
from eval.parts.judge_rows import serving_rows
from eval.parts.serving_grid import UNCOUNTED_HITS, Cell, streams

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Side:
    """A server under measurement.

    Attributes:
        name: among the others.
        url: where it is.
        server: how it is asked.
        target: what it says of itself.
        inputs: what it says of its generated inputs; None where it attends with the model's own.
        prefill_config: of its prefill method, resolved; None where it has none.
        prefill_graphs: whether it prefills by CUDA graphs.
    """

    name: str
    url: str
    server: LiveServer
    target: Target
    inputs: Config | None = None
    prefill_config: Config | None = None
    prefill_graphs: bool = False

    @property
    def counted(self) -> bool:
        """Whether it counts what a sparse method does."""
        return self.target.arm.counted


def drive(args: argparse.Namespace, side: Side, cell: Cell, run: int, config: Config, scratch: Path) -> dict[str, Any]:
    """Have SGLang's client send a batch, and prove what was measured.

    Args:
        args: the command line.
        side: the server.
        cell: the batch.
        run: number of this run; the prefix cache is flushed before the first one.
        config: of the sparse server's method.
        scratch: folder for the client's files.

    Raises:
        EvaluationError: the client or a request failed, or the counters do not show what they should.
    """
    interval = config.get("rectify_interval", 0)
    sizes = {"output_length": args.output_length, "prompts": cell.batch, "concurrency": cell.batch}
    asked = argparse.Namespace(base_url=side.url, seed=args.seed, **sizes)
    path = scratch / f"{side.name}-{cell.name}-{run}.jsonl"
    command = [*serving_command(side.target, asked, cell.context, path), "--warmup-requests", str(args.warmup)]
    if run:
        command.remove("--flush-cache")
    before = side.server.counters() if side.counted else None
    run_judge(command, scratch, args.out.with_suffix(".log"))
    after = side.server.counters() if before is not None else None
    counts = moved(before, after) if before is not None and after is not None else None
    result = json.loads(path.read_text())
    answers = streams(result)
    if not run and any(answer.cached_tokens for answer in answers):
        raise EvaluationError("prompts of a batch share a prefix: give another --seed")
    if counts is not None and config:
        require_sparse_cell(cell, counts, config)
    figures = decode_figures(answers, max(interval, 1))
    row = serving_rows(result)[1] | {"id": f"{side.name}/{cell.name}/{run}", "arm": side.name, "run": run}
    row |= {"context": cell.context, "batch": cell.batch, "ttfts": figures["ttft"]}
    row |= {"decode_tpot": figures["tpot_mean"], "decode_tpots": figures["tpot"]}
    row |= {f"decode_{name}": figures[name] for name in ("itl_p50", "itl_p99", "itl_max", "merged")}
    row |= {"density": None, "dense_rows": None, "counters": counts}
    if after is None or counts is None:
        return row
    if after.get("prefill"):
        require_sparse_prefill(cell, counts, after["prefill"])
    return row | read_shares(counts)


def require_sparse_prefill(cell: Cell, counts: dict[str, int], prefill: Config) -> None:
    """Refuse counts of a prefill method that did nothing.

    Args:
        cell: the batch.
        counts: of `moved`.
        prefill: what the server says of the method.

    Raises:
        EvaluationError: the prompts are longer than where it begins.
    """
    begins = prefill["config"]["crossover_tokens"]
    if not counts["prefill_sparse_tokens"] and cell.context > begins:
        raise EvaluationError(
            f"{cell.name}: no token was prefilled sparse, although {prefill['method']} begins at {begins}"
        )


def require_sparse_cell(cell: Cell, counts: dict[str, int], config: Config) -> None:
    """Refuse counts that do not show sparse decode, unless the server's limits make such a batch dense.

    Raises:
        EvaluationError: as said.
    """
    limits = ((cell.context, "min_seq_len"), (cell.context * cell.batch, "crossover_tokens"))
    if any(tokens < config.get(limit, 0) for tokens, limit in limits):
        return
    # The client's warm-up request, and the first ones of a batch, may be too few to run sparse.
    require_sparse(cell.name, {**counts, "dense_fallback_rows": 0}, rectifying=config.get("rectify_interval", 0) > 0)
    share = dense_rows(counts) or 0.0
    if share > MAX_DENSE_ROWS:
        raise EvaluationError(
            f"{share:.0%} of the rows were decoded dense, allowed are {MAX_DENSE_ROWS:.0%}: start the sparse server "
            "with lower min_seq_len and crossover_tokens"
        )


def hit(args: argparse.Namespace, side: Side) -> dict[str, Any]:
    """Time prompts whose first tokens are in the prefix cache, one after the other.

    Raises:
        EvaluationError: a request failed, or its prefix was not cached.
    """
    page = side.target.facts["page_size"]
    vocabulary = side.server.vocabulary_size()
    (prefix,) = random_prompts(1, args.prefix, vocabulary, args.seed)
    tails = random_prompts(args.hits + UNCOUNTED_HITS, args.tail, vocabulary, args.seed + 1)
    prompts = [[*prefix, *tail] for tail in tails]
    fill, warm, *counted = [request_of(prompt, 1, {}) for prompt in prompts]
    side.server.each(generate, [fill])
    side.server.each(stream, [warm])
    before = side.server.counters() if side.counted else None
    answers = side.server.each(stream, counted)
    row: dict[str, Any] = {"id": f"{side.name}/prefix_hit", "task": "prefix_hit", "arm": side.name}
    row |= {"context": args.prefix, "tail": args.tail, "hits": len(answers)}
    uncached = [len(prompts[0]) - answer.cached_tokens for answer in answers]
    if max(uncached) > args.tail + page:
        raise EvaluationError(f"of prompts of {len(prompts[0])} tokens up to {max(uncached)} were not cached")
    row |= {"ttft": [answer.chunks[0].seconds - answer.sent for answer in answers], "uncached_tokens": uncached}
    if before is None:
        return row
    name = "extend_pages_summarised"
    pages = side.server.counters()[name] - before[name]
    return row | {"pages_summarised": pages, "recomputed": pages - sum(-(-tokens // page) for tokens in uncached)}
