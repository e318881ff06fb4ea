"""Calibrations of MLA models as ``sglang_sparse.calibrate --method robsa`` writes them, for tests."""

from typing import Any


def calibration(similarities: list[float], fingerprint: str = "0" * 64) -> dict[str, Any]:
    """One of a model with so many layers, of these mean similarities."""
    rows = [{"layer": i, "mean": mean, "deviation": 0.0, "recall": None} for i, mean in enumerate(similarities)]
    return {
        "method": "robsa",
        "fingerprint": fingerprint,
        "model": "some-model",
        "architecture": "DeepseekV3ForCausalLM",
        "theta1": 0.9,
        "block_size": 16,
        "queries": 16,
        "prompts": [{"kind": "files", "prompts": 4, "tokens": 1024}],
        "files": ["texts.txt"],
        "seed": 0,
        "device": "cpu",
        "dtype": "float32",
        "versions": {},
        "layers": rows,
    }
