"""Time per output token over the context, from a file of ``eval.bench_serving``, and the least it could be.

The limit is what is left when the attention of a sparse step costs nothing but its bytes, read once each at the rate
``W`` of the chip's memory (`eval.figures.ceilings`). For a batch of ``rows`` rows of ``context`` tokens:

    limit = T0 - B0 / W  +  share * B / W
    B     = rows * context * layers * KV heads * 2 * head dimension * bytes of an element of the KV cache
    share = (1 - 1/f) * min(1, attended + summaries) + 1/f
    attended  = max(min_pages, ceil(pages * active_ratio)) / pages, at most 1, where pages = ceil(context / page size)
    summaries = bytes of an element of a summary / (page size * bytes of an element of the KV cache)

``T0`` is the time measured of the dense server in the file's cell of fewest KV tokens and ``B0`` the ``B`` of its cache
there. ``T0 - B0 / W`` is what is not attention, reading the weights too, so these are not added again; a larger batch
takes longer for it, which the limit leaves out. Without a cell whose KV is a small part of it (`MOST_KV`) there is no
limit: what dense attention loses against ``W`` would count as not attention. A summary is
a maximum and a minimum of a page's keys, so of each element of the head dimension it has two where K and V have
2 * page size. ``f`` tokens cost f - 1 sparse steps and one dense pass over all of K and V
(`sglang_sparse.scheduler.rectification`); without rectification 1/f is 0. Layers that do not run sparse read all of K
and V. The tokens of the answer are not
counted: a few hundred beside thousands.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from eval.figures.active_blocks import cells_with_blocks, panel
from eval.figures.ceilings import CEILING_GBPS
from eval.figures.pictures import save
from eval.live.counters import EvaluationError
from eval.parts.model_shapes import SHAPES
from eval.parts.serving_grid import DENSE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COMMAND = "eval.bench_serving"
SPARSE, LIMIT = "sparse", "limit"
# Bytes of an element, by a server's --kv-cache-dtype or --dtype; "auto" is what the shapes are: bfloat16.
ITEMSIZE = {"auto": 2, "bf16": 2, "bfloat16": 2, "half": 2, "float16": 2, "fp8_e4m3": 1}
SUMMARY_ITEMSIZE = {"bf16": 2, "fp8": 1}
# Share of T0 that B0 / W may be.
MOST_KV = 0.1

Row = Mapping[str, Any]


class Point(NamedTuple):
    """A time per output token.

    Attributes:
        context: tokens of each prompt.
        seconds: the median of the runs, or the limit.
        low, high: range of the runs, in seconds; of the limit both are ``seconds``.
    """

    context: int
    seconds: float
    low: float
    high: float


# Of each line its points, by context.
Lines = dict[str, list[Point]]


@dataclass(frozen=True)
class Limit:
    """The least that a step can take on one GPU; the formula is that of this module.

    Attributes:
        layers: of the model.
        elements: of K and V of a token in a layer: KV heads * 2 * head dimension.
        gbps: ``W``, in 10^9 bytes a second.
        itemsize: bytes of an element of the sparse server's KV cache.
        dense_itemsize: the same of the dense server's.
        sparse_layers: layers that run sparse.
        config: of the method "resa", resolved.
    """

    layers: int
    elements: int
    gbps: float
    itemsize: int
    dense_itemsize: int
    sparse_layers: int
    config: Row

    def kv_seconds(self, tokens: int, itemsize: int) -> float:
        """``B / W``: what it takes to read K and V of so many tokens in all layers."""
        return tokens * self.layers * self.elements * itemsize / (self.gbps * 1e9)

    def share(self, context: int) -> float:
        """Bytes that a step reads of a row's K, V and summaries, over those of K and V; the mean of ``f`` steps."""
        config = self.config
        pages = math.ceil(context / config["page_size"])
        # The guard that the method has: 0.1 is not 1/10 in binary.
        selected = max(config["min_pages"], math.ceil(pages * config["active_ratio"] - 1e-9))
        summaries = SUMMARY_ITEMSIZE.get(config["summary_dtype"], self.itemsize) / (config["page_size"] * self.itemsize)
        sparse = min(1.0, selected / pages + summaries)
        passes = 1 / config["rectify_interval"] if config["rectify_interval"] else 0.0
        read = (1 - passes) * sparse + passes
        return 1 - self.sparse_layers / self.layers * (1 - read)

    def rest(self, dense: Mapping[int, Sequence[Point]]) -> float | None:
        """``T0 - B0 / W`` in seconds, or None where every cell has too much KV to say it.

        Args:
            dense: points of the dense server by batch size.
        """
        cells = [(batch * point.context, point.seconds) for batch, points in dense.items() for point in points]
        tokens, seconds = min(cells)
        attention = self.kv_seconds(tokens, self.dense_itemsize)
        return seconds - attention if attention <= MOST_KV * seconds else None

    def seconds(self, batch: int, context: int, rest: float) -> float:
        """The limit of a batch; ``rest`` is `rest`."""
        return rest + self.share(context) * self.kv_seconds(batch * context, self.itemsize)


