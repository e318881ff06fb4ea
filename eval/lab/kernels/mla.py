"""RoBSA's sensitive layer against dense MLA decode: the table of a file of ``eval.lab.bench_mla``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval.live.record import read_finished
from eval.scores.tables import Column, number, percent, table, text

COMMAND = "eval.lab.bench_mla"
# The operations of a decode step: dense attention, the three that replace it, and these together.
DENSE, MASS, TOPP, ATTEND, WHOLE = "dense_mla", "block_mass", "block_topp", "sparse_mla_decode", "mass+topp+attend"
OPS = (DENSE, MASS, TOPP, ATTEND, WHOLE)
# Which keys the blocks are scored by: the RoPE part of the latent cache, a copy of it, or all dimensions.
ROPE, COPY, FULL = SCORES = ("rope", "rope_copy", "full_score")


def mla(path: Path) -> str:
    """Microseconds a layer of the operations of a decode step, by whom, and what their outputs are worth."""
    header, *rows = read_finished(path)
    columns: list[Column] = [
        ("shape", text("shape")),
        ("heads", text("heads")),
        ("operation", text("op")),
        ("by", text("implementation")),
        ("µs a layer", number("us", 1)),
        ("spread", number("spread", 1)),
        ("GB/s", number("gbps", 0)),
        ("TFLOP/s", number("tflops", 0)),
        ("of the ceiling", percent("of_ceiling")),
        ("times faster", number("dense_ratio", 2)),
        ("than FlashMLA", number("flashmla_ratio", 2)),
        ("active blocks", number("active_blocks", 0)),
        ("most", text("active_blocks_max")),
        ("of all", percent("active_share")),
        ("mass kept", number("recall", 3)),
        ("cosine of RoPE scores", number("similarity", 4)),
        ("relative L2", number("relative_l2", 4)),
        ("to dense", number("dense_l2", 3)),
        ("why not", text("unavailable")),
    ]
    return table([_with_ceiling(row, header) for row in rows if row["kind"] == "item"], columns)


def _with_ceiling(row: Mapping[str, Any], header: Mapping[str, Any]) -> dict[str, Any]:
    """With how near it comes to what memory or tensor cores allow at best, whichever takes longer."""
    pairs = (("gbps", "ceiling_gbps"), ("tflops", "ceiling_tflops"))
    shares = [row[name] / header[ceiling] for name, ceiling in pairs if name in row and header.get(ceiling)]
    # Of a float8 cache some compute in float8, faster.
    return {**row, "of_ceiling": max(shares)} if shares and row["kv_dtype"] == "bfloat16" else dict(row)
