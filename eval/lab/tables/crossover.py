"""From how many KV tokens on sparse decode is faster: the table of ``python -m sglang_sparse.tune --out FILE``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from eval.live.counters import EvaluationError
from eval.scores.pictures import save
from eval.scores.tables import Column, number, table, text
from eval.serving.report import tokens_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 2


class Point(BaseModel):
    """One batch: ``batch`` rows of ``context`` KV tokens, and microseconds of a layer's attention."""

    batch: int = Field(gt=0)
    context: int = Field(gt=0)
    dense: str
    dense_us: float = Field(gt=0)
    sparse_us: float = Field(gt=0)

    @property
    def tokens(self) -> int:
        """KV tokens of the batch."""
        return self.batch * self.context


class Entry(BaseModel):
    """Measurements of one GPU, shape and share of the pages; see `sglang_sparse.tune.entry`."""

    gpu: str
    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    kv_dtype: str
    summary: str
    group: str
    summary_dtype: str
    active_ratio: float
    crossover_tokens: int
    overhead_us: float
    points: list[Point] = Field(min_length=1)

    @property
    def heads(self) -> str:
        """As ``--shape`` is given."""
        return f"{self.q_heads}x{self.kv_heads}x{self.head_dim}"

    def ratio(self, point: Point) -> float:
        """Dense time over sparse time; the sparse one with the overhead that the crossover was chosen with."""
        return point.dense_us / (point.sparse_us + self.overhead_us)


def read(path: Path) -> list[Entry]:
    """The entries of a table.

    Raises:
        EvaluationError: it cannot be read, is something else, or has no entries.
    """
    try:
        entries = TypeAdapter(list[Entry]).validate_json(path.read_bytes())
    except OSError as error:
        raise EvaluationError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise EvaluationError(
            f"{path} is no table of sglang_sparse.tune: {f'{place}: ' if place else ''}{first['msg']}"
        ) from error
    if not entries:
        raise EvaluationError(f"{path} has no entries: sglang_sparse.tune has measured nothing yet")
    return entries


def crossover_table(path: Path) -> str:
    """The entries as Markdown, a line each.

    Raises:
        EvaluationError: see `read`.
    """
    columns: list[Column] = [
        ("GPU", text("gpu")),
        ("query heads x KV heads x dimension", text("heads")),
        ("tokens per page", text("page_size")),
        ("KV", text("kv_dtype")),
        ("summaries", lambda row: f"{row['summary']}, {row['summary_dtype']}"),
        ("group", text("group")),
        ("active ratio", text("active_ratio")),
        ("overhead of a sparse step, µs a layer", number("overhead_us", 1)),
        ("sparse from, KV tokens of a batch", text("crossover_tokens")),
    ]
    return table([{**entry.model_dump(), "heads": entry.heads} for entry in read(path)], columns)


def plot(entries: Sequence[Entry], stem: Path) -> list[Path]:
    """Dense time over sparse time by the KV tokens of a batch: a panel for each entry, a line for each batch size.

    Above the horizontal line sparse is faster; the vertical one is the crossover that was chosen.

    Args:
        entries: one at least.
        stem: path without a suffix.

    Returns:
        The paths written.
    """
    from matplotlib.figure import Figure

    wide = min(COLUMNS, len(entries))
    high = -(-len(entries) // wide)
    sizes = sorted({point.batch for entry in entries for point in entry.points})
    colours = {batch: f"C{number}" for number, batch in enumerate(sizes)}
    figure = Figure(figsize=(5 * wide, 4.4 * high), layout="constrained")
    places = figure.subplots(high, wide, squeeze=False).ravel()
    for axes, entry in zip(places, entries, strict=False):
        _panel(axes, entry, colours)
    for axes in places[len(entries) :]:
        axes.set_visible(False)
    return save(figure, stem)


def _panel(axes: Axes, entry: Entry, colours: dict[int, str]) -> None:
    for batch, colour in colours.items():
        mine = sorted((point for point in entry.points if point.batch == batch), key=lambda point: point.tokens)
        if mine:
            ratios = [entry.ratio(point) for point in mine]
            axes.plot([point.tokens for point in mine], ratios, color=colour, marker="o", label=f"batch {batch}")
    axes.axhline(1, color="grey", linewidth=0.8)
    chosen = f"sparse from {entry.crossover_tokens} tokens"
    axes.axvline(max(entry.crossover_tokens, 1), color="black", linestyle="--", label=chosen)
    tokens_axis(axes, [point.tokens for point in entry.points])
    selection = f"{entry.summary} ({entry.summary_dtype}), {entry.group}"
    kind = f"pages of {entry.page_size}, {entry.kv_dtype} KV, {selection}"
    axes.set_title(f"{entry.heads}, active ratio {entry.active_ratio}\n{entry.gpu}\n{kind}", fontsize="medium")
    axes.set(xlabel="KV tokens of the batch", ylabel="dense time / sparse time")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")


def draw(path: Path, stem: Path) -> list[Path]:
    """`plot` of a file.

    Raises:
        EvaluationError: see `read`.
    """
    return plot(read(path), stem)
