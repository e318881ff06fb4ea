"""Resources of the kernels on GPUs that the machine lacks: a table of ``eval.lab.compile_kernels``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.live.record import read_rows
from eval.scores.tables import Column, table, text

FLOAT8 = "float8_e4m3fn"
KIB = 1024


def compiled(path: Path) -> str:
    """Most shared memory of a program that fits, by operation and compute capability, and what stands in the way."""
    header, *found = read_rows(path)
    rows: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in found:
        rows.setdefault(row["operation"], {}).setdefault(row["target"], []).append(row)
    limits = {name: facts["shared_memory"] for name, facts in header["targets"].items()}
    lines = [
        {"operation": operation, **{name: _cell(mine, limits[name]) for name, mine in by_target.items()}}
        for operation, by_target in rows.items()
    ]
    columns: list[Column] = [("operation", text("operation")), *((name, text(name)) for name in limits)]
    return table(lines, columns)


def _cell(rows: Sequence[dict[str, Any]], limit: int) -> str:
    failed = [row for row in rows if row["failed"]]
    if other := [row["failed"] for row in failed if FLOAT8 not in row["dtypes"]]:
        return f"no: {other[0]}"
    built = [row["kernels"] for row in rows if row["kernels"]]
    if not built:
        return "no float8"
    needed = [max(kernel["shared_bytes"] for kernel in kernels) for kernels in built]
    fitting, larger = [most for most in needed if most <= limit], [most for most in needed if most > limit]
    remarks = [f"{max(fitting) / KIB:.0f} KiB"] if fitting else []
    remarks += [f"{len(larger)} of {len(needed)} cases need {max(larger) / KIB:.0f}"] if larger else []
    remarks += ["no float8"] if failed else []
    remarks += ["spills"] if any(kernel["stack_bytes"] for kernels in built for kernel in kernels) else []
    return ", ".join(remarks)
