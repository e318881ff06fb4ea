"""The section of a tiny model's card that a calibration file makes."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from eval.lab.train import card

RESULTS = Path(__file__).parent.parent.parent / "eval" / "lab" / "results"


def test_card_has_the_layers_of_a_calibration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def layer(number: int, mean: float, long: float | None) -> dict[str, Any]:
        figures = {"deviation": 0.00123, "recall": 0.9}
        return {"layer": number, "mean": mean, **figures, "long": long and {"mean": long, **figures}}

    about = {"fingerprint": "0", "model": "m", "architecture": "A", "theta1": 0.9, "block_size": 16, "queries": 16}
    about |= {"files": [], "seed": 0, "device": "cpu", "dtype": "float32", "versions": {}, "method": "robsa"}
    groups = [{"kind": "code", "prompts": n, "tokens": 300} for n in (5, 3)]
    layers = [layer(0, 0.99612, 0.995), layer(1, 0.992, 0.985), layer(2, 0.75, None)]
    found = about | {"prompts": groups, "min_seq_len": 4096, "long_prompts": 3, "layers": layers}
    results = [card.read(RESULTS / f"tiny-mla-{kind}.jsonl") for kind in ("accuracy", "training")]

    def made(content: dict[str, Any] | None) -> str:
        if content:
            (tmp_path / card.CALIBRATION).write_text(json.dumps(content))
        paths = [f"--{kind}={RESULTS / f'tiny-mla-{kind}.jsonl'}" for kind in ("accuracy", "training")]
        monkeypatch.setattr(sys, "argv", ["card", *paths, "--out", str(tmp_path / "README.md")])
        card.main()
        return (tmp_path / "README.md").read_text()

    without = made(None)
    assert without == card.card(*results) and "sensitive" not in without
    text = made({"calibration": found})
    before, section, after = text.partition(card.partition({"calibration": found}))
    assert section and before + after == without and after.startswith("## Training")
    assert "over 8 prompts, and the mean over the 3 of at least 4096 tokens" in section and "theta2 = 0.99." in section
    assert "| 0 | 0.9961 | 0.0012 | 0.9950 | yes |\n| 1 | 0.9920 | 0.0012 | 0.9850 | no |" in section
    assert "| 2 | 0.7500 | 0.0012 |  | no |" in section
    assert "| 1 | 0.9920 | 0.0012 | 0.9850 | yes |" in made({"theta2": 0.98, "calibration": found})
    with pytest.raises(ValueError, match="calibration: got 'deepseek-v3-paper-ruler', allowed is what sglang_sparse"):
        card.partition({"calibration": "deepseek-v3-paper-ruler"})
