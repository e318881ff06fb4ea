"""What ``eval.bench_mla`` measures on: decode steps of MLA layers whose attention has a known structure, and this
project's operations on them.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from tqdm import tqdm

from eval.figures.mla import ATTEND, COPY, DENSE, FULL, MASS, ROPE, TOPP
from eval.parts.kernel_inputs import layers_beyond
from eval.structured.generator import make_mla_decode
from eval.structured.structure import Recipe
from eval.texts.lengths import short_length
from sglang_sparse_kernels.block_mass import block_mass
from sglang_sparse_kernels.block_topp import block_topp
from sglang_sparse_kernels.sparse_mla_decode import sparse_mla_decode
from sglang_sparse_kernels.testing import paged_batch, seeded

# DeepSeek-V3's softmax scale, with YaRN's factor for a context 40 times as long. The queries are made for it, so that
# another model's would change nothing but roundings.
SM_SCALE = 192**-0.5 * (0.1 * math.log(40) + 1) ** 2


@dataclass(frozen=True)
class Shape:
    """One decode step: ``batch`` rows of ``length`` tokens, by default in DeepSeek-V3's attention.

    ``target_share`` is the share of the blocks that the inputs are made for; ``positions`` the tokens that are made, of
    which a row is the first (None: as many as it has).
    """

    batch: int
    length: int
    heads: int = 128
    latent: int = 512
    rope: int = 64
    page_size: int = 64
    block_size: int = 16
    theta1: float = 0.9
    max_active_ratio: float = 0.5
    kv_dtype: torch.dtype = torch.bfloat16
    target_share: float | None = None
    positions: int | None = None

    @property
    def name(self) -> str:
        """As given on the command line."""
        return f"{self.batch}x{short_length(self.length)}"

    @property
    def n_blocks(self) -> int:
        """Blocks of a row."""
        return math.ceil(self.length / self.block_size)

    @property
    def capacity(self) -> int:
        """The most blocks that a sparse row attends to, as a server allows it."""
        return max(1, math.floor(self.n_blocks * self.max_active_ratio + 1e-9))

    def facts(self) -> dict[str, Any]:
        """The fields that a row of results has of its shape."""
        facts = {"shape": self.name, **asdict(self), "n_blocks": self.n_blocks}
        facts["kv_dtype"] = str(self.kv_dtype).removeprefix("torch.")
        return facts

    def num_bytes(self, op: str, score: str, active: float, itemsize: int) -> int:
        """Bytes that an operation must move in a layer: each input read once, each output written once.

        Args:
            op: of `OPS`.
            score: of `SCORES`.
            active: blocks that a row attends to, on average.
            itemsize: bytes of an element of the KV cache.
        """
        scored, stored = self.rope if score != FULL else self.latent + self.rope, self.latent + self.rope
        sizes = {
            DENSE: self.length * stored * itemsize,
            MASS: self.length * scored * itemsize + 4 * self.n_blocks,
            TOPP: 8 * self.n_blocks + 4 * active,
            ATTEND: active * self.block_size * stored * itemsize,
        }
        return round(self.batch * (sizes[op] if op in sizes else sizes[MASS] + sizes[TOPP] + sizes[ATTEND]))

    def flops(self, op: str, score: str, active: float) -> float:
        """Floating-point operations of the products of a layer, with arguments as for `num_bytes`."""
        scored = self.rope if score != FULL else self.latent + self.rope
        attended = 2 * (2 * self.latent + self.rope)
        sizes = {
            DENSE: self.length * attended,
            MASS: self.length * 2 * scored,
            TOPP: 0,
            ATTEND: active * self.block_size * attended,
        }
        return self.batch * self.heads * (sizes[op] if op in sizes else sizes[MASS] + sizes[ATTEND])

    def num_layers(self, l2_bytes: int) -> int:
        """Layers whose inputs are several times the L2 cache, for each operation that streams from memory."""
        streamed = [self.num_bytes(MASS, ROPE, 0, self.kv_dtype.itemsize)]
        if self.target_share is not None:
            streamed.append(self.num_bytes(ATTEND, ROPE, self.target_share * self.n_blocks, self.kv_dtype.itemsize))
        return layers_beyond(l2_bytes, min(streamed))


@dataclass(frozen=True)
class Selection:
    """What the blocks of a layer weigh and which are attended to.

    Attributes:
        mass: ``[B, n_blocks]`` float32.
        indices, counts: as ``block_topp`` gives them.
    """

    mass: torch.Tensor
    indices: torch.Tensor
    counts: torch.Tensor


class Layer:
    """The inputs of one layer and the buffers that its kernels write.

    Attributes:
        q: ``[B, H, latent + rope]`` bfloat16.
        cache: ``[slots, latent + rope]`` in the cache's dtype.
        selections: by the RoPE dimensions and by all, so that no graph changes another's inputs.
        out: ``[B, H, latent]`` bfloat16.
    """

    def __init__(self, step: Step, seed: int) -> None:
        shape, device, dim = step.shape, step.device, step.shape.latent + step.shape.rope
        slots = step.batch.num_pages * shape.page_size
        self.cache = torch.zeros(slots, dim, dtype=torch.bfloat16, device=device)
        self.q = torch.empty(shape.batch, shape.heads, dim, dtype=torch.bfloat16, device=device)
        for row in range(shape.batch):
            sizes = {"latent": shape.latent, "rope": shape.rope, "device": device, "positions": shape.positions}
            made = make_mla_decode(shape.length, shape.heads, step.recipe, SM_SCALE, seed + row, **sizes)
            self.q[row] = made[0]
            self.cache[step.slots(row)] = made[1][:, 0]
        self.cache = self.cache.to(shape.kv_dtype)
        self.out = torch.empty(shape.batch, shape.heads, shape.latent, dtype=torch.bfloat16, device=device)
        self.selections = {score: self._selection(shape, device) for score in (ROPE, FULL)}
        self._latent = shape.latent

    @staticmethod
    def _selection(shape: Shape, device: str) -> Selection:
        sizes, integer = (shape.batch, shape.n_blocks), {"dtype": torch.int32, "device": device}
        indices = torch.zeros(shape.batch, 1, shape.n_blocks, **integer)
        return Selection(torch.empty(sizes, device=device), indices, torch.zeros(shape.batch, 1, **integer))

    @cached_property
    def copy(self) -> torch.Tensor:
        """The RoPE keys side by side, ``[slots, rope]``."""
        return self.cache[:, self._latent :].contiguous()

    def scored(self, score: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys of a score."""
        if score == FULL:
            return self.q, self.cache
        return self.q[..., self._latent :], self.copy if score == COPY else self.cache[:, self._latent :]

    def selection(self, score: str) -> Selection:
        """The buffers of a score."""
        return self.selections[FULL if score == FULL else ROPE]


