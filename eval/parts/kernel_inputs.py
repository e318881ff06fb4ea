"""What ``eval.bench_kernels`` measures on: shapes, layers with caches of their own, and this project's operations."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from eval.structured.generator import make_decode
from eval.structured.structure import Recipe
from eval.texts.lengths import short_length
from sglang_sparse_kernels.page_score import page_score
from sglang_sparse_kernels.page_summary import update_page_summaries, update_page_summary
from sglang_sparse_kernels.page_topk import page_topk
from sglang_sparse_kernels.sparse_decode import sparse_decode
from sglang_sparse_kernels.testing import PagedBatch, paged_batch, random_cache, seeded

WHOLE = "score+topk+decode"
PARTS = ("page_score", "page_topk", "sparse_decode")
OPS = ("dense_decode", "page_summary", *PARTS, WHOLE)
STREAMED = ("page_score", "sparse_decode")
L2_MULTIPLE = 3
MAX_LAYERS = 128


@dataclass(frozen=True)
class Shape:
    """One decode step: ``batch`` rows of ``length`` tokens, by default an 8B model's attention."""

    batch: int
    length: int
    q_heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    page_size: int = 16
    active_ratio: float = 0.1
    n_min: int = 16
    summary_dtype: torch.dtype = torch.bfloat16

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
        return min(self.n_pages, max(self.n_min, math.ceil(self.n_pages * self.active_ratio)))

    def facts(self) -> dict[str, Any]:
        """The fields that a row of results has of its shape."""
        return {
            "shape": self.name,
            **asdict(self),
            "summary_dtype": str(self.summary_dtype).removeprefix("torch."),
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


class Layer:
    """The inputs of one layer and the buffers that its kernels write.

    Attributes:
        k_pages, v_pages: keys and values, ``[num_pages, page_size, Hkv, d]`` bfloat16.
        k_cache, v_cache: the same as slots, ``[num_pages * page_size, Hkv, d]``.
        summary: ``[num_pages, Hkv, 2, d]``.
        q: ``[B, Hq, d]`` bfloat16.
        scores: ``[B, Hkv, n_pages]`` float32.
        indices, counts: the selection, ``[B, Hkv, n_select]`` and ``[B, Hkv]`` int32.
        out: as ``q``.
    """

    def __init__(
        self, shape: Shape, batch: PagedBatch, generator: torch.Generator, recipe: Recipe | None = None, seed: int = 0
    ) -> None:
        rows, heads, dim, device = shape.batch, shape.kv_heads, shape.dim, generator.device
        cache = (batch.num_pages, shape.page_size, heads, dim)
        self.k_pages, self.v_pages = (random_cache(cache, torch.bfloat16, device, generator) for _ in range(2))
        self.q = torch.randn(rows, shape.q_heads, dim, generator=generator, device=device).bfloat16()
        if recipe is not None:
            self._plant(shape, batch, recipe, seed)
        self.k_cache, self.v_cache = self.k_pages.flatten(0, 1), self.v_pages.flatten(0, 1)
        self.summary = torch.zeros(batch.num_pages, heads, 2, dim, device=device).to(shape.summary_dtype)
        last_slots = torch.arange(1, batch.num_pages + 1, device=device) * shape.page_size - 1
        update_page_summary(self.k_cache, self.summary, last_slots, shape.page_size)
        update_page_summary(self.k_cache, self.summary, batch.last_slots, shape.page_size)
        self.scores = torch.empty(rows, heads, shape.n_pages, device=device)
        self.indices = torch.empty(rows, heads, shape.n_select, dtype=torch.int32, device=device)
        self.counts = torch.empty(rows, heads, dtype=torch.int32, device=device)
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
    """The layers of one shape, each with its selection made, and this project's operations on them.

    Args:
        shape: what to make.
        device: where.
        layers: how many.
        recipe: of the structure of the inputs; None for normally distributed ones, which have none.
        seed: of everything random.

    Raises:
        torch.OutOfMemoryError: it does not fit.
        ValueError: the shape leaves no room for the structure.
    """

    def __init__(self, shape: Shape, device: str, layers: int, recipe: Recipe | None = None, seed: int = 0) -> None:
        self.shape = shape
        generator = seeded(device, seed)
        self.batch: PagedBatch = paged_batch((shape.length,) * shape.batch, shape.page_size, device, generator)
        self.n_select = torch.full((shape.batch,), shape.n_select, dtype=torch.int32, device=device)
        self.sm_scale = shape.dim**-0.5
        self.arrivals = torch.zeros(shape.batch, shape.kv_heads, dtype=torch.int32, device=device)
        first = seed * layers
        self.layers = [Layer(shape, self.batch, generator, recipe, first + layer) for layer in range(layers)]
        for layer in self.layers:
            self.score(layer)
            self.select(layer)

    def summarise(self, layer: Layer) -> None:
        """Summarise the newest page of every row, in all layers after the last one, as a server does."""
        if layer is self.layers[-1]:
            caches, summaries = zip(*((one.k_cache, one.summary) for one in self.layers), strict=True)
            update_page_summaries(caches, summaries, self.batch.last_slots, self.shape.page_size)

    def score(self, layer: Layer) -> None:
        """Score every page."""
        tables = (self.batch.page_table, self.batch.n_pages)
        page_score(layer.q, layer.summary, *tables, layer.scores, summaries_ready=True)

    def select(self, layer: Layer) -> torch.Tensor:
        """Select the highest pages; the result is ``[B, Hkv, n_select]``, physical pages."""
        tables = (self.batch.page_table, self.batch.n_pages, self.n_select, self.shape.n_select)
        page_topk(layer.scores, *tables, (layer.indices, layer.counts), tables_ready=True)
        return layer.indices

    def attend(self, layer: Layer) -> torch.Tensor:
        """Attend to the selected pages; the result is ``[B, Hq, d]``."""
        pages = (layer.indices, layer.counts, self.batch.last_slots, self.shape.page_size)
        caches = (layer.k_cache, layer.v_cache)
        return sparse_decode(layer.q, *caches, *pages, self.sm_scale, out=layer.out, arrivals=self.arrivals)

    def whole(self, layer: Layer) -> torch.Tensor:
        """Score, select and attend."""
        self.score(layer)
        self.select(layer)
        return self.attend(layer)
