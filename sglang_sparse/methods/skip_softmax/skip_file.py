"""What ``sglang_sparse.calibrate --method skip_softmax`` writes, and the formula that it fits.

It needs neither torch nor transformers, so that a server can read a calibration before it starts anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

# Shares that the formula is fitted to: beyond them the share bends towards 0 or all blocks, and the formula does not.
LOWEST, HIGHEST = 0.1, 0.9
# What makes a fit nonsense: too few points, a range of shares that is too small to say how they rise, or a formula that
# is this far off at one of its points.
FEWEST_POINTS, LEAST_RANGE, MOST_ERROR = 4, 0.2, 0.15


class Point(BaseModel):
    """What was measured at one factor, of the prompts of one length.

    Attributes:
        threshold_scale_factor: the factor.
        length: tokens of the prompts, as they were asked for.
        sparsity: share of the blocks that were skipped, over layers, heads and prompts, as a server counts it.
        recall: share of the attention mass on the other ones, mean over layers, heads, queries and prompts.
        worst_layer_recall: the same in the layer where it is least.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    threshold_scale_factor: float = Field(gt=0)
    length: int = Field(ge=1)
    sparsity: float = Field(ge=0, le=1)
    recall: float = Field(ge=0, le=1)
    worst_layer_recall: float = Field(ge=0, le=1)

    @property
    def is_fitted(self) -> bool:
        """Whether the formula is fitted to it: not where its share is at an end, nor where every threshold is 1.

        That is where the factor is above the length; a higher one skips nothing more.
        """
        return LOWEST <= self.sparsity <= HIGHEST and self.threshold_scale_factor <= self.length


class Fit(BaseModel):
    """How well the formula stands for the points of a phase.

    Attributes:
        lowest: smallest share that it was fitted to, in thousandths, rounded up.
        highest: largest one, rounded down.
        r_squared: coefficient of determination of ``log(factor)`` over the share.
        error: most that the share of a point that it was fitted to differs from what the formula says of its factor.
        points: all that was measured, by length and factor.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    lowest: float = Field(ge=0, le=1)
    highest: float = Field(ge=0, le=1)
    r_squared: float = Field(le=1)
    error: float = Field(ge=0)
    points: list[Point]


class SkipCalibration(BaseModel):
    """What stands under ``calibration``, beside a ``sparse_attention_config`` as Model Optimizer writes it.

    Attributes:
        method: the method that it is for.
        fingerprint: of the model, see `fingerprint.fingerprint`.
        model: folder or name of the checkpoint, as it was given.
        architecture: the model's class.
        phases: how good the coefficients of each phase are.
        layers: those that were measured in each phase.
        first_position: of the queries of prefill that were looked at.
        queries: how many of the last positions of each prompt were looked at for decode.
        prompts: how many were run, of each length.
        files: names of the user's files that the prompts were drawn from; empty for made-up ones.
        seed: of the prompts.
        device: where the model ran.
        dtype: in which element type.
        versions: of the packages that took part.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    method: Literal["skip_softmax"]
    fingerprint: str
    model: str
    architecture: str
    phases: dict[Literal["prefill", "decode"], Fit] = Field(min_length=2)
    layers: dict[Literal["prefill", "decode"], list[int]] = Field(min_length=2)
    first_position: int
    queries: int
    prompts: dict[str, int]
    files: list[str]
    seed: int
    device: str
    dtype: str
    versions: dict[str, str]


class Formula(NamedTuple):
    """``factor = a * exp(b * share)``."""

    a: float
    b: float

    def share(self, factor: float) -> float:
        """The share that a factor is said to skip."""
        return math.log(factor / self.a) / self.b


def fit(phase: str, points: Sequence[Point]) -> tuple[Formula, Fit]:
    """Fit the formula to a phase's points by least squares of ``log(factor)``, lengths together; see `Point.is_fitted`.

    Raises:
        ValueError: the points tell no formula; says why.
    """
    used = [point for point in points if point.is_fitted]
    shares = [point.sparsity for point in used]
    factors = {point.threshold_scale_factor for point in used}
    # Of one factor, the shares of several lengths tell no slope.
    if len(used) < FEWEST_POINTS or len(factors) < 2 or max(shares) - min(shares) < LEAST_RANGE:
        found = [point.sparsity for point in points]
        raise ValueError(
            f"{phase}: the factors skip {min(found):.1%} to {max(found):.1%} of the blocks, and {len(used)} of them a "
            f"share from {LOWEST:.0%} to {HIGHEST:.0%}; needed are {FEWEST_POINTS} of two factors, over at "
            f"least {LEAST_RANGE:.0%}: give longer --lengths, or texts such as the server will see"
        )
    logs = [math.log(point.threshold_scale_factor) for point in used]
    mean, mean_log = sum(shares) / len(used), sum(logs) / len(used)
    spread = sum((share - mean) ** 2 for share in shares)
    b = sum((share - mean) * (log - mean_log) for share, log in zip(shares, logs, strict=True)) / spread
    formula = Formula(math.exp(mean_log - b * mean), b)
    left = sum((log - math.log(formula.a) - b * share) ** 2 for share, log in zip(shares, logs, strict=True))
    r_squared = 1 - left / sum((log - mean_log) ** 2 for log in logs)
    error = max(abs(formula.share(point.threshold_scale_factor) - point.sparsity) for point in used) if b > 0 else 1.0
    if error > MOST_ERROR:
        raise ValueError(
            f"{phase}: a * exp(b * share) does not fit what was measured: a share is off by up to {error:.1%} "
            f"(allowed: {MOST_ERROR:.0%}; b {b:.3g}, R² {r_squared:.3f}): give more prompts, or "
            "--lengths that are more alike"
        )
    ends = math.ceil(min(shares) * 1000) / 1000, math.floor(max(shares) * 1000) / 1000
    return formula, Fit(lowest=ends[0], highest=ends[1], r_squared=r_squared, error=error, points=list(points))
