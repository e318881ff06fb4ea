"""Factors of Skip-Softmax for a share of skipped blocks, by a calibration of the model.

Source: ``sparse_attention_config`` as NVIDIA Model Optimizer leaves it in a language model's config.json, and as
TensorRT-LLM reads it. One of its ``config_groups`` is about Skip-Softmax: its ``algorithm`` is "skip_softmax", in older
ones its ``sparse_algo`` "softmax_skip". That group, in older ones the table itself, has a ``threshold_scale_factor``: a
formula over ``target_sparsity`` and its coefficients for each phase. Differences: only the formula that Model Optimizer
exports is understood, and a group that leaves layers dense (``ignore``) is refused. ``sglang_sparse.calibrate`` writes
the same table into a separate file, and says there of which model it is and for which shares it is good.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeGuard

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sglang_sparse.errors import SparseArgumentError
from sglang_sparse.methods.config import is_number
from sglang_sparse.methods.fingerprint import misfit
from sglang_sparse.methods.layers import parse_layers

if TYPE_CHECKING:
    from sglang_sparse.methods.config import SparseConfig
    from sglang_sparse.methods.support import ModelConfig

PHASES = ("prefill", "decode")
TABLE = "sparse_attention_config"
FORMULA = "a * exp(b * target_sparsity)"
# Stands in the config.json of a model that is not available: whether Model Optimizer has calibrated it is not known,
# and what asks for it is not refused.
STAND_IN = {TABLE: {"threshold_scale_factor": {"formula": FORMULA, "coefficients": {"a": 1.0, "b": 1.0}}}}
MOST_EXPONENT = 100
# Beyond any context, and a number in the kernels' float32 too.
MOST_FACTOR = 1e30
FACTOR_RANGE = "a number from 0 to 1e30"
CALIBRATE = "python -m sglang_sparse.calibrate --method skip_softmax"


def is_factor(value: object) -> TypeGuard[float]:
    """Whether a value is a ``threshold_scale_factor`` of one phase: a number from 0 to ``MOST_FACTOR``."""
    # NaN is in no range.
    return is_number(value) and 0 <= value <= MOST_FACTOR


def only_with_a_model(value: object) -> None:
    """Refuse a field that ``resolved_fields`` would have replaced: there is no model."""
    if value is not None:
        raise ValueError("is resolved when a server starts, with its model, and not without one")


def resolved_fields(
    fields: dict[str, object], checkpoint: Callable[[], Mapping[str, object]], phases: Sequence[str] = PHASES
) -> dict[str, object]:
    """Put the factors of a calibration instead of ``target_sparsity`` and ``calibration_file``.

    Args:
        fields: what the user gave.
        checkpoint: reads the model's config.json; asked where there is no file.
        phases: those that the config has.

    Returns:
        The fields, with ``threshold_scale_factor`` by phase and what it comes from as ``calibration``.

    Raises:
        SparseArgumentError: one of both is wrong or has no use; names it, what was got and what is allowed.
    """
    target, file = fields.get("target_sparsity"), fields.get("calibration_file")
    if target is None and file is None:
        return fields
    name, value = ("target_sparsity", target) if file is None else ("calibration_file", file)
    if "threshold_scale_factor" in fields:
        message = f"{name}: got {value!r} together with threshold_scale_factor"
        raise SparseArgumentError(message, field=name, got=value, allowed="one of them")
    if target is None:
        message = f"calibration_file: got {file!r} without target_sparsity"
        raise SparseArgumentError(message, field="calibration_file", got=file, allowed="both, or neither")
    shares = _shares(target, phases)
    others = {name: value for name, value in fields.items() if name not in ("target_sparsity", "calibration_file")}
    if file is None:
        factors, about = _factors(checkpoint(), shares, "the checkpoint")
    else:
        table, found = _read(file)
        _require_range(file, found, shares)
        factors, about = _factors(table, shares, f"calibration_file {file}")
        fits = {phase: one.model_dump(exclude={"points"}) for phase, one in found.phases.items()}
        layers = {phase: measured for phase, measured in found.layers.items() if shares.get(phase)}
        about |= {"file": file, "model": found.model, "fingerprint": found.fingerprint, "fits": fits, "layers": layers}
    return {**others, "threshold_scale_factor": factors, "calibration": {"target_sparsity": target, **about}}


def refuse_other_model(
    config: SparseConfig, calibration: Mapping[str, object] | None, model_config: ModelConfig
) -> str | None:
    """Say why a config's ``calibration`` is not one of a server's model and sparse layers; None if it is, or unknown.

    Args:
        config: of the method.
        calibration: of that config, as ``resolved_fields`` returned it.
    """
    fingerprint = (calibration or {}).get("fingerprint")
    if not calibration or fingerprint is None:
        return None
    if not isinstance(fingerprint, str):
        return f"calibration.fingerprint: got {fingerprint!r}; allowed: the text that the calibration has"
    layers = calibration.get("layers", {})
    if not isinstance(layers, dict):
        return f"calibration.layers: got {layers!r}; allowed: the mapping that the calibration has"
    if reason := misfit("skip_softmax", fingerprint, str(calibration.get("model")), model_config):
        return reason
    served = list(parse_layers(config.layers, model_config.num_hidden_layers))
    return next(
        (_other_layers(phase, measured, served) for phase, measured in layers.items() if measured != served), None
    )


def _other_layers(phase: str, measured: object, served: list[int]) -> str:
    return (
        f"the calibration is of {phase} in layers {measured}, and layers {served} are to run sparse, of which it does "
        f"not say what a factor skips; allowed: the same layers, or a calibration with them: {CALIBRATE} "
        "--sparse-config '{\"layers\": …}'"
    )


def _shares(target: object, phases: Sequence[str]) -> dict[str, float]:
    given: dict[str, object] = target if isinstance(target, dict) else dict.fromkeys(phases, target)
    shares = {phase: share for phase, share in given.items() if is_factor(share) and share <= 1}
    if not given or not set(given) <= set(phases) or len(shares) < len(given):
        several = "both phases, or a mapping with prefill or decode or both"
        allowed = several if len(phases) > 1 else f"{phases[0]}, or a mapping with it"
        message = f"target_sparsity: got {target!r}; must be a number from 0 to 1 for {allowed}"
        raise SparseArgumentError(message, field="target_sparsity", got=target)
    return shares


def _read(file: object) -> tuple[dict[str, object], SkipCalibration]:
    allowed = f"what {CALIBRATE} --model-path MODEL --out FILE.json wrote"
    if not isinstance(file, str):
        message = f"calibration_file: got {file!r}"
        raise SparseArgumentError(message, field="calibration_file", got=file, allowed=f"the path of {allowed}")
    try:
        content = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        message = f"calibration_file: cannot read {file!r}: {error}"
        raise SparseArgumentError(message, field="calibration_file", got=file, allowed=allowed) from error
    try:
        return content, SkipCalibration.model_validate(content["calibration"])
    except (KeyError, TypeError, ValidationError) as error:
        # Pydantic's first line says how many errors there are.
        detail = error.errors()[0] if isinstance(error, ValidationError) else None
        why = f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" if detail else "it has no calibration"
        message = f"calibration_file: {file!r} is another file ({why})"
        raise SparseArgumentError(message, field="calibration_file", got=file, allowed=allowed) from error


def _require_range(file: object, found: SkipCalibration, shares: Mapping[str, float]) -> None:
    for phase, fit in found.phases.items():
        share = shares.get(phase)
        if share and not fit.lowest <= share <= fit.highest:
            allowed = f"{fit.lowest} to {fit.highest}, as {file} has measured, or 0 (dense)"
            message = f"target_sparsity: got {share!r} for {phase}"
            raise SparseArgumentError(message, field="target_sparsity", got=share, allowed=allowed)


def _factors(
    source: Mapping[str, object], shares: Mapping[str, float], origin: str
) -> tuple[dict[str, float], dict[str, object]]:
    """The factor of each phase, and what it comes from; ``origin`` is what messages call the source."""
    table = source.get(TABLE)
    table = table if isinstance(table, dict) else {}
    scale = _scale_factor(table, origin)
    # Of a phase in which nothing is to be skipped Model Optimizer has calibrated nothing.
    coefficients = {phase: _coefficients(scale, phase, origin) for phase, share in shares.items() if share}
    factors = dict.fromkeys(shares, 0.0)
    factors |= {phase: one["a"] * math.exp(one["b"] * shares[phase]) for phase, one in coefficients.items()}
    return factors, {"coefficients": coefficients, "producer": table.get("producer")}


def _scale_factor(table: Mapping[str, object], origin: str) -> Mapping[str, object]:
    # TensorRT-LLM's guide shows the table itself instead of its only group.
    plain = {"algorithm": "skip_softmax", **table} if "threshold_scale_factor" in table else table
    groups = table.get("config_groups", {"only": plain} if table else {})
    names = (("algorithm", "skip_softmax"), ("sparse_algo", "softmax_skip"))
    found = [
        group
        for group in (groups.values() if isinstance(groups, dict) else ())
        if isinstance(group, dict) and any(group.get(key) == name for key, name in names)
    ]
    if len(found) != 1:
        number = len(found) or (f"a {TABLE} of another method" if groups else 0)
        raise SparseArgumentError(
            f"target_sparsity: needs one {TABLE} for skip_softmax, as NVIDIA Model Optimizer leaves it in config.json; "
            f"{origin} has {number}",
            field=TABLE,
            got=groups,
            allowed=f"calibration_file, made by {CALIBRATE}, or threshold_scale_factor",
            where="without one",
        )
    (group,) = found
    if ignored := group.get("ignore"):
        message = (
            f"target_sparsity: the {TABLE} of {origin} leaves layers dense (ignore: {ignored!r}), which is not read"
        )
        raise SparseArgumentError(message, field=TABLE, got=ignored, allowed="threshold_scale_factor and layers")
    scale = group.get("threshold_scale_factor", table.get("threshold_scale_factor"))
    formula = scale.get("formula") if isinstance(scale, dict) else None
    if not isinstance(scale, dict) or str(formula).replace(" ", "") != FORMULA.replace(" ", ""):
        message = f"target_sparsity: the formula of {origin} is {formula!r}"
        raise SparseArgumentError(message, field="formula", got=formula, allowed=repr(FORMULA))
    return scale


def _coefficients(scale: Mapping[str, object], phase: str, origin: str) -> dict[str, float]:
    # Those of no phase are for both.
    found = scale.get(phase, scale.get("coefficients"))
    numbers: Mapping[str, object] = found if isinstance(found, dict) else {}
    a, b = numbers.get("a"), numbers.get("b")
    # Beyond any calibration, and e ** 100 is still a number.
    if not is_factor(a) or not is_number(b) or not abs(b) <= MOST_EXPONENT:
        message = f"target_sparsity: the coefficients of {origin} for {phase} are {found!r}"
        allowed = f"numbers a, at least 0, and b, up to {MOST_EXPONENT}"
        raise SparseArgumentError(message, field=phase, got=found, allowed=allowed)
    return {"a": a, "b": b}


# Shares that the formula is fitted to: beyond them the share bends towards 0 or all blocks, and the formula does not.
LOWEST, HIGHEST = 0.1, 0.9
# What makes a fit nonsense: too few points, a range of shares that is too small to say how they rise, or a formula that
# is this far off at one of its points.
FEWEST_POINTS, LEAST_RANGE, MOST_ERROR = 4, 0.2, 0.15


class Point(BaseModel):
    """The measurement at one factor, of the prompts of one length.

    Attributes:
        threshold_scale_factor: the factor.
        length: tokens of the prompts, as they were asked for.
        sparsity: share of the blocks that were skipped, over layers, heads and prompts, as a server counts it.
        recall: share of the attention mass on the other ones and on attention sinks, mean over layers, heads, queries
            and prompts.
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
    """The fit of the formula to the points of a phase.

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
    """The part of a file under ``calibration``, next to Model Optimizer's ``sparse_attention_config``.

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
        sinks: share of the attention mass of each phase that attention sinks hold. It counts as kept; no block is
            compared with a sink. None: the model has none.
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
    sinks: dict[str, float] | None = None


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
