"""Inputs of ``eval.lab.bench_mla``: decode steps of MLA layers whose attention has a known structure, and this
project's operations on them. The structure needs as many blocks as the paper says, or as asked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from tqdm import tqdm

from eval.lab.kernels.kernel_inputs import layers_beyond
from eval.lab.kernels.mla import ATTEND, COPY, DENSE, FULL, MASS, ROPE, TOPP
from eval.lab.structured.generator import make_mla_decode, mla_structure
from eval.lab.structured.structure import Recipe
from eval.lab.structured.structure import block_mass as expected_mass
from eval.live.counters import EvaluationError
from eval.texts.lengths import short_length
from sglang_sparse_kernels import block_mass as mass_kernels
from sglang_sparse_kernels import block_topp as topp_kernels
from sglang_sparse_kernels.block_mass import block_mass
from sglang_sparse_kernels.block_topp import block_topp
from sglang_sparse_kernels.common.testing import paged_batch, seeded
from sglang_sparse_kernels.sparse_mla_decode import sparse_mla_decode

# DeepSeek-V3's softmax scale, with YaRN's factor for a context 40 times as long. The queries are made for it, so that
# another model's would change nothing but roundings.
SM_SCALE = 192**-0.5 * (0.1 * math.log(40) + 1) ** 2
# Of an element of a query or an output, in bfloat16.
QUERY_BYTES = 2
# A layer of the kind that the method selects in by RoPE scores: these give nearly the full scores (cosine above .99).
# At theta1 .9 all but a tenth of the stripes are needed and nothing of the background, by either score.
RECIPE: Mapping[str, Any] = {
    "sink": 0.25,
    "band": 0.2,
    "stripes": 0.5,
    "background": 0.05,
    "rope_share": 0.95,
}
# Active blocks of 16 tokens by thousands of tokens, at theta1 .9 (RoBSA, table 10).
PAPER_BLOCKS = {32: 220, 48: 260, 64: 320, 80: 380, 96: 430, 112: 450, 128: 500}
PAPER_BLOCK_SIZE, PAPER_THETA1 = 16, 0.9
BISECTIONS = 12


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
        """Bytes that an operation must move in a layer: each input read once (the cache, queries, and tables of pages
        or blocks), each output written once.

        Args:
            op: of `OPS`.
            score: of `SCORES`.
            active: blocks that a row attends to, on average.
            itemsize: bytes of an element of the KV cache.
        """
        scored, stored = self.rope if score != FULL else self.latent + self.rope, self.latent + self.rope
        attended = self.heads * (stored + self.latent) * QUERY_BYTES
        sizes = {
            DENSE: self.length * stored * itemsize + 4 * math.ceil(self.length / self.page_size) + attended,
            MASS: self.length * scored * itemsize + 8 * self.n_blocks + self.heads * scored * QUERY_BYTES,
            TOPP: 8 * self.n_blocks + 4 * active,
            ATTEND: active * self.block_size * stored * itemsize + 4 * active + attended,
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
    """The masses of a layer's blocks, and the blocks to attend to.

    Attributes:
        mass: ``[B, n_blocks]`` float32.
        indices, counts: as ``block_topp`` gives them.
    """

    mass: torch.Tensor
    indices: torch.Tensor
    counts: torch.Tensor

    @staticmethod
    def empty(shape: Shape, device: str) -> Selection:
        """Of masses that are no numbers, and no blocks."""
        mass = torch.full((shape.batch, shape.n_blocks), torch.nan, device=device)
        integer = {"dtype": torch.int32, "device": device}
        indices = torch.full((shape.batch, 1, shape.n_blocks), -1, **integer)
        return Selection(mass, indices, torch.zeros(shape.batch, 1, **integer))

    def clear(self) -> None:
        """Make it `empty` again."""
        self.mass.fill_(torch.nan)
        self.indices.fill_(-1)
        self.counts.zero_()


class Layer:
    """The inputs of one layer and the buffers that its kernels write.

    Attributes:
        q: ``[B, H, latent + rope]`` bfloat16.
        cache: ``[slots, latent + rope]`` in the cache's dtype.
        given: selections by the RoPE dimensions and by all: inputs, which no operation writes.
        made: what this project's operations write, likewise. What one has left there no other reads.
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
        self.given, self.made = ({score: Selection.empty(shape, device) for score in (ROPE, FULL)} for _ in range(2))
        self._latent = shape.latent

    @cached_property
    def copy(self) -> torch.Tensor:
        """The RoPE keys side by side, ``[slots, rope]``."""
        return self.cache[:, self._latent :].contiguous()

    def scored(self, score: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys of a score. A server has a query in two parts: for all dimensions it joins them."""
        if score == FULL:
            return torch.cat([self.q[..., : self._latent], self.q[..., self._latent :]], dim=-1), self.cache
        return self.q[..., self._latent :], self.copy if score == COPY else self.cache[:, self._latent :]


class Step:
    """The layers of one shape, and this project's operations on them.

    The selections that layers are given are made by the references in plain torch, not by what is measured. All rows
    have the same length and need nearly as many blocks: how well an operation shares out unequal rows is not seen.

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
            for score, given in layer.given.items():
                self._weigh(*layer.scored(score), given.mass)
                limits = (self.n_blocks, self.capacity, self.theta1, (given.indices, given.counts))
                topp_kernels.reference.block_topp(given.mass, self.block_table, *limits)

    def _weigh(self, q: torch.Tensor, keys: torch.Tensor, out: torch.Tensor) -> None:
        # Row by row: the reference holds a row's logits of all heads.
        for row in range(self.shape.batch):
            one = slice(row, row + 1)
            blocks = (self.block_table[one], self.n_blocks[one], self.batch.last_slots[one], self.shape.block_size)
            mass_kernels.reference.block_mass(q[one], keys, *blocks, SM_SCALE, 1.0, out[one])

    def clear(self) -> None:
        """Forget what operations wrote."""
        for layer in self.layers:
            layer.out.fill_(torch.nan)
            for made in layer.made.values():
                made.clear()

    def slots(self, row: int) -> torch.Tensor:
        """The slots of a row's tokens, ``[length]`` int64."""
        pages = self.batch.page_table[row].long()[:, None] * self.shape.page_size
        return (pages + torch.arange(self.shape.page_size, device=self.device)).flatten()[: self.shape.length]

    def mass(self, score: str, layer: Layer) -> torch.Tensor:
        """Weigh every block, ``[B, n_blocks]``."""
        blocks = (self.block_table, self.n_blocks, self.batch.last_slots, self.shape.block_size)
        return block_mass(*layer.scored(score), *blocks, SM_SCALE, out=layer.made[by(score)].mass)

    def select(self, score: str, layer: Layer) -> torch.Tensor:
        """Select the heaviest blocks by the given masses, ``[B, 1, n_blocks]``, counting as a server does."""
        return self._select(layer.given[by(score)].mass, layer.made[by(score)])

    def attend(self, score: str, layer: Layer) -> torch.Tensor:
        """Attend to the given blocks, ``[B, H, latent]``."""
        return self._attend(layer, layer.given[by(score)])

    def whole(self, score: str, layer: Layer) -> torch.Tensor:
        """Weigh, select by that and attend to what was selected."""
        made = layer.made[by(score)]
        self._select(self.mass(score, layer), made)
        return self._attend(layer, made)

    def _select(self, mass: torch.Tensor, into: Selection) -> torch.Tensor:
        limits = (self.n_blocks, self.capacity, self.theta1, (into.indices, into.counts), self.stats)
        return block_topp(mass, self.block_table, *limits)[0]

    def _attend(self, layer: Layer, chosen: Selection) -> torch.Tensor:
        latent = self.shape.latent
        blocks = (chosen.indices, chosen.counts, self.batch.last_slots, self.shape.block_size, SM_SCALE)
        queries = (layer.q[..., :latent], layer.q[..., latent:])
        server = {"usual_blocks": self.shape.capacity, "newest_last": True}
        return sparse_mla_decode(*queries, layer.cache, *blocks, out=layer.out, **server)

    def active(self, score: str) -> torch.Tensor:
        """Blocks that each row of each layer is given to attend to, ``[layers, B]`` int64."""
        return torch.stack([layer.given[by(score)].counts[:, 0] for layer in self.layers]).long()


def by(score: str) -> str:
    """Return the score to look masses up by, `FULL` or `ROPE`: a copy of the RoPE keys gives the same masses."""
    return FULL if score == FULL else ROPE


def target_share(shape: Shape, active: str | float) -> float | None:
    """The share of the blocks that the inputs are to be made for.

    Args:
        shape: what is measured.
        active: "paper", "any" (none in particular), or the share itself.

    Raises:
        EvaluationError: the paper has no figure for the shape.
    """
    if active == "any":
        return None
    if isinstance(active, float):
        return active
    blocks = PAPER_BLOCKS.get(shape.length // 1024) if shape.length % 1024 == 0 else None
    if blocks is None or (shape.block_size, shape.theta1) != (PAPER_BLOCK_SIZE, PAPER_THETA1):
        raise EvaluationError(
            f"--active: of {shape.name} with blocks of {shape.block_size} at theta1 {shape.theta1} the paper does not "
            f"say how many are active: it does of {', '.join(f'{k}k' for k in PAPER_BLOCKS)} with blocks of "
            f"{PAPER_BLOCK_SIZE} at {PAPER_THETA1}; give the share of the blocks, or any"
        )
    return blocks / shape.n_blocks


def recipe_for(shape: Shape, base: Recipe, seed: int = 0, device: str = "cpu") -> Recipe:
    """The recipe whose stripes are so many that RoPE scores need the shape's target share of the blocks at theta1.

    Found by bisection, on the expected scores of the last query (`eval.lab.structured.structure`).

    Raises:
        EvaluationError: sinks, band and background alone need more.
        ValueError: the sizes leave no room for the structure.
    """
    if shape.target_share is None:
        return base
    low, high, found = 0.0, shape.target_share, 0.0
    recipe = base
    for _ in range(BISECTIONS):
        ratio = (low + high) / 2
        recipe = base.model_copy(update={"stripe_ratio": ratio})
        structure = mla_structure(shape.positions or shape.length, recipe, seed, device, shape.latent, shape.rope)
        scores = structure.logits(shape.length - 1) * recipe.rope_share
        mass = expected_mass(scores.softmax(-1), shape.block_size)[0]
        needed = int((mass.sort(descending=True).values.cumsum(0) < shape.theta1).sum()) + 1
        found = min(needed, shape.n_blocks) / shape.n_blocks
        low, high = (ratio, high) if found < shape.target_share else (low, ratio)
        if abs(found / shape.target_share - 1) < 0.01:
            return recipe
    if abs(found - shape.target_share) > 1 / shape.n_blocks:
        raise EvaluationError(
            f"{shape.name}: no number of stripes makes {shape.target_share:.3f} of the blocks hold {shape.theta1} of "
            f"the RoPE scores' mass; the nearest is {found:.3f}: change --recipe"
        )
    return recipe
