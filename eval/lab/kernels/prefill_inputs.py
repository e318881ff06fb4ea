"""Inputs of ``bench_prefill``: a layer of a prompt with a known structure, and the quality of outputs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch

from eval.lab.structured.generator import make_qkv
from eval.lab.structured.structure import Recipe, block_mass
from eval.texts.lengths import short_length
from sglang_sparse_kernels.common.testing import paged_batch, seeded

SAMPLED = 64
# First keys that every method attends to: Skip-Softmax has the smallest blocks.
KEPT = 64
# Float32 elements of attention weights that are made at a time.
STRIP = 2**28


@dataclass(frozen=True)
class Shape:
    """A prompt of ``length`` tokens, prefilled ``chunk`` tokens at a time; by default an 8B model's attention.

    ``block_size`` is that of all methods; ``step`` of its blocks share their keys in this project's.
    """

    length: int
    chunk: int = 8192
    q_heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    page_size: int = 16
    block_size: int = 128
    step: int = 16

    @property
    def name(self) -> str:
        """As in ``eval.lab.bench_kernels``."""
        return f"1x{short_length(self.length)}"

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """First token of each chunk, and the one behind its last."""
        return [(start, min(start + self.chunk, self.length)) for start in range(0, self.length, self.chunk)]

    def facts(self) -> dict[str, Any]:
        """The fields that a row of results has of its shape."""
        return {"shape": self.name, **asdict(self)}


class Prompt:
    """The inputs of one layer.

    The first dimension of the values is 1 in the first ``KEPT`` keys and 0 elsewhere. What a query's output holds there
    is the share of its attention that these have, and every method here keeps them all: dense attention's share over a
    sparse one's is the attention mass that the sparse one keeps, whatever it is made of.

    Args:
        shape: what to make.
        recipe: of the structure.
        device: where.
        seed: of everything random.
        positions: tokens to make, of which the first ones are the prompt; by default its length. A server makes as many
            as a request may have, and where stripes lie depends on how many there are.

    Attributes:
        q: ``[length, q_heads, dim]`` bfloat16.
        k, v: ``[length, kv_heads, dim]`` bfloat16.
        k_pages, v_pages: the same as scattered pages, ``[pages, page_size, kv_heads, dim]``.
        page_table: ``[1, pages of the prompt]`` int32.
        out: as ``q``, written by what fills a given tensor.
        scale: of the softmax.
    """

    def __init__(self, shape: Shape, recipe: Recipe, device: str, seed: int = 0, positions: int | None = None) -> None:
        self.shape = shape
        heads = (shape.q_heads, shape.kv_heads, shape.dim)
        made = make_qkv(positions or shape.length, *heads, recipe, seed, device)
        self.q, self.k, self.v = (part[: shape.length] for part in made)
        self.v[..., 0] = 0
        self.v[:KEPT, :, 0] = 1
        self.scale = shape.dim**-0.5
        batch = paged_batch((shape.length,), shape.page_size, device, seeded(device, seed))
        self.page_table = batch.page_table
        self.k_pages, self.v_pages = (self._scattered(part, batch.num_pages) for part in (self.k, self.v))
        self.out = torch.empty_like(self.q)
        self._sample(seed)

    def _scattered(self, part: torch.Tensor, num_pages: int) -> torch.Tensor:
        size = self.shape.page_size
        pages = torch.zeros(num_pages, size, *part.shape[1:], dtype=part.dtype, device=part.device)
        padding = -len(part) % size
        whole = torch.nn.functional.pad(part, (0, 0, 0, 0, 0, padding))
        pages[self.page_table[0].long()] = whole.unflatten(0, (-1, size))
        return pages

    def _sample(self, seed: int) -> None:
        shape, device = self.shape, self.q.device
        first = min(shape.block_size, shape.length - 1)
        count = min(SAMPLED, shape.length - first)
        picked = first + torch.randperm(shape.length - first, generator=torch.Generator().manual_seed(seed))[:count]
        self.sampled = picked.sort().values.to(device)
        group = shape.q_heads // shape.kv_heads
        later = torch.arange(shape.length, device=device) > self.sampled[:, None]
        self.dense = torch.empty(count, shape.q_heads, shape.dim, dtype=torch.float64, device=device)
        for head in range(shape.q_heads):
            key, value = self.k[:, head // group].double(), self.v[:, head // group].double()
            logits = self.q[self.sampled, head].double() @ key.T * self.scale
            self.dense[:, head] = logits.masked_fill(later, -math.inf).softmax(-1) @ value

    @cached_property
    def block_mass(self) -> torch.Tensor:
        """Exact softmax mass of blocks of keys over blocks of queries, summed over queries and the query heads of a KV
        head: ``[kv_heads, blocks, blocks]`` float32, zeros above the diagonal.
        """
        shape, device = self.shape, self.q.device
        size, group = shape.block_size, shape.q_heads // shape.kv_heads
        blocks = -(-shape.length // size)
        rows = max(STRIP // (group * shape.length) // size, 1) * size
        found = torch.zeros(shape.kv_heads, blocks, blocks, device=device)
        for head in range(shape.kv_heads):
            keys = self.k[:, head].float()
            for start in range(0, shape.length, rows):
                end = min(start + rows, shape.length)
                queries = self.q[start:end, head * group : (head + 1) * group].float().transpose(0, 1)
                logits = queries @ keys[:end].T * self.scale
                later = torch.arange(end, device=device) > torch.arange(start, end, device=device)[:, None]
                weights = logits.masked_fill_(later, -math.inf).softmax(-1)
                mass = block_mass(block_mass(weights, size).sum(0).T, size).T
                found[head, start // size : start // size + mass.shape[0], : mass.shape[1]] = mass
        return found

    def quality(self, output: torch.Tensor) -> dict[str, float]:
        """Measure the quality of an output, over sampled queries of all heads.

        Args:
            output: ``[length, q_heads, dim]``.

        Returns:
            ``dense_l2``, its relative L2 distance from dense attention in float64, and ``recall``, the attention mass
            that it keeps.
        """
        got = output[self.sampled].double()
        share = got[..., 0]
        # What gives nothing to the first block, or no number, keeps nothing that can be told.
        shares = torch.where(share > 0, self.dense[..., 0] / share, 0).clamp(max=1)
        return {
            "dense_l2": ((got - self.dense).norm() / self.dense.norm()).item(),
            "recall": shares.mean().item(),
        }

    def causal_flops(self) -> float:
        """Floating-point operations of dense causal attention."""
        shape = self.shape
        return 2 * shape.length * (shape.length + 1) * shape.q_heads * shape.dim
