"""How many blocks the inputs of ``eval.lab.bench_mla`` are made to need, and the structure that needs so many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eval.lab.kernels.mla_inputs import Shape
from eval.lab.structured.generator import mla_structure
from eval.lab.structured.structure import Recipe, block_mass
from eval.live.counters import EvaluationError

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
        mass = block_mass(scores.softmax(-1), shape.block_size)[0]
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
