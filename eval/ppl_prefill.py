"""``python -m eval.ppl_prefill``: what prefilling sparse costs in perplexity, by the log-probabilities of prompts.

Windows of held-out books that do not overlap are prompts of a server with a sparse prefill method, once as it runs and
once with ``sparse: false``; nothing is decoded. Three texts, see `eval.texts.windows`. Of ``book``, the window as it
stands, all tokens are judged that a sparse query, or one behind it, predicts: from the server's ``crossover_tokens``
on. The end of ``repeat`` repeats an earlier passage, and its last 32 tokens are judged; a model that does not repeat
prose from so far before predicts them no better with those keys than without. In ``records`` numbers are told from
token 128 on, one of them is asked for at the end, ``--apart`` tokens or more behind the last of them, and the answer is
judged: a model that looks numbers up must find these keys. Its windows begin anywhere in the books, because nothing of
these is judged. A ``dense_tail`` that covers what is judged shows what is left of the keys that it looks for, one of 0
what a sparse query misses of them.

Beside the perplexities, the difference of a token's log-probability stands by position of the query that predicts it.

Passed is: the upper end of the 95 % interval of the relative change of perplexity is at most ``--bound``
on each text, the rule by which `eval.compare` calls decode's perplexity the same.
The command ends with status 1 where it does not, and where the server's counters do not show that one arm was dense and
that the other left something out.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from eval.live.arms import phases_of, require_least, require_sparse_prefill
from eval.live.client import LiveServer, command_line, shown
from eval.live.counters import EvaluationError, moved, require_dense_prefill, sparsity
from eval.live.forced import prefilled_suffix
from eval.live.record import Record, read_finished, read_rows
from eval.scores.stats import Floats, interval, resamples
from eval.scores.tables import Column, bounds, number, table, text
from eval.texts.windows import (
    SCORED,
    Window,
    add_arguments,
    make_windows,
    read_tokens,
    require_books,
    windows_anywhere,
    with_records,
    with_repetition,
)

COMMAND = "eval.ppl_prefill"
# A block of AnchorAttention: what stands in the first one is never left out.
FIRST_RECORD = 128
# The longest group of AnchorAttention by default, and the block before it, are never left out either.
APART = 2048 + 128
DENSE: dict[str, Any] = {"sparse": False}
# Of the perplexity that may be lost.
BOUND = 0.005
FIRST_EDGE = 1024


def begins_at(facts: dict[str, Any], length: int) -> int:
    """The first position at which a server may prefill sparse; refuses one that prefills such windows dense."""
    if phases_of(facts)[1] is None:
        raise EvaluationError("the server runs no prefill method; eval.ppl_rectify judges decode")
    config = facts["sparse"]["prefill"]["config"]
    begins, ends = config["crossover_tokens"], length - config["dense_tail"]
    if begins >= ends:
        raise EvaluationError(
            f"the server prefills windows of {length} tokens dense: it is sparse from position {begins} to {ends}; "
            "start it with a lower crossover_tokens in --sparse-prefill-config, or give a larger --length"
        )
    return begins


def make_text(
    text: str, args: argparse.Namespace, books: Mapping[str, Sequence[int]], encode: Callable[[str], Sequence[int]]
) -> list[Window]:
    """The windows of one of ``eval.texts.windows.TEXTS``, of the tokens of `books`; `encode` makes more of them."""
    if text == "records":
        count = args.windows or len(make_windows(books, args.length, None, args.seed))
        plain = windows_anywhere(books, args.length, count, args.seed)
        return [with_records(window, FIRST_RECORD, args.seed + i, encode, args.apart) for i, window in enumerate(plain)]
    plain = make_windows(books, args.length, args.windows, args.seed)
    return [with_repetition(window, args.length, args.seed) for window in plain] if text == "repeat" else plain


def ask(
    server: LiveServer, record: Record, text: str, arm: str, windows: Sequence[Window], args: argparse.Namespace
) -> Floats:
    """Negative log-likelihoods ``[windows, tokens]``; writes what the server counted.

    Of ``records`` they are those of the answers; else of all tokens but the first, so that nothing of a prompt is taken
    from the cache.
    """
    params = DENSE if arm == "dense" else args.custom_params
    suffix = windows[0].scored if text == "records" else args.length - 1
    before = server.counters()
    found = server.each(
        lambda client, window: prefilled_suffix(client, window.tokens, suffix, params),
        windows,
        f"{text} {arm}",
    )
    counts = moved(before, server.counters())
    record.add("counters", task=text, arm=arm, items=len(found), sparsity=sparsity(counts), counters=counts)
    if arm == "dense":
        require_dense_prefill(f"{text} dense", counts)
    else:
        require_sparse_prefill(text, counts)
        if args.least_sparsity is not None:
            row = {"arm": "base", "task": text, "length": args.length, "sparsity": sparsity(counts)}
            require_least([row], "sparsity", args.least_sparsity)
    return -np.array(found)


def rows_of(text: str, windows: Sequence[Window], nlls: dict[str, Floats], begins: int) -> list[dict[str, Any]]:
    """The rows that a text's figures are made of, by the negative log-likelihoods of `ask` for each arm.

    A token's stands at the position of the query that predicts it; `begins` is that of `begins_at`.
    """
    length = len(windows[0].tokens)
    first = begins if text == "book" else -windows[0].scored
    rows: list[dict[str, Any]] = [
        {"kind": "item", "id": f"{text}/{i}", "task": text, "arm": arm, "window": i}
        | {"book": window.book, "start": window.start, "depth": window.depth}
        | {"scores": {"nll": round(float(found[i, first:].mean()), 6)}}
        for arm, found in nlls.items()
        for i, window in enumerate(windows)
    ]
    if text != "book":
        return rows
    for low, high in pairwise(edges(length - 1, begins)):
        dense, sparse = (nlls[arm][:, low:high] for arm in ("dense", "sparse"))
        figures = {"dense": dense.mean(1), "sparse": sparse.mean(1), "change": abs(sparse - dense).mean(1)}
        figures = {name: np.round(values, 6).tolist() for name, values in figures.items()}
        rows.append({"kind": "buckets", "task": text, "from": low, "to": high, **figures})
    return rows


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all texts, write the file, and return the summary, see `summarise`."""
    with LiveServer(args.base_url, args.concurrency) as server:
        facts = server.facts()
        begins = begins_at(facts, args.length)
        books = read_tokens(args.book, server.tokenize)
        texts = {text: make_text(text, args, books, server.tokenize) for text in args.kind}
        names = ("length", "kind", "seed", "custom_params", "least_sparsity", "bound", "apart")
        settings = {"windows": len(texts[args.kind[0]]), "books": sorted(books)}
        settings |= {name: getattr(args, name) for name in names}
        header = {"servers": {"base": facts}, "arguments": settings, "label": args.label}
        with Record(args.out, COMMAND, args.revision, **header) as record:
            for text, windows in texts.items():
                nlls = {arm: ask(server, record, text, arm, windows, args) for arm in ("dense", "sparse")}
                for row in rows_of(text, windows, nlls, begins):
                    record.add(**row)
            summary = summarise(read_rows(args.out), args.seed, args.bound)
            for row in summary:
                record.add("summary", length=args.length, **row)
    return summary


