"""Calibrations of Skip-Softmax: tables as Model Optimizer leaves them, and a file as ours is."""

import json
from pathlib import Path
from typing import Any

from sglang_sparse.methods.fingerprint import fingerprint
from sglang_sparse.methods.skip_softmax.calibration_file import Fit, SkipCalibration

FORMULA = {"formula": "a * exp(b * target_sparsity)"}
BY_PHASE = {**FORMULA, "prefill": {"a": 7.93, "b": 8.61}, "decode": {"a": 0.12, "b": 9.85}}
OLD = {
    "config_groups": {"group_0": {"sparse_algo": "softmax_skip", "targets": ["LlamaAttention"]}},
    "threshold_scale_factor": BY_PHASE,
    "producer": {"name": "modelopt", "version": "0.37.0"},
}
OTHER_GROUP = {"algorithm": "sparse_softmax"}
GROUP = {"algorithm": "skip_softmax", "targets": ["Attention"], "threshold_scale_factor": BY_PHASE}
NEW = {"config_groups": {"group_0": OTHER_GROUP, "group_1": GROUP}}

TINY = Path(__file__).parents[2] / "eval" / "models" / "tiny-gqa"
RANGES = {"prefill": (0.2, 0.8), "decode": (0.1, 0.9)}


def calibration_file(folder: Path) -> str:
    """As `sglang_sparse.calibrate` writes it, for the tiny model."""
    fits: Any = {
        phase: Fit(lowest=low, highest=high, r_squared=0.98, error=0.03, points=[])
        for phase, (low, high) in RANGES.items()
    }
    found = SkipCalibration(
        method="skip_softmax",
        fingerprint=fingerprint(str(TINY)),
        model="models/tiny",
        architecture="A",
        phases=fits,
        layers={phase: [0, 1, 2, 3] for phase in RANGES},
        first_position=0,
        queries=16,
        prompts={},
        files=[],
        seed=0,
        device="cpu",
        dtype="float32",
        versions={},
    )
    path = folder / "skip.json"
    path.write_text(json.dumps({"sparse_attention_config": NEW, "calibration": found.model_dump()}))
    return str(path)