def limit_of(rows: Sequence[Row]) -> Limit | None:
    """What a file says of its limit.

    Args:
        rows: of the file: its header and its ``server`` rows.

    Returns:
        None where it cannot be said: the model is no shape of `eval.parts.model_shapes`, or an MLA one; the chip or the
        element type is unknown; the method is not ReSA with the paper's summaries; or a server runs on several GPUs.
    """
    header = rows[0]
    shape, gbps = SHAPES.get(header["arguments"].get("shape") or ""), CEILING_GBPS.get(header["device"])
    servers = {row["arm"]: row for row in rows if row["kind"] == "server"}
    if shape is None or "head_dim" not in shape or gbps is None or not {DENSE, SPARSE} <= servers.keys():
        return None
    own, dense = (_itemsize(servers[name]["facts"]) for name in (SPARSE, DENSE))
    sparse = servers[SPARSE]["facts"].get("sparse") or {}
    several = any(re.search(r"--(tp|tensor-parallel)", server["command"]) for server in servers.values())
    if own is None or dense is None or sparse.get("method") != "resa" or several:
        return None
    if sparse["config"].get("summary", "minmax") != "minmax":
        return None
    layers, elements = shape["num_hidden_layers"], shape["num_key_value_heads"] * 2 * shape["head_dim"]
    return Limit(layers, elements, gbps, own, dense, sparse["sparse_layers"], sparse["config"])


def _itemsize(facts: Row) -> int | None:
    name = facts.get("kv_cache_dtype", "auto")
    return ITEMSIZE.get(facts.get("dtype", "auto") if name == "auto" else name)


def curves(rows: Sequence[Row]) -> dict[int, Lines]:
    """The lines of each batch size: "dense", further dense servers by name, "sparse", and "limit" where it is known.

    Args:
        rows: of the file: header, ``server`` rows, and ``summary`` rows of task "serving" (seconds).

    Raises:
        EvaluationError: no cell was measured on both servers.
    """
    cells = [row for row in rows if row["kind"] == "summary" and row["task"] == "serving"]
    if not cells:
        raise EvaluationError("there are no cells to draw: the run was refused or interrupted, or nothing fitted")
    names = dict.fromkeys([DENSE, *(row["arm"] for row in cells if row["arm"] != SPARSE), SPARSE])
    found: dict[int, Lines] = {}
    for batch in sorted({row["batch"] for row in cells}):
        mine = [row for row in cells if row["batch"] == batch]
        lines = {name: _points([row for row in mine if name in (DENSE, row["arm"])], name) for name in names}
        found[batch] = {name: points for name, points in lines.items() if points}
    limit = limit_of(rows)
    rest = limit.rest({batch: lines[DENSE] for batch, lines in found.items()}) if limit else None
    if limit and rest is not None:
        for batch, lines in found.items():
            times = {point.context: limit.seconds(batch, point.context, rest) for point in lines[DENSE]}
            lines[LIMIT] = [Point(context, seconds, seconds, seconds) for context, seconds in times.items()]
    return found


