"""Time per output token of dummy weights over the context, beside the least it could be.

The limit is what is left when the attention of a sparse step costs nothing but its bytes, read once each at the rate
``W`` of the chip's memory (`eval.lab.kernels.harness`). For a batch of ``rows`` rows of ``context`` tokens:

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

Below it the picture has the active blocks of RoBSA's rows, where cells say how many there were (RoBSA's figures 10 and
11).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.lab.kernels.harness import CEILINGS
from eval.lab.servers.model_shapes import SHAPES
from eval.serving import report
from eval.serving.grid import DENSE
from eval.serving.report import LIMIT, SPARSE, Lines, Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Bytes of an element, by a server's --kv-cache-dtype or --dtype; "auto" is what the shapes are: bfloat16.
ITEMSIZE = {"auto": 2, "bf16": 2, "bfloat16": 2, "half": 2, "float16": 2, "fp8_e4m3": 1}
SUMMARY_ITEMSIZE = {"bf16": 2, "fp8": 1}
# Share of T0 that B0 / W may be.
MOST_KV = 0.1

Row = Mapping[str, Any]


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
    """Compute the latency limit of a file's servers.

    Args:
        rows: of the file: its header and its ``server`` rows.

    Returns:
        None where it cannot be said: the model is no shape of `eval.lab.servers.model_shapes`, or an MLA one; the chip
        or the element type is unknown; the method is not ReSA with the paper's summaries; or a server runs on several
        GPUs.
    """
    header = rows[0]
    shape, gbps = SHAPES.get(header["arguments"].get("shape") or ""), CEILINGS["gbps"].get(header["device"])
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
    """Those of `eval.serving.report.curves`, and "limit" where it is known."""
    found = report.curves(rows)
    limit = limit_of(rows)
    rest = limit.rest({batch: lines[DENSE] for batch, lines in found.items()}) if limit else None
    if limit and rest is not None:
        for batch, lines in found.items():
            times = {point.context: limit.seconds(batch, point.context, rest) for point in lines[DENSE]}
            lines[LIMIT] = [Point(context, seconds, seconds, seconds) for context, seconds in times.items()]
    return found


def cells_with_blocks(rows: Sequence[Row]) -> list[Row]:
    """The cells in which blocks were counted, by context.

    Args:
        rows: of a file of ``eval.bench_serving``.
    """
    found = [row for row in rows if row["kind"] == "summary" and row.get("active_blocks") and row.get("block_size")]
    return sorted(found, key=lambda row: row["context"])


def panel(axes: Axes, cells: Sequence[Row], colours: Mapping[str, str]) -> None:
    """Draw the blocks that a row attends to in a sparse layer on average, and all that it holds, on a logarithmic axis.

    Args:
        axes: to draw on.
        cells: of `cells_with_blocks`, of one batch size.
        colours: of the servers by name.
    """
    held = {row["context"]: math.ceil(row["context"] / row["block_size"]) for row in cells}
    axes.plot(list(held), list(held.values()), color=colours[DENSE], marker="o", label="all that there are")
    arms = dict.fromkeys(row["arm"] for row in cells)
    # Servers with the same inputs need the same blocks: a line must not hide the one under it.
    for arm, style in zip(arms, ("-", "--", ":", "-.") * len(arms), strict=False):
        mine = [row for row in cells if row["arm"] == arm]
        points = [row["context"] for row in mine], [row["active_blocks"] for row in mine]
        axes.plot(*points, color=colours[arm], linestyle=style, marker="o", label=arm)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.set(ylabel=f"active blocks of {cells[0]['block_size']} tokens")
    axes.legend()


def plot(rows: Sequence[Row], stem: Path) -> list[Path]:
    """See `eval.serving.report.plot_times`."""
    return report.plot_times(rows, stem, curves(rows), cells_with_blocks(rows), panel)


def draw(path: Path, stem: Path) -> None:
    """See `eval.serving.report.draw`."""
    report.draw(path, stem, plot)
