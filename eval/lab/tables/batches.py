"""Needles asked in batches of mixed lengths: a line for each file of ``eval.niah``, over all its tasks and lengths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.lab.tables.kept import ASKED
from eval.lab.tables.weights import weights
from eval.live.counters import density, sparsity, sum_of
from eval.live.record import read_finished
from eval.scores.stats import compare
from eval.scores.summary import by_prompt
from eval.scores.tables import Column, Row, bounds, number, percent, table, text
from eval.texts.lengths import short_length


def pooled(path: Path) -> dict[str, Any]:
    """What a file says of all its questions together.

    Returns:
        ``file``, its name; ``n``; ``score`` and ``dense``, exact match of the base server and of the one that it is
        compared with, and the figures of `eval.scores.stats.compare`; ``prefilled``, tokens that the base server's
        prefill computed, as a share of those of the questions' prompts (what is computed of a turn before the question
        is counted, and is none of these, so that without a cache it is about 2 there), and ``sparsity``, share of the
        query-key pairs left out, None without a prefill method; ``density``, share of the pages that decode read, None
        without a decode method; ``rectified``, tokens that dense passes encoded again, None where the server has none.
    """
    header, *rows = read_finished(path)
    items = {arm: [row for row in rows if row["kind"] == "item" and row["arm"] == arm] for arm in ("base", "compare")}
    mine, theirs = (by_prompt(found) for found in items.values())
    both = [prompt for prompt in mine if prompt in theirs]
    scores, dense = ([found[prompt] for prompt in both] for found in (mine, theirs))
    counts = sum_of(row["counters"] for row in rows if row["kind"] == "counters" and row["arm"] == "base")
    computed = counts.get("prefill_sparse_tokens", 0) + counts.get("prefill_dense_tokens", 0)
    asked = sum(row["prompt_tokens"] for row in items["base"])
    lengths, server = header["arguments"]["lengths"], header["servers"]["base"]
    return {
        "file": path.name.removeprefix("niah-mixed-").split(".jsonl")[0],
        "decode": server.get("sparse_method"),
        "prefill": server.get("sparse_prefill_method"),
        "weights": weights(header),
        "graphs": "no" if server["disable_cuda_graph"] else "yes",
        "device": server["device"],
        "asked": ASKED[header["arguments"]["form"]],
        "lengths": f"{short_length(min(lengths))} … {short_length(max(lengths))}",
        "in_a_batch": "mixed" if header["arguments"].get("mixed") else "one",
        "n": len(both),
        "score": sum(scores) / len(both),
        "dense": sum(dense) / len(both),
        **compare(scores, dense),
        "prefilled": computed / asked if server.get("sparse_prefill_method") else None,
        "sparsity": sparsity(counts),
        "density": density(counts),
        "rectified": counts["rectified_tokens"] or None,
    }


def batches(paths: Sequence[Path]) -> str:
    """See `pooled`."""
    if not paths:
        return "Not measured yet."
    columns: list[Column] = [
        ("file", text("file")),
        ("decode", text("decode")),
        ("prefill", text("prefill")),
        ("weights", text("weights")),
        ("CUDA graphs", text("graphs")),
        ("device", text("device")),
        ("asked", text("asked")),
        ("lengths", text("lengths")),
        ("in a batch", text("in_a_batch")),
        ("n", text("n")),
        ("dense", number("dense", 3)),
        ("sparse", number("score", 3)),
        ("right in one alone: dense, sparse", _apart),
        ("95 % of the difference", bounds("diff_interval", 3)),
        ("prefilled, of the prompts' tokens", percent("prefilled")),
        ("left out of prefill", percent("sparsity")),
        ("read", percent("density")),
        ("tokens rectified", text("rectified")),
        ("verdict", text("verdict")),
    ]
    return table([pooled(path) for path in paths], columns)


def _apart(row: Row) -> str:
    return f"{row['lost']}, {row['won']}"
