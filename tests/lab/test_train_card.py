"""The layers of a calibration in a tiny model's card."""

from typing import Any

import pytest

from eval.lab.tables import cards


def test_card_has_the_layers_of_a_calibration() -> None:
    def layer(number: int, mean: float, long: float | None) -> dict[str, Any]:
        figures = {"deviation": 0.00123, "recall": 0.9}
        return {"layer": number, "mean": mean, **figures, "long": long and {"mean": long, **figures}}

    about = {"fingerprint": "0", "model": "m", "architecture": "A", "theta1": 0.9, "block_size": 16, "queries": 16}
    about |= {"files": [], "seed": 0, "device": "cpu", "dtype": "float32", "versions": {}, "method": "robsa"}
    groups = [{"kind": "code", "prompts": n, "tokens": 300} for n in (5, 3)]
    layers = [layer(0, 0.99612, 0.995), layer(1, 0.992, 0.985), layer(2, 0.75, None)]
    found = about | {"prompts": groups, "min_seq_len": 4096, "long_prompts": 3, "layers": layers}
    text = cards.layers({"calibration": found})
    assert "| 0 | 0.9961 | 0.0012 | 0.9950 | yes |\n| 1 | 0.9920 | 0.0012 | 0.9850 | no |" in text
    assert "| 2 | 0.7500 | 0.0012 |  | no |" in text
    assert "| 1 | 0.9920 | 0.0012 | 0.9850 | yes |" in cards.layers({"theta2": 0.98, "calibration": found})
    with pytest.raises(ValueError, match="calibration: got 'deepseek-v3-paper-ruler', allowed is what sglang_sparse"):
        cards.layers({"calibration": "deepseek-v3-paper-ruler"})
