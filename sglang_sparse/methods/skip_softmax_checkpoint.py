"""Factors of Skip-Softmax from the calibration that NVIDIA Model Optimizer leaves in a checkpoint's config.json.

Source: ``sparse_attention_config`` as Model Optimizer exports it for language models, and as TensorRT-LLM reads it. One
of its ``config_groups`` is about Skip-Softmax: its ``algorithm`` is "skip_softmax", in older ones its ``sparse_algo``
"softmax_skip". That group, in older ones the table itself, has a ``threshold_scale_factor``: a formula over
``target_sparsity`` and its coefficients for each phase. Difference: only the formula that Model Optimizer exports is
understood, and a group that leaves layers dense (``ignore``) is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sglang_sparse.methods.skip_softmax import is_factor

PHASES = ("prefill", "decode")
TABLE = "sparse_attention_config"
FORMULA = "a * exp(b * target_sparsity)"
MOST_EXPONENT = 100


def calibrated_fields(checkpoint: Mapping[str, Any], target: Any) -> dict[str, Any]:
    """Return the fields of a config that reach a share of skipped blocks, as far as the calibration goes.

    Args:
        checkpoint: the model's config.json.
        target: the share, from 0 (never skips) to 1: one for both phases, or a mapping with those that are to be
            sparse.

    Returns:
        ``threshold_scale_factor`` by phase, and what it comes from as ``calibration``.

    Raises:
        ValueError: the share is none, or the checkpoint has no calibration that is understood; says which.
    """
    shares: dict[str, Any] = target if isinstance(target, dict) else dict.fromkeys(PHASES, target)
    known = bool(shares) and set(shares) <= set(PHASES)
    if not known or not all(is_factor(share) and share <= 1 for share in shares.values()):
        raise ValueError(
            f"target_sparsity: got {target!r}; must be a number from 0 to 1 for both phases, or a mapping with prefill "
            "or decode or both"
        )
    table = checkpoint.get(TABLE)
    table = table if isinstance(table, dict) else {}
    scale = _scale_factor(table)
    # Of a phase in which nothing is to be skipped Model Optimizer has calibrated nothing.
    coefficients = {phase: _coefficients(scale, phase) for phase, share in shares.items() if share}
    factors = dict.fromkeys(shares, 0.0)
    factors |= {phase: one["a"] * math.exp(one["b"] * shares[phase]) for phase, one in coefficients.items()}
    calibration = {"target_sparsity": target, "coefficients": coefficients, "producer": table.get("producer")}
    return {"threshold_scale_factor": factors, "calibration": calibration}


def _scale_factor(table: Mapping[str, Any]) -> Mapping[str, Any]:
    # TensorRT-LLM's guide shows the table itself in the place of its only group.
    groups = table.get("config_groups", {"only": {"algorithm": "skip_softmax", **table}} if table else {})
    names = (("algorithm", "skip_softmax"), ("sparse_algo", "softmax_skip"))
    found = [
        group
        for group in (groups.values() if isinstance(groups, dict) else ())
        if isinstance(group, dict) and any(group.get(key) == name for key, name in names)
    ]
    if len(found) != 1:
        raise ValueError(
            f"target_sparsity: needs a checkpoint whose config.json has one {TABLE} for skip_softmax, as NVIDIA Model "
            f"Optimizer writes it; this one has {len(found)}; allowed without one: threshold_scale_factor"
        )
    (group,) = found
    if ignored := group.get("ignore"):
        raise ValueError(
            f"target_sparsity: the checkpoint's {TABLE} leaves layers dense (ignore: {ignored!r}), which is not read; "
            "allowed: threshold_scale_factor and layers"
        )
    scale = group.get("threshold_scale_factor", table.get("threshold_scale_factor"))
    formula = scale.get("formula") if isinstance(scale, dict) else None
    if not isinstance(scale, dict) or str(formula).replace(" ", "") != FORMULA.replace(" ", ""):
        raise ValueError(f"target_sparsity: the checkpoint's formula is {formula!r}; allowed: {FORMULA!r}")
    return scale


def _coefficients(scale: Mapping[str, Any], phase: str) -> dict[str, float]:
    # Those of no phase are for both.
    found = scale.get(phase, scale.get("coefficients"))
    numbers: Mapping[str, Any] = found if isinstance(found, dict) else {}
    a: Any = numbers.get("a")
    b: Any = numbers.get("b")
    # Beyond any calibration, and e ** 100 is still a number.
    if not is_factor(a) or type(b) not in (int, float) or not abs(b) <= MOST_EXPONENT:
        raise ValueError(
            f"target_sparsity: the checkpoint's coefficients for {phase} are {found!r}; allowed: numbers a, at least "
            f"0, and b, up to {MOST_EXPONENT}"
        )
    return {"a": a, "b": b}
