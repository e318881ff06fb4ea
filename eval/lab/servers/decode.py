"""The table of files of ``eval.lab.bench_decode``: time per output token, sparse and dense."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from eval.lab.servers.decode_peers import backend_of
from eval.lab.servers.server_facts import sglang_of
from eval.live.record import read_finished
from eval.scores.tables import Column, Row, number, percent, table, text

SPARSE = {"sparse": "sparse, never rectified", "rectified": "sparse, rectified"}
LOAD = ("batch", "context")


def decode(*paths: Path, beside: Sequence[Path] = ()) -> str:
    """Time per output token of the arms, and who their ratios are against.

    Args:
        *paths: files of sparse servers.
        beside: files of ``--dense-only`` over a KV cache of another element type, which reads fewer bytes and answers
            something else. Each has a line beside the files of the same model, batch and context, with its ratio to
            what the others are against, and counts as no peer of theirs.
    """
    rows: list[dict[str, Any]] = []
    for path in paths:
        header, *found = read_finished(path)
        own = backend_of(header["server"])
        # Files of older revisions know no dense decode but their own.
        rows += [
            {"own": own, "dense": own, "sglang": sglang_of(header), **row} for row in found if row["kind"] == "summary"
        ]
        against = next((row for row in found if row.get("dense_ratio") == 1), None)
        if against is not None:
            rows += [_line(other, against) for other in beside if _load(other) == _load(path)]

    def shown(row: Row) -> str:
        return SPARSE.get(row["arm"]) or f"dense, {row['backend'] if row['arm'] in ('peer', 'beside') else row['own']}"

    columns: list[Column] = [
        ("shape", text("shape")),
        ("decode", shown),
        ("TPOT, ms", number("tpot", 2, 1e3)),
        ("of the rounds", lambda row: " … ".join(f"{value * 1e3:.2f}" for value in row["tpot_range"])),
        ("times faster", number("dense_ratio", 2)),
        ("than dense", text("dense")),
        ("read", percent("density")),
        ("SGLang", text("sglang")),
    ]
    return table([row for row in rows if row["arm"] != "dense_short"], columns)


def memory(*paths: Path) -> str:
    """Return a table of allocations in a decode step by arm, the server's peak, and its summaries against their charge.

    Args:
        *paths: files of sparse servers; those of older revisions, whose servers did not say, are left out.
    """
    rows: list[dict[str, Any]] = []
    for path in paths:
        header, *found = read_finished(path)
        rounds = [row for row in found if row["kind"] == "round"]
        if not all(row.get("peak_bytes") for row in rounds):
            continue
        steps = {
            arm: median(row["allocations_per_step"] for row in rounds if row["arm"] == arm)
            for arm in ("dense", *SPARSE)
        }
        held = header["server"]["sparse"]
        raised = max(row["peak_bytes"] for row in rounds) / held["allocator"]["peak_bytes"] - 1
        taken = held["aux_bytes_measured"] / held["aux_bytes_accounted"] - 1
        rows.append(
            {**header, **steps, "raised": raised, "taken": taken, "charged": held["aux_bytes_accounted"] / 2**30}
        )
    columns: list[Column] = [
        ("shape", text("shape")),
        ("summaries charged, GiB", number("charged", 2)),
        ("taken beyond that", lambda row: f"{row['taken']:.3%}"),
        ("peak raised by the rounds", lambda row: f"{row['raised']:.3%}"),
        ("allocations a step: dense", number("dense", 1)),
        *((decode, number(arm, 1)) for arm, decode in SPARSE.items()),
        ("revision", text("revision")),
    ]
    return table(rows, columns)


def _load(path: Path) -> tuple[Any, ...]:
    """The model (by the name of its folder), batch and context of a file."""
    header = read_finished(path)[0]
    return (Path(header["server"]["model_path"]).name, *(header[name] for name in LOAD))


def _line(path: Path, against: Row) -> dict[str, Any]:
    header, *rows = read_finished(path)
    (row,) = [row for row in rows if row["kind"] == "summary"]
    server = header["server"]
    return {
        **row,
        "arm": "beside",
        "shape": against["shape"],
        "backend": f"{backend_of(server)}, {server['kv_cache_dtype']} KV",
        "dense": against.get("dense"),
        "sglang": sglang_of(header),
        "dense_ratio": against["tpot"] / row["tpot"],
    }
