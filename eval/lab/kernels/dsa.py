"""DSA's stages, SGLang's own beside this project's: the table of a file of ``eval.lab.bench_dsa``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from eval.live.record import read_finished
from eval.scores.tables import Column, number, percent, table, text

COMMAND = "eval.lab.bench_dsa"
# What a decode step or a chunk of a prompt attends to: logits of the indexer, the best of them, and their slots.
DECODE, PREFILL = "dsa_decode_selection", "dsa_prefill_selection"
# The same without the logits, which are given.
DECODE_TOPK, PREFILL_TOPK = "dsa_decode_topk", "dsa_prefill_topk"
# Sparse MLA decode over given slots.
ATTEND = "dsa_attention"
OPS = (DECODE, PREFILL, DECODE_TOPK, PREFILL_TOPK, ATTEND)
# What SGLang runs by default on Hopper; this project's choice behind SGLang's logits, which is "auto" where there are
# such; and this project's kernels alone.
NATIVE, AUTO, PORTABLE = "native", "auto", "portable"


def dsa(path: Path) -> str:
    """Microseconds a layer of each stage, by whom, how near that is to what the chip allows, and what is chosen."""
    header, *rows = read_finished(path)
    columns: list[Column] = [
        ("shape", text("shape")),
        ("chunk", lambda row: text("chunk")(row) if row["chunk"] else ""),
        ("operation", text("op")),
        ("by", text("implementation")),
        ("KV", text("kv_dtype")),
        ("µs a layer", number("us", 1)),
        ("spread", number("spread", 1)),
        ("GB/s", number("gbps", 0)),
        ("of the memory's", percent("memory_share")),
        ("times its floor", number("over_floor", 2)),
        ("times faster than native", number("native_ratio", 2)),
        ("native by", text("native")),
        ("same tokens as float64", number("overlap", 5)),
        ("off by", _scientific("off_by")),
        ("same tokens as native", number("native_overlap", 5)),
        ("off by (native)", _scientific("native_off_by")),
        ("same every time", _yes_no("repeatable")),
        ("relative L2", number("relative_l2", 4)),
        ("why not", text("unavailable")),
    ]
    return table([_with_share(row, header) for row in rows if row["kind"] == "item"], columns)


def _with_share(row: Mapping[str, Any], header: Mapping[str, Any]) -> dict[str, Any]:
    """With the share of the memory's bandwidth that its bytes, each moved once, come to."""
    ceiling = header.get("ceiling_gbps")
    return {**row, "memory_share": row["gbps"] / ceiling} if ceiling and "gbps" in row else dict(row)


def _scientific(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: "" if row.get(name) is None else f"{row[name]:.1e}"


def _yes_no(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: {None: "", True: "yes", False: "no"}[row.get(name)]