class Step:
    """The layers of one shape, each with its selections made, and this project's operations on them.

    Args:
        shape: what to make.
        recipe: of the structure.
        device: where.
        layers: how many; no two rows of them have the same keys.
        seed: of the inputs.

    Raises:
        torch.OutOfMemoryError: it does not fit.
        ValueError: the sizes leave no room for the structure.
    """

    def __init__(self, shape: Shape, recipe: Recipe, device: str, layers: int, seed: int = 0) -> None:
        self.shape, self.recipe, self.device = shape, recipe, device
        self.batch = paged_batch((shape.length,) * shape.batch, shape.page_size, device, seeded(device, seed))
        part = torch.arange(shape.page_size // shape.block_size, dtype=torch.int32, device=device)
        blocks = self.batch.page_table[..., None] * len(part) + part
        self.block_table = blocks.flatten(1)[:, : shape.n_blocks].contiguous()
        integers = {"dtype": torch.int32, "device": device}
        self.n_blocks = torch.full((shape.batch,), shape.n_blocks, **integers)
        self.capacity = torch.full((shape.batch,), shape.capacity, **integers)
        self.theta1 = torch.full((shape.batch,), shape.theta1, device=device)
        self.stats = torch.zeros(4, dtype=torch.int64, device=device)
        places = tqdm(range(layers), desc=f"inputs of {shape.name}", leave=False)
        self.layers = [Layer(self, seed + layer * shape.batch) for layer in places]
        for layer in self.layers:
            for score in (ROPE, FULL):
                self.mass(score, layer)
                self.select(score, layer)

    def slots(self, row: int) -> torch.Tensor:
        """The slots of a row's tokens, ``[length]`` int64."""
        pages = self.batch.page_table[row].long()[:, None] * self.shape.page_size
        return (pages + torch.arange(self.shape.page_size, device=self.device)).flatten()[: self.shape.length]

    def mass(self, score: str, layer: Layer) -> torch.Tensor:
        """Weigh every block, ``[B, n_blocks]``."""
        blocks = (self.block_table, self.n_blocks, self.batch.last_slots, self.shape.block_size)
        return block_mass(*layer.scored(score), *blocks, SM_SCALE, out=layer.selection(score).mass)

    def select(self, score: str, layer: Layer) -> torch.Tensor:
        """Select the heaviest blocks, ``[B, 1, n_blocks]``, counting as a server does."""
        chosen = layer.selection(score)
        limits = (self.n_blocks, self.capacity, self.theta1, (chosen.indices, chosen.counts), self.stats)
        return block_topp(chosen.mass, self.block_table, *limits)[0]

    def attend(self, score: str, layer: Layer) -> torch.Tensor:
        """Attend to the selected blocks, ``[B, H, latent]``."""
        chosen, latent = layer.selection(score), self.shape.latent
        blocks = (chosen.indices, chosen.counts, self.batch.last_slots, self.shape.block_size, SM_SCALE)
        queries = (layer.q[..., :latent], layer.q[..., latent:])
        return sparse_mla_decode(*queries, layer.cache, *blocks, out=layer.out, usual_blocks=self.shape.capacity)

    def whole(self, score: str, layer: Layer) -> torch.Tensor:
        """Weigh, select and attend."""
        self.mass(score, layer)
        self.select(score, layer)
        return self.attend(score, layer)

    def active(self, score: str) -> torch.Tensor:
        """Blocks that each row of each layer attends to, ``[layers, B]`` int64."""
        return torch.stack([layer.selection(score).counts[:, 0] for layer in self.layers]).long()
