"""Quality of the outputs that ``bench_mla`` times, against float64 over a sample of rows with all their heads.

All heads of a generated row attend to the same tokens in nearly the same shares, so that a selection by the mean of the
heads fits every one of them: ``recall``, ``dense_l2`` and ``similarity`` are best cases, and say nothing of a model's
heads, which differ. Times do not depend on it.

The reference attends to the contents of the cache, in its dtype. An output further from it than roundings explain is
refused, so that no wrong call is timed as a right one. A selection of another size than the inputs were made for is
refused, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eval.lab.kernels.harness import First, Implementation
from eval.lab.kernels.kernel_quality import require, require_near
from eval.lab.kernels.mla import DENSE, FULL, MASS, ROPE, SCORES, TOPP, WHOLE
from eval.lab.kernels.mla_inputs import SM_SCALE, Selection, Step, by
from eval.lab.structured.generator import ACTIVE_TOLERANCE, SPARSITY_TOLERANCE, near_active
from eval.lab.structured.structure import block_mass
from sglang_sparse_kernels.common.timing import Replay, Run

SAMPLED = 4
LARGEST_MASS_ERROR = 1e-3
# How far from the lightest block that the reference selects, relative to it, the mass of a block may be that only one
# of the two selects. By the reference's masses none differs; by masses of its own, made of float16 sums, nearly equal
# ones may fall otherwise.
LARGEST_TIE = {TOPP: 0.0, WHOLE: 0.01}


@dataclass(frozen=True)
class Sample:
    """One row of the first layer, in float64.

    Attributes:
        row: which.
        values: latents of its tokens, ``[T, latent]``.
        weights: attention of each head, ``[H, T]``.
        mass: by score, what the heads' mean gives to each block, ``[n_blocks]``.
        similarity: cosine of a head's weights by RoPE scores and by full ones, mean over the heads (RoBSA, section
            2.2.3).
        dense: output of attention to all tokens, ``[H, latent]``.
    """

    row: int
    values: torch.Tensor
    weights: torch.Tensor
    mass: dict[str, torch.Tensor]
    similarity: float
    dense: torch.Tensor


def samples(step: Step) -> list[Sample]:
    """At most `SAMPLED` rows of the first layer, spread evenly."""
    count = min(SAMPLED, step.shape.batch)
    return [_sample(step, i * (step.shape.batch - 1) // max(1, count - 1)) for i in range(count)]


def _sample(step: Step, row: int) -> Sample:
    layer, latent = step.layers[0], step.shape.latent
    keys, query = layer.cache[step.slots(row)].double(), layer.q[row].double()
    weights = (query @ keys.T * SM_SCALE).softmax(-1)
    rope = (query[:, latent:] @ keys[:, latent:].T * SM_SCALE).softmax(-1)
    means = {FULL: weights.mean(0), ROPE: rope.mean(0)}
    mass = {score: block_mass(mean[None], step.shape.block_size)[0] for score, mean in means.items()}
    similarity = torch.cosine_similarity(weights, rope, dim=-1).mean().item()
    values = keys[:, :latent].clone()
    return Sample(row, values, weights, mass, similarity, weights @ values)


def active(step: Step, score: str) -> dict[str, Any]:
    """Count the blocks that the rows of all layers are given to attend to.

    Returns:
        ``active_blocks`` (mean), ``active_blocks_max``, their share ``active_share`` and ``sparsity``, the rest;
        ``dense_rows``, the share of rows that attend to all.
    """
    counts = step.active(score)
    mean = counts.double().mean().item()
    share = mean / step.shape.n_blocks
    dense_rows = (counts >= step.shape.n_blocks).double().mean().item()
    found = {"active_blocks": mean, "active_blocks_max": int(counts.max()), "active_share": share}
    return {**found, "sparsity": 1 - share, "dense_rows": dense_rows}


def quality(step: Step, over: list[Sample], one: Implementation[Step], output: torch.Tensor | None) -> dict[str, Any]:
    """The figures of quality that belong to an operation.

    Args:
        step: the inputs.
        over: of `samples`.
        one: who did it.
        output: what it gave for the first layer.

    Returns:
        Of attention ``relative_l2``, the relative L2 error against float64 over the same tokens; over selected blocks
        also ``dense_l2``, the distance from dense attention, ``recall``, the share of the full scores' attention mass
        that the blocks hold, mean over the heads, and ``similarity``, see `Sample`. Of a selection, and of the layer as
        a whole, ``recall``, ``agreement``, the least share of blocks that the given selection has, too, and ``off_by``,
        see `LARGEST_TIE`. Of masses ``mass_error``, the largest. Of all that follow a selection what `active` says.

    Raises:
        ValueError: the output is wrong, or the selection is not of the size that the inputs were made for.
    """
    if output is None:
        raise ValueError("there is no output")
    score = ROPE if one.name not in SCORES else one.name
    scored, first = by(score), step.layers[0]
    if one.op == DENSE:
        return {"relative_l2": require_near(_relative_l2(output, over, [s.dense for s in over]), one.kv_dtype)}
    if one.op == MASS:
        # Python's max would pass over a NaN.
        error = torch.stack([(output[s.row].double() - s.mass[scored]).abs().max() for s in over]).max().item()
        require(error <= LARGEST_MASS_ERROR, f"its masses are off by {error:.2g} (allowed: {LARGEST_MASS_ERROR:g})")
        return {"mass_error": error}
    found = _sized(step, scored)
    # A peer, and attention alone, attend to the blocks that they are given.
    chosen = first.made[scored] if one.op in LARGEST_TIE else first.given[scored]
    masks = [_selected(step, chosen, s.row) for s in over]
    found["recall"] = torch.stack([s.mass[FULL][mask].sum() for s, mask in zip(over, masks, strict=True)]).mean().item()
    if one.op in LARGEST_TIE:
        found |= _agreement(step, one.op, scored, over, masks)
    if one.op == TOPP:
        return found
    sparse = [_over_blocks(step, s, mask) for s, mask in zip(over, masks, strict=True)]
    found |= {"relative_l2": require_near(_relative_l2(output, over, sparse), one.kv_dtype)}
    found |= {"dense_l2": _relative_l2(output, over, [s.dense for s in over])}
    return found | {"similarity": sum(s.similarity for s in over) / len(over)}


def judged_capture(
    step: Step,
    judge: Callable[[Implementation[Step], torch.Tensor | None], object],
    capture: Callable[[Sequence[Run]], Replay],
    runs: Sequence[Run],
) -> Replay:
    """Capture runs, replay them once, and judge what the `First` of them wrote.

    Raises:
        ValueError: it is wrong, or whatever `capture` raises.
    """
    replay, first = capture(runs), runs[0]
    step.clear()
    replay()
    if isinstance(first, First):
        judge(first.one, first.output)
    return replay


def _sized(step: Step, score: str) -> dict[str, Any]:
    found, target = active(step, score), step.shape.target_share
    if target is None:
        return found
    share = found["active_share"]
    require(
        near_active(share, target),
        f"{share:.2%} of the blocks are active, and the inputs were made for {target:.2%}: allowed are "
        f"{SPARSITY_TOLERANCE:.0%} of all blocks more or less, and {ACTIVE_TOLERANCE:.0%} of the active ones",
    )
    return {**found, "target_sparsity": 1 - target}


def _selected(step: Step, chosen: Selection, row: int) -> torch.Tensor:
    return torch.isin(step.block_table[row], chosen.indices[row, 0, : int(chosen.counts[row, 0])])


def _agreement(step: Step, op: str, scored: str, over: list[Sample], masks: list[torch.Tensor]) -> dict[str, float]:
    shares, distances = [], [0.0]
    for sample, mask in zip(over, masks, strict=True):
        best, mass = _selected(step, step.layers[0].given[scored], sample.row), sample.mass[scored]
        shares.append(int((best & mask).sum()) / int((best | mask).sum()))
        # The newest block is selected whatever it weighs.
        lightest = mass[:-1][best[:-1]].min()
        distances += ((mass - lightest).abs()[best ^ mask] / lightest).tolist()
    allowed = LARGEST_TIE[op]
    require(
        max(distances) <= allowed,
        f"it shares {min(shares):.1%} of its blocks with the reference, and those that differ are up to "
        f"{max(distances):.1%} heavier or lighter than the lightest one there (allowed: {allowed:.0%})",
    )
    return {"agreement": min(shares), "off_by": max(distances)}


def _over_blocks(step: Step, sample: Sample, mask: torch.Tensor) -> torch.Tensor:
    tokens = mask.repeat_interleave(step.shape.block_size)[: step.shape.length]
    weights = sample.weights * tokens
    return weights @ sample.values / weights.sum(-1, keepdim=True)


def _relative_l2(output: torch.Tensor, over: list[Sample], expected: list[torch.Tensor]) -> float:
    wanted = torch.stack(expected)
    got = torch.stack([output[s.row].double() for s in over])
    return ((got - wanted).norm() / wanted.norm()).item()
