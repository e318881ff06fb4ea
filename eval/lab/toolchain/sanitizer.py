"""What compute-sanitizer found in the kernels: a table of ``eval.lab.sanitize_kernels``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eval.live.record import read_finished
from eval.scores.tables import Column, table, text


def sanitizer(path: Path) -> str:
    """What was run, and a line for each operation with a column for each tool."""
    header, *rows = read_finished(path)
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["kind"] == "item":
            line = found.setdefault(row["operation"], {"operation": row["operation"], "cases": 0, "kernels": set()})
            line[row["tool"]] = _cell(row)
            line["cases"] = max(line["cases"], row["cases"])
            line["kernels"] |= set(row["kernels"])
    tools: list[str] = header["arguments"]["tools"]
    names: list[str] = [name for name in header["arguments"]["operations"] if name in found]
    columns: list[Column] = [
        ("operation", text("operation")),
        ("cases", text("cases")),
        ("kernels", lambda row: ", ".join(sorted(row["kernels"]))),
        *((tool, text(tool)) for tool in tools),
    ]
    said = [header["device"] or "no GPU"]
    said += [f"{name} {header[key]}" for name, key in (("driver", "driver"), ("compute-sanitizer", "sanitizer"))]
    said += [f"{name} {version}" for name, version in header["versions"].items()]
    return f"{', '.join(said)}:\n\n{table([found[name] for name in names], columns)}"


def _cell(row: dict[str, Any]) -> str:
    """The verdict, with what was found; files from before the count have no "meant"."""
    counts = {"error": row["errors"], "warning": row["warnings"]}
    found = [f"{count} {name}{'' if count == 1 else 's'}" for name, count in counts.items() if count]
    found += [f"{row['meant']} meant"] if row.get("meant") else []
    if row["verdict"] == "errors":
        return ", ".join(found)
    return ", ".join([row["verdict"], *found])
