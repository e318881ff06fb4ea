"""Inputs of ``bench_kernels``: shapes, layers with a cache each, and this project's operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any

import torch

from eval.lab.structured.generator import make_decode
from eval.lab.structured.structure import Recipe
from eval.texts.lengths import short_length
from sglang_sparse_kernels.common.testing import PagedBatch, paged_batch, random_cache, seeded
from sglang_sparse_kernels.page_centroids import record_bytes, update_page_centroids
from sglang_sparse_kernels.page_score import page_score
from sglang_sparse_kernels.page_score import reference as score_reference
from sglang_sparse_kernels.page_summary import update_page_summaries, update_page_summary
from sglang_sparse_kernels.page_topk import page_topk
from sglang_sparse_kernels.page_topk import reference as topk_reference
from sglang_sparse_kernels.sparse_decode import sparse_decode

WHOLE = "score+topk+decode"
PARTS = ("page_score", "page_topk", "sparse_decode")
OPS = ("dense_decode", "page_summary", *PARTS, WHOLE)
STREAMED = ("page_score", "sparse_decode")
L2_MULTIPLE = 3
MAX_LAYERS = 128
# As in a server of this project: newest pages that ReSA always selects, and what widths are multiples of.
LOCAL_PAGES = 2
COLUMNS = 16
# As ReSA keeps them where it keeps centroids.
NUM_CENTROIDS = 6

# What `page_score` and `page_topk` are called as, and each of their kernels.
Scoring = Callable[..., torch.Tensor]
Selecting = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Shape:
    """One decode step: ``batch`` rows of ``length`` tokens, by default an 8B model's attention.

    ``context_length`` is that of the server, for which its tables and scores are made; no less than ``length``.
    """

    batch: int
    length: int
    q_heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    page_size: int = 16
    active_ratio: float = 0.1
    n_min: int = 16
    summary_dtype: torch.dtype = torch.bfloat16
    context_length: int = 0

    @property
    def name(self) -> str:
        """As given on the command line."""
        return f"{self.batch}x{short_length(self.length)}"

    @property
    def n_pages(self) -> int:
        """Pages of a row."""
        return math.ceil(self.length / self.page_size)

    @property
    def n_select(self) -> int:
        """Pages that a row selects."""
        return self._selected_of(self.n_pages)

    @property
    def longest_pages(self) -> int:
        """Pages of the longest context that a request may have."""
        return math.ceil(max(self.length, self.context_length) / self.page_size)

    @property
    def usual_select(self) -> int:
        """Pages that a row of such a context selects."""
        return self._selected_of(self.longest_pages)

    @property
    def local_pages(self) -> int:
        """Newest pages that a row always selects."""
        return min(LOCAL_PAGES, self.n_min)

    def _selected_of(self, n_pages: int) -> int:
        # As a server counts: a ratio of 0.1 is not 1/10 in binary.
        return min(n_pages, max(self.n_min, math.ceil(n_pages * self.active_ratio - 1e-9)))

    def facts(self) -> dict[str, Any]:
        """The fields that a row of results has of its shape."""
        return {
            "shape": self.name,
            **asdict(self),
            "summary_dtype": str(self.summary_dtype).removeprefix("torch."),
            "context_length": max(self.length, self.context_length),
            "local_pages": self.local_pages,
            "n_select": self.n_select,
        }

    def num_bytes(self, op: str, kv_itemsize: int = 2) -> int:
        """Bytes that an operation must move: each input read once, each output written once.

        Args:
            op: one of `OPS`.
            kv_itemsize: bytes of an element of the KV cache.
        """
        heads = self.batch * self.kv_heads
        page = self.page_size * 2 * self.dim * kv_itemsize  # keys and values
        sizes = {
            "dense_decode": heads * self.n_pages * page,
            "page_summary": heads * page // 2,
            "page_score": heads * self.n_pages * (2 * self.dim * self.summary_dtype.itemsize + 4),
            "page_topk": heads * 4 * (2 * self.n_pages + self.n_select),
            "sparse_decode": heads * self.n_select * page,
        }
        return sizes[op] if op in sizes else sum(sizes[part] for part in PARTS)


def num_layers(shape: Shape, l2_bytes: int) -> int:
    """Layers whose inputs together are several times the L2 cache, for each operation that streams from memory."""
    return layers_beyond(l2_bytes, min(shape.num_bytes(op) for op in STREAMED))


def layers_beyond(l2_bytes: int, num_bytes: int) -> int:
    """Layers of so many bytes that together are several times the L2 cache.

    What a tiny shape would need thousands of layers for stays in the cache: there are `MAX_LAYERS` at most.
    """
    return min(MAX_LAYERS, max(2, math.ceil(L2_MULTIPLE * l2_bytes / num_bytes)))


class View:
    """State that a server's layers share: a batch, and the buffers that its kernels write.

    Args:
        shape: of the rows, and of the longest context.
        batch: the rows.

    Attributes:
        page_table: ``[B, max_pages]`` int32, page 0 beyond a row's pages.
        n_pages, n_select: ``[B]`` int32, pages of a row, and those that it selects.
        scores: ``[B, Hkv, max_pages]`` float32.
        selected: ``[B, Hkv, max_pages]`` and ``[B, Hkv]`` int32.
        arrivals: ``[B, Hkv]`` int32 zeros.
        stats: int64 counters.
    """

    def __init__(self, shape: Shape, batch: PagedBatch) -> None:
        rows, heads, width = shape.batch, shape.kv_heads, math.ceil(shape.longest_pages / COLUMNS) * COLUMNS
        device = batch.page_table.device
        zeros = partial(torch.zeros, dtype=torch.int32, device=device)
        self.page_table = torch.nn.functional.pad(batch.page_table, (0, width - shape.n_pages))
        self.n_pages, self.n_select = zeros(rows).fill_(shape.n_pages), zeros(rows).fill_(shape.n_select)
        self.scores = torch.zeros(rows, heads, width, device=device)
        self.selected = zeros(rows, heads, width), zeros(rows, heads)
        self.arrivals = zeros(rows, heads)
        self.stats = torch.zeros(4, dtype=torch.int64, device=device)

    @property
    def max_select(self) -> int:
        """Columns of a selection."""
        return self.page_table.shape[1]


class Layer:
    """The inputs of one layer, which no kernel writes, and the output of its attention.

    Attributes:
        k_pages, v_pages: keys and values, ``[num_pages, page_size, Hkv, d]`` bfloat16.
        k_cache, v_cache: the same as slots, ``[num_pages * page_size, Hkv, d]``.
        summary: ``[num_pages, Hkv, 2, d]``.
        q: ``[B, Hq, d]`` bfloat16.
        scores: ``[B, Hkv, max_pages]`` float32, by the definition in plain torch.
        indices, counts: the selection by them, ``[B, Hkv, max_pages]`` and ``[B, Hkv]`` int32.
        out: as ``q``.
    """

    def __init__(
        self,
        shape: Shape,
        batch: PagedBatch,
        view: View,
        generator: torch.Generator,
        recipe: Recipe | None = None,
        seed: int = 0,
    ) -> None:
        heads, dim, device = shape.kv_heads, shape.dim, generator.device
        cache = (batch.num_pages, shape.page_size, heads, dim)
        self.k_pages, self.v_pages = (random_cache(cache, torch.bfloat16, device, generator) for _ in range(2))
        self.q = torch.randn(shape.batch, shape.q_heads, dim, generator=generator, device=device).bfloat16()
        if recipe is not None:
            self._plant(shape, batch, recipe, seed)
        self.k_cache, self.v_cache = self.k_pages.flatten(0, 1), self.v_pages.flatten(0, 1)
        self.summary = torch.zeros(batch.num_pages, heads, 2, dim, device=device).to(shape.summary_dtype)
        last_slots = torch.arange(1, batch.num_pages + 1, device=device) * shape.page_size - 1
        update_page_summary(self.k_cache, self.summary, last_slots, shape.page_size)
        update_page_summary(self.k_cache, self.summary, batch.last_slots, shape.page_size)
        tables, scores = (view.page_table, view.n_pages), torch.empty_like(view.scores)
        self.scores = score_reference.page_score(self.q, self.summary, *tables, scores, shape.local_pages)
        made = (torch.empty_like(view.selected[0]), torch.empty_like(view.selected[1]))
        pages = (*tables, view.n_select, view.max_select)
        self.indices, self.counts = topk_reference.page_topk(self.scores, *pages, made)
        self.out = torch.empty_like(self.q)

    def _plant(self, shape: Shape, batch: PagedBatch, recipe: Recipe, seed: int) -> None:
        sizes = (shape.length, shape.q_heads, shape.kv_heads, shape.dim)
        padding = -shape.length % shape.page_size
        for row, pages in enumerate(batch.page_table):
            # Rows of other seeds than those of another layer.
            q, *caches = make_decode(*sizes, recipe, seed * shape.batch + row, self.q.device)
            self.q[row] = q
            for into, made in zip((self.k_pages, self.v_pages), caches, strict=True):
                whole = torch.nn.functional.pad(made, (0, 0, 0, 0, 0, padding))
                into[pages.long()] = whole.unflatten(0, (-1, shape.page_size))


class Step:
    """The layers of one shape, each with its selection made, and this project's operations on them, as a server's ReSA
    calls them: in buffers that all layers share.

    Args:
        shape: what to make.
        device: where.
        layers: how many.
        recipe: of the structure of the inputs; None for normally distributed ones, which have none.
        seed: of everything random.

    Attributes:
        batch: the rows, in a table as wide as they are.
        view: the same as a server has them.

    Raises:
        torch.OutOfMemoryError: it does not fit.
        ValueError: the shape leaves no room for the structure.
    """

    def __init__(self, shape: Shape, device: str, layers: int, recipe: Recipe | None = None, seed: int = 0) -> None:
        self.shape = shape
        generator = seeded(device, seed)
        self.batch: PagedBatch = paged_batch((shape.length,) * shape.batch, shape.page_size, device, generator)
        self.view = View(shape, self.batch)
        self.sm_scale = shape.dim**-0.5
        first = seed * layers
        each = range(first, first + layers)
        self.layers = [Layer(shape, self.batch, self.view, generator, recipe, layer) for layer in each]

    @cached_property
    def centroids(self) -> list[torch.Tensor]:
        """Records of every page of each layer, ``[num_pages, Hkv, bytes]`` uint8."""
        found, size = [], self.shape.page_size
        for layer in self.layers:
            pages, heads, device = len(layer.k_pages), self.shape.kv_heads, layer.q.device
            size_of_one = record_bytes(NUM_CENTROIDS, self.shape.dim)
            made = torch.zeros(pages, heads, size_of_one, dtype=torch.uint8, device=device)
            for slots in (torch.arange(1, pages + 1, device=device) * size - 1, self.batch.last_slots):
                update_page_centroids([layer.k_cache], [made], slots, size)
            found.append(made)
        return found

    def given_scores(self, layer: Layer) -> torch.Tensor:
        """Its scores without what lies beyond the rows' pages, ``[B, Hkv, n_pages]``."""
        return layer.scores[..., : self.shape.n_pages].contiguous()

    def given_pages(self, layer: Layer) -> torch.Tensor:
        """Its selection without what lies beyond the counts, ``[B, Hkv, n_select]``."""
        return layer.indices[..., : self.shape.n_select].contiguous()

    def forget(self) -> None:
        """Spoil all that kernels write, so that what writes nothing is not taken for right."""
        self.view.scores.fill_(math.nan)
        for made in self.view.selected:
            made.fill_(-1)
        for layer in self.layers:
            layer.out.fill_(math.nan)

    def summarise(self, layer: Layer) -> None:
        """Summarise the newest page of every row, in all layers after the last one, as a server does."""
        if layer is self.layers[-1]:
            caches, summaries = zip(*((one.k_cache, one.summary) for one in self.layers), strict=True)
            update_page_summaries(caches, summaries, self.batch.last_slots, self.shape.page_size)

    def score(self, layer: Layer, by: Scoring = page_score) -> torch.Tensor:
        """Score every page; the result is ``[B, Hkv, max_pages]``."""
        tables = (self.view.page_table, self.view.n_pages, self.view.scores)
        return by(layer.q, layer.summary, *tables, self.shape.local_pages, summaries_ready=True)

    def select(self, layer: Layer) -> torch.Tensor:
        """Select the highest pages by the given scores; the result is ``[B, Hkv, n_select]``, physical pages."""
        return self._select(layer.scores)[0][..., : self.shape.n_select]

    def _select(self, scores: torch.Tensor, by: Selecting = page_topk) -> tuple[torch.Tensor, torch.Tensor]:
        view = self.view
        pages = (view.page_table, view.n_pages, view.n_select, view.max_select)
        return by(scores, *pages, view.selected, view.stats, tables_ready=True)

    def attend(self, layer: Layer) -> torch.Tensor:
        """Attend to the given pages; the result is ``[B, Hq, d]``."""
        return self.attend_to(layer, (layer.indices, layer.counts))

    def attend_to(self, layer: Layer, selected: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Attend to what was selected, ``(indices, counts)``; the result is ``[B, Hq, d]``."""
        pages = (*selected, self.batch.last_slots, self.shape.page_size)
        scratch = {"usual_pages": self.shape.usual_select, "arrivals": self.view.arrivals}
        return sparse_decode(layer.q, layer.k_cache, layer.v_cache, *pages, self.sm_scale, out=layer.out, **scratch)

    def whole(self, layer: Layer, scoring: Scoring = page_score, selecting: Selecting = page_topk) -> torch.Tensor:
        """Score, select and attend; the selection is in the view then."""
        return self.attend_to(layer, self._select(self.score(layer, scoring), selecting))