def _points(cells: Sequence[Row], name: str) -> list[Point]:
    field = "dense_decode_tpot" if name == DENSE else "decode_tpot"
    # The row of every server holds the dense server's figures.
    return sorted({Point(row["context"], row[field], *row[f"{field}_range"]) for row in cells})


def plot(rows: Sequence[Row], stem: Path) -> list[Path]:
    """Milliseconds per output token over the context, a panel for each batch size; bars are the range of the runs.

    Where the cells say how many blocks were active (`eval.figures.active_blocks`), these are drawn below.

    Args:
        rows: see `curves`.
        stem: path without a suffix.

    Returns:
        The paths written: PNG and SVG.

    Raises:
        EvaluationError: see `curves`.
    """
    from matplotlib.figure import Figure

    panels = curves(rows)
    others = dict.fromkeys(name for lines in panels.values() for name in lines if name not in (DENSE, SPARSE, LIMIT))
    colours = {DENSE: "C7", SPARSE: "C0", LIMIT: "black"} | {name: f"C{1 + i}" for i, name in enumerate(others)}
    cells = cells_with_blocks(rows)
    lower = {batch: [row for row in cells if row["batch"] == batch] for batch in panels if cells}
    figure = Figure(figsize=(5 * len(panels), 8.4 if lower else 4.2), layout="constrained")
    grid = figure.subplots(2 if lower else 1, len(panels), squeeze=False)
    for axes, (batch, lines) in zip(grid[0], panels.items(), strict=True):
        for name, points in lines.items():
            contexts, times, low, high = zip(*points, strict=True)
            times = [1e3 * seconds for seconds in times]
            if name == LIMIT:
                axes.plot(contexts, times, color=colours[name], linestyle="--", marker="x", markersize=4, label=name)
                continue
            # The median of two runs lies between them but for rounding.
            below = [max(0.0, time - 1e3 * least) for time, least in zip(times, low, strict=True)]
            above = [max(0.0, 1e3 * most - time) for time, most in zip(times, high, strict=True)]
            axes.errorbar(contexts, times, yerr=(below, above), color=colours[name], marker="o", capsize=3, label=name)
        tokens_axis(axes, [point.context for points in lines.values() for point in points])
        axes.set(title=f"batch {batch}", xlabel="context, tokens", ylabel="time per output token, ms")
        axes.set_ylim(bottom=0)
        axes.legend()
    for axes, (batch, mine) in zip(grid[-1], lower.items(), strict=False):
        axes.set_visible(bool(mine))
        if mine:
            panel(axes, mine, colours)
            tokens_axis(axes, [row["context"] for row in mine])
            axes.set(title=f"batch {batch}", xlabel="context, tokens")
    figure.suptitle(_title(rows))
    return save(figure, stem)


def tokens_axis(axes: Axes, tokens: Sequence[int]) -> None:
    """A logarithmic horizontal axis with a tick at each power of two: 512, 1k, 2k."""
    powers = range(math.floor(math.log2(min(tokens))), math.ceil(math.log2(max(tokens))) + 1)
    axes.set_xscale("log", base=2)
    axes.set_xticks([2**power for power in powers], [f"{2**p // 1024}k" if p >= 10 else str(2**p) for p in powers])
    axes.minorticks_off()


def _title(rows: Sequence[Row]) -> str:
    arguments = rows[0]["arguments"]
    model = arguments.get("shape") or Path(arguments["model_path"]).name
    facts = next((row["facts"] for row in rows if row["kind"] == "server" and row["arm"] == SPARSE), {})
    state = facts.get("sparse") or {}
    named = {"active_ratio": "active ratio", "theta1": "theta1", "rectify_interval": "tokens between rectifications"}
    config = [f"{text} {state['config'][name]}" for name, text in named.items() if name in state.get("config", {})]
    return "\n".join(filter(None, (f"{model} on {rows[0]['device']}", ", ".join(config))))
