"""Active blocks of RoBSA's rows over the context: the panels under the time per token (RoBSA's figures 10 and 11)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

from eval.serving.grid import DENSE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]


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
    held = {row["context"]: ceil(row["context"] / row["block_size"]) for row in cells}
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
