"""The grid of ``eval.bench_serving``: what its cells need of a server, and figures of what was measured in them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Any

from eval.live.client import Chunk, Stream
from eval.live.counters import EvaluationError
from eval.scores.stats import median_ratio_interval
from eval.texts.lengths import short_length

NO_METHOD, ROBSA = "none", "robsa"
# More than any page, on both sides of a request's KV.
ROOM = 128
DENSE = "dense"
# One request fills the cache, and one compiles and allocates what a hit does for the first time.
UNCOUNTED_HITS = 2
SHORT = 8192
# What counts of a cell: the first run's, and the median of all runs'.
FIRST = ("ttft_median", "ttft_p99", "output_throughput", "request_throughput")
# Of the dense server, what makes it the strongest.
SERVED = ("decode_backend", "page_size", "decode_graphs")
ATTENDED = ("active_blocks", "sparse_layers")
# A bootstrap of fewer says nothing of how far medians spread.
LEAST_PAIRS = 5
EVERY = ("decode_tpot", "decode_itl_p50", "decode_itl_p99", "tpot_median", "tpot_p99", "itl_median", "itl_p99")

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """A batch of prompts of one length: `context` tokens each, `batch` requests at once."""

    context: int
    batch: int

    @property
    def name(self) -> str:
        """Such as "4x32k"."""
        return f"{self.batch}x{short_length(self.context)}"

    def tokens(self, output: int) -> int:
        """Tokens of KV that the batch takes with answers of `output` tokens."""
        return self.batch * (self.context + output + ROOM)


def prefix_tokens(args: argparse.Namespace) -> int:
    """Tokens of KV that the prefix hits take."""
    return args.prefix + (args.hits + UNCOUNTED_HITS) * (args.tail + ROOM) if args.prefix else 0


def grid(args: argparse.Namespace) -> list[Cell]:
    """The cells in which decode is measured: none where the sparse server has no decode method."""
    if args.sparse_method == NO_METHOD:
        return []
    return [Cell(context, batch) for context in args.contexts for batch in args.batch]


def batch_flags(most: int) -> list[str]:
    """Return the flags of a server that decodes up to `most` requests at once."""
    # SGLang takes a batch for full when one place is left and the last chunk of a prompt is prefilled: the last
    # prompt would wait until an answer ends.
    return ["--cuda-graph-max-bs-decode", str(most), "--max-running-requests", str(most + 1)]


def server_flags(args: argparse.Namespace, chunk: int | None = None) -> list[str]:
    """Return the flags of every server: room for the largest cell, and no more.

    `chunk` tokens are prefilled at once; None leaves that to the server.
    """
    # Without a grid prompts come one by one.
    cells = grid(args) or [Cell(context, 1) for context in args.contexts]
    tokens = max([prefix_tokens(args), *(cell.tokens(args.output_length) for cell in cells)])
    longest = max(max(args.contexts) + args.output_length, args.prefix + args.tail) + ROOM
    flags = ["--context-length", str(longest), "--max-total-tokens", str(-(-tokens // ROOM) * ROOM)]
    flags += batch_flags(max(cell.batch for cell in cells))
    flags += ["--chunked-prefill-size", str(chunk)] if chunk else []
    # One that waits would take a core, and another one's step may wait for it.
    flags += ["--sleep-on-idle"] if args.both else []
    return flags


def sparse_flags(args: argparse.Namespace) -> list[str]:
    """Return the further flags of the sparse server."""
    flags = []
    if args.sparse_method != NO_METHOD:
        flags += ["--sparse-method", args.sparse_method, "--sparse-config", args.sparse_config]
    if args.sparse_prefill_method:
        flags += ["--sparse-prefill-method", args.sparse_prefill_method]
        flags += ["--sparse-prefill-config", args.sparse_prefill_config]
    return flags


def methods(args: argparse.Namespace) -> list[str]:
    """Names of what the sparse server runs."""
    return [name for name in (args.sparse_method, args.sparse_prefill_method) if name not in (None, NO_METHOD)]


def dense_by_limits(cell: Cell, config: Row) -> bool:
    """Whether a batch is decoded dense: by the limits of a decode method's config, or because there is none."""
    limits = ((cell.context, "min_seq_len"), (cell.context * cell.batch, "crossover_tokens"))
    return not config or any(tokens < config.get(limit, 0) for tokens, limit in limits)


def unfit(facts: Row, needed: int) -> str | None:
    """Return the reason that a server cannot hold so many tokens of KV, or None if it can."""
    pool = facts["max_total_num_tokens"]
    return f"needs {needed} tokens of KV, the server has {pool}" if needed > pool else None


def streams(result: Row) -> list[Stream]:
    """The answers in a result, with ``--output-details``, of SGLang's client, which sends a batch at once.

    Refused if a request failed, or brought fewer tokens than asked for.
    """
    names = ("output_lens", "ttfts", "itls", "errors", "cached_tokens")
    found = []
    for tokens, ttft, gaps, error, cached in zip(*(result[name] for name in names), strict=True):
        if error or not ttft:
            raise EvaluationError(f"a request failed: {error.strip().splitlines()[-1] if error else 'no text came'}")
        if tokens < result["random_output_len"]:
            raise EvaluationError(f"an answer has {tokens} tokens, asked for were {result['random_output_len']}")
        # The client divides a chunk's time evenly among its tokens; those of the first chunk have no times.
        first = tokens - len(gaps)
        chunks = [Chunk(seconds, first + i) for i, seconds in enumerate(accumulate(gaps, initial=ttft))]
        found.append(Stream(0.0, chunks, cached))
    return found