def edges(length: int, begins: int) -> list[int]:
    """Return the edges of the buckets of positions: powers of two, and the first position that may be sparse."""
    powers = [FIRST_EDGE << i for i in range(length.bit_length()) if FIRST_EDGE << i < length]
    return sorted({0, begins, *powers, length})


def summarise(rows: Sequence[dict[str, Any]], seed: int = 0, bound: float = BOUND) -> list[dict[str, Any]]:
    """Judge every text.

    Args:
        rows: of the JSONL file: ``item`` rows with task (the text), window, arm ("dense" or "sparse") and the score
            nll (nats per token) over the judged positions; ``buckets`` rows with from, to, and lists of a figure for
            each window: dense, sparse (nll) and change; ``counters`` rows of the sparse arm.
        seed: of the bootstrap.
        bound: largest share by which the perplexity of the judged positions may grow.

    Returns:
        One dict for each text, then one for each of its buckets: perplexities ``dense`` and ``sparse``; ``relative``,
        by what share the second differs from the first, with its paired 95 % interval; ``change``, the mean absolute
        difference of a token's log-probability. That of a text has ``sparsity`` and ``passed`` as well: whether the
        upper end of the interval is within the bound.

    Raises:
        EvaluationError: a text has not the same windows in both arms.
    """
    found = []
    for task in dict.fromkeys(row["task"] for row in rows if row["kind"] == "item"):
        mine = [row for row in rows if row.get("task") == task]
        items = [row for row in mine if row["kind"] == "item"]
        dense, sparse = (
            {row["window"]: row["scores"]["nll"] for row in items if row["arm"] == arm} for arm in ("dense", "sparse")
        )
        if dense.keys() != sparse.keys():
            raise EvaluationError(f"{task}: {len(sparse)} windows are sparse and {len(dense)} dense, or other ones")
        weights = resamples(len(dense), seed)
        (counts,) = (row for row in mine if row["kind"] == "counters" and row["arm"] == "sparse")
        line = judge(np.array([dense[i] for i in dense]), np.array([sparse[i] for i in dense]), weights)
        within = line["relative_interval"][1] <= bound
        found.append({"task": task, "positions": "judged", **line, "sparsity": counts["sparsity"], "passed": within})
        for row in mine:
            if row["kind"] == "buckets":
                line = judge(np.array(row["dense"]), np.array(row["sparse"]), weights)
                place = {"task": task, "positions": f"{row['from']}-{row['to']}"}
                found.append({**place, **line, "change": float(np.mean(row["change"]))})
    return found


