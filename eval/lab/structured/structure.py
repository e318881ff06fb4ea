"""Attention of a known shape: sinks, a local band, stripes, and an even background, planted in queries and keys.

Each query spreads its softmax mass over four disjoint sets of keys, in the shares that a `Recipe` gives:

- *sinks*: the first tokens;
- *stripes*: tokens at random places, others for each KV head, to which all later queries attend;
- the *band*: of the other tokens those of the query's own block of ``band_tokens / 2`` and of the block before it;
- the *background*: all others.

A key has one direction for being a sink and one for being a stripe, and a code for its block; a query has a coefficient
for each, so that the logits of a set are equal and follow in closed form from the numbers of tokens before the query.
The shares therefore hold at every position at which the sets exist. The codes are chirps,
``exp(2 pi i (c j^3 + a j^2 + b j) / p)`` for j below a prime p: of two blocks they correlate by at most
``2 / sqrt(p)``, which makes the background of a query uneven from block to block; what it holds in sum is worked out
exactly. Noise, orthogonal to all this, spreads the logits of band and background, and a random rotation of each head
hides the directions from whoever looks at single dimensions. Nothing grows with the square of the number of tokens,
only with that of blocks.

With a *level* one more dimension is the same in all keys, and queries differ in how much they have there: all logits
of a query shift alike, by an amount for its head and one for its block of ``band_tokens / 2`` queries. The softmax, and
so everything above, does not see it; a comparison of logits with a fixed number does. Both amounts are normally
distributed and know nothing of each other, of the KV head or of the text. The noise has a dimension less, and is
another one; in bfloat16 the logits lose in precision, by less than a hundredth of the level.

The patterns are those that AnchorAttention and MInference report of real models; the construction is this project's
own. Keys are as after RoPE.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

PARTS = ("sink", "band", "stripes", "background")
SINK, BAND, STRIPE, BACKGROUND = range(4)
# Codes hardly correlate, so that each iteration leaves a small part of the error.
ITERATIONS = 12


class Recipe(BaseModel):
    """The shares of the softmax mass, which add up to 1, and what they fall on."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    sink: float = Field(0.3, gt=0, lt=1, description="Share of the sinks.")
    band: float = Field(0.3, gt=0, lt=1, description="Share of the local band.")
    stripes: float = Field(0.3, gt=0, lt=1, description="Share of the stripes.")
    background: float = Field(0.1, gt=0, lt=1, description="Share of all other tokens.")
    sink_tokens: int = Field(4, ge=1, description="First tokens that are sinks.")
    band_tokens: int = Field(256, ge=2, multiple_of=2, description="Tokens of the band, at most.")
    stripe_ratio: float = Field(0.01, gt=0, lt=1, description="Share of the tokens that are stripes.")
    stripe_run: int = Field(1, ge=1, description="Adjacent tokens of a stripe; it starts at a multiple of this.")
    noise: float = Field(0.5, ge=0, description="Standard deviation of the logits within band and background.")
    head_level: float = Field(0.0, ge=0, description="Standard deviation of what a query head adds to all its logits.")
    block_level: float = Field(0.0, ge=0, description="Standard deviation of what each block of queries adds to that.")
    rope_share: float = Field(0.9, ge=0, le=1, description="MLA: share of the logits that the RoPE dimensions carry.")

    @property
    def has_level(self) -> bool:
        """Whether queries differ in what they add to all their logits."""
        return self.head_level > 0 or self.block_level > 0

    @model_validator(mode="after")
    def _whole(self) -> Recipe:
        total = self.sink + self.band + self.stripes + self.background
        if abs(total - 1) > 1e-6:
            raise ValueError(f"sink, band, stripes and background must add up to 1, got {total:g}")
        return self


class Slice(NamedTuple):
    """Adjacent dimensions of a head that carry a share of the logits."""

    dims: int
    share: float


