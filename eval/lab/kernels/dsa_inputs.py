"""Inputs of ``eval.lab.bench_dsa``: passes of DSA layers over random keys, and this project's stages on them.

Queries, keys, gates and latents are normally distributed. The model fixes how much is read and chosen, so that inputs
without structure cost as much as a model's. They say nothing of the quality of a selection.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn.functional import pad
from tqdm import tqdm

from eval.lab.kernels.dsa import ATTEND, DECODE, DECODE_TOPK, PREFILL, PREFILL_TOPK
from eval.lab.kernels.kernel_inputs import layers_beyond
from eval.lab.kernels.mla_inputs import QUERY_BYTES, SM_SCALE
from eval.texts.lengths import short_length
from sglang_sparse_kernels.common.testing import paged_batch, seeded
from sglang_sparse_kernels.index_keys import PAGE_SIZE
from sglang_sparse_kernels.index_keys import reference as index_keys
from sglang_sparse_kernels.index_logits import index_logits
from sglang_sparse_kernels.index_topk.choose import choose_in_parts, queries_at_once, select
from sglang_sparse_kernels.latent_rows import row_bytes
from sglang_sparse_kernels.sparse_mla_decode import sparse_mla_decode

INDEX_DIM = 128
# A token of the indexer's cache: its key in float8, and a float32 scale.
KEY_BYTES = INDEX_DIM + 4
FP8 = torch.float8_e4m3fn
# Of the cache that attention reads. It does not see how long a row is, only which slots were chosen; that of 32 rows of
# 128k would have more elements than 32 bits count, and a kernel that counts so would end the process.
MOST_SLOTS = 1 << 21
# SGLang's logits have rows of a multiple of so many elements, longer than what is meant.
ROW_MULTIPLE = 256
# Logits of one layer that are kept for a selection alone.
LOGITS = (DECODE_TOPK, PREFILL_TOPK)


@dataclass(frozen=True)
class Shape:
    """``batch`` rows of ``length`` tokens, in DeepSeek-V3.2's sizes: one query a row, or with a ``chunk`` the last so
    many tokens of one row.
    """

    batch: int
    length: int
    chunk: int = 0
    heads: int = 128
    latent: int = 512
    rope: int = 64
    index_heads: int = 64
    topk: int = 2048

    @property
    def name(self) -> str:
        """As given on the command line."""
        return f"{self.batch}x{short_length(self.length)}"

    @property
    def ops(self) -> tuple[str, ...]:
        """The operations to measure."""
        return (PREFILL, PREFILL_TOPK) if self.chunk else (DECODE, DECODE_TOPK, ATTEND)

    @property
    def queries(self) -> int:
        """Tokens that choose."""
        return self.chunk or self.batch

    @property
    def pairs(self) -> int:
        """Query and key pairs: what each query sees, added up."""
        return self.chunk * self.length - self.chunk * (self.chunk - 1) // 2 if self.chunk else self.batch * self.length

    def facts(self) -> dict[str, Any]:
        """The fields that a row of results has of its shape."""
        return {"shape": self.name, **asdict(self)}

    def num_bytes(self, op: str, kv_dtype: torch.dtype) -> int:
        """Bytes that an operation must move in a layer: each input read once, each output written once. Logits between
        two kernels are neither.
        """
        table = self.batch * 4 * math.ceil(self.length / PAGE_SIZE)
        named = self.queries * 4 * self.topk
        if op == ATTEND:
            token = row_bytes(self.latent, self.rope) if kv_dtype == FP8 else 2 * (self.latent + self.rope)
            attended = self.heads * (2 * self.latent + self.rope) * QUERY_BYTES
            return self.batch * (self.topk * token + attended) + named
        if op in LOGITS:
            return 4 * self.pairs + table + named
        asked = self.queries * self.index_heads * (INDEX_DIM + 4)
        return self.batch * self.length * KEY_BYTES + asked + table + named

    def flops(self, op: str) -> int:
        """Floating-point operations of the products of a layer."""
        if op == ATTEND:
            return 2 * self.batch * self.heads * self.topk * (2 * self.latent + self.rope)
        return 0 if op in LOGITS else 2 * self.pairs * self.index_heads * INDEX_DIM

    def num_layers(self, op: str, l2_bytes: int) -> int:
        """Layers whose inputs are several times the L2 cache."""
        return layers_beyond(l2_bytes, self.num_bytes(op, torch.bfloat16))


@dataclass
class Layer:
    """The inputs of one layer, those of its operation, and what this project's stages write.

    Attributes:
        chosen, counts, slots: of the portable stages, as a server makes them once a pass.
        q: ``[T, index_heads, 128]`` float8_e4m3fn, index queries.
        weights: ``[T, index_heads]`` float32.
        buffer: the indexer's cache, ``[pages, 64 * 132]`` uint8.
        logits: ``[T, 64 * pages of a row]`` float32, given as SGLang's: its rows are parts of longer ones.
        attending: ``[B, heads, latent + rope]`` bfloat16.
        cache: ``[slots, latent + rope]`` bfloat16.
        given: ``[B, topk]`` int32, slots to attend to.
        out: ``[B, heads, latent]`` bfloat16.
    """

    chosen: torch.Tensor
    counts: torch.Tensor
    slots: torch.Tensor
    q: torch.Tensor
    weights: torch.Tensor
    buffer: torch.Tensor
    logits: torch.Tensor
    attending: torch.Tensor
    cache: torch.Tensor
    given: torch.Tensor
    out: torch.Tensor


class Step:
    """The layers of one operation over one shape.

    Args:
        shape: of the pass.
        op: whose inputs are made.
        device: where.
        layers: how many.
        seed: of the inputs.

    Raises:
        torch.OutOfMemoryError: it does not fit.
    """

    def __init__(self, shape: Shape, op: str, device: str, layers: int, seed: int = 0) -> None:
        self.shape, self.op, self.device = shape, op, device
        self._random = seeded(device, seed)
        batch = paged_batch((shape.length,) * shape.batch, PAGE_SIZE, device, self._random)
        # A decode step's table is a page wider than the context: SGLang's requests have room for a few tokens more.
        self.page_table = pad(batch.page_table, (0, 0 if shape.chunk else 1))
        self.num_pages = batch.num_pages
        integers = {"dtype": torch.int32, "device": device}
        if shape.chunk:
            self.rows = torch.zeros(shape.chunk, **integers)
            self.lengths = torch.arange(shape.length - shape.chunk + 1, shape.length + 1, **integers)
        else:
            self.rows = torch.arange(shape.batch, **integers)
            self.lengths = torch.full((shape.batch,), shape.length, **integers)
        self.first = torch.zeros_like(self.lengths) if shape.chunk else None
        self.wanted = self.lengths.clamp(max=shape.topk)
        self.width = self.page_table.shape[1] * PAGE_SIZE
        self.last_slots = torch.zeros(shape.batch, dtype=torch.int64, device=device)
        # A server counts in decode alone.
        self.stats = None if shape.chunk else torch.zeros(4, dtype=torch.int64, device=device)
        self.at_once = queries_at_once(self.width, self.rows.device) if shape.chunk else shape.batch
        self.layers = [self._layer() for _ in tqdm(range(layers), desc=f"inputs of {shape.name}, {op}", leave=False)]

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, generator=self._random, dtype=torch.bfloat16)

    def _quantized(self, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.empty(shape, dtype=FP8, device=self.device)
        return index_keys.quantize(self._normal(*shape), False, (values, torch.empty(shape[:-1], device=self.device)))

    def _layer(self) -> Layer:
        shape, device = self.shape, self.device
        nothing = torch.empty(0, device=device)
        chosen = torch.full((shape.queries, shape.topk), -1, dtype=torch.int32, device=device)
        q = weights = buffer = logits = attending = cache = given = out = nothing
        if self.op == ATTEND:
            attending = self._normal(shape.batch, shape.heads, shape.latent + shape.rope)
            slots = min(self.num_pages * PAGE_SIZE, MOST_SLOTS)
            cache = self._normal(slots, shape.latent + shape.rope)
            given = chosen.clone()
            wanted = min(shape.topk, shape.length)
            some = torch.randperm(slots - PAGE_SIZE, device=device, generator=self._random)[: shape.batch * wanted]
            # No token twice. Sorted, as this project gives them; SGLang's are in no order.
            given[:, :wanted] = (PAGE_SIZE + some).view(shape.batch, wanted).sort(-1).values
            out = torch.empty(shape.batch, shape.heads, shape.latent, dtype=torch.bfloat16, device=device)
        elif self.op in LOGITS:
            row = (self.width // ROW_MULTIPLE + 1) * ROW_MULTIPLE
            logits = torch.randn(shape.queries, row, device=device, generator=self._random)[:, : self.width]
        else:
            q, scales = self._quantized(shape.queries, shape.index_heads, INDEX_DIM)
            weights = self._normal(shape.queries, shape.index_heads).float() * scales * q[0].numel() ** -0.5
            buffer = torch.zeros(self.num_pages, PAGE_SIZE * KEY_BYTES, dtype=torch.uint8, device=device)
            for slots in self.slots():
                index_keys.store(*self._quantized(len(slots), INDEX_DIM), slots, buffer)
        counts = self.wanted[:, None].clone()
        return Layer(chosen, counts, torch.empty_like(chosen), q, weights, buffer, logits, attending, cache, given, out)

    def slots(self) -> torch.Tensor:
        """The slots of each row's tokens, ``[batch, length]`` int64."""
        page = torch.arange(PAGE_SIZE, device=self.device)
        return (self.page_table.long()[..., None] * PAGE_SIZE + page).flatten(1)[:, : self.shape.length]

    def portable(self, layer: Layer) -> torch.Tensor:
        """Choose as a server with portable stages does: logits of as many queries at a time as fit, the best of them,
        and their slots, ``[T, topk]`` int32.
        """

        def scores(mine: slice) -> torch.Tensor:
            if self.op in LOGITS:
                return layer.logits[mine]
            rows = self.page_table, self.rows[mine], self.lengths[mine]
            return index_logits(layer.q[mine], layer.weights[mine], layer.buffer, *rows)

        names, out = (self.page_table, self.rows, None), (layer.chosen, layer.counts.view(-1), layer.slots)
        choose_in_parts(scores, self.at_once, self.lengths, self.wanted, names, out, self.stats, nothing=0)
        return layer.slots

    def behind(self, logits: torch.Tensor) -> torch.Tensor:
        """Choose as a server does behind SGLang's logits, ``[T, topk]`` int32 slots."""
        rows = self.rows if self.shape.chunk else None
        return select(logits, self.lengths, self.shape.topk, self.first, (self.page_table, rows, None))

    def attend(self, layer: Layer) -> torch.Tensor:
        """Attend to the given slots, ``[B, heads, latent]``."""
        latent = self.shape.latent
        queries = layer.attending[..., :latent], layer.attending[..., latent:]
        selected = (layer.given[:, None], layer.counts, self.last_slots)
        return sparse_mla_decode(*queries, layer.cache, *selected, 1, SM_SCALE, out=layer.out)
