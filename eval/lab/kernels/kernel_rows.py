"""The rows of ``eval.lab.bench_kernels``, made from times alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eval.lab.kernels.kernel_inputs import WHOLE, Shape
from eval.lab.kernels.kernel_table import OURS, Implementation

Row = dict[str, Any]
DENSE = "dense_decode"
# What replaces dense attention, so that a ratio to it means something.
AGAINST_DENSE = (DENSE, "sparse_decode", WHOLE)
SHAPE_FIELDS = tuple(Shape(1, 1).facts())
QUALITY = ("relative_l2", "dense_l2", "recall", "agreement", "score_error")


def identity(shape: Shape, implementation: Implementation) -> Row:
    """What a row is about."""
    facts = shape.facts()
    settings = f"{shape.name}/p{shape.page_size}/r{shape.active_ratio}/{facts['summary_dtype']}"
    return {
        "id": f"kernels/{settings}/{implementation.op}/{implementation.name}",
        "op": implementation.op,
        "implementation": implementation.name,
        "peer": implementation.peer,
        "kv_dtype": str(implementation.kv_dtype).removeprefix("torch."),
        **facts,
    }


def timing(times: Sequence[float], num_bytes: int) -> Row:
    """The figures of one implementation.

    Args:
        times: microseconds a layer, of each round; two at least.
        num_bytes: that it has to move.

    Returns:
        ``us`` (median), ``spread`` (between the 10th and the 90th percentile), ``us_range`` (these two), ``bytes`` and
        ``gbps`` (achieved, in 1e9 bytes a second).
    """
    median, deciles = statistics.median(times), statistics.quantiles(times, n=10)
    return {
        "us": round(median, 3),
        "spread": round(deciles[-1] - deciles[0], 3),
        "us_range": [round(deciles[0], 3), round(deciles[-1], 3)],
        "bytes": num_bytes,
        "gbps": round(num_bytes / median / 1e3, 1),
    }


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """The rows of one shape with ``dense_ratio``: the time of the strongest dense peer over theirs.

    The strongest is the fastest over the same bfloat16 cache; dense attention over an fp8 cache stands beside.
    """
    dense = strongest(row for row in rows if row["op"] == DENSE)
    if dense is None:
        return list(rows)
    return [
        {**row, "dense_ratio": dense["us"] / row["us"]} if "us" in row and row["op"] in AGAINST_DENSE else row
        for row in rows
    ]


def strongest(rows: Iterable[Row]) -> Row | None:
    """The fastest over a bfloat16 cache, None where nothing was measured."""
    measured = [row for row in rows if "us" in row and row["kv_dtype"] == "bfloat16"]
    return min(measured, key=lambda row: row["us"], default=None)


def summarise(items: Sequence[Mapping[str, Any]]) -> list[Row]:
    """For each shape and operation what a server of this project runs, and who it is compared with.

    Args:
        items: rows of kind ``item``.

    Returns:
        Rows with the settings of the shape, ``op``, ``implementation``, its figures and quality; ``dense``,
        ``dense_us`` and ``dense_ratio`` for the strongest dense peer, and ``best_peer``, ``best_peer_us`` and
        ``best_peer_ratio`` for the fastest peer at the same operation. For dense attention the implementation is the
        strongest peer itself. What this project could not do is left out.
    """
    found = []
    for shape in dict.fromkeys(row["shape"] for row in items):
        rows = [dict(row) for row in items if row["shape"] == shape]
        dense = strongest(row for row in rows if row["op"] == DENSE)
        for op in dict.fromkeys(row["op"] for row in rows):
            best = strongest(row for row in rows if row["op"] == op and (op == DENSE or row["implementation"] == OURS))
            peer = strongest(row for row in rows if row["op"] == op and op != DENSE and row["peer"])
            if best is None:
                continue
            kept = ("op", "implementation", *SHAPE_FIELDS, "us", "spread", "gbps", "dense_ratio", *QUALITY)
            line = {name: best[name] for name in kept if name in best}
            if dense is not None:
                line |= {"dense": dense["implementation"], "dense_us": dense["us"]}
            if peer is not None:
                line |= {"best_peer": peer["implementation"], "best_peer_us": peer["us"]}
                line["best_peer_ratio"] = peer["us"] / best["us"]
            found.append(line)
    return found
