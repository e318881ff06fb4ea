"""Inputs of ``eval.lab.bench_framework``: decode steps of RocketKV and Skip-Softmax over a known structure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from eval.lab.kernels.kernel_inputs import Layer, Shape, Step
from eval.lab.structured.generator import SPARSITY_TOLERANCE
from eval.lab.structured.structure import Recipe
from sglang_sparse_kernels.kt_select import kt_select
from sglang_sparse_kernels.page_summary import update_page_summary
from sglang_sparse_kernels.page_topk import page_topk
from sglang_sparse_kernels.skip_softmax_decode import BLOCK_KEYS, LOCAL_BLOCKS, skip_softmax_decode
from sglang_sparse_kernels.sparse_decode import sparse_decode
from sglang_sparse_kernels.window_score import window_score

PREDICT, ROCKET = "rocketkv_predict", "rocketkv_predict+attend"
SKIP = "skip_softmax_decode"
OPS = ("dense_decode", PREDICT, ROCKET, SKIP)
BISECTIONS = 20


@dataclass(frozen=True)
class Settings:
    """RocketKV's fields, TensorRT-LLM's defaults; and what Skip-Softmax is to skip.

    Attributes:
        prompt_budget: tokens that each KV head keeps of a prompt.
        window_size: of these the newest.
        kernel_size: tokens around one that share its importance.
        kt_page_size: tokens of a block.
        topk: blocks that a step attends to.
        topr: dimensions of the query that score a block; None for all.
        skipped: share of the blocks of keys that Skip-Softmax is to skip.
    """

    prompt_budget: int = 2048
    window_size: int = 32
    kernel_size: int = 63
    kt_page_size: int = 4
    topk: int = 64
    topr: int | None = None
    skipped: float = 0.73


class Rocket:
    """RocketKV's state in one layer: a prompt that just ended, and the buffers of a step.

    The window's queries of a server are the prompt's last 32; here it is the last one, which stands for them: in these
    inputs all later queries attend to the same stripes.

    Args:
        step: all layers.
        layer: one of them.
        settings: of the method.
    """

    def __init__(self, step: Step, layer: Layer, settings: Settings) -> None:
        shape, size, device = step.shape, settings.kt_page_size, layer.q.device
        rows, heads, blocks = shape.batch, shape.kv_heads, -(-shape.length // settings.kt_page_size)
        in_page = torch.arange(shape.page_size // size, dtype=torch.int32, device=device)
        table = (step.batch.page_table[..., None] * len(in_page) + in_page).flatten(1)
        self.table = table[:, :blocks].contiguous()
        options: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.n_blocks = torch.full((rows,), blocks, **options)
        self.n_select = torch.full((rows,), min(settings.topk, blocks), **options)
        slots = len(layer.k_cache)
        self.summary = torch.zeros(slots // size, heads, 2, shape.dim, device=device).to(torch.float8_e5m2)
        ends = torch.arange(1, slots // size + 1, device=device) * size - 1
        update_page_summary(layer.k_cache, self.summary, ends, size)
        update_page_summary(layer.k_cache, self.summary, step.batch.last_slots, size)
        lengths = torch.full((rows,), shape.length, **options)
        first = 0 if shape.length <= settings.prompt_budget else (shape.length - settings.window_size) // size
        count = min(first, (settings.prompt_budget - settings.window_size) // size)
        self.kept = torch.zeros(rows, heads, max(count, 1), **options)
        if count:
            one = torch.ones(rows, **options)
            tables = (layer.k_cache, step.batch.page_table, lengths, shape.page_size, step.sm_scale, 1.0)
            scores = window_score(layer.q[:, None], one, *tables, settings.kernel_size)
            best = scores[..., : first * size].unflatten(2, (-1, size)).amax(dim=3)
            logical = torch.arange(first, **options).expand(rows, -1)
            counts = (torch.full((rows,), first, **options), torch.full((rows,), count, **options))
            self.kept = page_topk(best, logical, *counts, count)[0]
        self.n_kept, self.first = torch.full((rows,), count, **options), torch.full((rows,), first, **options)
        self.requests = torch.arange(rows, device=device)
        pairs = torch.empty(rows, heads, **options), torch.empty(rows, heads, **options)
        self.visible = (torch.empty(rows, heads, blocks, **options), *pairs)
        self.scores = torch.empty(rows, heads, blocks, device=device)
        self.indices = torch.full((rows, heads, blocks), -1, **options)
        self.counts = torch.empty(rows, heads, **options)


class FrameworkStep(Step):
    """The layers of one shape, and the operations of both methods on them, as their methods call them.

    Args:
        shape: what to make.
        device: where.
        layers: how many.
        recipe: of the structure.
        settings: of the methods.
        seed: of everything random.

    Attributes:
        factor: the ``threshold_scale_factor`` at which Skip-Softmax skips the share that is asked for.
        skipped: the share that it skips with it in the first layer.

    Raises:
        torch.OutOfMemoryError: it does not fit.
        ValueError: the shape leaves no room for the structure.
    """

    def __init__(
        self, shape: Shape, device: str, layers: int, recipe: Recipe, settings: Settings, seed: int = 0
    ) -> None:
        super().__init__(shape, device, layers, recipe, seed)
        self.settings = settings
        self.rockets = {id(layer): Rocket(self, layer, settings) for layer in self.layers}
        self.factors = torch.zeros(shape.batch, device=device)
        low, high = 1e-3, float(shape.length)
        for _ in range(BISECTIONS):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self._share(middle) < settings.skipped else (low, middle)
        # Of the two the nearer: the share may jump.
        self.factor = min((low, high), key=lambda factor: abs(self._share(factor) - settings.skipped))
        self.skipped = self._share(self.factor)

    def _share(self, factor: float) -> float:
        self.factors.fill_(factor)
        stats = torch.zeros(2, dtype=torch.int64, device=self.factors.device)
        self.skip(self.layers[0], stats)
        visited, skipped = stats.tolist()
        return skipped / visited

    def predict(self, layer: Layer) -> torch.Tensor:
        """RocketKV's second stage; the result is ``[B, Hkv, blocks]``, physical blocks of which ``topk`` are meant."""
        own = self.rockets[id(layer)]
        tables = (own.kept, own.n_kept, own.first, own.requests, own.table, own.n_blocks, own.n_select)
        sizes = (self.settings.topr or self.shape.dim, self.sm_scale)
        scratch = (*own.visible, own.scores)
        selected = (own.indices, own.counts)
        kt_select(layer.q, own.summary, *tables, *sizes, out=selected, scratch=scratch, tables_ready=True)
        return own.indices

    def rocket(self, layer: Layer) -> torch.Tensor:
        """Predict and attend; the result is ``[B, Hq, d]``."""
        self.predict(layer)
        own = self.rockets[id(layer)]
        blocks = (own.indices, own.counts, self.batch.last_slots, self.settings.kt_page_size)
        caches = (layer.k_cache, layer.v_cache)
        scratch = {"usual_pages": self.settings.topk, "arrivals": self.view.arrivals}
        return sparse_decode(layer.q, *caches, *blocks, self.sm_scale, out=layer.out, **scratch)

    def skip(self, layer: Layer, stats: torch.Tensor | None = None) -> torch.Tensor:
        """Skip-Softmax; the result is ``[B, Hq, d]``."""
        tables = (self.batch.page_table, self.batch.n_pages, self.batch.last_slots)
        sizes = (self.shape.page_size, self.sm_scale)
        caches = (layer.k_cache, layer.v_cache)
        scratch = {"stats": stats, "arrivals": self.view.arrivals}
        return skip_softmax_decode(layer.q, *caches, *tables, self.factors, *sizes, out=layer.out, **scratch)

    def attended(self, op: str, row: int, head: int, logits: torch.Tensor) -> torch.Tensor:
        """The tokens that an operation attends to in the first layer, ``[length]`` bool.

        Of Skip-Softmax by its definition, whose rule is written out here once more.

        Args:
            op: of `OPS`, but for the dense one.
            row: of the batch.
            head: KV head.
            logits: ``[G, length]`` float64, of the head's group.
        """
        length, size = self.shape.length, self.settings.kt_page_size
        if op == SKIP:
            blocks = -(-length // BLOCK_KEYS)
            padded = torch.nn.functional.pad(logits, (0, blocks * BLOCK_KEYS - length), value=-math.inf)
            largest = padded.unflatten(1, (blocks, BLOCK_KEYS)).amax(2)
            always = torch.zeros(blocks, dtype=torch.bool, device=logits.device)
            always[0] = always[-LOCAL_BLOCKS:] = True
            least = largest[:, always].amax(1, keepdim=True) + math.log(min(1.0, self.factor / length))
            kept = always | (largest >= least).any(0)
            return kept.repeat_interleave(BLOCK_KEYS)[:length]
        own = self.rockets[id(self.layers[0])]
        chosen = own.indices[row, head, : int(own.counts[row, head])]
        return torch.isin(own.table[row], chosen).repeat_interleave(size)[:length]

    def num_bytes(self, op: str, kv_itemsize: int = 2) -> int:
        """Bytes that an operation must move: each input read once, each output written once.

        Args:
            op: one of `OPS`.
            kv_itemsize: bytes of an element of the KV cache.
        """
        shape, own = self.shape, next(iter(self.rockets.values()))
        heads, token = shape.batch * shape.kv_heads, shape.dim * kv_itemsize
        if op == SKIP:
            return round(heads * shape.length * token * (2 - self.skipped))
        if op not in (PREDICT, ROCKET):
            return shape.num_bytes(op, kv_itemsize)
        visible = int(own.n_kept[0]) + own.table.shape[1] - int(own.first[0])
        # A block's bounds, its number in and out, its score in and out.
        predict = heads * (visible * (2 * shape.dim + 16) + 4 * int(own.n_select[0]))
        attend = heads * int(own.n_select[0]) * self.settings.kt_page_size * 2 * token
        return predict + (attend if op == ROCKET else 0)

    def require_share(self) -> None:
        """Refuse a share of skipped blocks that is not the one asked for.

        Raises:
            ValueError: no factor gives it, for these inputs.
        """
        if abs(self.skipped - self.settings.skipped) > SPARSITY_TOLERANCE:
            raise ValueError(
                f"no factor skips {self.settings.skipped:g} of the blocks, the nearest {self.skipped:.3f} "
                f"({self.factor:.4g}): the recipe has too many stripes, or too few"
            )