class Structure:
    """The kind of each token, and the weight that each query gives to it.

    Args:
        recipe: the shares.
        tokens: length of the longest context.
        kv_heads: KV heads, each with stripes of its own.
        slices: the head dimension from its beginning; the shares add up to 1.
        seed: of the stripes and the rotations, which are the same on every device.
        device: where everything is made.

    Raises:
        ValueError: the sizes leave no room for the structure.
    """

    def __init__(
        self,
        recipe: Recipe,
        tokens: int,
        kv_heads: int,
        slices: tuple[Slice, ...],
        seed: int = 0,
        device: str | torch.device = "cpu",
    ):
        if tokens < 1 or kv_heads < 1:
            raise ValueError(f"tokens and kv_heads must be positive, got {tokens} and {kv_heads}")
        self.recipe, self.tokens, self.kv_heads, self.slices = recipe, tokens, kv_heads, slices
        self.block = recipe.band_tokens // 2
        generator = torch.Generator().manual_seed(4 * seed)
        self.kind = _kinds(recipe, tokens, kv_heads, generator).to(device)
        blocks = -(-tokens // self.block)
        self.codes = [chirps(blocks, part.dims).to(device) for part in slices]
        self.wanted = [own_and_previous(codes) for codes in self.codes]
        self.rotations = [
            torch.linalg.qr(torch.randn(kv_heads, part.dims, part.dims, generator=generator))[0].to(device)
            for part in slices
        ]
        self._level_seed = int(torch.randint(2**62, (), generator=generator))
        # Dimensions that are the same in all keys; without a level the tensors are as if there were no such thing.
        self._flat = int(recipe.has_level)
        # How much of its coefficient for the band a query of one block spends on the keys of another.
        pairs = zip(slices, self.wanted, self.codes, strict=True)
        self.gram = torch.stack([part.share * wanted @ codes.T for part, wanted, codes in pairs]).sum(0)
        self.seen = {kind: _running(self.kind == kind) for kind in (BACKGROUND, STRIPE)}
        self._solve()

    def _solve(self) -> None:
        """Find the coefficient of the band, a block of queries at a time, for as many band tokens as they see on
        average: the background depends on it, a little.
        """
        blocks = self.gram.shape[0]
        index = torch.arange(blocks + 1, device=self.kind.device)
        count = self.seen[BACKGROUND][:, (index * self.block).clamp(max=self.tokens)].diff(dim=1)
        previous = torch.nn.functional.pad(count, (1, 0))[:, :-1]
        self._usual = (previous + count / 2).clamp(min=1)
        self._strength = torch.zeros_like(self._usual)
        self._log_far, self._slope = torch.zeros_like(self._usual), torch.zeros_like(self._usual)
        for head in range(self.kv_heads):
            far = torch.where(index[:-1] < index[:-1, None] - 1, count[head], 0)
            for _ in range(ITERATIONS):
                self._log_far[head], self._slope[head] = self._background(far, self._strength[head])
                self._strength[head] = self._ratio(BAND) + self._log_far[head] - self._usual[head].log()

    def _background(self, far: torch.Tensor, strength: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logarithm of the background's weight, 0 where there is none, and its derivative by the coefficient.

        Args:
            far: ``[blocks, blocks]``, background tokens that the queries of one block find in another.
            strength: ``[blocks]``, coefficients of the band.
        """
        weight = far * torch.exp(strength[:, None] * self.gram)
        total = weight.sum(1)
        slope = (weight * self.gram).sum(1) / total.clamp(min=1e-9)
        return total.clamp(min=1e-9).log().where(total > 0, 0), slope

    def _ratio(self, part: int) -> float:
        return math.log(getattr(self.recipe, PARTS[part]) / self.recipe.background)

    def coefficients(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute the coefficients of queries for a sink, the band and a stripe, as logits.

        Args:
            positions: ``[n]`` int64, below ``tokens``.

        Returns:
            Three of ``[kv_heads, n]`` float32.
        """
        block = positions // self.block
        plain, stripes = self.seen[BACKGROUND], self.seen[STRIPE][:, positions + 1]
        near = (plain[:, positions + 1] - plain[:, (block - 1).clamp(min=0) * self.block]).clamp(min=1)
        # The background's dependence on the coefficient is linear enough between a block's ends.
        change = (self._usual[:, block] / near).log() / (1 - self._slope[:, block])
        log_far = self._log_far[:, block] + self._slope[:, block] * change
        # Noise raises the mean weight of band and background.
        log_far_mean = log_far + self.recipe.noise**2 / 2
        sinks = (positions + 1).clamp(max=self.recipe.sink_tokens)
        return (
            self._ratio(SINK) + log_far_mean - sinks.log(),
            self._strength[:, block] + change,
            self._ratio(STRIPE) + log_far_mean - stripes.clamp(min=1).log(),
        )

    def levels(self, q_heads: int) -> torch.Tensor:
        """Return the levels that the queries of each block add to all their logits, ``[q_heads, blocks]`` float32."""
        generator = torch.Generator().manual_seed(self._level_seed)
        heads, blocks = (torch.randn(q_heads, n, generator=generator) for n in (1, self.gram.shape[0]))
        return (self.recipe.head_level * heads + self.recipe.block_level * blocks).to(self.kind.device)

    def logits(self, position: int) -> torch.Tensor:
        """Logarithm of the mean weight of each key, ``[kv_heads, position + 1]`` float32, for a query there.

        Without the level, which differs between the query heads of a KV head.
        """
        sink, band, stripe = (value[:, 0, None] for value in self.coefficients(self._at(position)))
        kind = self.kind[:, : position + 1]
        towards = self.gram[position // self.block].repeat_interleave(self.block)[: position + 1]
        plain = band * towards + self.recipe.noise**2 / 2
        return torch.where(kind == SINK, sink, torch.where(kind == STRIPE, stripe, plain))

    def parts(self, position: int) -> torch.Tensor:
        """Index into `PARTS` of each key, ``[kv_heads, position + 1]`` int64, for a query there."""
        kind = self.kind[:, : position + 1].long()
        index = torch.arange(position + 1, device=kind.device)
        near = index >= (position // self.block - 1) * self.block
        return torch.where((kind == BACKGROUND) & near, BAND, kind)

    def mass(self, position: int) -> torch.Tensor:
        """Expected share of the softmax mass in each of `PARTS`, ``[kv_heads, 4]`` float32, for a query there.

        It is the recipe's where all parts exist; where one does not, the others share its mass in proportion.
        """
        weights = self.logits(position).softmax(-1)
        return weights.new_zeros(self.kv_heads, len(PARTS)).scatter_add_(1, self.parts(position), weights)

    def blocks_at_recall(self, position: int, recall: float, block: int = 16) -> torch.Tensor:
        """The least share of the blocks of keys that holds `recall` of the mass, ``[kv_heads]``, for a query there."""
        mass = block_mass(self.logits(position).softmax(-1), block)
        best = mass.sort(dim=-1, descending=True).values.cumsum(-1)
        return ((best < recall).sum(-1) + 1).clamp(max=mass.shape[-1]) / mass.shape[-1]

    def _at(self, position: int) -> torch.Tensor:
        return torch.tensor([position], device=self.kind.device)

    def keys(self, positions: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Keys ``[n, kv_heads, dims]`` float32 of positions ``[n]``; the generator is for their noise."""
        kind = self.kind[:, positions].T[..., None]
        made = []
        for part, codes, rotation in zip(self.slices, self.codes, self.rotations, strict=True):
            size = math.sqrt(part.dims)
            width = codes.shape[1]
            shape = (len(positions), self.kv_heads, part.dims - 2 - width - self._flat)
            noise = torch.randn(shape, generator=generator, device=kind.device)
            plain = torch.cat([size * codes[positions // self.block][:, None].expand(-1, self.kv_heads, -1), noise], -1)
            flat = noise.new_full((*shape[:2], self._flat), size)
            marks = size * (kind == SINK), size * (kind == STRIPE)
            features = torch.cat([*marks, plain * (kind == BACKGROUND), flat], -1)
            made.append(torch.einsum("nhd,hde->nhe", features, rotation))
        return torch.cat(made, -1)

    def queries(self, positions: torch.Tensor, q_heads: int, scale: float, generator: torch.Generator) -> torch.Tensor:
        """Queries ``[n, q_heads, dims]`` float32 of positions ``[n]``.

        Args:
            positions: int64.
            q_heads: a multiple of the KV heads; all of a group want the same, up to noise and level.
            scale: what the model multiplies ``q @ k`` with.
            generator: for their noise.

        Raises:
            ValueError: the heads do not form groups.
        """
        group, rest = divmod(q_heads, self.kv_heads)
        if rest or not group:
            raise ValueError(f"q_heads must be a multiple of the {self.kv_heads} KV heads, got {q_heads}")
        sink, band, stripe = (value.T[:, :, None, None] for value in self.coefficients(positions))
        level = self.levels(q_heads)[:, positions // self.block].T.reshape(len(positions), self.kv_heads, group, 1)
        level, made = level[..., : self._flat], []
        for part, wanted, rotation in zip(self.slices, self.wanted, self.rotations, strict=True):
            width = wanted.shape[1]
            shape = (len(positions), self.kv_heads, group, part.dims - 2 - width - self._flat)
            noise = torch.randn(shape, generator=generator, device=sink.device)
            noise = noise * (self.recipe.noise * math.sqrt(part.share) / scale / noise.norm(dim=-1, keepdim=True))
            planted = torch.cat([sink, stripe, band * wanted[positions // self.block][:, None, None]], -1)
            unit = part.share / scale / math.sqrt(part.dims)
            features = torch.cat([(planted * unit).expand(-1, -1, group, -1), noise, level * unit], -1)
            made.append(torch.einsum("nhgd,hde->nhge", features, rotation))
        return torch.cat(made, -1).flatten(1, 2)


def block_mass(weights: torch.Tensor, block: int) -> torch.Tensor:
    """Sums over blocks: ``[heads, tokens]`` becomes ``[heads, ceil(tokens / block)]``."""
    return torch.nn.functional.pad(weights, (0, -weights.shape[-1] % block)).unflatten(-1, (-1, block)).sum(-1)


def _kinds(recipe: Recipe, tokens: int, kv_heads: int, generator: torch.Generator) -> torch.Tensor:
    """`SINK`, `STRIPE` or `BACKGROUND` for each token, ``[kv_heads, tokens]`` int8."""
    kind = torch.full((kv_heads, tokens), BACKGROUND, dtype=torch.int8)
    first = -(-recipe.sink_tokens // recipe.stripe_run)
    runs = max(tokens // recipe.stripe_run - first, 0)
    chosen = min(max(round(tokens * recipe.stripe_ratio / recipe.stripe_run), 1), runs)
    for head in kind:
        starts = (torch.randperm(runs, generator=generator)[:chosen] + first) * recipe.stripe_run
        head[(starts[:, None] + torch.arange(recipe.stripe_run)).flatten()] = STRIPE
    kind[:, : recipe.sink_tokens] = SINK
    return kind


def _running(marked: torch.Tensor) -> torch.Tensor:
    """Count the marked ones among the first n, ``[heads, tokens + 1]`` float32 for n from 0; exact below 2**24."""
    return torch.nn.functional.pad(marked.cumsum(1).float(), (1, 0))


def chirps(count: int, dims: int) -> torch.Tensor:
    """`count` codes ``[count, 2 p]`` float32 of length 1, p the largest prime up to a quarter of the dimensions.

    Raises:
        ValueError: fewer than 20 dimensions, or more codes than there are.
    """
    if dims < 20:
        raise ValueError(f"a head, or the RoPE part of one, must have at least 20 dimensions, got {dims}")
    p = next(n for n in range(dims // 4, 4, -1) if all(n % divisor for divisor in range(2, math.isqrt(n) + 1)))
    if count > p**3:
        raise ValueError(f"{dims} dimensions have codes for {p**3} blocks, needed are {count}: raise band_tokens")
    index, j = torch.arange(count)[:, None], torch.arange(p)
    turns = (index // p**2 * j**3 + index // p % p * j**2 + index % p * j) % p
    phase = turns * (2 * math.pi / p)
    return torch.cat([phase.cos(), phase.sin()], 1) / math.sqrt(p)


def own_and_previous(codes: torch.Tensor) -> torch.Tensor:
    """For each block what gives 1 with its own code and with the code before it."""
    wanted = codes.clone()
    overlap = (codes[1:] * codes[:-1]).sum(-1, keepdim=True)
    wanted[1:] = (codes[1:] + codes[:-1]) / (1 + overlap)
    return wanted