def perplexities(paths: Sequence[Path]) -> str:
    """A line for each file and text, and one for each of its ranges of positions, with perplexities in both arms."""
    if not paths:
        return "Not measured yet."
    rows = []
    for path in paths:
        header, *mine = read_finished(path)
        rows += [{**row, "file": path.name.split(".")[0]} for row in summarise(mine, header["arguments"]["seed"])]
    columns: list[Column] = [
        ("file", text("file")),
        ("text", text("task")),
        ("positions", text("positions")),
        ("windows", text("windows")),
        ("dense", number("dense", 2)),
        ("sparse", number("sparse", 2)),
        ("difference, %", number("relative", 2, 100, sign=True)),
        ("95 %", bounds("relative_interval", 2, scale=100)),
        ("left out", lambda row: f"{row['sparsity']:.1%}" if "sparsity" in row else ""),
        ("within the bound", lambda row: {True: "yes", False: "no"}[row["passed"]] if "passed" in row else ""),
    ]
    return table(rows, columns)


def judge(dense: Floats, sparse: Floats, weights: Floats) -> dict[str, Any]:
    """Perplexities of two arms, and their relative change with its 95 % interval, from nats by window."""
    lost = sparse - dense
    low, high = interval(weights @ lost)
    return {
        "windows": len(lost),
        "dense": math.exp(dense.mean()),
        "sparse": math.exp(sparse.mean()),
        "relative": math.expm1(lost.mean()),
        "relative_interval": (math.expm1(low), math.expm1(high)),
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = command_line(COMMAND, __doc__)
    parser.add_argument("--base-url", required=True, help="the server, with a sparse prefill method")
    parser.add_argument("--out", required=True, type=Path, help="JSONL file to write")
    add_arguments(parser, length=16384, concurrency=4, kind="book")
    parser.add_argument("--apart", type=int, default=APART, help="of records: tokens between the last one and the end")
    parser.add_argument("--custom-params", type=json.loads, default={}, help="JSON, sent with each sparse request")
    parser.add_argument("--least-sparsity", type=float, metavar="SHARE", help="of the pairs that must be left out")
    parser.add_argument("--bound", type=float, default=BOUND, help="largest share by which perplexity may grow")
    args = parser.parse_args(arguments)
    require_books(parser, args.book)
    for wrong, message in (
        (args.length < 2 * SCORED, f"--length must be at least {2 * SCORED}"),
        (args.apart < 0, "--apart must be at least 0"),
        (args.bound <= 0, "--bound must be above 0"),
    ):
        if wrong:
            parser.error(message)
    return args


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 0 when the gate holds."""
    args = parse(arguments)
    return shown(COMMAND, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