def beside_dense(items: Sequence[Row], *place: str) -> Iterator[tuple[tuple[Any, ...], list[Row], list[Row]]]:
    """Of each server but the dense one, and each `place`: its name and the place, its runs, and the dense server's."""
    runs: dict[tuple[Any, ...], list[Row]] = {}
    for item in items:
        runs.setdefault((item["arm"], *(item[name] for name in place)), []).append(item)
    for key, mine in runs.items():
        theirs = runs.get((DENSE, *key[1:]))
        if key[0] != DENSE and theirs:
            yield key, mine, theirs


def spread(name: str, times: Sequence[float]) -> dict[str, Any]:
    """The median of times as `name`, and their range."""
    return {name: median(times), f"{name}_range": (min(times), max(times))}


def summarise(items: Sequence[Row], carried: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Compare every server with the dense one, cell by cell, by rows of task "serving".

    Fields `carried` are kept of the first run.

    Returns:
        For each cell and each server but the dense one, where both have it: its own figures (seconds, and requests or
        tokens a second), those of the dense server with the prefix ``dense_``, and their ratios with the suffix
        ``_ratio``: times are dense over sparse and rates sparse over dense, so that above 1 the sparse server is
        better. Of several runs times to the first token and rates are the first one's, in which nothing was cached; all
        others are medians, ``decode_tpot_range`` is their range. ``decode_tpot_ratio_interval`` is a paired bootstrap
        95 % interval of the ratio of the medians, None where the servers did not take turns or too rarely.
    """
    summary = []
    for (arm, context, batch), mine, theirs in beside_dense(items, "context", "batch"):
        own, dense = _figures(mine), _figures(theirs)
        row: dict[str, Any] = {"id": f"{arm}/{Cell(context, batch).name}", "task": "serving", "arm": arm}
        row |= {"context": context, "batch": batch, "runs": len(mine)}
        row |= {"density": mine[-1]["density"], "dense_rows": mine[-1]["dense_rows"]}
        # Later runs find their prompts in the cache.
        row |= {name: mine[0][name] for name in (*ATTENDED, *carried) if mine[0].get(name) is not None}
        row |= {"sparsity": mine[0].get("sparsity"), **own}
        row |= {f"dense_{name}": theirs[0].get(name) for name in SERVED}
        row |= {f"dense_{name}": value for name, value in dense.items()}
        for name in (*FIRST, *EVERY):
            better = (own, dense) if name.endswith("throughput") else (dense, own)
            row[f"{name}_ratio"] = better[0][name] / better[1][name] if better[1][name] else None
        pairs = [(old["decode_tpot"], new["decode_tpot"]) for old, new in zip(theirs, mine, strict=False)]
        in_turn = len(pairs) >= LEAST_PAIRS and all(run.get("in_turn") for run in (*mine, *theirs))
        found = median_ratio_interval(*zip(*pairs, strict=True), seed=0) if in_turn else None
        row["decode_tpot_ratio_interval"] = found
        summary.append(row)
    return summary


def _figures(runs: Sequence[Row]) -> dict[str, Any]:
    times = [row["decode_tpot"] for row in runs]
    figures = {name: runs[0][name] for name in FIRST} | {name: median(row[name] for row in runs) for name in EVERY}
    return {**figures, "decode_tpot_range": (min(times), max(times))}


def short_contexts(summary: Sequence[Row]) -> list[dict[str, Any]]:
    """The `least_ratio` of dense to sparse time per output token at contexts of at most ``SHORT`` tokens.

    ``dense_rows`` is the share of that cell's rows that were decoded dense.
    """
    return [
        row | {"context": SHORT} | {name: least[name] for name in ("decode_tpot_ratio_interval", "dense_rows")}
        for row, least, _ in least_ratio("short_contexts", "decode_tpot_ratio", summary)
    ]


def least_ratio(task: str, ratio: str, summary: Sequence[Row]) -> Iterator[tuple[dict[str, Any], Row, Sequence[Row]]]:
    """Of each server that has cells of at most ``SHORT`` tokens the least ratio, the cell it was found in, and all.

    The ratio is in a row of a task, with the cell's id and the ``ratios`` of all.
    """
    for arm in dict.fromkeys(row["arm"] for row in summary):
        if cells := [row for row in summary if row["arm"] == arm and row["context"] <= SHORT]:
            least = min(cells, key=lambda row: row[ratio])
            ratios = {row["id"].rpartition("/")[2]: row[ratio] for row in cells}
            row = {"id": f"{arm}/{task}", "task": task, "arm": arm, ratio: least[ratio], "cell": least["id"]}
            yield row | {"ratios": ratios}, least, cells
