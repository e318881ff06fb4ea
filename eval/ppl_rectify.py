"""``python -m eval.ppl_rectify``: what decoding sparse costs in perplexity, and what rectification wins back.

Windows of L tokens of held-out books that do not overlap, or with ``--stride`` not where something is decoded; the
first L - S tokens are the prompt, the last S are forced through decode one by one, and the last 32 are scored:
perplexity = exp(mean negative log-likelihood). Three texts: ``book`` is the window as it stands; the end of ``repeat``
repeats an earlier passage; in ``records`` numbers are told in the suffix, one is asked for at its end, and its answer
is what is scored: see `eval.texts.windows`.
Settings, each over the same windows:

- ``dense``: the requests say ``sparse: false``;
- ``off``: a ratio, of RoBSA its ``theta1``, never rectified;
- ``rectified``: a ratio and an interval of f tokens, left out where S <= f: none would fall into the suffix;
- ``bound``: a ratio; all earlier KV is exact and only the scored step is sparse, see `eval.live.forced`.

With S = 32 the first scored token comes from prefill in every setting, the bound too. A server that rectifies in the
place of a decode step scores one token in f densely, so that a rectified setting can pass its bound.

The prefix cache stays on: only exact KV enters it, so settings share the prefill of a prompt, and a bound costs one
decode step a position. (The plan flushes it between settings, so that no KV that one has changed serves the next.)

The command ends with status 1 where the server's counters do not show what a setting says, and where forced dense
decode, tried first, does not give the log-probabilities of prefill: a mean difference of .01 or more, or a mean
absolute one of .03. In bfloat16 the kernels of the two round each value differently, which cancels in the mean.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from eval.live.arms import decode_config
from eval.live.client import LiveServer, command_line, list_of, shown
from eval.live.counters import EvaluationError, density, moved, require_dense, require_sparse
from eval.live.forced import mean_nll, prefilled_suffix, suffix_logprobs
from eval.live.record import Record, read_rows
from eval.scores.ppl_summary import Cell, cell_of, plot, summarise
from eval.texts.windows import (
    SCORED,
    Window,
    add_arguments,
    make_windows,
    read_tokens,
    require_books,
    with_records,
    with_repetition,
)

COMMAND = "eval.ppl_rectify"
MAX_DIFFERENCE = 0.01
MAX_ABSOLUTE_DIFFERENCE = 0.03
CHECKED_WINDOWS = 16
# What a request sets of a method that a ratio can stand for.
FIELDS = ("active_ratio", "theta1")


def make_cells(text: str, ratios: Sequence[float], intervals: Sequence[int], suffix: int) -> list[Cell]:
    """The settings of one text: dense, then for each ratio off, the intervals below `suffix`, and bound."""
    inside = sorted({f for f in intervals if 0 < f < suffix})
    cells = [Cell(text, "dense")]
    for ratio in ratios:
        cells.append(Cell(text, "off", ratio, 0))
        cells += [Cell(text, "rectified", ratio, f) for f in inside]
        cells.append(Cell(text, "bound", ratio))
    return cells


def require_settings(config: dict[str, Any], prompt: int, length: int, ratios: Sequence[float]) -> str:
    """Refuse a server that would run such windows dense, or give two ratios the same pages where they are scored.

    `prompt` and `length` are the tokens of prompts and whole windows. Returned is what a ratio is called in the
    requests of this method; refused if it has no such field.
    """
    if config.get("dense_fallback") != "never":
        for field in ("min_seq_len", "crossover_tokens"):
            if config.get(field, 0) > prompt:
                raise EvaluationError(
                    f"the server runs a prompt of {prompt} tokens dense: its {field} is {config[field]}; start it with "
                    f"a smaller one, or with dense_fallback: never"
                )
    found = [field for field in FIELDS if field in config]
    if not found:
        raise EvaluationError(f"the server's method has none of {', '.join(FIELDS)}, which a ratio is here")
    if found != ["active_ratio"]:
        # How many pages hold a share of the mass, no ratio says.
        return found[0]
    pages = (length - SCORED) // config["page_size"]
    least = config.get("min_pages", 0)
    budgets = {max(least, math.ceil(pages * ratio - 1e-9)) for ratio in ratios}
    if len(budgets) < len(ratios) or max(budgets) >= pages or least * config["page_size"] >= prompt:
        raise EvaluationError(
            f"ratios {list(ratios)} of {pages} pages with min_pages {least} are {sorted(budgets)} pages: they must "
            "differ and be fewer than all; start the server with a smaller min_pages"
        )
    return found[0]


def make_text(text: str, plain: list[Window], prompt: int, seed: int, server: LiveServer) -> list[Window]:
    """The windows of one of ``TEXTS``."""
    if text == "repeat":
        return [with_repetition(window, prompt, seed) for window in plain]
    if text == "records":
        return [with_records(window, prompt, seed, server.tokenize) for window in plain]
    return plain


def check_forcing(server: LiveServer, record: Record, text: str, windows: Sequence[Window], suffix: int) -> None:
    """Compare forced dense decode with prefill, write a ``check`` row, and refuse a difference."""
    before = server.counters()
    checked = windows[:CHECKED_WINDOWS]
    prefilled = server.each(
        lambda client, window: prefilled_suffix(client, window.tokens, suffix), checked, f"{text} prefill"
    )
    decoded = server.each(
        lambda client, window: suffix_logprobs(client, window.tokens, suffix, {"sparse": False}),
        checked,
        f"{text} check",
    )
    pairs = zip(prefilled, decoded, strict=True)
    differences = [b - a for one, other in pairs for a, b in zip(one, other, strict=True)]
    sizes = [abs(difference) for difference in differences]
    passed = abs(fmean(differences)) < MAX_DIFFERENCE and fmean(sizes) < MAX_ABSOLUTE_DIFFERENCE
    row = {"windows": len(checked), "mean_difference": fmean(differences), "passed": passed}
    row |= {"mean_absolute_difference": fmean(sizes), "max_absolute_difference": max(sizes)}
    counts = moved(before, server.counters())
    record.add("check", task=text, **row, counters=counts)
    require_dense(f"{text} check", counts)
    if not passed:
        raise EvaluationError(f"forced dense decode differs from prefill: {row}")


def measure(
    server: LiveServer, record: Record, cell: Cell, windows: Sequence[Window], suffix: int, field: str
) -> list[dict[str, Any]]:
    """Measure one setting, and write and return its rows; refuses counters that do not show the setting."""
    label = " ".join(str(part) for part in cell if part is not None)
    before = server.counters()
    nlls = server.each(lambda client, window: mean_nll(client, window, suffix, cell, field), windows, label)
    counts = moved(before, server.counters())
    if cell.setting == "dense":
        require_dense(label, counts)
    else:
        require_sparse(label, counts, rectifying=cell.setting == "rectified")
    place = {"task": cell.task, "arm": label, "setting": cell.setting, "ratio": cell.ratio, "interval": cell.interval}
    rows: list[dict[str, Any]] = [
        {"kind": "item", "id": f"{cell.task}/{i}", **place, "window": i, "scores": {"nll": round(nll, 6)}}
        for i, nll in enumerate(nlls)
    ]
    rows.append({"kind": "counters", **place, "items": len(nlls), "density": density(counts), "counters": counts})
    for row in rows:
        record.add(**row)
    return rows


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all texts and settings, write the file, and return the summary of `eval.scores.ppl_summary`."""
    prompt = args.length - args.suffix
    with LiveServer(args.base_url, args.concurrency) as server:
        facts = server.facts()
        field = require_settings(decode_config(server), prompt, args.length, args.ratios)
        books = read_tokens(args.book, server.tokenize)
        plain = make_windows(books, args.length, args.windows, args.seed, args.stride)
        texts = {text: make_text(text, plain, prompt, args.seed, server) for text in args.kind}
        names = ("length", "suffix", "stride", "intervals", "ratios", "kind", "seed")
        settings = {
            "windows": len(plain),
            "books": sorted({window.book for window in plain}),
            **{name: getattr(args, name) for name in names},
        }
        header = {"servers": {"base": facts}, "arguments": settings, "label": args.label}
        with Record(args.out, COMMAND, args.revision, resume=True, **header) as record:
            rows = [row for row in record.earlier if row["kind"] in ("item", "counters")]
            checked = {row["task"] for row in record.earlier if row["kind"] == "check" and row["passed"]}
            # The counters of a setting are written last.
            done = {cell_of(row) for row in rows if row["kind"] == "counters"}
            for text in args.kind:
                if text not in checked:
                    for i, window in enumerate(texts[text]):
                        place = {name: getattr(window, name) for name in ("book", "start", "depth", "scored")}
                        record.add("window", task=text, window=i, **place)
                    check_forcing(server, record, text, texts[text], args.suffix)
                for cell in make_cells(text, args.ratios, args.intervals, args.suffix):
                    if cell not in done:
                        rows += measure(server, record, cell, texts[text], args.suffix, field)
            summary = summarise(rows, args.seed)
            for row in summary:
                record.add("summary", length=args.length, suffix=args.suffix, **row)
    return summary


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = command_line(COMMAND, __doc__)
    parser.add_argument("--base-url", help="the sparse server")
    parser.add_argument("--out", type=Path, help="JSONL file to write")
    parser.add_argument("--plot", type=Path, help="picture to draw, .png or .svg")
    parser.add_argument("--from", type=Path, dest="file", help="take the figures of this JSONL file, without a server")
    add_arguments(parser, length=4096, concurrency=32, kind="book,repeat,records")
    parser.add_argument("--suffix", type=int, default=256, help="tokens of it forced through decode")
    parser.add_argument("--stride", type=int, help="tokens from one window's begin to the next's (default: --length)")
    parser.add_argument("--intervals", type=list_of(int), default="8,16,32,64,128,0", help="0 (never) is always run")
    parser.add_argument(
        "--ratios", type=list_of(float), default=".02,.05,.1", help="shares of the pages, or of the mass: theta1"
    )
    args = parser.parse_args(arguments)
    require_books(parser, args.book)
    for wrong, message in (
        (not args.file and not (args.base_url and args.out), "--base-url and --out are needed, or --from"),
        (args.file and not args.plot, "--from needs --plot"),
        (not SCORED <= args.suffix < args.length, f"--suffix must be at least {SCORED} and below --length"),
        (args.stride is not None and args.stride < args.suffix, "--stride must be at least --suffix"),
        (min(args.intervals, default=0) < 0, "--intervals must be 0 or more"),
        (not args.ratios or not all(0 < r < 1 for r in args.ratios), "--ratios must be between 0 and 1"),
    ):
        if wrong:
            parser.error(message)
    return args


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 1 when its figures would not show what they say."""
    args = parse(arguments)

    def measured() -> list[dict[str, Any]]:
        summary = summarise(read_rows(args.file), args.seed) if args.file else run(args)
        if args.plot:
            plot(summary, args.plot)
        return summary

    return shown(COMMAND, measured)


if __name__ == "__main__":
    sys.exit(main())
